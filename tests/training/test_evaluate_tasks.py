"""Reading labelled files, and dividing them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from models.errors import UserError
from tests.training.tiny_checkpoints import write_table
from training.evaluate.labelled_files import broken_entities, read_sentences, read_table
from training.evaluate.task_recipe import TaskRecipe, load_task_recipe, shipped_tasks
from training.evaluate.tasks import load_task, summary


def _recipe(folder: Path, kind: str = "sequence-classification", **data: object) -> TaskRecipe:
    fields = {"directory": str(folder), "train": "train", **data}
    return TaskRecipe.model_validate({"kind": kind, "data": fields})


def _write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def test_sentences(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(
        "\ufeffMina\tB-PER\r\nKhan\tI-PER\r\n\r\n\n \nok\tO\n\tO\nx\tO\t\n".encode()
        + b"Dhaka\tI-LOC\ny\t\n\xff\tO\n"
    )
    found = read_sentences(str(path), unprefixed_tags="refuse")
    assert [(one.units, one.labels, one.line) for one in found.examples] == [
        (("Mina", "Khan"), ("B-PER", "I-PER"), 1),
        (("ok", "Dhaka"), ("O", "I-LOC"), 6),
    ]
    assert found.damaged == [
        (7, "no_token"), (8, "wrong_number_of_fields"), (10, "no_tag"), (11, "not_utf8")
    ]  # fmt: skip
    assert found.broken_entities == 1


def test_broken_entities() -> None:
    assert broken_entities(["I-A", "I-A", "I-B", "O", "B-A", "I-A", "I-B"]) == 3


def test_tags_without_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\tTIM\nb\tTIM\nc\tO\nd\tTIM\ne\tB-X\nf\tTIM\n")
    with pytest.raises(UserError, match=r"line 1: tag 'TIM' is not O, B-TYPE or I-TYPE; .*entity"):
        read_sentences(str(path), unprefixed_tags="refuse")
    (found,) = read_sentences(str(path), unprefixed_tags="entity").examples
    assert found.labels == ("B-TIM", "I-TIM", "O", "B-TIM", "B-X", "B-TIM")
    path.write_text("a\tE-LOC\n")
    with pytest.raises(UserError, match="'E-LOC'"):
        read_sentences(str(path), unprefixed_tags="entity")


def test_table(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('label\ttext\ng\t"open quote\nb\t\n\thello\nb\tx\ty\n\nb\t two  words \n')
    found = read_table(str(path), text_column="text", label_column="label")
    assert [(one.units, one.labels) for one in found.examples] == [
        (('"open quote',), ("g",)),
        (("two  words",), ("b",)),
    ]
    assert found.damage_counts() == {"no_label": 1, "no_text": 1, "wrong_number_of_fields": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id\ttxt\nx\ty\n", "has no column 'text': its header has 'id', 'txt'"),
        ("", "holds no example"),
        ("text\tlabel\n", "holds no example"),
        ("text\tlabel\nx\n", r"holds no example \(1 lines are damaged: wrong_number_of_fields\)"),
        ("text\tlabel\nx\ta\ny\ta\n", "only one label, 'a'"),
        ("text\tlabel\nx\ta\ny\tb\n", "has no validation example left of 2"),
    ],
)
def test_mistakes_in_a_table(tmp_path: Path, text: str, message: str) -> None:
    _write(tmp_path, "train", text)
    with pytest.raises(UserError, match=message):
        load_task(_recipe(tmp_path))


def test_a_missing_file_and_an_unknown_label(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(No such file.*--data DIR"):
        load_task(_recipe(tmp_path))
    write_table(tmp_path / "train", 30, 0)
    _write(tmp_path, "test", "text\tlabel\nx\tperson\ny\tthing\n")
    with pytest.raises(UserError, match="test' line 3: label 'thing' never stands in"):
        load_task(_recipe(tmp_path, test="test"))


def test_a_part_that_is_empty_is_told_with_its_reason(tmp_path: Path) -> None:
    write_table(tmp_path / "train", 30, 0)
    _write(tmp_path, "test", "text\tlabel\nx\tperson\n")
    with pytest.raises(UserError) as caught:
        load_task(_recipe(tmp_path, test="test", validation="test"))
    assert "no validation example left of 1 in" in str(caught.value)
    assert "(removed: 1 validation texts that stand in test)" in str(caught.value)
    with pytest.raises(UserError, match=r"no train example left of 30 .*texts that stand in test"):
        load_task(_recipe(tmp_path, test="train"))


def test_windows_files(tmp_path: Path) -> None:
    """Byte order mark, line ends, empty lines, spaces in labels."""
    text = "\ufefftext\tlabel\r\n\r\nhello there\tgood one\r\nb\tbad\r\n\r\n"
    (tmp_path / "a").write_bytes(text.encode())
    found = read_table(str(tmp_path / "a"), text_column="text", label_column="label")
    assert [(one.units, one.labels, one.line) for one in found.examples] == [
        (("hello there",), ("good one",), 3), (("b",), ("bad",), 4)
    ]  # fmt: skip
    assert found.damaged == []


def test_a_type_may_be_continued_only_in_the_test(tmp_path: Path) -> None:
    _write(tmp_path, "train", "".join(f"w{n}\tB-PER\n\n" for n in range(20)))
    _write(tmp_path, "test", "a\tB-PER\nb\tI-PER\n")
    task = load_task(_recipe(tmp_path, "token-classification", test="test"))
    assert task.labels == ("O", "B-PER", "I-PER")


def test_texts_stand_in_one_part(tmp_path: Path) -> None:
    """Blanks and composed letters do not make another text; the test file stays whole."""
    train = [("one", "a"), ("one ", "a"), ("one", "b"), ("caf\u00e9  x", "a"), ("v", "b")]
    train += [(f"t{n}", "ab"[n % 2]) for n in range(20)]
    _write(tmp_path, "train", "text\tlabel\n" + "".join(f"{t}\t{label}\n" for t, label in train))
    _write(tmp_path, "test", "text\tlabel\ncafe\u0301 x\ta\nz\tb\nz\tb\nq\ta\n")
    _write(tmp_path, "dev", "text\tlabel\nv\tb\nq\ta\nr\ta\n")
    task = load_task(_recipe(tmp_path, test="test", validation="dev"))
    assert [units for (units,) in task.test_units] == ["cafe\u0301 x", "z", "z", "q"]
    assert task.test_labels.open() == (("a",), ("b",), ("b",), ("a",))
    assert [one.units[0] for one in task.validation] == ["v", "r"]
    assert [one.units[0] for one in task.train] == ["one", *(f"t{n}" for n in range(20))]
    assert task.notes["removed"] == {
        "repeats in the train file": 1,
        "repeats with other labels (the first stays) in the train file": 1,
        "train texts that stand in test": 1,
        "validation texts that stand in test": 1,
        "train texts that stand in validation": 1,
    }
    assert any("removed 1 train texts that stand in test" in line for line in summary(task))


def test_one_file_is_divided_by_label(tmp_path: Path) -> None:
    rows = [(f"text {n}", "rare" if n % 10 == 0 else "often") for n in range(200)]
    _write(tmp_path, "train", "text\tlabel\n" + "".join(f"{t}\t{label}\n" for t, label in rows))
    recipe = _recipe(tmp_path, test_share=0.2, validation_share=0.25)
    task = load_task(recipe)
    assert Counter(labels[0] for labels in task.test_labels.open()) == {"often": 36, "rare": 4}
    assert Counter(one.labels[0] for one in task.validation) == {"often": 36, "rare": 4}
    parts = [
        {units[0] for units in task.test_units},
        {one.units[0] for one in task.validation},
        {one.units[0] for one in task.train},
    ]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 200
    assert load_task(recipe).test_units == task.test_units
    other = load_task(_recipe(tmp_path, test_share=0.2, split_seed=1))
    assert other.test_units != task.test_units


def test_train_examples_are_a_sample(tmp_path: Path) -> None:
    write_table(tmp_path / "train", 100, 0)
    whole = load_task(_recipe(tmp_path))
    part = load_task(_recipe(tmp_path, train_examples=10))
    assert len(part.train) == 10
    assert set(part.train) <= set(whole.train)
    assert part.test_units == whole.test_units
    assert part.notes["train_examples_available"] == len(whole.train)


def test_the_shipped_tasks_read_their_real_files(data_dir: Path) -> None:
    assert shipped_tasks() == ["bn-ner", "bn-news", "bn-sentiment"]
    folder = {"bn-ner": "ner", "bn-news": "cls", "bn-sentiment": "cls"}
    found = {}
    for name in shipped_tasks():
        place = data_dir / "bn" / folder[name]
        found[name] = load_task(load_task_recipe(name, [f"data.directory={place}"]))
    ner = found["bn-ner"].notes
    assert ner["files"]["train"]["examples"] == 4612
    assert ner["files"]["train"]["damaged_by_reason"] == {"no_tag": 4, "no_token": 34}
    assert ner["files"]["test"]["damaged_by_reason"] == {"no_tag": 1, "wrong_number_of_fields": 3}
    assert ner["examples"]["test"] == 1950
    assert ner["removed"]["train texts that stand in test"] > 0
    assert found["bn-ner"].labels == (
        "O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER", "B-TIM", "I-TIM"
    )  # fmt: skip
    news = found["bn-news"].notes
    assert news["removed"] == {"repeats in the train file": 87}
    assert sum(news["examples"].values()) == 902 - 87
    assert found["bn-sentiment"].labels == ("negative", "neutral", "positive")
    assert found["bn-sentiment"].notes["examples"] == {
        "train": 1940, "validation": 372, "test": 371
    }  # fmt: skip
