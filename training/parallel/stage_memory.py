"""What stages hold at their peak, for every cut that there could be.

A rank holds the state of its parameters; the activations of the microbatches in flight; what one
unit needs while it computes, and gradients that wait for what earlier units add to them; the
batch; and torch's receive buffers. Of those `PipelineStage` makes one for the input and one for the
gradient of the output of EVERY microbatch, once, whatever the schedule. Or, where that is more,
the state and what the optimiser needs.

The numbers are those of `parallel.rank_memory` or a little more, never clearly less: a cut that
fits by them fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from training.parallel.memory import FLOAT_BYTES
from training.parallel.schedules import Held, moments, rank_of, schedule_named
from training.parallel.timing import Floats, Ints, Tied, tied_groups
from training.parallel.units import Pipe, Profile, UnitCost


class Shared(NamedTuple):
    """A group of tied parameters."""

    elements: int
    largest: int
    """Elements of the largest of them."""
    used: Floats
    """1 where the segment uses them."""


@dataclass(frozen=True)
class Segments:
    """Bytes of the units i .. j - 1, at [i, j], i < j: of one microbatch where there are any."""

    own: Floats
    """Parameters (elements) that no other unit uses."""
    shared: tuple[Shared, ...]
    """Groups of tied parameters."""
    matrices: Floats
    """Elements of the parameters of its own with more than one dimension."""
    update: Floats
    """Elements that LAMB's updates take for them at most (`memory.update_bytes`)."""
    kept: Floats
    forward: Floats
    """Beside `kept`, while the forward pass computes."""
    backward: Floats
    came: Floats
    """The input, that the segment before sends."""
    goes: Floats
    """The output."""
    batch: float
    """A microbatch's own tensors, on every rank for the whole step."""


STATE_BYTES = 16
"""Of a parameter that is whole: weights, gradients, two moments."""


def segments(profile: Profile) -> Segments:
    """All segments of a chain. What is below the diagonal means nothing."""
    units, count = profile.units, len(profile.units)
    kept = _prefix([unit.kept_bytes for unit in units])
    cached = _prefix([unit.cached_bytes for unit in units])
    out = np.array([unit.output_bytes for unit in units], dtype=float)
    groups = tied_groups(profile)
    sizes = {name: size for unit in units for name, size in unit.shared.items()}
    names = {name for group in groups for name in group.names}
    own = _prefix(
        [
            unit.parameters - sum(size for name, size in unit.shared.items() if name in names)
            for unit in units
        ]
    )
    came, goes = np.zeros((count + 1, count + 1)), np.zeros((count + 1, count + 1))
    came[1:-1] = out[:-1, None]
    goes[:, 1:-1] = out[None, :-1]
    whole = kept[None, :] - kept[:, None]
    forward = np.array([unit.forward_bytes for unit in units]) + kept[:-1] + cached[1:]
    backward = np.array([unit.backward_bytes for unit in units]) + kept[:-1]
    highest = _backward(backward, kept, out, groups)
    return Segments(
        own=own[None, :] - own[:, None],
        shared=tuple(
            Shared(
                group.parameters,
                max(sizes[name] for name in group.names),
                _uses(group.units, count),
            )
            for group in groups
        ),
        matrices=_between([sum(unit.matrices) for unit in units]),
        update=_updates(units),
        kept=whole + profile.side_bytes,
        forward=np.maximum(_highest(forward, kept + cached) - whole, 0.0),
        backward=np.maximum(highest - whole, 0.0),
        came=came,
        goes=goes,
        batch=profile.batch_bytes,
    )


def stage_bytes(parts: Segments, pipe: Pipe, stage: int) -> Floats:
    """At [i, j]: the peak of `stage` with the units i .. j - 1, were it alone on its rank."""
    schedule = schedule_named(pipe.schedule)
    rank = rank_of(schedule, stage, pipe.ranks)
    parameters = parts.own + sum(group.elements * group.used for group in parts.shared)
    most = {False: 0, True: 0}
    for moment in moments(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)[rank]:
        if moment.stage == stage:
            most[moment.backward] = max(most[moment.backward], dict(moment.counts)[stage])
    activations = np.maximum(
        most[False] * parts.kept + parts.forward, most[True] * parts.kept + parts.backward
    )
    buffers = pipe.microbatches * (parts.came + parts.goes + parts.batch)
    computing = pipe.bytes_per_parameter * parameters + activations
    uses = [(group, group.used) for group in parts.shared]
    updating = _updating(parameters, [(parts.update, parts.matrices)], uses, pipe)
    return np.asarray(np.maximum(computing, updating) + buffers)


