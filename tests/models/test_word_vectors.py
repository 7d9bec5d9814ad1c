"""Sums of word vectors: against a slow spelling of the definition, whatever is kept."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import word_vectors
from models._word_sums import WordSums
from models.fasttext_model import SOFTMAX, SUPERVISED, Arguments, DenseMatrix, FastTextModel
from models.word_vectors import WordVectors

_SPACES = " \n\r\t\v\f\0"
_DICTIONARY = [b"</s>", b"the", "বল".encode(), b"__label__word", b"a"]
_LABELS = [b"__label__bn", b"odd"]
_BUCKETS = 97


def _model(*, minn: int = 2, maxn: int = 4, pruned: bool = False, dim: int = 3) -> FastTextModel:
    rng = np.random.default_rng(7)
    hashed = 20 if pruned else _BUCKETS
    rows = rng.normal(size=(len(_DICTIONARY) + hashed, dim)).astype(np.float32)
    matrix = DenseMatrix(rows.view(np.uint8).ravel(), (len(rows), dim))
    kept = rng.choice(_BUCKETS + 5, 20, replace=False).astype(np.int32)  # some name no bucket
    return FastTextModel(
        Arguments(dim, 1, SOFTMAX, SUPERVISED, _BUCKETS, minn, maxn),
        _DICTIONARY,
        _LABELS,
        [1, 1],
        (kept, np.arange(20, dtype=np.int32)) if pruned else None,
        matrix,
        matrix,
    )


def _fnv1a(text: str) -> int:
    value = 2166136261
    for byte in text.encode():
        signed = byte - 256 if byte > 127 else byte
        value = ((value ^ (signed & 0xFFFFFFFF)) * 16777619) & 0xFFFFFFFF
    return value


def _rows_of_word(model: FastTextModel, word: str) -> list[int]:
    """fastText's rule, n-gram by n-gram."""
    given = word.encode()
    if given in model.labels:
        return []
    rows = [model.words.index(given)] if given in model.words else []
    if word == "</s>" or (not rows and word.startswith("__label__")):
        return rows
    chars = ["<", *word, ">"]
    for first in range(len(chars)):
        for n in range(max(1, model.arguments.minn), model.arguments.maxn + 1):
            ngram = chars[first : first + n]
            if len(ngram) < n or (n == 1 and first in (0, len(chars) - 1)):
                continue
            bucket = _fnv1a("".join(ngram)) % model.arguments.bucket
            if model.pruned is None:
                rows.append(len(model.words) + bucket)
            else:
                known = dict(zip(*(part.tolist() for part in model.pruned), strict=True))
                if bucket in known:
                    rows.append(len(model.words) + known[bucket])
    return rows


def _expected(model: FastTextModel, vectors: WordVectors, line: str) -> list[int]:
    for space in _SPACES:
        line = line.replace(space, " ")
    words = [word for word in line.split(" ") if word]
    rows = [row for word in [*words, "</s>"] for row in _rows_of_word(model, word)]
    whole = np.rint(model.input.rows(np.array(rows, int)) * vectors.steps_in_one).astype(int)
    return [*whole.sum(axis=0).tolist(), len(rows)]


_WORD = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.sampled_from(
        ["the", "বল", "</s>", "__label__bn", "__label__word", "__label__x", "odd", "a"]
    ),
    st.builds(
        lambda c, n: c * n, st.sampled_from("aก語😀<"), st.sampled_from([37, 38, 39, 40, 2000])
    ),
)
_LINE = st.lists(_WORD, max_size=8).flatmap(
    lambda words: st.builds(lambda space: space.join(words), st.sampled_from(_SPACES))
)


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(_LINE, max_size=5),
    minn=st.integers(-1, 3),
    maxn=st.integers(0, 5),
    pruned=st.booleans(),
    unpacked=st.booleans(),
    kept_bytes=st.sampled_from([1, 300, 1 << 20]),
)
def test_equal_to_the_definition(
    lines: list[str], minn: int, maxn: int, pruned: bool, unpacked: bool, kept_bytes: int
) -> None:
    model = _model(minn=minn, maxn=maxn, pruned=pruned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_vectors, "_TABLE_BYTES", 1 << 20 if unpacked else 0)
        vectors = WordVectors(model, kept_bytes)
    encoded = [line.encode() for line in lines]
    expected = [_expected(model, vectors, line) for line in lines]
    for _ in range(2):  # with nothing kept, and with what the first time kept
        assert vectors.of_lines(encoded).tolist() == expected


def test_a_published_hash() -> None:
    assert _fnv1a("foobar") == 0xBF9CF968  # Noll's test vectors for FNV-1a, 32 bits


def test_what_is_kept_is_bounded() -> None:
    vectors = WordVectors(_model(), kept_bytes=4096)
    words = [f"w{i}".encode() for i in range(500)]
    one_by_one = [vectors.of_lines([word]).tolist()[0] for word in words]
    assert 16 < vectors.kept_words <= 4096 // 64
    assert WordVectors(_model()).of_lines(words).tolist() == one_by_one
    before = vectors.kept_words
    vectors.of_lines([b"x" * 40])  # too long to be kept
    assert vectors.kept_words == before


def test_bytes_that_are_no_utf8_give_some_answer() -> None:
    vectors = WordVectors(_model())
    rng = np.random.default_rng(1)
    lines = [rng.bytes(int(size)) for size in rng.integers(0, 300, 200)]
    assert vectors.of_lines(lines).tolist() == WordVectors(_model(), 1).of_lines(lines).tolist()


def test_threads_share_one() -> None:
    lines = [f"shared words {i % 50} and w{i}".encode() for i in range(4000)]
    expected = WordVectors(_model()).of_lines(lines).tolist()
    vectors = WordVectors(_model(), kept_bytes=2000)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(vectors.of_lines(lines).tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.parametrize(
    "changed",
    [
        {"dim": 0},
        {"slots": 3},
        {"slots": 0},
        {"bucket": 0},
        {"first_ngram": 9},
        {"first_ngram": -1},
        {"bucket": 9},
        {"buckets": np.full(4, 10, np.int32)},
        {"buckets": np.full(4, -2, np.int32)},
        {"buckets": np.zeros(3, np.int32)},
        {"entries": [(b"word", 6)]},
        {"entries": [(b"word", -2)]},
        {"table": np.zeros((2, 2), np.int32)},
    ],
    ids=str,
)
def test_no_row_outside_the_table_is_ever_read(changed: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "dim": 2, "minn": 2, "maxn": 4, "bucket": 4, "first_ngram": 6,
        "table": np.zeros((10, 2), np.int32), "scale": 0.0, "buckets": None,
        "entries": [(b"word", 5)], "slots": 4,
    }  # fmt: skip
    WordSums(**settings)
    with pytest.raises(ValueError, match=r"not valid|has not|words' rows"):
        WordSums(**settings | changed)


def test_the_wrong_place_for_sums_is_refused() -> None:
    sums = WordSums(dim=2, minn=0, maxn=0, bucket=0, first_ngram=1,
                    table=np.ones((1, 2), np.int32), scale=0.0, buckets=None,
                    entries=[(b"word", 0)], slots=1)  # fmt: skip
    out = np.zeros((2, 3), np.int64)
    sums.add([b"word word", b"other"], out)
    assert out.tolist() == [[2, 2, 2], [0, 0, 0]]
    with pytest.raises(ValueError, match="int64 of shape"):
        sums.add([b"word"], out)
    with pytest.raises(TypeError, match="bytes"):
        sums.add([b"word", "other"], out)  # type: ignore[list-item]
