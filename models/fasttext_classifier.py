"""What fastText's supervised models answer, several times as fast.

fastText's score of a text comes from the mean of the rows of all its words
(`models.word_vectors`) and the labels' rows (`models.label_scores`). The result is fastText's,
except that fastText sums in 32 bits, so that its score of a page of ordinary length is off by up
to about 1e-4, and ours is not.

A result depends on the text alone, not on the batch, nor on what is kept of earlier ones, nor on
the processor: sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models import word_vectors
from models.fasttext_model import (
    HIERARCHICAL_SOFTMAX,
    SOFTMAX,
    SUPERVISED,
    FastTextModel,
)
from models.label_scores import LabelScores
from models.word_vectors import KEPT_BYTES, WordVectors

_LARGEST_BUCKET: Final = 1 << 24
_MOST_LABELS: Final = 1 << 16
_BATCH_CHARS: Final = 1 << 21
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
    return word_vectors.why_not(model)


class FastTextClassifier:
    """The best label of texts under `model`, for which `why_not` must be None.

    Threads may share one. Raises DamagedModel when a value in the model is not a number.
    """

    def __init__(self, model: FastTextModel, kept_bytes: int = KEPT_BYTES) -> None:
        self._vectors = WordVectors(model, kept_bytes)
        self._scores = LabelScores(
            model,
            self._vectors.magnitude_bits + _MEAN_EXTRA_BITS,
            self._vectors.steps_in_one * 2**_MEAN_EXTRA_BITS,
        )

    @property
    def kept_words(self) -> int:
        """How many words' vectors are kept now."""
        return self._vectors.kept_words

    def best(self, lines: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Index and score of the best label of each line; -1 and 0 where it has no known row.

        Lines hold no line break and no surrogates, and each is taken to be whole.
        """
        labels = np.full(len(lines), -1, np.int64)
        scores = np.zeros(len(lines))
        for first, last in _batches(lines):
            sums = self._vectors.of_lines([line.encode() for line in lines[first:last]])
            counts = sums[:, -1:]
            found = np.flatnonzero(counts[:, 0])
            means = sums[found, :-1] * 2.0**_MEAN_EXTRA_BITS / counts[found]
            labels[first + found], scores[first + found] = self._scores.best(means)
        return labels, scores


def _batches(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    first = size = 0
    for index, line in enumerate(lines):
        size += len(line)
        if size >= _BATCH_CHARS:
            yield first, index + 1
            first, size = index + 1, 0
    if first < len(lines):
        yield first, len(lines)