def ranks_bytes(parts: Segments, bounds: Ints, pipe: Pipe) -> Floats:
    """The peaks of the ranks, (ranks, cuts). bounds: (stages + 1, cuts)."""
    schedule = schedule_named(pipe.schedule)
    where = [(bounds[stage], bounds[stage + 1]) for stage in range(pipe.stages)]
    held = moments(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)
    peaks = []
    for rank in range(pipe.ranks):
        own = [s for s in range(pipe.stages) if rank_of(schedule, s, pipe.ranks) == rank]
        parameters = sum(parts.own[where[stage]] for stage in own)
        several = np.zeros(bounds.shape[1])  # elements that several stages use: not divided
        uses = []
        for group in parts.shared:
            users = np.sum([group.used[where[stage]] for stage in own], axis=0)
            uses.append((group, np.minimum(users, 1)))
            parameters = parameters + group.elements * uses[-1][1]
            if pipe.shards > 1:
                several = several + group.elements * (users > 1)
        buffers = parts.batch + sum((parts.came + parts.goes)[where[stage]] for stage in own)
        activations = np.max([_moment(parts, one, where) for one in held[rank]], axis=0)
        more = max(0.0, STATE_BYTES - pipe.bytes_per_parameter)
        computing = pipe.bytes_per_parameter * parameters + more * several + activations
        matrices = [(parts.update[where[stage]], parts.matrices[where[stage]]) for stage in own]
        updating = (STATE_BYTES - _shard_bytes(pipe)) * several
        updating = updating + _updating(np.asarray(parameters), matrices, uses, pipe)
        peaks.append(np.maximum(computing, updating) + pipe.microbatches * buffers)
    return np.asarray(peaks)


def _updating(
    parameters: Floats,
    matrices: Sequence[tuple[Floats, Floats]],
    uses: Sequence[tuple[Shared, Floats]],
    pipe: Pipe,
) -> Floats:
    """State and updates while the optimiser works. matrices: `update` and
    `matrices` of a rank's stages in order; uses: 1 where it holds the tied parameters. AdamW needs
    nothing beside its state, which is there in every other moment too."""
    if pipe.optimiser != "lamb":
        return np.zeros_like(parameters)
    before = sum(group.elements * used for group, used in uses) + np.zeros_like(parameters)
    # Shared ones come first: no more than if the largest of them were the last.
    most = before + 3 * np.max([group.largest * used for group, used in uses] or [before], axis=0)
    for update, size in matrices:
        most = np.maximum(most, before + update)
        before = before + size
    return np.asarray(_shard_bytes(pipe) * parameters + FLOAT_BYTES * most / pipe.shards)


def _shard_bytes(pipe: Pipe) -> float:
    """Of a parameter while the optimiser works: whole weights are not there."""
    return min(STATE_BYTES / pipe.shards, pipe.bytes_per_parameter)


def _moment(parts: Segments, moment: Held, where: list[tuple[Ints, Ints]]) -> Floats:
    beside = parts.backward if moment.backward else parts.forward
    total = beside[where[moment.stage]]
    for stage, count in moment.counts:
        total = total + count * parts.kept[where[stage]]
    return np.asarray(total)


def _uses(units: tuple[int, ...], count: int) -> Floats:
    used = np.zeros(count)
    used[list(units)] = 1
    total = _prefix(used.tolist())
    return np.asarray((total[None, :] - total[:, None] > 0).astype(float))


def _highest(values: Floats, before: Floats) -> Floats:
    """At [i, j]: the highest of the moments i .. j - 1, counted from what was before unit i."""
    found = np.zeros((len(before), len(before)))
    for first in range(len(values)):
        found[first, first + 1 :] = np.maximum.accumulate(values[first:]) - before[first]
    return found


def _backward(backward: Floats, kept: Floats, out: Floats, groups: Sequence[Tied]) -> Floats:
    """As `_highest` of the backward passes, less the gradient of the output, which is in a buffer
    where another stage follows; with the gradients that wait: at unit u those of what both a later
    unit of the segment and u itself or one before it use."""
    count = len(backward)
    found = np.zeros((count + 1, count + 1))
    for number in range(count):
        beside = np.zeros((number + 1, count - number))
        if number + 1 < count:
            beside[:, 0] = -out[number]
        for group in groups:
            before = [unit for unit in group.units if unit <= number]
            after = [unit for unit in group.units if unit > number]
            if before and after:
                # Segments that have one of both: from the last before, past the first after.
                beside[: before[-1] + 1, after[0] - number :] += FLOAT_BYTES * group.parameters
        here = found[: number + 1, number + 1 :]
        np.maximum(here, backward[number] - kept[: number + 1, None] + beside, out=here)
    return found


def _updates(units: Sequence[UnitCost]) -> Floats:
    """At [i, j]: the most that LAMB's updates of the units' own matrices take, one after the other
    (`memory.update_bytes`)."""
    sums = _prefix([sum(unit.matrices) for unit in units])
    most = []
    for unit, before in zip(units, sums[:-1], strict=True):
        highest = at = 0
        for matrix in unit.matrices:
            highest, at = max(highest, at + 4 * matrix), at + matrix
        most.append(before + highest)
    return _highest(np.array(most), sums)


def _between(values: list[int]) -> Floats:
    sums = _prefix(values)
    return np.asarray(sums[None, :] - sums[:, None])


def _prefix(values: list[float] | list[int]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
