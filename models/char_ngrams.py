"""Hashes of the character n-grams of words, as fastText takes them, for many words at once.

The n-grams are those of `<word>`, counted in UTF-8 characters; the marks alone are none. The
hash is 32-bit FNV-1a over the bytes, each taken as signed (Bojanowski et al. 2017, "Enriching
Word Vectors with Subword Information", section 3.2).

Words with equally many characters stand as the columns of a table of characters, whose rows
are hashed by NumPy. A word that is long is cut into pieces, each with the characters after it
that its n-grams reach into, so that also a word of many megabytes is done in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES: Final = 48
"""A word with marks that is not longer is one piece; a longer one is cut at about each so many."""
PIECE_CHARS: Final = PIECE_BYTES + 3
"""No piece has more characters in which n-grams begin."""

_BLOCK_BYTES: Final = 1 << 20
_LONGEST_CHAR_BYTES: Final = 4
_FNV_OFFSET: Final = np.uint32(2_166_136_261)
_FNV_PRIME: Final = np.uint32(16_777_619)
_Offsets = NDArray[np.int64]


class NgramHashes(NamedTuple):
    """N-grams of some pieces of words."""

    words: NDArray[np.int64]
    """The index of each piece's word (pieces,)."""
    hashes: NDArray[np.uint32]
    """(n-grams of a piece, pieces)"""
    whole: bool
    """Each piece is a whole word; else a word may stand in `words` repeatedly."""


def ngram_hashes(words: Sequence[bytes], minn: int, maxn: int) -> Iterator[NgramHashes]:
    """Every n-gram of minn to maxn characters of each of `words`, in parts of bounded size.

    `words` are UTF-8; what is none gives no error and other n-grams than fastText's.
    """
    lengths = np.fromiter(map(len, words), np.int64, len(words)) + 2
    ends = np.cumsum(lengths)
    first = 0
    while first < len(words):
        begin = ends[first] - lengths[first]
        last = max(first + 1, int(np.searchsorted(ends, begin + _BLOCK_BYTES, "right")))
        marked = b"<" + b"><".join(words[first:last]) + b">"
        pieces = _cut(np.frombuffer(marked, np.uint8), lengths[first:last])
        for part in _parts(pieces):
            yield from _part_hashes(marked, part, first, minn, maxn)
        first = last


class _Pieces(NamedTuple):
    """Pieces of marked words, as offsets into the bytes."""

    word: _Offsets
    start: _Offsets
    stop: _Offsets
    """N-grams begin in [start, stop)."""
    begin_of_word: _Offsets
    end_of_word: _Offsets


