"""Losses against transformers' own full computation, and against each document alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.albert import build_albert
from models.decoder import build_decoder
from training.examples import IGNORED
from training.networks import checkpoint_blocks
from training.objectives import Losses, Objective, document_mask

VOCAB = 120
Batch = dict[str, Tensor]


def decoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_decoder("tiny", VOCAB, max_length=64)


def albert(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return build_albert("tiny", VOCAB, max_length=64, dropout=dropout)


def packed(rows: Sequence[Sequence[int]], length: int, seed: int = 1) -> Batch:
    """Causal batch whose rows hold documents of the given lengths, then padding up to `length`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    for row, lengths in enumerate(rows):
        start = 0
        for size in lengths:
            document = torch.randint(5, VOCAB, (size,), generator=generator)
            ids[row, start : start + size] = document
            labels[row, start : start + size - 1] = document[1:]
            positions[row, start : start + size] = torch.arange(size)
            start += size
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def pairs(lengths: Sequence[int], length: int, seed: int = 2) -> Batch:
    """ALBERT batch of segment pairs of the given lengths, padded to `length`."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    ids = torch.randint(5, VOCAB, (count, length), generator=generator)
    chosen = torch.rand(count, length, generator=generator) < 0.2
    here = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    return {
        "input_ids": torch.where(here, ids, 0),
        "attention_mask": here.long(),
        "token_type_ids": (here & (torch.arange(length) >= 5)).long(),
        "labels": torch.where(chosen & here, ids.flip(1), IGNORED),
        "sentence_order_label": torch.arange(count) % 2,
    }


def rows_of(batch: Mapping[str, Tensor], chosen: slice | list[int]) -> Batch:
    return {name: tensor[chosen] for name, tensor in batch.items()}


def loss_of(losses: Losses, counts: Tensor) -> Tensor:
    return (losses.sums.sum(dim=1) / counts).sum()


def gradients(objective: Objective) -> dict[str, Tensor]:
    found = {}
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor], within: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=within, msg=name)


CASES: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "decoder": (decoder, packed([[9, 7], [16], [3, 4, 5], [8]], length=16)),
    "albert": (albert, pairs([16, 9, 12, 7], length=16)),
}
FAMILIES = pytest.mark.parametrize("family", CASES)


def test_a_packed_document_has_the_losses_of_the_document_alone() -> None:
    objective = Objective(decoder())
    lengths = [[5, 11, 8], [1, 2, 21], [24]]
    batch = packed(lengths, length=24)
    together = objective.token_losses(batch)
    for row, sizes in enumerate(lengths):
        ends = list(itertools.accumulate(sizes))
        for size, end in zip(sizes, ends, strict=True):
            part = slice(end - size, end)
            alone = rows_of({name: value[:, part] for name, value in batch.items()}, [row])
            torch.testing.assert_close(
                together[[row], part], objective.token_losses(alone), rtol=0, atol=1e-5
            )


def test_with_cross_document_attention_a_later_document_sees_the_earlier_ones() -> None:
    objective = Objective(decoder())
    batch = packed([[6, 10]], length=16)
    apart = objective.token_losses(batch)
    del batch["position_ids"]
    across = objective.token_losses(batch)
    torch.testing.assert_close(across[0, :6], apart[0, :6], rtol=0, atol=1e-6)
    assert (across[0, 6:15] - apart[0, 6:15]).abs().max() > 1e-3
    running = batch | {"position_ids": torch.arange(16)[None]}
    torch.testing.assert_close(objective.token_losses(running), across, rtol=0, atol=0)


def test_document_mask_by_hand() -> None:
    positions = torch.tensor([[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]])
    mask = document_mask(positions)
    assert mask is not None
    assert mask.shape == (2, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert torch.equal(mask[1, 0], torch.ones(5, 5).tril().bool())


def test_rows_of_one_document_leave_the_kernel_to_attention() -> None:
    assert document_mask(torch.arange(6).expand(3, -1)) is None


def test_the_causal_loss_is_that_of_all_logits() -> None:
    network = decoder()
    batch = packed([[16], [16]], length=16)
    logits = network(input_ids=batch["input_ids"]).logits
    expected = functional.cross_entropy(
        logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED, reduction="none"
    )
    losses = Objective(network)(batch)
    torch.testing.assert_close(losses.sums, expected.sum(1)[None], rtol=0, atol=1e-5)
    hits = ((logits.argmax(-1) == batch["labels"]) & (batch["labels"] != IGNORED)).sum(1)
    assert losses.correct.tolist() == [hits.tolist()]
    assert losses.counts.tolist() == [[15, 15]]
    torch.testing.assert_close(Objective(network).token_losses(batch), expected, rtol=0, atol=1e-6)
    assert losses.tokens is not None
    assert not losses.tokens.requires_grad
    torch.testing.assert_close(losses.tokens, expected, rtol=0, atol=1e-6)


def test_the_masked_loss_is_that_of_all_logits() -> None:
    network = albert()
    batch = CASES["albert"][1]
    output = network(**batch)
    losses = Objective(network)(batch)
    counts = Objective.counts(batch)
    assert loss_of(losses, counts).item() == pytest.approx(output.loss.item(), abs=1e-6)
    expected = functional.cross_entropy(
        output.prediction_logits.transpose(1, 2), batch["labels"], reduction="none"
    )
    torch.testing.assert_close(losses.sums[0], expected.sum(1), rtol=0, atol=1e-5)
    hits = output.prediction_logits.argmax(-1) == batch["labels"]
    order = output.sop_logits.argmax(-1) == batch["sentence_order_label"]
    assert losses.correct.tolist() == [hits.sum(1).tolist(), order.int().tolist()]


def test_only_masked_tokens_get_logits() -> None:
    network = albert()
    batch = CASES["albert"][1]
    rows = []
    network.predictions.decoder.register_forward_hook(
        lambda module, inputs, output: rows.append(len(output))
    )
    Objective(network)(batch)
    assert rows == [int((batch["labels"] != IGNORED).sum())]


@FAMILIES
def test_counts_need_no_network(family: str) -> None:
    build, batch = CASES[family]
    objective = Objective(build())
    counts = Objective.counts(batch)
    assert counts.dtype == torch.float64
    assert counts.tolist() == objective(batch).counts.sum(dim=1).tolist()
    expected = [(batch["labels"] != IGNORED).sum().item()] + [4] * (family == "albert")
    assert counts.tolist() == expected
    assert len(objective.terms) == len(expected)


@FAMILIES
@pytest.mark.parametrize("split", [[4], [1, 3], [3, 1], [1, 1, 1, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("padding", [0, 5])
def test_microbatches_add_up(family: str, split: list[int], padding: int) -> None:
    """Loss and gradient of any uneven split, padded further, are those of the one batch."""
    build, batch = CASES[family]
    counts = Objective.counts(batch)
    whole = Objective(build())
    expected = loss_of(whole(batch), counts)
    expected.backward()

    parts = Objective(build())
    total = 0.0
    for begin, size in zip(itertools.accumulate([0, *split]), split, strict=False):
        part = rows_of(batch, slice(begin, begin + size))
        for name, tensor in part.items():
            if tensor.ndim == 2:
                fill = IGNORED if name == "labels" else 0
                part[name] = functional.pad(tensor, (0, padding), value=fill)
        loss = loss_of(parts(part), counts)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), abs=1e-6)
    assert_same(gradients(parts), gradients(whole), 1e-6)


@FAMILIES
def test_a_batch_without_labels_gives_zero_gradients(family: str) -> None:
    """A rank that has run out of examples still runs the network, as DDP and FSDP2 need."""
    build, batch = CASES[family]
    empty = {
        name: torch.full_like(tensor, IGNORED) if "label" in name else tensor
        for name, tensor in batch.items()
    }
    objective = Objective(build())
    assert Objective.counts(empty).tolist() == [0.0] * len(objective.terms)
    losses = objective(empty)
    losses.sums.sum().backward()
    assert losses.sums.count_nonzero() == 0
    assert losses.correct.count_nonzero() == 0
    assert all(grad.count_nonzero() == 0 for grad in gradients(objective).values())


@FAMILIES
def test_every_parameter_learns(family: str) -> None:
    build, batch = CASES[family]
    objective = Objective(build())
    objective(batch).sums.sum().backward()
    still = {name for name, grad in gradients(objective).items() if not grad.count_nonzero()}
    # Softmax does not see what is added to all scores alike: a key's bias changes nothing.
    assert all("key.bias" in name for name in still), still


@FAMILIES
def test_cross_entropy_is_in_float32_under_autocast(family: str) -> None:
    build, batch = CASES[family]
    objective = Objective(build())
    seen = []
    head = objective.network.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = objective(batch)
    assert seen[0].dtype == torch.bfloat16
    assert losses.sums.dtype == torch.float32
    labels = batch["labels"].flatten()
    labels = labels if family == "decoder" else labels[labels != IGNORED]
    exact = functional.cross_entropy(seen[0].double().view(-1, VOCAB), labels, reduction="sum")
    assert losses.sums[0].sum().item() == pytest.approx(exact.item(), rel=1e-6)


@FAMILIES
def test_a_bfloat16_network_sums_in_float32(family: str) -> None:
    build, batch = CASES[family]
    objective = Objective(build().bfloat16())
    assert objective(batch).sums.dtype == torch.float32


@FAMILIES
def test_logits_in_parts_are_the_same_and_bounded(family: str) -> None:
    build, batch = CASES[family]
    whole, parts = Objective(build()), Objective(build(), max_logit_rows=3)
    rows = []
    parts.network.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: rows.append(len(output))
    )
    for objective in (whole, parts):
        objective(batch).sums.sum().backward()
    torch.testing.assert_close(parts(batch).sums, whole(batch).sums, rtol=0, atol=1e-5)
    assert_same(gradients(parts), gradients(whole), 1e-5)
    assert len(rows) > 2
    assert max(rows) == 3


@FAMILIES
def test_recomputed_blocks_change_nothing_but_the_work(family: str) -> None:
    build, batch = CASES[family]
    plain, recomputed = Objective(build()), Objective(build())
    calls = []
    for objective in (plain, recomputed):
        objective.train()
        count: list[int] = []
        calls.append(count)
        for name, module in objective.named_modules():
            if name.endswith((".self_attn", ".attention")):
                module.register_forward_hook(lambda *_, count=count: count.append(1))
    names = list(recomputed.state_dict())
    checkpoint_blocks(recomputed.network)
    assert list(recomputed.state_dict()) == names
    assert [name for name, _ in recomputed.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    losses = [objective(batch).sums for objective in (plain, recomputed)]
    for loss in losses:
        loss.sum().backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    assert_same(gradients(recomputed), gradients(plain), 1e-6)
    assert [len(count) for count in calls] == [2, 4]


def test_recomputed_blocks_draw_the_same_dropout() -> None:
    batch = CASES["albert"][1]
    found = []
    for recompute in (False, True):
        objective = Objective(albert(dropout=0.3)).train()
        if recompute:
            checkpoint_blocks(objective.network)
        torch.manual_seed(7)
        objective(batch).sums.sum().backward()
        found.append(gradients(objective))
    assert_same(found[0], found[1], 1e-6)
