"""What fastText's supervised models answer, computed with a cache of word vectors.

fastText's score of a text comes from the mean of the rows of all its words. Words repeat, so a
word's vector is made once and kept (`models.word_vectors`), and the vectors of a batch of texts
are summed by NumPy. The result is fastText's, except that fastText sums in 32 bits, so that its
score of a page of ordinary length is off by up to about 1e-4, and ours is not.

A result depends on the text alone, not on the batch, nor on what the cache holds: sums are
exact (see `models.word_vectors` and `models.label_scores`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from models.fasttext_model import (
    HIERARCHICAL_SOFTMAX,
    SOFTMAX,
    SUPERVISED,
    FastTextModel,
)
from models.label_scores import LabelScores
from models.word_vectors import END_OF_LINE, WordVectors

CACHE_BYTES: Final = 128 << 20
"""No more is kept, by the estimate of _ENTRY_BYTES for a word beside its vector."""
_ENTRY_BYTES: Final = 180
_CACHED_WORD_BYTES: Final = 40

_LARGEST_BUCKET: Final = 1 << 24
_MOST_LABELS: Final = 1 << 16
_BATCH_CHARS: Final = 1 << 21
_LANES: Final = 8
_BLOCK_BYTES: Final = 2 << 20
_MEAN_EXTRA_BITS: Final = 2


def why_not(model: FastTextModel) -> str | None:
    """Why `model` is not one that FastTextClassifier computes; None: it is."""
    arguments = model.arguments
    if arguments.model != SUPERVISED:
        return "it holds word vectors"
    if arguments.loss not in (HIERARCHICAL_SOFTMAX, SOFTMAX):
        return "its loss is neither softmax nor hierarchical softmax"
    if arguments.word_ngrams > 1:
        return "it has n-grams of words"
    if model.pruned is not None and arguments.bucket > _LARGEST_BUCKET:
        return f"it is pruned, from more than {_LARGEST_BUCKET:,} buckets"
    if not 0 < len(model.labels) <= _MOST_LABELS:
        return f"it has {len(model.labels):,} labels"
    return None


class FastTextClassifier:
    """The best label of texts under `model`, for which `why_not` must be None.

    Raises DamagedModel when a value in the model is not a number.
    """

    def __init__(self, model: FastTextModel, cache_bytes: int = CACHE_BYTES) -> None:
        self._vectors = WordVectors(model)
        self._scores = LabelScores(
            model,
            self._vectors.magnitude_bits + _MEAN_EXTRA_BITS,
            self._vectors.steps_in_one * 2**_MEAN_EXTRA_BITS,
        )
        self._width = self._vectors.dim + 1
        self._end_of_line = self._vectors.of([END_OF_LINE])[0]
        self._capacity = max(1, cache_bytes // (8 * self._width + _ENTRY_BYTES))
        self._kept = np.empty((self._capacity, self._width))
        self._slots: dict[bytes, int] = {}

    @property
    def cached_words(self) -> int:
        """How many words the cache holds now."""
        return len(self._slots)

    def best(self, lines: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Index and score of the best label of each line; -1 and 0 where it has no known row.

        Lines hold no line break and no surrogates; words are what stands between white space or
        NULs, and each line is taken to be whole.
        """
        labels = np.full(len(lines), -1, np.int64)
        scores = np.zeros(len(lines))
        for first, last in _batches(lines):
            sums = self._sums(lines[first:last])
            counts = sums[:, -1:]
            found = np.flatnonzero(counts[:, 0])
            means = sums[found, :-1] * 2**_MEAN_EXTRA_BITS / counts[found]
            labels[first + found], scores[first + found] = self._scores.best(means)
        return labels, scores

    def _sums(self, lines: Sequence[str]) -> NDArray[np.float64]:
        """For each line the sum of its words' vectors and the end's (lines, dim + 1): exact."""
        plain = [line.replace("\0", " ") if "\0" in line else line for line in lines]
        split = pc.ascii_split_whitespace(pa.array(plain, pa.large_string()))
        encoded = split.values.dictionary_encode()
        distinct = encoded.dictionary.cast(pa.large_binary())
        short = pc.less_equal(pc.binary_length(distinct), _CACHED_WORD_BYTES)
        vectors = self._look_up(
            distinct.to_numpy(zero_copy_only=False).tolist(), short.to_numpy(zero_copy_only=False)
        )
        ids = encoded.indices.to_numpy()
        sums = _sums_of_runs(vectors, ids, split.offsets.to_numpy())
        sums += self._end_of_line
        return sums

    def _look_up(self, words: list[bytes], short: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The vectors of distinct `words`, and one more row, of zeros; `short` ones are kept."""
        find = self._slots.get
        slots = np.array([find(word, -1) for word in words], np.int64)
        vectors = np.zeros((len(words) + 1, self._width))
        known = np.flatnonzero(slots >= 0)
        vectors[known] = np.take(self._kept, slots[known], axis=0)
        new = np.flatnonzero(slots < 0)
        vectors[new] = self._vectors.of([words[index] for index in new.tolist()])
        self._keep(words, vectors, new[short[new]])
        return vectors

    def _keep(
        self, words: list[bytes], vectors: NDArray[np.float64], some: NDArray[np.int64]
    ) -> None:
        if len(self._slots) + some.size > self._capacity:
            self._slots.clear()
            some = some[: self._capacity]
        first = len(self._slots)
        last = first + some.size
        self._kept[first:last] = vectors[some]
        self._slots.update(zip([words[i] for i in some.tolist()], range(first, last), strict=True))


def _batches(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    first = size = 0
    for index, line in enumerate(lines):
        size += len(line)
        if size >= _BATCH_CHARS:
            yield first, index + 1
            first, size = index + 1, 0
    if first < len(lines):
        yield first, len(lines)


def _sums_of_runs(
    vectors: NDArray[np.float64], ids: NDArray[np.integer], offsets: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Sums of the vectors of ids[offsets[i]:offsets[i + 1]]; the last vector is zero.

    NumPy adds long rows faster than short ones, so _LANES words stand side by side in a row,
    and runs are filled up to whole rows with the zero vector.
    """
    width = vectors.shape[1]
    lengths = np.diff(offsets)
    rows = -(-lengths // _LANES)
    row_offsets = np.concatenate([[0], np.cumsum(rows)])
    padded = np.full(int(row_offsets[-1]) * _LANES, len(vectors) - 1, np.int64)
    shift = np.repeat(row_offsets[:-1] * _LANES - (offsets[:-1] - offsets[0]), lengths)
    padded[np.arange(ids.size) + shift] = ids
    sums = np.zeros((lengths.size, _LANES * width))
    step = max(1, _BLOCK_BYTES // (8 * width * _LANES))
    bounds = row_offsets.tolist()
    run = 0
    for first in range(0, bounds[-1], step):
        last = min(first + step, bounds[-1])
        block = np.take(vectors, padded[first * _LANES : last * _LANES], axis=0)
        block = block.reshape(-1, _LANES * width)
        while bounds[run] < last:
            begin, end = max(bounds[run], first), min(bounds[run + 1], last)
            sums[run] += np.add.reduce(block[begin - first : end - first], axis=0)
            if bounds[run + 1] > last:
                break
            run += 1
    summed: NDArray[np.float64] = sums.reshape(lengths.size, _LANES, width).sum(axis=1)
    return summed
