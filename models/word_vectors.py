"""Word vectors of a supervised fastText model: for a word, the sum of its rows.

The rows of a word are its own, if the dictionary has it, and one for each of its character
n-grams (`models.char_ngrams`), whose hash modulo the number of buckets says which.

Sums are exact: every row is rounded once to a fixed step, so that sums are sums of whole
numbers and come out the same in any order and any grouping of the words. The step is about
2**-22 of the largest magnitude in the matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.char_ngrams import PIECE_CHARS, ngram_hashes
from models.fasttext_model import DamagedModel, FastTextModel

END_OF_LINE: Final = b"</s>"
LABEL_PREFIX: Final = b"__label__"

_SKIPPED: Final = -1
_UNKNOWN: Final = -2
_BLOCK_NGRAMS: Final = 1 << 15
_TABLE_BYTES: Final = 64 << 20


class WordVectors:
    """The vectors of any words under `model`. Raises DamagedModel when a value is no number.

    A matrix of up to 64 MiB is unpacked into whole numbers; of a larger one, rows are unpacked
    when they are needed. A pruned model takes 4 bytes for each bucket besides.
    """

    def __init__(self, model: FastTextModel) -> None:
        arguments = model.arguments
        self.dim = arguments.dim
        self._minn, self._maxn, self._bucket = arguments.minn, arguments.maxn, arguments.bucket
        # A later entry of the same name takes the place of an earlier one, as in fastText.
        self._dictionary = dict(zip(model.words, itertools.count(), strict=False))
        self._dictionary |= dict.fromkeys([b"", *model.labels], _SKIPPED)
        self._first_ngram_row = len(model.words)
        self._no_row = model.input.shape[0]
        self._matrix = model.input
        fits = 4 * self.dim * self._no_row <= _TABLE_BYTES
        unpacked = model.input.rows(np.arange(self._no_row)) if fits else None
        largest = model.input.largest() if unpacked is None else float(np.abs(unpacked).max())
        if not math.isfinite(largest):
            raise DamagedModel("a value of the input matrix is not a number")
        # The sum of a piece of a word must fit into 32 bits.
        ngrams_of_piece = PIECE_CHARS * max(1, self._maxn - self._minn + 1)
        self.magnitude_bits = 30 - math.ceil(math.log2(ngrams_of_piece))
        """No row has a magnitude above 2**magnitude_bits steps."""
        self.steps_in_one = 2.0 ** (self.magnitude_bits - max(-64, math.frexp(largest)[1]))
        self._table: NDArray[np.int32] | None = None
        if unpacked is not None:
            self._table = np.zeros((self._no_row + 1, self.dim), np.int32)
            self._table[:-1] = self._in_steps(unpacked)
        self._row_of_bucket: NDArray[np.int32] | None = None
        if model.pruned is not None:
            buckets, rows = model.pruned
            used = buckets < self._bucket
            self._row_of_bucket = np.full(max(1, self._bucket), self._no_row, np.int32)
            self._row_of_bucket[buckets[used]] = self._first_ngram_row + rows[used]
            self._is_known = self._row_of_bucket != self._no_row  # a quarter of its size

    def of(self, words: Sequence[bytes]) -> NDArray[np.float64]:
        """For each word the sum of its rows, in steps, and then how many they are: (n, dim + 1).

        Words are UTF-8, without white space. "" has no rows, nor has a word that begins like a
        label, unless the dictionary has it as a word.
        """
        vectors = np.zeros((len(words), self.dim + 1))
        find = self._dictionary.get
        own = np.array([find(word, _UNKNOWN) for word in words], np.int64)
        known = np.flatnonzero(own >= 0)
        vectors[known, : self.dim] = self._rows(own[known])
        vectors[known, self.dim] = 1
        if self._maxn <= 0:
            return vectors
        numbers = np.flatnonzero(self._have_ngrams(words, own))
        spelled = words if numbers.size == len(words) else [words[i] for i in numbers.tolist()]
        parts = ngram_hashes(spelled, self._minn, self._maxn)
        for members, hashes, whole in parts:
            self._add_ngrams(vectors, numbers[members], hashes, whole)
        return vectors

    def _have_ngrams(self, words: Sequence[bytes], own: NDArray[np.int64]) -> NDArray[np.bool_]:
        result: NDArray[np.bool_] = own != _SKIPPED
        # Most often no word is special, which one search finds out.
        joined = b" ".join(words)
        if LABEL_PREFIX in joined or END_OF_LINE in joined:
            for index, word in enumerate(words):
                if word == END_OF_LINE or (own[index] < 0 and word.startswith(LABEL_PREFIX)):
                    result[index] = False
        return result

    def _add_ngrams(
        self,
        vectors: NDArray[np.float64],
        targets: NDArray[np.int64],
        hashes: NDArray[np.uint32],
        whole: bool,
    ) -> None:
        if hashes.shape[0] == 0:
            return
        step = max(1, _BLOCK_NGRAMS // hashes.shape[0])
        for first in range(0, targets.size, step):
            rows, counts = self._known_rows(hashes[:, first : first + step])
            some = np.flatnonzero(counts)
            if not some.size:
                continue
            target, counts = targets[first : first + step][some], counts[some]
            # 32 bits are enough for the sum of a piece, and faster.
            starts = np.cumsum(counts) - counts
            sums = np.add.reduceat(self._rows(rows), starts, axis=0, dtype=np.int32)
            if not whole:  # a word's pieces follow one another
                starts = np.flatnonzero(np.diff(target, prepend=-1))
                sums = np.add.reduceat(sums, starts, axis=0, dtype=np.int64)
                counts = np.add.reduceat(counts, starts)
                target = target[starts]
            vectors[target, : self.dim] += sums
            vectors[target, self.dim] += counts

    def _known_rows(
        self, hashes: NDArray[np.uint32]
    ) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """The rows of n-grams (n-grams, pieces), piece after piece, and how many each piece has.

        Of a pruned model most n-grams have no row: they are left out first.
        """
        hashes = np.ascontiguousarray(hashes.T)
        # hashes % bucket, in the form that NumPy has a fast loop for
        bucket = np.uint32(self._bucket)
        buckets = hashes - hashes // bucket * bucket
        if self._row_of_bucket is None:
            rows = buckets.ravel().astype(np.int64) + self._first_ngram_row
            return rows, np.full(buckets.shape[0], buckets.shape[1])
        known = np.take(self._is_known, buckets)
        return np.take(self._row_of_bucket, buckets[known]), np.count_nonzero(known, axis=1)

    def _rows(self, ids: NDArray[np.integer]) -> NDArray[np.int32]:
        """Rows `ids` in steps, (*ids.shape, dim); row `_no_row` is all zero."""
        if self._table is not None:
            return np.take(self._table, ids, axis=0)
        flat = ids.ravel()
        whole = self._in_steps(self._matrix.rows(np.minimum(flat, self._no_row - 1)))
        whole[flat == self._no_row] = 0
        return whole.reshape(*ids.shape, self.dim)

    def _in_steps(self, rows: NDArray[np.float32]) -> NDArray[np.int32]:
        whole: NDArray[np.int32] = np.rint(rows * np.float32(self.steps_in_one)).astype(np.int32)
        return whole
