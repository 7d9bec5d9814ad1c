"""An encoded task: batches of rows for the network, and labels out of its guesses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from training.evaluate.encoding import Encoded, EncodedPart, encode_sentences, encode_texts
from training.evaluate.labelled_files import OUTSIDE

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

    from training.evaluate.tasks import Task

IGNORED = -100
_BATCHES_SORTED_TOGETHER = 50


@dataclass(frozen=True)
class EncodedTask:
    """A task's three parts through one tokenizer."""

    task: Task
    train: EncodedPart
    validation: EncodedPart
    test: EncodedPart
    pad_id: int

    def notes(self) -> dict[str, dict[str, int]]:
        """What did not fit into a row, by part."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {
            name: {
                "split_examples": part.split_examples,
                "cut_examples": part.cut_examples,
                "words_without_token": part.words_without_token,
            }
            for name, part in parts.items()
        }


def encode_task(
    task: Task, tokenizer: Tokenizer, max_length: int, *, pad_id: int, causal: bool
) -> EncodedTask:
    """The task's texts as token ids; words of token classification one by one.

    causal: a word's label stands on its last token, the only one that has seen all of it.
    """

    def encode(units: Sequence[tuple[str, ...]]) -> EncodedPart:
        if task.kind == "token-classification":
            place: Literal["first", "last"] = "last" if causal else "first"
            return encode_sentences(tokenizer, units, max_length, place=place)
        return encode_texts(tokenizer, [text for (text,) in units], max_length)

    return EncodedTask(
        task,
        encode([example.units for example in task.train]),
        encode([example.units for example in task.validation]),
        encode(task.test_units),
        pad_id,
    )


def label_ids(
    rows: Sequence[Encoded], gold: Sequence[Sequence[str]], labels: Sequence[str]
) -> list[np.ndarray]:
    """Ids of the gold labels at each row's places."""
    ids = {label: number for number, label in enumerate(labels)}
    return [
        np.array([ids[gold[row.example][unit]] for unit in row.units.tolist()], dtype=np.int64)
        for row in rows
    ]


def labels_of(
    guesses: Sequence[np.ndarray],
    rows: Sequence[Encoded],
    units: Sequence[int],
    labels: Sequence[str],
) -> list[list[str]]:
    """Labels of each example's units (`units`: how many) from the ids guessed at its rows' places.

    A word without a token is outside of every entity.
    """
    found = [[OUTSIDE] * count for count in units]
    for row, guess in zip(rows, guesses, strict=True):
        for unit, label in zip(row.units.tolist(), guess.tolist(), strict=True):
            found[row.example][unit] = labels[label]
    return found


def shuffled_batches(
    rows: Sequence[Encoded], size: int, key: tuple[int, int]
) -> Iterator[list[int]]:
    """Numbers of rows, `size` at a time, in an order given by `key`.

    Rows of a batch are of about one length: sorted inside of large shuffled groups.
    """
    generator = np.random.Generator(np.random.PCG64(key))
    order = generator.permutation(len(rows)).tolist()
    batches: list[list[int]] = []
    group = size * _BATCHES_SORTED_TOGETHER
    for start in range(0, len(order), group):
        part = sorted(order[start : start + group], key=lambda number: len(rows[number].input_ids))
        batches += [part[first : first + size] for first in range(0, len(part), size)]
    for number in generator.permutation(len(batches)):
        yield batches[number]


def sorted_batches(rows: Sequence[Encoded], size: int) -> Iterator[list[int]]:
    """Numbers of rows, longest first, `size` at a time."""
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].input_ids))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def inputs(
    network: PreTrainedModel, rows: Sequence[Encoded], pad_id: int
) -> dict[str, torch.Tensor]:
    """What the network takes, padded to the longest row, on its device."""
    length = max(len(row.input_ids) for row in rows)
    ids = torch.full((len(rows), length), pad_id)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for number, row in enumerate(rows):
        size = len(row.input_ids)
        ids[number, :size] = torch.from_numpy(row.input_ids)
        types[number, :size] = torch.from_numpy(row.token_type_ids)
        mask[number, :size] = 1
    batch = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in inspect.signature(network.forward).parameters:
        batch["token_type_ids"] = types
    return {name: tensor.to(network.device) for name, tensor in batch.items()}


def targets(rows: Sequence[Encoded], ids: Sequence[np.ndarray]) -> torch.Tensor:
    """Label ids at the rows' places, IGNORED elsewhere: (rows, longest row)."""
    length = max(len(row.input_ids) for row in rows)
    gold = torch.full((len(rows), length), IGNORED)
    for number, (row, own) in enumerate(zip(rows, ids, strict=True)):
        gold[number, torch.from_numpy(row.places)] = torch.from_numpy(own)
    return gold
