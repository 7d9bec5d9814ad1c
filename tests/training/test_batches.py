"""Batches against naive loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.tokenizer import PAD_ID
from tests.training import step_examples
from tests.training.small_tokenizer import made_up_text, small_tokenizer
from training.albert_examples import AlbertExamples
from training.batches import blank, collate, filled
from training.causal_examples import CausalExamples
from training.examples import IGNORED, Example
from training.recipe import Examples


def causal(count: int, *, across: bool = False) -> list[Example]:
    settings = Examples(sequence_length=24, cross_document_attention=across)
    builder = CausalExamples(small_tokenizer(), settings)
    pages = builder.encode([made_up_text(seed, 2, (1, 4)) for seed in range(30)])
    found, start = [], 0
    for index in range(count):
        cut = builder.cut(pages, start, 0)
        (arrays,) = builder.build([cut.plan])
        del pages[: cut.finished]
        start = cut.start
        found.append(Example(index, index % 3, arrays))
    return found


def test_causal_labels_are_the_next_token_of_the_same_document() -> None:
    examples = causal(6)
    batch = collate(examples)
    assert sorted(batch) == ["document_ids", "domains", "input_ids", "labels", "position_ids"]
    assert batch["domains"].tolist() == [0, 1, 2, 0, 1, 2]
    borders = 0
    for row, example in enumerate(examples):
        ids = example.arrays["input_ids"].tolist()
        documents = example.arrays["document_ids"].tolist()
        for position in range(24):
            label = IGNORED
            if position < 23 and documents[position] == documents[position + 1]:
                label = ids[position + 1]
            else:
                borders += 1
            assert batch["labels"][row, position] == label
        assert batch["position_ids"][row].tolist() == example.arrays["position_ids"].tolist()
    assert borders > 6  # some inside the sequences
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_padding_of_causal_rows_is_no_document() -> None:
    plain, padded = collate(causal(2, across=True)), collate(causal(2, across=True), 30)
    assert "position_ids" not in padded
    assert torch.equal(padded["labels"][:, :24], plain["labels"])
    assert (padded["labels"][:, 24:] == IGNORED).all()
    assert (padded["document_ids"][:, 24:] == -1).all()
    assert (padded["input_ids"][:, 24:] == PAD_ID).all()


def test_albert_rows_are_padded() -> None:
    builder = AlbertExamples(small_tokenizer(), Examples(sequence_length=64))
    pages = builder.encode([made_up_text(seed, 2 + seed, (3, 6)) for seed in range(4)])
    cuts = [builder.cut([page], 0, key) for key, page in enumerate(pages)]
    built = builder.build([cut.plan for cut in cuts])
    examples = [Example(i, 2, arrays) for i, arrays in enumerate(built)]
    sizes = [len(example.arrays["input_ids"]) for example in examples]
    assert len(set(sizes)) > 2
    for length, width in [(None, max(sizes)), (64, 64)]:
        batch = collate(examples, length)
        assert batch["sentence_order_label"].tolist() == [
            int(example.arrays["swapped"]) for example in examples
        ]
        assert batch["domains"].tolist() == [2] * len(examples)
        for name, padding in [
            ("input_ids", PAD_ID), ("labels", IGNORED), ("token_type_ids", 0),
        ]:  # fmt: skip
            assert batch[name].shape == (len(examples), width)
            for row, example in enumerate(examples):
                size = sizes[row]
                assert batch[name][row, :size].tolist() == example.arrays[name].tolist()
                assert (batch[name][row, size:] == padding).all()
        assert batch["attention_mask"].sum(1).tolist() == sizes
        assert np.array_equal(
            batch["attention_mask"].argmin(1).numpy() % width, np.array(sizes) % width
        )
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    with pytest.raises(ValueError, match="in a batch of 20"):
        collate(examples, 20)


@pytest.mark.parametrize("kind", ["albert", "decoder", "decoder without positions"])
def test_batches_are_filled_to_one_shape(kind: str) -> None:
    """Also one that is only a blank example: it has no tensor less than the others."""
    family, _, without = kind.partition(" ")
    length, positions = step_examples.LENGTH, not without
    examples = collate(step_examples.examples(family, 0, 2), length)
    if without:
        del examples["position_ids"]
    full = filled(examples, family, 4, length, positions=positions)
    empty = filled(blank(family, length), family, 4, length, positions=positions)
    shapes = {name: (4, *tensor.shape[1:]) for name, tensor in examples.items()}
    for found in (full, empty):
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
        assert {tensor.dtype for tensor in found.values()} == {torch.int64}
    for name, tensor in examples.items():
        assert torch.equal(full[name][:2], tensor)
        assert torch.equal(full[name][2:], empty[name][2:])
    for name in {"labels", "sentence_order_label"} & examples.keys():
        assert (empty[name] == IGNORED).all()
    if family == "decoder" and positions:
        assert empty["position_ids"].tolist() == [list(range(length))] * 4
