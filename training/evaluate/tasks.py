"""A fine-tuning task's examples: read, freed of texts that stand in two parts, divided.

The labels of the test examples are kept apart: training and every choice see `test_units` only.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models import files
from models.errors import UserError
from training.evaluate.labelled_files import (
    OUTSIDE,
    Labelled,
    LabelledFile,
    read_sentences,
    read_table,
)
from training.evaluate.task_recipe import TaskFiles, TaskRecipe

_MOST_DAMAGE_SHOWN = 5


class SealedLabels:
    """The test examples' labels, opened only to score predictions."""

    def __init__(self, labels: Sequence[tuple[str, ...]]) -> None:
        self._labels = tuple(labels)

    def open(self) -> tuple[tuple[str, ...], ...]:
        """One tuple of labels for each test example."""
        return self._labels


@dataclass(frozen=True)
class Task:
    """Examples of the three parts, and what was found in the files."""

    kind: str
    labels: tuple[str, ...]
    """All labels, in the order of their ids."""
    train: tuple[Labelled, ...]
    validation: tuple[Labelled, ...]
    test_units: tuple[tuple[str, ...], ...]
    test_labels: SealedLabels
    notes: dict[str, Any] = field(default_factory=dict)
    """Files with digest, damage and broken entities; sizes of the parts; texts taken out."""


def load_task(recipe: TaskRecipe) -> Task:
    """Read and divide the examples of `recipe`.

    A text that stands in two parts is taken out of the one that is trained on; so are repeats of a
    training text. Raises UserError for files that cannot be used, a label of the validation or test
    file that the training file lacks, and a part that comes out empty.
    """
    data = recipe.data
    read = _reader(recipe)
    train_file = read(_path(data, data.train))
    files_read = {"train": train_file}
    for part, name in (("validation", data.validation), ("test", data.test)):
        if name is not None:
            files_read[part] = read(_path(data, name))
    labels = _labels(recipe.kind, files_read)
    removed: Counter[str] = Counter()

    train = _without_repeats(train_file.examples, removed)
    by_label = recipe.kind == "sequence-classification"
    generator = np.random.Generator(np.random.PCG64(data.split_seed))
    if "test" in files_read:
        test = files_read["test"].examples
    else:
        train, test = _divide(train, data.test_share, generator, by_label=by_label)
    train = _without(train, test, "train texts that stand in test", removed)
    if "validation" in files_read:
        validation = _without(
            files_read["validation"].examples, test, "validation texts that stand in test", removed
        )
        train = _without(train, validation, "train texts that stand in validation", removed)
    else:
        train, validation = _divide(train, data.validation_share, generator, by_label=by_label)
    there = len(train)
    if data.train_examples is not None and there > data.train_examples:
        taken = generator.choice(there, data.train_examples, replace=False)
        train = [train[number] for number in sorted(taken.tolist())]
    for part, examples in (("train", train), ("validation", validation), ("test", test)):
        if not examples:
            gone = [f"{count} {what}" for what, count in removed.items()]
            raise UserError(
                f"task '{recipe.name}' has no {part} example left of "
                f"{len(files_read.get(part, train_file).examples)} in "
                f"'{files_read.get(part, train_file).path}'"
                + (f" (removed: {', '.join(gone)})" if gone else "")
                + ": give more examples, or set data.validation_share and data.test_share"
            )
    notes = {
        "files": {part: _file_notes(found) for part, found in files_read.items()},
        "examples": {"train": len(train), "validation": len(validation), "test": len(test)},
        "train_examples_available": there,
        "removed": dict(removed),
        "labels": _label_counts(train),
    }
    return Task(
        recipe.kind,
        labels,
        tuple(train),
        tuple(validation),
        tuple(example.units for example in test),
        SealedLabels([example.labels for example in test]),
        notes,
    )


