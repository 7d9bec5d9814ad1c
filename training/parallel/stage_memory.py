"""What stages hold at their peak, for every cut that there could be.

A rank holds the state of its parameters; the activations of the microbatches in flight; what one
unit needs while it computes; the batch; and torch's receive buffers. Of those `PipelineStage`
makes one for the input and one for the gradient of the output of EVERY microbatch, once, whatever
the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.parallel.schedules import Held, moments, rank_of, schedule_named
from training.parallel.timing import Floats, Ints, tied_groups
from training.parallel.units import Cut, Pipe, Profile


@dataclass(frozen=True)
class Segments:
    """Bytes of the units i .. j - 1, at [i, j], i < j: of one microbatch where there are any."""

    own: Floats
    """Parameters (elements) that no other unit uses."""
    shared: tuple[tuple[int, Floats], ...]
    """Of each group of tied parameters: the elements, and 1 where the segment uses them."""
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


def segments(profile: Profile) -> Segments:
    """All segments of a chain. What is below the diagonal means nothing."""
    units, count = profile.units, len(profile.units)
    kept = _prefix([unit.kept_bytes for unit in units])
    cached = _prefix([unit.cached_bytes for unit in units])
    out = np.array([unit.output_bytes for unit in units], dtype=float)
    groups = tied_groups(profile)
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
    return Segments(
        own=own[None, :] - own[:, None],
        shared=tuple((group.parameters, _uses(group.units, count)) for group in groups),
        kept=whole + profile.side_bytes,
        forward=np.maximum(_highest(forward, kept + cached) - whole, 0.0),
        backward=np.maximum(_highest(backward, kept) - whole, 0.0),
        came=came,
        goes=goes,
        batch=profile.batch_bytes,
    )


def stage_bytes(parts: Segments, pipe: Pipe, stage: int) -> Floats:
    """At [i, j]: the peak of `stage` with the units i .. j - 1, were it alone on its rank."""
    schedule = schedule_named(pipe.schedule)
    rank = rank_of(schedule, stage, pipe.ranks)
    parameters = parts.own + sum(size * used for size, used in parts.shared)
    most = {False: 0, True: 0}
    for moment in moments(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)[rank]:
        if moment.stage == stage:
            most[moment.backward] = max(most[moment.backward], dict(moment.counts)[stage])
    activations = np.maximum(
        most[False] * parts.kept + parts.forward, most[True] * parts.kept + parts.backward
    )
    buffers = pipe.microbatches * (parts.came + parts.goes + parts.batch)
    return np.asarray(pipe.bytes_per_parameter * parameters + activations + buffers)


def ranks_bytes(parts: Segments, bounds: Ints, pipe: Pipe) -> Floats:
    """The peaks of the ranks, (ranks, cuts). bounds: (stages + 1, cuts)."""
    schedule = schedule_named(pipe.schedule)
    where = [(bounds[stage], bounds[stage + 1]) for stage in range(pipe.stages)]
    held = moments(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)
    peaks = []
    for rank in range(pipe.ranks):
        own = [s for s in range(pipe.stages) if rank_of(schedule, s, pipe.ranks) == rank]
        parameters = sum(parts.own[where[stage]] for stage in own)
        for size, used in parts.shared:
            parameters = parameters + size * np.max([used[where[s]] for s in own], axis=0)
        buffers = parts.batch + sum((parts.came + parts.goes)[where[stage]] for stage in own)
        activations = np.max([_moment(parts, one, where) for one in held[rank]], axis=0)
        peaks.append(
            pipe.bytes_per_parameter * parameters + pipe.microbatches * buffers + activations
        )
    return np.asarray(peaks)


def bytes_of(profile: Profile, cut: Cut, pipe: Pipe) -> tuple[int, ...]:
    """The peak of each rank in a step."""
    peaks = ranks_bytes(segments(profile), np.array([cut.bounds]).T, pipe)
    return tuple(round(peak) for peak in peaks[:, 0].tolist())


def size_text(size_bytes: float) -> str:
    """For people, as '1.5 GiB'."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= one:
            return f"{size_bytes / one:.4g} {unit}"
    return f"{size_bytes:.0f} B"


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


def _prefix(values: list[float] | list[int]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
