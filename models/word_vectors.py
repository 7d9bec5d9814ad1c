"""Word vectors of a supervised fastText model, summed over texts.

The rows of a word are its own, if the dictionary has it, and one for each of its character
n-grams, whose hash modulo the number of buckets says which (Bojanowski et al. 2017, "Enriching
Word Vectors with Subword Information", section 3.2). Words repeat, so a short word's sum is kept.

Sums are exact: every row is rounded once to a fixed step, so that sums are sums of whole
numbers and come out the same in any order and any grouping of the words, whatever is kept. The
step is about 2**-22 of the largest magnitude in the matrix.

The loop over words and n-grams is in C (`_word_sums.c`): the same in NumPy, a batch of new words
at a time, was 1.2 to 1.9 times as fast as fastText, since new words are too many; this is several
times as fast as that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models._word_sums import WordSums
from models.fasttext_model import DamagedModel, DenseMatrix, FastTextModel

KEPT_BYTES: Final = 64 << 20
"""No more is kept of words and their sums."""

_SKIPPED: Final = -1
_TABLE_BYTES: Final = 64 << 20
_KEPT_WORD_CHARS: Final = 41
"""At most, with marks: longer words are not kept (SHORT_BYTES in _word_sums.c)."""
_ENTRY_HEAD_BYTES: Final = 48


def why_not(model: FastTextModel) -> str | None:
    """Why the matrix of `model` is not one that WordVectors takes; None: it is."""
    rows, dim = model.input.shape
    if 4 * rows * dim > _TABLE_BYTES and not isinstance(model.input, DenseMatrix):
        return f"its quantised matrix is more than {_TABLE_BYTES:,} bytes unpacked"
    return None


class WordVectors:
    """Sums the vectors of words under `model`. Raises DamagedModel when a value is no number.

    A matrix of up to 64 MiB is unpacked into whole numbers; of a larger one, which must be dense,
    the rows are rounded when they are needed. A pruned model takes 4 bytes for each bucket besides.
    """

    def __init__(self, model: FastTextModel, kept_bytes: int = KEPT_BYTES) -> None:
        arguments = model.arguments
        self.dim = arguments.dim
        rows = model.input.shape[0]
        fits = 4 * self.dim * rows <= _TABLE_BYTES
        unpacked = model.input.rows(np.arange(rows)) if fits else None
        largest = model.input.largest() if unpacked is None else float(np.abs(unpacked).max())
        if not math.isfinite(largest):
            raise DamagedModel("a value of the input matrix is not a number")
        # The sum of a word that is kept must fit into 32 bits.
        lengths = max(1, arguments.maxn - max(1, arguments.minn) + 1)
        most_rows = 1 + _KEPT_WORD_CHARS * lengths
        self.magnitude_bits = 30 - math.ceil(math.log2(most_rows))
        """No row has a magnitude above 2**magnitude_bits steps."""
        self.steps_in_one = 2.0 ** (self.magnitude_bits - max(-64, math.frexp(largest)[1]))
        if unpacked is None:
            assert isinstance(model.input, DenseMatrix)  # `why_not` says so
            table: NDArray[np.generic] = model.input.bytes
        else:
            table = np.rint(unpacked * np.float32(self.steps_in_one)).astype(np.int32)
        entry_bytes = _ENTRY_HEAD_BYTES + 4 * (self.dim + 1) + 7
        slots = 1 << max(0, int(math.log2(max(1, kept_bytes // entry_bytes))))
        self._sums = WordSums(
            dim=self.dim,
            minn=arguments.minn,
            maxn=arguments.maxn,
            bucket=max(0, arguments.bucket),
            first_ngram=len(model.words),
            table=table,
            scale=0.0 if fits else self.steps_in_one,
            buckets=_row_of_bucket(model),
            entries=_dictionary(model),
            slots=slots,
        )
        self._end_of_line = np.zeros((1, self.dim + 1), np.int64)
        self._sums.add([b"</s>"], self._end_of_line)

    @property
    def kept_words(self) -> int:
        """How many words are kept now."""
        return self._sums.kept

    def of_lines(self, lines: Sequence[bytes]) -> NDArray[np.int64]:
        """For each line the sum of the rows of its words and of its end, in steps, and then how
        many rows they are: (lines, dim + 1).

        Words are what stands between white space or NULs. A word that begins like a label has no
        rows, unless the dictionary has it as a word. What is no UTF-8 gives no error.
        """
        found = np.repeat(self._end_of_line, len(lines), axis=0)
        self._sums.add(list(lines), found)
        return found


def _dictionary(model: FastTextModel) -> list[tuple[bytes, int]]:
    # A later entry of the same name takes the place of an earlier one, as in fastText.
    rows = dict(zip(model.words, itertools.count(), strict=False))
    return list((rows | dict.fromkeys(model.labels, _SKIPPED)).items())


def _row_of_bucket(model: FastTextModel) -> NDArray[np.int32] | None:
    """Of a pruned model: the row of each bucket, or -1; shape (buckets,)."""
    if model.pruned is None:
        return None
    buckets, rows = model.pruned
    found = np.full(max(0, model.arguments.bucket), -1, np.int32)
    used = buckets < found.size
    found[buckets[used]] = len(model.words) + rows[used]
    return found
