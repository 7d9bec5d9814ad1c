"""Chains that `bench_parallel` runs through a pipeline: of real units, and of units that sleep.

A sleeping unit takes the time that it is told to, in its forward and in its backward pass, and
next to no processor time. So two ranks on two busy cores run as on two idle devices, and what is
measured is the cut and the schedule, not the machine. A sleep ends late, by a tenth of a
millisecond or by many when the machine is busy: what one takes too much is taken from the next of
the same process, so that a rank sleeps as long as its units say.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scripts.parallel_models import SHAPES, build, mean_loss, tokens
from training.batches import Batch
from training.parallel.chain import Chain, Side, Unit, module_chain
from training.parallel.units import Profile


class Rest:
    """Sleeps, and remembers by how much too long."""

    def __init__(self) -> None:
        self.late_s = 0.0
        self._end_s = 0.0
        self._last: tuple[str, int] | None = None

    def take(self, seconds: float, kind: str, unit: int) -> None:
        """Sleep so long, less what has been too much.

        kind: 'F' or 'B', which of its passes `unit` is in. Where the unit before it in that
        pass came last, what torch did in between is a part of this one's time.
        """
        begin_s = time.perf_counter()
        if self._last == (kind, unit - 1 if kind == "F" else unit + 1):
            self.late_s += begin_s - self._end_s
        wanted_s = seconds - self.late_s
        if wanted_s > 0:
            time.sleep(wanted_s)
        self._end_s = time.perf_counter()
        self.late_s = self._end_s - begin_s - wanted_s
        self._last = kind, unit


_REST = Rest()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward_s: float, backward_s: float, unit: int) -> Tensor:
        ctx.backward_s, ctx.unit = backward_s, unit
        _REST.take(forward_s, "F", unit)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        _REST.take(ctx.backward_s, "B", ctx.unit)
        return gradient, None, None, None


class Sleeper(nn.Module):
    """Takes time; gives its input times its one weight, 1."""

    def __init__(self, forward_s: float, backward_s: float, unit: int) -> None:
        """unit: its number in the chain."""
        super().__init__()
        self.forward_s, self.backward_s, self.unit = forward_s, backward_s, unit
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        """A tensor of the same shape."""
        given = hidden * self.weight, self.forward_s, self.backward_s, self.unit
        found: Tensor = _Sleep.apply(*given)  # type: ignore[no-untyped-call]
        return found


def sleeping_chain(profile: Profile) -> Chain:
    """A chain whose units take the times of the profile."""
    return module_chain(
        nn.Sequential(
            *(
                Sleeper(unit.forward_s, unit.backward_s, number)
                for number, unit in enumerate(profile.units)
            )
        )
    )


def sleeping_batch(number: int) -> Batch:
    """Microbatch `number` for a chain that sleeps: one example of one value, number + 1."""
    return {"input": torch.full((1, 1), number + 1.0)}


def scaled(profile: Profile, factor: float) -> Profile:
    """The same units, their times multiplied."""
    units = tuple(
        replace(unit, forward_s=unit.forward_s * factor, backward_s=unit.backward_s * factor)
        for unit in profile.units
    )
    return replace(profile, units=units, source="given")


def real_chain(name: str) -> Chain:
    """Model `name` of `parallel_models` as a chain; its head gives the mean loss, (1, 1).

    Units have the names of `objective_chain`'s, which tell the tree's algorithm what is a layer.
    """
    network = build(SHAPES[name])
    chain = module_chain(network)
    head = network[-1]

    def loss(hidden: Tensor, side: Side) -> Tensor:
        return mean_loss(head(hidden), side["labels"]).reshape(1, 1)

    first, *blocks, last = chain.units
    units: tuple[Unit, ...] = (
        replace(first, name="embedding"),
        *(replace(block, name=f"layer {number}") for number, block in enumerate(blocks)),
        replace(last, name="head", run=loss),
    )
    return replace(chain, units=units, side=lambda batch: {"labels": batch["labels"]})


def real_batch(name: str, number: int) -> Batch:
    """Microbatch `number` for model `name`."""
    ids, labels = tokens(SHAPES[name], number)
    return {"input": ids, "labels": labels}
