"""Sums of word vectors and label scores are exact at the limits of what a model may hold."""

from __future__ import annotations

import numpy as np
import pytest

from models.fasttext_classifier import FastTextClassifier
from models.fasttext_model import (
    HIERARCHICAL_SOFTMAX,
    SOFTMAX,
    SUPERVISED,
    Arguments,
    DenseMatrix,
    FastTextModel,
)
from models.label_scores import LabelScores
from models.word_vectors import WordVectors

_LARGEST_PAGE_BYTES = 64 << 20  # pipelines.wet.WetReader hands out no larger record


def _matrix(values: np.ndarray) -> DenseMatrix:
    values = np.ascontiguousarray(values, np.float32)
    return DenseMatrix(values.view(np.uint8).ravel(), values.shape)


def _model(
    input_rows: np.ndarray,
    output_rows: np.ndarray,
    *,
    minn: int = 0,
    maxn: int = 0,
    loss: int = SOFTMAX,
    counts: list[int] | None = None,
) -> FastTextModel:
    labels = [b"__label__%d" % i for i in range(len(output_rows))]
    bucket = len(input_rows) - 1
    return FastTextModel(
        Arguments(input_rows.shape[1], 1, loss, SUPERVISED, bucket, minn, maxn),
        [b"</s>"],
        labels,
        counts or [1] * len(labels),
        None,
        _matrix(input_rows),
        _matrix(output_rows),
    )


@pytest.mark.parametrize("largest", [1e-12, 0.999, 1.0, 3e38])
@pytest.mark.parametrize(("minn", "maxn"), [(1, 6), (-9, 6), (2, 4), (5, 5), (1, 255)])
def test_no_word_overflows_where_each_row_is_the_largest(
    minn: int, maxn: int, largest: float
) -> None:
    rows = np.array([[1, -1, 0.5]] * 2, np.float32) * np.float32(largest)
    vectors = WordVectors(_model(rows, rows, minn=minn, maxn=maxn))
    one = np.rint(rows[1].astype(np.float64) * vectors.steps_in_one)
    assert abs(one).max() <= 2**vectors.magnitude_bits
    for word in (b"a", b"a" * 46, b"a" * 49, b"a" * 5000, "語".encode() * 600):
        chars = len(word.decode()) + 2
        ngrams = sum(max(0, chars + 1 - n) for n in range(max(1, minn), maxn + 1))
        ngrams -= 2 * (minn <= 1)  # the marks alone
        expected = [*(one * ngrams), ngrams]
        end = vectors.of_lines([b""])
        assert (vectors.of_lines([word]) - end).tolist() == [expected]
    # A page of one-letter words has the most n-grams a byte: three characters for two bytes.
    most_rows = _LARGEST_PAGE_BYTES // 2 * (1 + 3 * (maxn - max(1, minn) + 1))
    assert most_rows * 2**vectors.magnitude_bits <= 2**53


@pytest.mark.parametrize("dim", [1, 16, 300, 1024])
@pytest.mark.parametrize("maxn", [0, 4])
def test_products_are_exact_at_the_limit(dim: int, maxn: int) -> None:
    rng = np.random.default_rng(dim)
    output = (1 - rng.random((40, dim)) / 50).astype(np.float32) * np.float32(1e4)
    output[0] = 1e4 * (1 - 2.0**-24)
    model = _model(np.ones((2, dim), np.float32), output, maxn=maxn)
    mean_bits = WordVectors(model).magnitude_bits + 2
    scores = LabelScores(model, mean_bits, 2.0**mean_bits)
    means = (2**mean_bits - rng.integers(0, 99, (5, dim))).astype(np.float64)
    means[0] = 2**mean_bits
    weights = [[int(v) for v in row] for row in scores._weights.T]
    exact = [[sum(int(m) * w for m, w in zip(mean, row, strict=True)) for row in weights]
             for mean in means]  # fmt: skip
    assert scores._product(means).tolist() == exact
    assert max(map(max, exact)) > 2**46


@pytest.mark.parametrize("loss", [SOFTMAX, HIERARCHICAL_SOFTMAX])
def test_no_function_takes_part_whose_bits_depend_on_the_processor(
    loss: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(30, 8))
    classifier = FastTextClassifier(_model(rows, rows[:9], maxn=3, loss=loss))
    expected = classifier.best(["some words", "others"])

    def fail(*_: object) -> None:
        raise AssertionError("differs between processors")

    for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "power", "tanh"):
        monkeypatch.setattr(np, name, fail)
    found = classifier.best(["some words", "others"])
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()


def test_a_deep_tree_has_its_best_label() -> None:
    # Counts like Fibonacci's make a tree of one long branch: products of small ones become 0.
    counts = [1, 1]
    while len(counts) < 70:
        counts.append(counts[-1] + counts[-2])
    rows = np.full((70, 1), 50.0)
    model = _model(rows[:2], rows, loss=HIERARCHICAL_SOFTMAX, counts=counts[::-1])
    for sign in (1.0, -1.0):
        labels, scores = LabelScores(model, 20, 1.0).best(np.array([[sign]]))
        assert labels.shape == (1,)
        assert 0.99 < scores[0] < 1.01
