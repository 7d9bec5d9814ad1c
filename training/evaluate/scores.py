"""Scores of predictions, and their mean and spread over seeds.

Entities are scored by seqeval in its default mode, which is that of CoNLL's script: an I- tag that
continues nothing begins an entity, and an entity counts when type, first and last word agree.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import seqeval.metrics
import sklearn.metrics

Tags = Sequence[Sequence[str]]
_AVERAGES = {"micro avg", "macro avg", "weighted avg"}
MAIN_SCORE = {"token-classification": "f1", "sequence-classification": "macro_f1"}
"""What is optimised on validation and compared."""


@dataclass(frozen=True)
class Scores:
    """`values`: shares of 1 by name. `by_label`: precision, recall, f1, support of each entity type
    or class. `confusion[gold][predicted]` counts words (tags) or texts (classes)."""

    values: dict[str, float]
    by_label: dict[str, dict[str, float]]
    labels: tuple[str, ...]
    confusion: list[list[int]]


def entity_scores(gold: Tags, predicted: Tags, labels: Sequence[str]) -> Scores:
    """Entity-level precision, recall and F1 (micro), and accuracy of the tags.

    Without a predicted entity precision is 0, without a true one recall is 0.
    """
    truth, guess = [list(tags) for tags in gold], [list(tags) for tags in predicted]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0 / 0 is 0: said above
        report = (
            seqeval.metrics.classification_report(truth, guess, output_dict=True, zero_division=0)
            if any(tag != "O" for tags in (*truth, *guess) for tag in tags)
            else {}
        )
        accuracy = float(seqeval.metrics.accuracy_score(truth, guess))
    micro = report.get("micro avg", {})
    values = {
        "precision": float(micro.get("precision", 0.0)),
        "recall": float(micro.get("recall", 0.0)),
        "f1": float(micro.get("f1-score", 0.0)),
        "accuracy": accuracy,
    }
    by_type = {name: _numbers(row) for name, row in report.items() if name not in _AVERAGES}
    flat_gold = [tag for tags in gold for tag in tags]
    flat_predicted = [tag for tags in predicted for tag in tags]
    return Scores(values, by_type, tuple(labels), _confusion(flat_gold, flat_predicted, labels))


def class_scores(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> Scores:
    """Accuracy, and F1 averaged over `labels`, each counting the same; 0 / 0 is 0."""
    # Not classification_report: its keys are the labels, and a label may be called "accuracy".
    columns = sklearn.metrics.precision_recall_fscore_support(
        list(gold), list(predicted), labels=list(labels), zero_division=0
    )
    names = ("precision", "recall", "f1", "support")
    by_class = {
        label: dict(zip(names, map(float, row), strict=True))
        for label, row in zip(labels, zip(*columns, strict=True), strict=True)
    }
    values = {
        "accuracy": float(sklearn.metrics.accuracy_score(list(gold), list(predicted))),
        "macro_f1": math.fsum(row["f1"] for row in by_class.values()) / len(labels),
    }
    return Scores(values, by_class, tuple(labels), _confusion(gold, predicted, labels))


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and the sample standard deviation (n - 1; None for one seed)."""

    mean: float
    std: float | None


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation of `values`."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Spread(mean, None)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (len(values) - 1)))


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        "precision": float(row["precision"]),
        "recall": float(row["recall"]),
        "f1": float(row["f1-score"]),
        "support": float(row["support"]),
    }


def _confusion(
    gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]
) -> list[list[int]]:
    place = {label: number for number, label in enumerate(labels)}
    table = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for truth, guess in zip(gold, predicted, strict=True):
        table[place[truth], place[guess]] += 1
    rows: list[list[int]] = table.tolist()
    return rows
