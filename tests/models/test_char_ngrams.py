"""Character n-gram hashes: against a slow spelling of the definition, in parts and whole."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import char_ngrams
from models.char_ngrams import ngram_hashes


def _slow(word: bytes, minn: int, maxn: int) -> Counter[int]:
    chars = ["<", *word.decode(), ">"]
    found: Counter[int] = Counter()
    for first in range(len(chars)):
        for last in range(first + max(minn, 1), min(first + maxn, len(chars)) + 1):
            if last - first == 1 and (first == 0 or last == len(chars)):
                continue
            value = 2166136261
            for byte in "".join(chars[first:last]).encode():
                signed = byte - 256 if byte > 127 else byte
                value = ((value ^ (signed & 0xFFFFFFFF)) * 16777619) & 0xFFFFFFFF
            found[value] += 1
    return found


def _fast(words: list[bytes], minn: int, maxn: int) -> list[Counter[int]]:
    found: list[Counter[int]] = [Counter() for _ in words]
    for numbers, hashes, whole in ngram_hashes(words, minn, maxn):
        assert not whole or len(set(numbers.tolist())) == numbers.size
        for column, number in enumerate(numbers.tolist()):
            found[number].update(hashes[:, column].tolist())
    return found


def test_a_published_hash() -> None:
    # FNV-1a, 32 bits, of "foobar" (Noll's test vectors)
    hashes = _fast([b"foobar"], 6, 6)[0]
    assert 0xBF9CF968 in hashes
    assert hashes.total() == 3


_WORD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=150).map(str.encode)


@settings(max_examples=150, deadline=None)
@given(st.lists(_WORD, max_size=6), st.integers(0, 3), st.integers(1, 6))
def test_equal_to_the_definition(words: list[bytes], minn: int, maxn: int) -> None:
    assert _fast(words, minn, maxn) == [_slow(word, minn, maxn) for word in words]


@pytest.mark.parametrize("text", ["a", "ก", "語", "😀", "aก語😀", "<", "><"])
def test_a_word_that_is_cut_into_many_parts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(char_ngrams, "_BLOCK_BYTES", 500)
    words = [(text * 700).encode(), b"short", (text * 13).encode()]
    assert _fast(words, 1, 4) == [_slow(word, 1, 4) for word in words]
