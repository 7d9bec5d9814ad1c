"""Our computation of fastText's answers, with fastText itself as the oracle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import label_scores, word_vectors
from models.fasttext_classifier import FastTextClassifier, why_not
from models.fasttext_model import read_fasttext_model
from models.language_id import LanguageIdentifier
from pipelines.wet import WetReader
from tests.models.fasttext_models import sentences, train

TOLERANCE = 2e-4


@pytest.fixture(scope="session")
def lid176(data_dir: Path) -> str:
    return str(data_dir / "models" / "lid.176.ftz")


def _pages(folder: Path) -> list[str]:
    texts = []
    for path in sorted(folder.glob("*.warc.wet.gz")):
        reader = WetReader(memoryview(path.read_bytes()))
        texts += [record.body.decode("utf-8", "replace") for record in reader]
    return texts


def _assert_equal_to_fasttext(path: str, texts: list[str], profile: Any) -> None:
    languages, scores = LanguageIdentifier(path, profile).identify(texts)
    expected, expected_scores = LanguageIdentifier(path, profile, engine="fasttext").identify(texts)
    assert languages == expected
    # CCNet rounds: what is within the tolerance may fall on the other side of x.xx5.
    slack = 0.01 if profile == "ccnet" else 0.0
    np.testing.assert_allclose(scores, expected_scores, rtol=0, atol=TOLERANCE + slack)


@pytest.mark.parametrize("profile", ["default", "ccnet"])
def test_all_pages_of_wet_docs_small(data_dir: Path, lid176: str, profile: str) -> None:
    texts = _pages(data_dir / "wet_docs_small")
    assert len(texts) == 1040
    _assert_equal_to_fasttext(lid176, texts, profile)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["default", "ccnet"])
def test_all_pages_of_wet_docs(data_dir: Path, lid176: str, profile: str) -> None:
    texts = _pages(data_dir / "wet_docs")
    assert len(texts) == 23977
    _assert_equal_to_fasttext(lid176, texts, profile)


_ODD = st.text(
    st.one_of(
        st.sampled_from(["</s>", "__label__", "__label__en", " ", "\0", "\t", "\r", "\v", "\f"]),
        st.sampled_from(["\x1c", "\x85", "\u00a0", "\u2028", "\u3000", "\n", "\ud800", "<", ">"]),
        st.characters(),
        st.sampled_from(["語", "😀", "ก", "the ", "und ", "de "]),
    ).filter(lambda s: len(s) == 1),
    max_size=80,
)
_ODD_WORDS = st.lists(
    st.sampled_from(
        ["</s>", "__label__", "__label__en", "x__label__", "</s>x", "\0", "der", "語語", ""]
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_ODD, max_size=4),
    st.lists(_ODD_WORDS, max_size=3),
    st.sampled_from([" ", "\0", "\t", "\n"]),
)
def test_odd_texts(lid176: str, odd: list[str], words: list[list[str]], separator: str) -> None:
    texts = odd + [separator.join(line) for line in words]
    for profile in ("default", "ccnet"):
        _assert_equal_to_fasttext(lid176, texts, profile)


@pytest.mark.parametrize("word", ["a", "語", "กา", "😀b", "x</s>"])
def test_a_long_page_without_spaces(lid176: str, word: str) -> None:
    _assert_equal_to_fasttext(lid176, [word * 60_000], "ccnet")


QUANTISED: list[dict[str, Any] | None] = [
    None,
    {},
    {"qnorm": True},
    {"qnorm": True, "qout": True, "dsub": 3},
    {"cutoff": 300},
    {"cutoff": 300, "retrain": True, "qnorm": True, "qout": True, "epoch": 1},
]


@pytest.mark.parametrize("quantised", QUANTISED, ids=str)
@pytest.mark.parametrize("loss", ["softmax", "hs"])
@pytest.mark.parametrize("maxn", [0, 1, 4])
def test_models_of_every_make(
    tmp_path: Path, loss: str, maxn: int, quantised: dict[str, Any] | None
) -> None:
    model = train(tmp_path, quantised, loss=loss, minn=min(maxn, 2), maxn=maxn)
    assert why_not(read_fasttext_model(model)) is None
    texts = [text for _, text in sentences(2, 120)]
    texts += ["", "unknown wörds", "</s>", "__label__xa", "__label__new kala", "語" * 300]
    _assert_equal_to_fasttext(str(model), texts, "default")
    _assert_equal_to_fasttext(str(model), texts, "ccnet")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"loss": "ova"}, "loss"),
        ({"loss": "ns"}, "loss"),
        ({"loss": "softmax", "wordNgrams": 2}, "n-grams of words"),
        ({"loss": "hs", "wordNgrams": 2, "maxn": 0, "minn": 0}, "n-grams of words"),
    ],
)
def test_other_models_are_left_to_fasttext(
    tmp_path: Path, made: dict[str, Any], reason: str
) -> None:
    model = train(tmp_path, **made)
    assert reason in str(why_not(read_fasttext_model(model)))
    texts = [text for _, text in sentences(2, 50)]
    ours = LanguageIdentifier(model).identify(texts)
    theirs = LanguageIdentifier(model, engine="fasttext").identify(texts)
    assert ours[0] == theirs[0]
    assert ours[1].tolist() == theirs[1].tolist()


def _answers(
    classifier: FastTextClassifier, lines: list[str], size: int
) -> list[tuple[int, float]]:
    found = []
    for first in range(0, len(lines), size):
        labels, scores = classifier.best(lines[first : first + size])
        found += list(zip(labels.tolist(), scores.tolist(), strict=True))
    return found


@pytest.mark.parametrize("name", ["lid176", "softmax"])
def test_the_same_bits_in_any_order_batch_and_cache(
    data_dir: Path, lid176: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lid176 if name == "lid176" else train(tmp_path, loss="softmax", dim=37)
    model = read_fasttext_model(path)
    lines = [" ".join(text.split("\n")) for text in _pages(data_dir / "wet_docs_small")[::9]]
    lines += ["語" * 5000, "a" * 9999, ""]
    expected = _answers(FastTextClassifier(model), lines, len(lines))
    one_cache = FastTextClassifier(model)
    assert _answers(one_cache, lines, 1) == expected
    assert _answers(one_cache, lines, 7) == expected
    order = list(range(len(lines)))
    random.Random(5).shuffle(order)
    shuffled = _answers(one_cache, [lines[i] for i in order], 100)
    assert [shuffled[order.index(i)] for i in range(len(lines))] == expected
    # Hardly anything kept, no unpacked table
    if name == "softmax":
        monkeypatch.setattr(word_vectors, "_TABLE_BYTES", 0)
    monkeypatch.setattr(label_scores, "_PRODUCT", 1)
    tiny = FastTextClassifier(model, kept_bytes=30_000)
    assert _answers(tiny, lines, 33) == expected
    assert tiny.kept_words <= 256
