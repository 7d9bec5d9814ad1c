"""One step's examples, dealt to microbatches in the same way for any number of ranks, and the
gradient that they add up to.

Example i of the global stream goes to microbatch i % G of its step, G = ranks x ceil(examples /
(ranks x microbatch)), and rank r computes the microbatches g with g % ranks == r: just the
examples that its part of the stream holds. So the microbatches, and with a seed for each of them
the dropout masks, are the same on every number of ranks for which G is the same. All microbatches
of a step have the same size, or one less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from training.batches import Batch, blank, collate
from training.examples import Example
from training.metrics import Window
from training.objectives import Losses, Objective
from training.pipelined import Pipelined
from training.strategy import Parallel


def count(examples: int, microbatch: int, ranks: int) -> int:
    """G: microbatches of a step over all ranks; each rank computes G / ranks of them."""
    return ranks * -(-examples // (ranks * microbatch))


def deal(examples: Sequence[Example], number: int, rank: int, ranks: int) -> list[list[Example]]:
    """This rank's examples of a step, by microbatch g = rank, rank + ranks, ... below `number`.

    A microbatch is empty where a step has fewer examples than microbatches.
    """
    dealt: list[list[Example]] = [[] for _ in range(number // ranks)]
    for example in examples:
        dealt[(example.index % number - rank) // ranks].append(example)
    return dealt


def batch(
    examples: Sequence[Example],
    family: str,
    length: int,
    device: torch.device,
    *,
    one_shape: bool = False,
) -> Batch:
    """One microbatch on `device`; a `blank` one without examples.

    one_shape: padded to `length`, which changes nothing but the time: compiled code wants it.
    """
    found = collate(examples, length if one_shape else None) if examples else blank(family, length)
    if device.type == "cuda":
        return {
            name: tensor.pin_memory().to(device, non_blocking=True)
            for name, tensor in found.items()
        }
    return found


def dropout_seed(seed: int, step: int, microbatch: int) -> int:
    """Seed of the random choices in one microbatch: they need no state and know no ranks."""
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {microbatch}".encode()) >> 1


@dataclass(frozen=True)
class Passed:
    """What the forward and backward passes of a step left beside the gradients."""

    window: Window
    """Sums of this rank's examples."""
    tokens: int
    """Of all ranks."""
    dealt: Sequence[Sequence[Example]]
    sums: Sequence[torch.Tensor]
    """Losses (terms, examples) of each microbatch."""

    def non_finite(self) -> list[int]:
        """Indexes of this rank's examples whose own loss is not finite."""
        return [
            example.index
            for part, sums in zip(self.dealt, self.sums, strict=True)
            for example, good in zip(part, sums.isfinite().all(dim=0).tolist(), strict=False)
            if not good
        ]


def forward(parallel: Parallel, batch: Batch, number: int, *, seed: int, step: int) -> Losses:
    """Losses of this rank's microbatch `number` of a step; the same at each call, dropout too."""
    place = parallel.place
    torch.manual_seed(dropout_seed(seed, step, place.rank + number * place.ranks))
    return parallel(batch)


Weigh = Callable[[Batch, Losses], torch.Tensor]
"""Weights, (terms, examples) or broadcast to it, of the losses of a microbatch's examples. Called
on every rank after each forward pass, with the losses, which must stay as they are."""


def gradients(
    parallel: Parallel | Pipelined,
    dealt: Sequence[Sequence[Example]],
    batches: Sequence[Batch],
    window: Window,
    *,
    seed: int,
    step: int,
    weigh: Weigh | None = None,
) -> Passed:
    """Leave in the parameters the gradient of the loss of the whole global batch.

    That loss is the sum over terms of (sum of the losses of all labels / labels in the global
    batch); with `weigh`, the sum of all examples' losses times their weights. dealt, batches: this
    rank's microbatches, as `deal` gives them and as tensors on its device, at least one, as many
    on each rank. window: empty; what is seen is added to it. Raises ValueError for `weigh` with a
    pipeline, whose first ranks do not have the losses that it weighs.
    """
    if weigh is not None and isinstance(parallel, Pipelined):
        raise ValueError("a pipeline cannot weigh examples by their losses")
    place = parallel.place
    counts = torch.stack([Objective.counts(batch).cpu() for batch in batches]).sum(0)
    tokens = sum(example.arrays["input_ids"].size for part in dealt for example in part)
    found = place.total(torch.cat([counts, torch.tensor([tokens], dtype=torch.float64)]))
    *counts_of_all, tokens_of_all = (found / place.copies).tolist()
    # DDP and FSDP2 divide the sum of the ranks' gradients by the number of ranks.
    factors = [parallel.gradient_factor / max(count, 1.0) for count in counts_of_all]
    by_label = torch.tensor(factors, dtype=torch.float32, device=place.device)[:, None]
    sums = []
    if isinstance(parallel, Pipelined):
        for losses, batch in zip(
            parallel.passes(batches, by_label, seed=seed, step=step), batches, strict=True
        ):
            window.add(losses, batch["domains"])
            sums.append(losses.sums)
        return Passed(window, round(tokens_of_all), dealt, sums)
    for number, batch in enumerate(batches):
        with parallel.microbatch(last=number == len(batches) - 1):
            losses = forward(parallel, batch, number, seed=seed, step=step)
            weights = by_label
            if weigh is not None:
                weights = weigh(batch, losses) * parallel.gradient_factor
            (losses.sums * weights).sum().backward()  # type: ignore[no-untyped-call]
        window.add(losses, batch["domains"])
        sums.append(losses.sums.detach())
    return Passed(window, round(tokens_of_all), dealt, sums)