def summary(task: Task) -> list[str]:
    """What a user has to know about the data, in lines."""
    sizes = task.notes["examples"]
    there = task.notes["train_examples_available"]
    of = f" of {there:,}" if there > sizes["train"] else ""
    lines = [
        f"data: {sizes['train']:,}{of} train, {sizes['validation']:,} validation, "
        f"{sizes['test']:,} test; labels {', '.join(task.labels)}"
    ]
    lines += [f"data: removed {count:,} {what}" for what, count in task.notes["removed"].items()]
    for part, notes in task.notes["files"].items():
        if notes["damaged_lines"]:
            shown = ", ".join(f"{place['line']} {place['reason']}" for place in notes["damaged"])
            more = ", ..." if notes["damaged_lines"] > len(notes["damaged"]) else ""
            lines.append(
                f"data: {part} file: {notes['damaged_lines']:,} damaged lines left out "
                f"(line {shown}{more})"
            )
        if notes["broken_entities"]:
            lines.append(
                f"data: {part} file: {notes['broken_entities']:,} I- tags continue nothing; they "
                "stay, and count as the beginning of an entity"
            )
    return lines


def _reader(recipe: TaskRecipe) -> Callable[[str], LabelledFile]:
    data = recipe.data
    if recipe.kind == "token-classification":
        return lambda path: read_sentences(path, unprefixed_tags=data.unprefixed_tags)
    return lambda path: read_table(
        path, text_column=data.text_column, label_column=data.label_column
    )


def _path(data: TaskFiles, name: str) -> str:
    return files.join(data.directory, name) if data.directory else name


def _labels(kind: str, found: dict[str, LabelledFile]) -> tuple[str, ...]:
    known = {label for example in found["train"].examples for label in example.labels}
    if kind == "token-classification":
        # A type seen as B- only in the training sentences can still be continued in others.
        types = sorted({label[2:] for label in known if label != OUTSIDE})
        labels = (OUTSIDE, *(f"{prefix}-{name}" for name in types for prefix in "BI"))
    else:
        labels = tuple(sorted(known))
    for part in ("validation", "test"):
        for example in found[part].examples if part in found else ():
            for label in example.labels:
                if label not in labels:
                    raise UserError(
                        f"'{found[part].path}' line {example.line}: label '{label}' never stands "
                        f"in '{found['train'].path}': its labels are {', '.join(labels)}"
                    )
    if len(labels) < 2:
        raise UserError(
            f"'{found['train'].path}' has only one label, '{labels[0]}': two are needed"
        )
    return labels


def _key(example: Labelled) -> str:
    return unicodedata.normalize("NFC", " ".join(" ".join(example.units).split()))


def _without_repeats(examples: Sequence[Labelled], removed: Counter[str]) -> list[Labelled]:
    kept: dict[str, Labelled] = {}
    for example in examples:
        first = kept.setdefault(_key(example), example)
        if first is not example:
            same = first.labels == example.labels
            what = "repeats" if same else "repeats with other labels (the first stays)"
            removed[f"{what} in the train file"] += 1
    return list(kept.values())


def _without(
    examples: Sequence[Labelled], others: Iterable[Labelled], what: str, removed: Counter[str]
) -> list[Labelled]:
    there = {_key(other) for other in others}
    kept = [example for example in examples if _key(example) not in there]
    if len(kept) < len(examples):
        removed[what] += len(examples) - len(kept)
    return kept


def _divide(
    examples: Sequence[Labelled],
    share: float,
    generator: np.random.Generator,
    *,
    by_label: bool,
) -> tuple[list[Labelled], list[Labelled]]:
    """(rest, part): `share` of the examples; by_label: of those of each label."""
    strata: dict[tuple[str, ...], list[int]] = {}
    for number, example in enumerate(examples):
        strata.setdefault(example.labels if by_label else (), []).append(number)
    part: set[int] = set()
    for key in sorted(strata):
        numbers = generator.permutation(strata[key])
        part.update(numbers[: round(share * len(numbers))].tolist())
    return (
        [example for number, example in enumerate(examples) if number not in part],
        [example for number, example in enumerate(examples) if number in part],
    )


def _file_notes(found: LabelledFile) -> dict[str, Any]:
    return {
        "path": found.path,
        "sha256": found.sha256,
        "examples": len(found.examples),
        "damaged_lines": len(found.damaged),
        "damaged_by_reason": found.damage_counts(),
        "damaged": [
            {"line": line, "reason": reason} for line, reason in found.damaged[:_MOST_DAMAGE_SHOWN]
        ],
        "broken_entities": found.broken_entities,
    }


def _label_counts(examples: Iterable[Labelled]) -> dict[str, int]:
    counts = Counter(label for example in examples for label in example.labels)
    return dict(counts.most_common())
