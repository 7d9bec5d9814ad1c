"""The reader of fastText's files: fastText's own answers, and files that are damaged."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import fasttext
import numpy as np
import pytest

from models.errors import UserError
from models.fasttext_model import DamagedModel, UnknownFormat, read_fasttext_model
from models.language_id import LanguageIdentifier
from tests.models.fasttext_models import train


@pytest.mark.parametrize("quantised", [None, {"qnorm": True, "dsub": 3, "qout": True}], ids=str)
def test_what_fasttext_says_of_the_model(tmp_path: Path, quantised: dict[str, Any] | None) -> None:
    path = train(tmp_path, quantised)
    model = read_fasttext_model(path)
    oracle = fasttext.load_model(str(path))
    words, counts = oracle.get_words(include_freq=True)
    assert [word.decode() for word in model.words] == words
    labels, counts = oracle.get_labels(include_freq=True)
    assert [label.decode() for label in model.labels] == list(labels)
    assert model.label_counts == counts.tolist()
    assert (model.arguments.dim, model.arguments.minn, model.arguments.maxn) == (10, 2, 4)
    for number in (0, 7, len(words) - 1, model.input.shape[0] - 1):
        expected = oracle.get_input_vector(number)
        np.testing.assert_allclose(model.input.rows(np.array([number]))[0], expected, rtol=1e-6)
    rows = model.input.rows(np.arange(model.input.shape[0]))
    assert model.input.largest() >= np.abs(rows).max()
    if quantised is None:
        assert model.input.largest() == np.abs(rows).max()
        expected = oracle.get_output_matrix()
        np.testing.assert_array_equal(model.output.rows(np.arange(len(labels))), expected)


def test_a_value_that_is_no_number(tmp_path: Path) -> None:
    path = train(tmp_path, epoch=1)
    data = bytearray(path.read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    path.write_bytes(data)
    with pytest.raises(UserError, match="not a number"):
        LanguageIdentifier(path).identify(["text"])


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "other.bin"
    for data in (
        b"",
        b"abc",
        b"version https://git-lfs.github.com",
        struct.pack("<ii", 793712314, 13),
    ):
        path.write_bytes(data)
        with pytest.raises(UnknownFormat):
            read_fasttext_model(path)
        with pytest.raises(UserError, match="is not a fastText model"):
            LanguageIdentifier(path).identify(["text"])


def test_word_vectors_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "train.txt"
    text.write_text("some words and some more words\n" * 20)
    path = tmp_path / "vectors.bin"
    fasttext.train_unsupervised(
        str(text), dim=4, bucket=50, minCount=1, thread=1, verbose=0
    ).save_model(str(path))
    with pytest.raises(UserError, match="it holds word vectors"):
        LanguageIdentifier(path).identify(["text"])


@pytest.mark.parametrize("quantised", [None, {"qnorm": True, "cutoff": 300}], ids=str)
def test_a_cut_file_is_refused(tmp_path: Path, quantised: dict[str, Any] | None) -> None:
    data = train(tmp_path, quantised).read_bytes()
    path = tmp_path / "cut.bin"
    cuts = [*range(0, 120), *range(120, len(data), len(data) // 60), len(data) - 1]
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises((DamagedModel, UnknownFormat)):
            read_fasttext_model(path)
    with pytest.raises(UserError, match=r"is not a fastText model \(.* bytes are due at offset"):
        LanguageIdentifier(path).identify(["text"])


@pytest.mark.parametrize("quantised", [None, {"qnorm": True, "cutoff": 300}], ids=str)
def test_flipped_bytes(tmp_path: Path, quantised: dict[str, Any] | None) -> None:
    path = train(tmp_path, quantised, loss="hs")
    data = path.read_bytes()
    rng = random.Random(3)
    refused = 0
    # The head and the dictionary, where a number can do most harm, and some of the rest.
    for offset in [*range(0, 100), *rng.sample(range(100, len(data)), 60)]:
        damaged = bytearray(data)
        damaged[offset] ^= rng.choice([1, 0x80, 0xFF])
        path.write_bytes(damaged)
        try:
            languages, scores = LanguageIdentifier(path.with_name(f"{path.name}")).identify(
                ["kala"]
            )
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            assert len(languages) == 1
            assert np.isfinite(scores).all()
        finally:
            _forget()
    assert refused > 20


def _forget() -> None:
    from models import language_id

    language_id._load.cache_clear()
