"""The best label of a text and its score, from the mean of the text's rows.

Softmax, or hierarchical softmax over a Huffman tree of the labels' counts, with the details of
fastText that show: 1e-5 is added to a probability before its logarithm, at each node of the
tree and once for a softmax, so a score may come out above 1.

Scores are the same whatever other texts are computed along with one. The mean is rounded to
whole steps, as the output matrix is, so that their product is exact, in whatever order a BLAS
sums; all else goes element by element, or is a sum of whole numbers too. Nor do they depend on
the processor: no function takes part whose last bits do (`models.portable_exp`).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.fasttext_model import HIERARCHICAL_SOFTMAX, DamagedModel, FastTextModel
from models.portable_exp import portable_exp

_ADDED: Final = 1e-5
_NEVER: Final = 10**15
"""fastText's count of a node that is not built yet."""
_EXACT_BITS: Final = 52
_PROBABILITY_BITS: Final = 32
# OpenBLAS takes one thread for a product of fewer multiplications.
_PRODUCT: Final = 1 << 18
_BLOCK_VALUES: Final = 1 << 16  # small enough for a processor's cache


class LabelScores:
    """Scores the labels of `model` for means of rows of at most 2**mean_bits steps.

    `steps_in_one`: steps of the means in 1. Raises DamagedModel when a value is no number, or
    the labels' counts make no tree.
    """

    def __init__(self, model: FastTextModel, mean_bits: int, steps_in_one: float) -> None:
        weights = model.output.rows(np.arange(len(model.labels))).astype(np.float64)
        largest = float(np.abs(weights).max())
        if not math.isfinite(largest):
            raise DamagedModel("a value of the output matrix is not a number")
        dim = weights.shape[1]
        bits = _EXACT_BITS - mean_bits - math.ceil(math.log2(dim))
        scale = 2.0 ** (bits - max(-64, math.frexp(largest)[1]))
        self._unit = 1 / (scale * steps_in_one)
        self._tree = None
        if model.arguments.loss == HIERARCHICAL_SOFTMAX:
            self._tree = _Tree(model.label_counts)
            weights = weights[:-1]  # inner nodes are one fewer
        self._weights = np.ascontiguousarray(np.rint(weights * scale).T)

    def best(self, means: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Index and score of the best label for each mean (n, dim), in steps."""
        whole = np.rint(means)
        labels = np.zeros(len(means), np.int64)
        scores = np.zeros(len(means))
        step = max(1, _BLOCK_VALUES // max(1, self._weights.shape[1]))
        for first in range(0, len(means), step):
            part = slice(first, first + step)
            logits = self._product(whole[part]) * self._unit
            labels[part], scores[part] = (
                _softmax(logits) if self._tree is None else self._tree.best(logits)
            )
        return labels, scores

    def _product(self, whole: NDArray[np.float64]) -> NDArray[np.float64]:
        result = np.empty((len(whole), self._weights.shape[1]))
        step = max(1, _PRODUCT // max(1, self._weights.size))
        for first in range(0, len(whole), step):
            part = slice(first, first + step)
            np.matmul(whole[part], self._weights, out=result[part])
        return result


def _softmax(logits: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    labels = logits.argmax(axis=1)
    odds = portable_exp(logits - np.take_along_axis(logits, labels[:, None], axis=1))
    total = np.rint(np.ldexp(odds, _PROBABILITY_BITS)).sum(axis=1)  # of whole numbers: exact
    return labels, np.ldexp(1 / total, _PROBABILITY_BITS) + _ADDED


class _Tree:
    """fastText's Huffman tree: labels are nodes 0 to n - 1, inner nodes n to 2n - 2, the root last.

    The labels stand in order of falling count; where counts are equal an inner node goes first.
    """

    def __init__(self, counts: list[int]) -> None:
        labels = len(counts)
        self._labels = labels
        node_counts = counts + [_NEVER] * (labels - 1)
        children: list[tuple[int, int]] = []
        leaf, node = labels - 1, labels
        for new in range(labels, 2 * labels - 1):
            pair = []
            for _ in range(2):
                if leaf >= 0 and (node >= new or node_counts[leaf] < node_counts[node]):
                    if node_counts[leaf] >= _NEVER:
                        raise DamagedModel(f"a label was seen {node_counts[leaf]:,} times")
                    pair.append(leaf)
                    leaf -= 1
                else:
                    pair.append(node)
                    node += 1
            children.append((pair[0], pair[1]))
            node_counts[new] = node_counts[pair[0]] + node_counts[pair[1]]
        depth = [0] * (2 * labels - 1)
        for inner in range(labels - 2, -1, -1):
            for child in children[inner]:
                depth[child] = depth[labels + inner] + 1
        pairs = np.array(children, np.int64).reshape(-1, 2)
        depths = np.array(depth[labels:], np.int64)
        self._levels = [
            (inner, pairs[inner, 0], pairs[inner, 1])
            for inner in (np.flatnonzero(depths == d) for d in range(max(depth, default=0)))
        ]

    def best(self, logits: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Index and score of the best label; `logits` (n, inner nodes) are of the right child."""
        right = 1 / (1 + portable_exp(-np.ascontiguousarray(logits.T)))
        left = 1 - right + _ADDED
        right += _ADDED
        # Products, where fastText has the exponential of a sum of logarithms. The smallest ones
        # may become 0, but of n labels the best one's is at least 1 / n.
        scores = np.ones((2 * self._labels - 1, len(logits)))
        for inner, left_child, right_child in self._levels:
            scores[left_child] = scores[self._labels + inner] * left[inner]
            scores[right_child] = scores[self._labels + inner] * right[inner]
        labels = scores[: self._labels].argmax(axis=0)
        return labels, np.take_along_axis(scores, labels[None, :], axis=0)[0]
