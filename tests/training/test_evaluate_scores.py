"""Scores against numbers computed by hand."""

from __future__ import annotations

import pytest

from training.evaluate.scores import class_scores, entity_scores, spread

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def test_entities_count_whole() -> None:
    """4 true, 3 predicted, 2 of them right: precision 2/3, recall 1/2, F1 4/7."""
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O", "B-PER"]]
    predicted = [["B-PER", "I-PER", "O", "O"], ["B-LOC", "B-LOC", "O"]]
    found = entity_scores(gold, predicted, LABELS)
    assert found.values["precision"] == pytest.approx(2 / 3)
    assert found.values["recall"] == pytest.approx(1 / 2)
    assert found.values["f1"] == pytest.approx(4 / 7)
    assert found.values["accuracy"] == pytest.approx(4 / 7)
    assert found.by_label["LOC"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2.0}
    assert found.by_label["PER"]["precision"] == 1.0
    assert found.confusion[LABELS.index("B-LOC")] == [1, 0, 0, 1, 0]
    assert sum(map(sum, found.confusion)) == 7


def test_a_cut_or_mistyped_entity_is_wrong() -> None:
    gold = [["B-PER", "I-PER", "O"], ["B-LOC", "O", "O"]]
    predicted = [["B-PER", "O", "O"], ["B-PER", "O", "O"]]
    assert entity_scores(gold, predicted, LABELS).values["f1"] == 0.0


def test_a_broken_entity_begins_one() -> None:
    """seqeval's default mode: I-PER after O is the entity that B-PER would be."""
    assert entity_scores([["O", "I-PER"]], [["O", "B-PER"]], LABELS).values["f1"] == 1.0
    mixed = entity_scores([["B-PER", "I-LOC"]], [["B-PER", "B-LOC"]], LABELS)
    assert mixed.values["f1"] == 1.0


def test_nothing_found_is_zero_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    found = entity_scores([["B-PER", "O"]], [["O", "O"]], LABELS)
    assert found.values == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 0.5}
    assert entity_scores([["O"]], [["O"]], LABELS).values["f1"] == 0.0
    assert len(recwarn) == 0


def test_classes() -> None:
    """a: P 2/3 R 1; b: P 1 R 1/2; c: never predicted, 0. Accuracy 3/5."""
    gold = ["a", "a", "b", "b", "c"]
    predicted = ["a", "a", "b", "a", "b"]
    found = class_scores(gold, predicted, ("a", "b", "c"))
    assert found.values["accuracy"] == pytest.approx(3 / 5)
    f1_a, f1_b = 2 * (2 / 3) * 1 / (2 / 3 + 1), 0.5
    assert found.values["macro_f1"] == pytest.approx((f1_a + f1_b + 0) / 3)
    assert found.confusion == [[2, 0, 0], [1, 1, 0], [0, 1, 0]]
    assert found.by_label["c"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1.0}


def test_labels_may_have_the_names_of_scores() -> None:
    gold, predicted = ["accuracy", "macro avg", "b"], ["accuracy", "macro avg", "accuracy"]
    found = class_scores(gold, predicted, ("accuracy", "b", "macro avg"))
    assert found.values["macro_f1"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert found.by_label["accuracy"] == pytest.approx(
        {"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 1.0}
    )
    entities = entity_scores([["B-x avg"]], [["B-x avg"]], ("O", "B-x avg", "I-x avg"))
    assert entities.by_label["x avg"]["f1"] == 1.0


def test_macro_f1_counts_a_class_that_is_nowhere() -> None:
    assert class_scores(["a"], ["a"], ("a", "b")).values["macro_f1"] == 0.5


def test_spread_is_the_sample_standard_deviation() -> None:
    found = spread([0.5, 0.6, 0.8])
    assert found.mean == pytest.approx(1.9 / 3)
    assert found.std == pytest.approx((0.07 / 3) ** 0.5)  # 0.0467 of squares, over n - 1 = 2
    assert spread([0.4]).std is None