def _cut(marked: NDArray[np.uint8], lengths: _Offsets) -> _Pieces:
    """Whole words, but long ones in pieces, which begin where a character does."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    words = np.arange(lengths.size)
    whole = _Pieces(words, begins, ends, begins, ends)
    long = np.flatnonzero(lengths > PIECE_BYTES).tolist()
    if not long:
        return whole
    numbers: list[int] = []
    cuts: list[int] = []
    for number in long:
        cut = int(begins[number])
        end = int(ends[number])
        while cut < end:
            numbers.append(number)
            cuts.append(cut)
            cut += PIECE_BYTES
            while cut < end and marked[cut] & 0xC0 == 0x80:
                cut += 1
    short = lengths <= PIECE_BYTES
    word = np.concatenate([words[short], np.array(numbers)])
    start = np.concatenate([begins[short], np.array(cuts)])
    order = np.argsort(start)
    word, start = word[order], start[order]
    stop = np.append(start[1:], marked.size)  # pieces leave nothing out
    return _Pieces(word, start, stop, begins[word], ends[word])


def _parts(pieces: _Pieces) -> Iterator[_Pieces]:
    """`pieces` in runs of about _BLOCK_BYTES."""
    first, count = 0, pieces.word.size
    while first < count:
        last = int(np.searchsorted(pieces.stop, pieces.start[first] + _BLOCK_BYTES, "right"))
        last = max(last, first + 1)
        yield _Pieces(*(column[first:last] for column in pieces))
        first = last


def _part_hashes(
    marked: bytes, pieces: _Pieces, first_word: int, minn: int, maxn: int
) -> Iterator[NgramHashes]:
    base = int(pieces.start[0])
    ahead = (maxn + 1) * _LONGEST_CHAR_BYTES
    # Three bytes more, so that a character's bytes can be asked for at the very end.
    data = np.frombuffer(marked[base : int(pieces.stop[-1]) + ahead] + b"\0\0\0", np.int8)
    size = data.size - 3
    signed = data.astype(np.uint32)
    is_start = (data[:size].view(np.uint8) & 0xC0) != 0x80
    char_at = np.zeros(size + 1, np.int64)  # how many characters begin before each byte
    np.cumsum(is_start, out=char_at[1:])
    chars = np.append(np.flatnonzero(is_start), size)
    widths = np.diff(chars).astype(np.uint8)
    start = char_at[pieces.start - base]
    own = char_at[pieces.stop - base] - start
    word_end = char_at[np.minimum(pieces.end_of_word - base, size)]
    height = np.minimum(own + maxn - 1, word_end - start)
    several_bytes = chars[start + height] - chars[start] != height
    at_begin = pieces.start == pieces.begin_of_word
    at_end = pieces.stop == pieces.end_of_word
    key = own * (PIECE_CHARS + maxn) + height
    key = key * 8 + several_bytes * 4 + at_begin * 2 + at_end
    order = np.argsort(key, kind="stable")
    bounds = np.flatnonzero(np.diff(key[order])) + 1
    for group in np.split(order, bounds):
        one = group[0]
        down = np.arange(height[one])[:, None]
        if several_bytes[one]:
            index = start[group] + down
            table = _CharTable(signed, np.take(chars, index), np.take(widths, index))
        else:
            table = _CharTable(signed, pieces.start[group] - base + down)
        hashes = _table_hashes(table, int(own[one]), minn, maxn)
        if hashes is None:
            continue
        if minn <= 1:  # the first rows are those of single characters
            last = int(own[one]) - 1
            marks = [0] * bool(at_begin[one]) + [last] * bool(at_end[one])
            hashes = np.delete(hashes, marks, axis=0)
        whole = bool(at_begin[one] and at_end[one])
        yield NgramHashes(pieces.word[group] + first_word, hashes, whole)


class _CharTable:
    """Characters as (characters of a piece, pieces), byte by byte."""

    def __init__(
        self, signed: NDArray[np.uint32], chars: _Offsets, widths: NDArray[np.uint8] | None = None
    ) -> None:
        self.shape = chars.shape
        self._bytes = [np.take(signed, chars)]
        self._has: list[NDArray[np.bool_]] = []
        if widths is not None:
            for number in range(1, int(widths.max())):
                self._bytes.append(np.take(signed, chars + number))
                self._has.append(widths > number)

    def extend(self, hashes: NDArray[np.uint32], shift: int) -> NDArray[np.uint32]:
        """The hashes, row by row, with the character `shift` rows further down added."""
        rows = slice(shift, shift + hashes.shape[0])
        hashes = hashes ^ self._bytes[0][rows]
        hashes *= _FNV_PRIME
        for values, has in zip(self._bytes[1:], self._has, strict=True):
            hashes = np.where(has[rows], (hashes ^ values[rows]) * _FNV_PRIME, hashes)
        return hashes


def _table_hashes(table: _CharTable, own: int, minn: int, maxn: int) -> NDArray[np.uint32] | None:
    """The hash of what begins in the `own` first rows, single characters first."""
    height = table.shape[0]
    hashes = np.full(table.shape, _FNV_OFFSET)
    found = []
    for n in range(1, min(maxn, height) + 1):
        hashes = table.extend(hashes[: min(own, height - n + 1)], n - 1)
        if n >= minn:
            found.append(hashes)
    return np.concatenate(found) if found else None
