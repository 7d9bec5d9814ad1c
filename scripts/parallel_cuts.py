"""Cuts of models A and B, predicted and run: a part of `bench_parallel`.

The units of a model are timed once, in this process, and every cut is made of that profile. It is
run with units that sleep for the profiled times, all multiplied by one number, and with the real
ones. Two cuts that turn out to be the same one are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from models.errors import UserError
from scripts.parallel_chains import real_batch, real_chain, scaled
from scripts.parallel_ranks import Case, Measured, awake, in_ranks, latency, measure
from training.host_memory import keep_freed_memory
from training.parallel import partition, timing, tree
from training.parallel.chain import run_chain
from training.parallel.profile import profile_chain
from training.parallel.units import Cut, Pipe, Profile, UnitCost

RANKS, MICROBATCHES = 2, 8
STEP_S = 2.0
"""What the best cut's step takes by the prediction, with units that sleep: long beside what torch
and gloo take themselves, 15 to 40 ms."""
BUBBLE_MICROBATCHES = 4
_BUBBLE_FORWARD_S, _BUBBLE_BACKWARD_S = 0.1, 0.2
_MAKERS: dict[str, Callable[[Profile, Pipe], Cut]] = {
    "uniform": partition.uniform,
    "tree, speed": lambda profile, pipe: _tree(profile, pipe, "speed"),
    "tree, memory": lambda profile, pipe: _tree(profile, pipe, "memory"),
    "optimal": partition.optimal,
}


@dataclass(frozen=True)
class CutRow:
    """One cut of one model."""

    model: str
    units: str
    """'sleep' or 'real'."""
    cut: str
    bounds: tuple[int, ...] = ()
    stage_s: tuple[float, ...] = ()
    """Predicted: forward and backward pass of a microbatch, by stage."""
    predicted_s: float = 0.0
    measured: Measured | None = None
    failed: str = ""
    """Why there is no such cut."""


@dataclass(frozen=True)
class Bubble:
    """A pipeline of two equal stages against one process with both."""

    ranks: int
    microbatches: int
    alone_s: float
    pipeline_s: float

    @property
    def ratio(self) -> float:
        """Measured."""
        return self.pipeline_s / self.alone_s

    @property
    def formula(self) -> float:
        """(m + p - 1) / (m p)."""
        return (self.microbatches + self.ranks - 1) / (self.microbatches * self.ranks)


def pipe(latency_s: float = 0.0) -> Pipe:
    """What cuts are judged by. latency_s: of a transfer; its bytes take next to no time here."""
    return Pipe(RANKS, MICROBATCHES, latency_s=latency_s)


def resting_latency(work: Path) -> float:
    """Of a transfer by ranks that have rested, as those whose units sleep."""
    with awake():
        return float(in_ranks(latency, (), RANKS, work, urgent=True))


@lru_cache
def profiled(model: str) -> Profile:
    """The units of a model, timed in this process with one thread."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return profile_chain(real_chain(model), real_batch(model, 0), device=torch.device("cpu"))


@lru_cache
def loss_alone(model: str) -> float:
    """Mean loss of the microbatches of a step, without a pipeline."""
    chain = real_chain(model)
    with torch.no_grad():
        losses = [run_chain(chain, real_batch(model, one)) for one in range(MICROBATCHES)]
    return sum(map(float, losses)) / MICROBATCHES


def cuts(profile: Profile, pipe: Pipe) -> dict[str, Cut | str]:
    """Of one model by name; a line instead of a cut where there is none."""
    found: dict[str, Cut | str] = {}
    for name, make in _MAKERS.items():
        try:
            found[name] = make(profile, pipe)
        except UserError as error:
            found[name] = str(error)
    return found


def _tree(profile: Profile, pipe: Pipe, optimize: Literal["speed", "memory"]) -> Cut:
    placed = tree.place(tree.profile_tree(profile), pipe.ranks, optimize)
    idle = placed.idle(pipe.ranks)
    if idle:
        raise UserError(f"rank {', '.join(map(str, idle))} has nothing to do")
    return placed.cut()


def sleeping_profile(model: str) -> Profile:
    """The model's profile, slowed down so that the best cut takes `STEP_S`."""
    best = timing.step_time(profiled(model), partition.optimal(profiled(model), pipe()), pipe())
    return scaled(profiled(model), STEP_S / best.step_s)


def rows(models: Sequence[str], units: str, steps: int, work: Path) -> list[CutRow]:
    """Every cut of the models, run with units that sleep or with real ones."""
    profiles = {
        model: sleeping_profile(model) if units == "sleep" else profiled(model) for model in models
    }
    given = profiles if units == "sleep" else {}
    judged = pipe(resting_latency(work) if units == "sleep" else 0.0)
    found = {model: cuts(profiles[model], judged) for model in models}
    keys = [
        (model, cut.bounds)
        for model in models
        for cut in found[model].values()
        if isinstance(cut, Cut)
    ]
    cases = {
        (model, bounds): Case(model, bounds, MICROBATCHES, profile=given.get(model))
        for model, bounds in keys
    }
    figures = measure(list(cases.values()), RANKS, steps, work)
    measured = dict(zip(cases, figures, strict=True))
    made = []
    for model in models:
        for name, cut in found[model].items():
            if isinstance(cut, str):
                made.append(CutRow(model, units, name, failed=cut))
                continue
            expected = timing.step_time(profiles[model], cut, judged)
            figure = measured[model, cut.bounds]
            made.append(
                CutRow(model, units, name, cut.bounds, expected.stage_s, expected.step_s, figure)
            )
    return made


def bubble(steps: int, work: Path, *, start_method: str = "spawn") -> Bubble:
    """Two stages of one length on two ranks, four microbatches; alone and as a pipeline in turn."""
    unit = UnitCost("unit", _BUBBLE_FORWARD_S, _BUBBLE_BACKWARD_S, parameters=1)
    profile = Profile((unit, unit), 1, "given")
    alone, piped = measure(
        [Case("", bounds, BUBBLE_MICROBATCHES, profile=profile) for bounds in ((0, 2), (0, 1, 2))],
        RANKS,
        steps,
        work,
        start_method=start_method,
    )
    return Bubble(RANKS, BUBBLE_MICROBATCHES, alone.least_s, piped.least_s)
