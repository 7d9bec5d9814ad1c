"""What a cut takes in time: the schedule's own actions, run by the clock instead of by torch.

Each rank does its actions in their order; one starts when the rank is free and its input is
there. Nothing is drawn: the times of a profile are times that every microbatch takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from training.parallel.schedules import Action, Schedule, actions, rank_of, schedule_named
from training.parallel.units import Cut, Pipe, Profile

GRADIENT_BYTES = 4
"""Of an element of a tied parameter, when its copies' gradients are added up."""
NOTICEABLE = 1.05
"""So many times the mean makes a stage the one that bounds the step."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Timing:
    """One step of one pipeline."""

    step_s: float
    bubble: float
    """Share of the ranks' time in which they compute nothing."""
    stage_s: tuple[float, ...]
    """By stage: forward and backward pass of one microbatch."""
    bound_by: int | None
    """The stage that the others wait for: the slowest of the busiest rank. None: they are even."""
    ideal_s: float
    """What the step would take by the same schedule if the units could be cut into stages of one
    length and transfers took no time."""


class Costs(NamedTuple):
    """What stages take, of one cut or of many: a row a stage, a column a cut."""

    forward_s: Floats
    backward_s: Floats
    sent_s: Floats
    """Output of a stage on the wire, beside the latency; the gradient that comes back likewise."""
    after_s: Floats
    """By cut: after the last backward pass."""


class Node(NamedTuple):
    """An action, and what has to be over before it starts. Numbers: of nodes; -1: none."""

    action: Action
    before: int
    """The action before it on its rank."""
    input: int
    """The one that its input comes from."""
    transferred: bool
    """That input, from another rank."""
    wire: int
    """The last one before it whose result goes the same way as its own."""
    sends: int
    """The stage whose output, or the gradient of whose output, it sends; -1: it sends nothing."""


def step_time(profile: Profile, cut: Cut, pipe: Pipe) -> Timing:
    """One step of `pipe` with the units cut like that."""
    costs = costs_of(profile, np.array([cut.bounds]).T, pipe)
    step_s = float(times_of(costs, pipe)[0])
    each = costs.forward_s[:, 0] + costs.backward_s[:, 0]
    busy = np.zeros(pipe.ranks)
    schedule = schedule_named(pipe.schedule)
    places = [rank_of(schedule, stage, pipe.ranks) for stage in range(cut.stages)]
    np.add.at(busy, places, each)
    slowest = int(busy.argmax())
    uneven = busy[slowest] > NOTICEABLE * busy.mean()
    own = [stage for stage in range(cut.stages) if places[stage] == slowest]
    total = float(pipe.microbatches * busy.sum())
    return Timing(
        step_s=step_s,
        bubble=1.0 - total / (pipe.ranks * step_s) if step_s > 0 else 0.0,
        stage_s=tuple(each.tolist()),
        bound_by=max(own, key=lambda stage: each[stage]) if uneven else None,
        ideal_s=_ideal(costs, pipe),
    )


def formula_s(profile: Profile, cut: Cut, pipe: Pipe) -> float:
    """The usual estimate for one stage a rank: (m - 1) max t + sum t + 2 sum of transfers.

    It is what GPipe and 1F1B take when forward and backward pass are in one ratio on every stage
    and the stages are even; where they are not, `step_time` knows better. To it comes what tied
    copies cost: each beside the first one transfer of its gradient and two latencies, which for
    two copies is one all-reduce and for more is a bound.
    """
    costs = costs_of(profile, np.array([cut.bounds]).T, pipe)
    each = (costs.forward_s + costs.backward_s)[:, 0]
    there_and_back = 2 * sum(
        transfer_s(profile.units[end - 1].output_bytes, pipe) for end in cut.bounds[1:-1]
    )
    copies = sum(
        copy_s(group, pipe) * (len({stage_of(cut, unit) for unit in group.units}) - 1)
        for group in tied_groups(profile)
    )
    return float((pipe.microbatches - 1) * each.max() + each.sum()) + there_and_back + copies


def copy_s(group: Tied, pipe: Pipe) -> float:
    """What a second copy of tied parameters adds to a step: an all-reduce of two ranks."""
    return transfer_s(group.parameters * GRADIENT_BYTES, pipe) + pipe.latency_s


def transfer_s(size_bytes: float, pipe: Pipe) -> float:
    """From one rank to another, nothing else on the wire."""
    return size_bytes / (pipe.bandwidth_bytes_s or np.inf) + pipe.latency_s


class Tied(NamedTuple):
    """Parameters that the same units use: they stay together or are copied together."""

    names: tuple[str, ...]
    parameters: int
    units: tuple[int, ...]
    """Their numbers, two or more."""


def tied_groups(profile: Profile) -> list[Tied]:
    """What several units of a chain use."""
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for number, unit in enumerate(profile.units):
        for name, size in unit.shared.items():
            holders.setdefault(name, []).append(number)
            sizes[name] = size
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, units in holders.items():
        if len(units) > 1:
            groups.setdefault(tuple(units), []).append(name)
    return [
        Tied(tuple(names), sum(sizes[name] for name in names), units)
        for units, names in groups.items()
    ]


def stage_of(cut: Cut, unit: int) -> int:
    """The stage that holds a unit."""
    return int(np.searchsorted(cut.bounds, unit, side="right")) - 1


def costs_of(profile: Profile, bounds: Ints, pipe: Pipe) -> Costs:
    """The costs of the stages of many cuts. bounds: (stages + 1, cuts)."""
    forward = _prefix([unit.forward_s for unit in profile.units])
    backward = _prefix([unit.backward_s for unit in profile.units])
    out = np.array([unit.output_bytes for unit in profile.units], dtype=float)
    return Costs(
        forward_s=np.diff(forward[bounds], axis=0),
        backward_s=np.diff(backward[bounds], axis=0),
        sent_s=out[bounds[1:] - 1] / (pipe.bandwidth_bytes_s or np.inf),
        after_s=_tied_s(profile, bounds, pipe),
    )


def times_of(costs: Costs, pipe: Pipe) -> Floats:
    """Seconds of a step, by cut."""
    nodes = _nodes(
        schedule_named(pipe.schedule), pipe.ranks, pipe.stages_per_rank, pipe.microbatches
    )
    lengths = _lengths(costs, pipe)
    nothing = np.zeros(costs.forward_s.shape[1])
    ends: list[Floats] = []
    wires: list[Floats] = []
    for node in nodes:
        action = node.action
        start = ends[node.before] if node.before >= 0 else nothing
        if node.input >= 0:
            came = wires[node.input] + pipe.latency_s if node.transferred else ends[node.input]
            start = np.maximum(start, came)
        end = start + lengths[action.kind][action.stage]
        ends.append(end)
        if node.sends < 0:
            wires.append(end)
            continue
        free = np.maximum(end, wires[node.wire]) if node.wire >= 0 else end
        wires.append(free + costs.sent_s[node.sends])
    followed = {node.before for node in nodes}
    last = [end for number, end in enumerate(ends) if number not in followed]
    return np.asarray(np.max(last, axis=0) + costs.after_s)


def _lengths(costs: Costs, pipe: Pipe) -> dict[str, Floats]:
    """Of each kind of action, by stage. Half of a backward pass for each part of a split one: on
    the first stage torch does nothing in I and all of it in W, but there W always follows at once.
    """
    whole = costs.backward_s
    first = whole if pipe.whole_backward else whole / 2
    return {"F": costs.forward_s, "B": whole, "I": first, "W": whole - first}


def _ideal(costs: Costs, pipe: Pipe) -> float:
    stages = costs.forward_s.shape[0]
    even = Costs(
        forward_s=np.full((stages, 1), costs.forward_s[:, 0].sum() / stages),
        backward_s=np.full((stages, 1), costs.backward_s[:, 0].sum() / stages),
        sent_s=np.zeros((stages, 1)),
        after_s=np.zeros(1),
    )
    wireless = replace(pipe, bandwidth_bytes_s=None, latency_s=0.0)
    return float(times_of(even, wireless)[0])


def _tied_s(profile: Profile, bounds: Ints, pipe: Pipe) -> Floats:
    """By cut: the all-reduces, in a ring, of the gradients of parameters on several ranks."""
    seconds = np.zeros(bounds.shape[1])
    schedule = schedule_named(pipe.schedule)
    places = np.array([rank_of(schedule, s, pipe.ranks) for s in range(len(bounds) - 1)])
    for group in tied_groups(profile):
        held = np.zeros((pipe.ranks, bounds.shape[1]), dtype=bool)
        for unit in group.units:
            stages = (bounds[1:] <= unit).sum(axis=0)
            held[places[stages], np.arange(bounds.shape[1])] = True
        ranks = held.sum(axis=0)
        sent = 2 * (ranks - 1) / ranks * group.parameters * GRADIENT_BYTES
        seconds += sent / (pipe.bandwidth_bytes_s or np.inf) + 2 * (ranks - 1) * pipe.latency_s
    return seconds


@lru_cache(maxsize=64)
def _nodes(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> list[Node]:
    """The actions of all ranks in an order in which each comes after all that it waits for."""
    orders = actions(schedule, ranks, stages_per_rank, microbatches)
    stages = ranks * stages_per_rank
    done: dict[tuple[str, int, int], int] = {}
    at, before = [0] * ranks, [-1] * ranks
    wires: dict[tuple[int, int], int] = {}
    nodes: list[Node] = []
    while len(nodes) < sum(map(len, orders)):
        known = len(nodes)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                source = _source(action, stages)
                if source is not None and source not in done:
                    break
                number = len(nodes)
                target = _target(action, stages)
                to = rank if target is None else rank_of(schedule, target, ranks)
                nodes.append(
                    Node(
                        action=action,
                        before=before[rank],
                        input=-1 if source is None else done[source],
                        transferred=source is not None
                        and rank_of(schedule, source[1], ranks) != rank,
                        wire=wires.get((rank, to), -1),
                        sends=-1 if to == rank else min(action.stage, target or 0),
                    )
                )
                if to != rank:
                    wires[rank, to] = number
                if action.kind != "W":
                    result = "F" if action.kind == "F" else "G"
                    done[result, action.stage, action.microbatch] = number
                before[rank] = number
                at[rank] += 1
        if len(nodes) == known:
            raise ValueError(f"the ranks of '{schedule.name}' wait for each other for ever")
    return nodes


def _source(action: Action, stages: int) -> tuple[str, int, int] | None:
    """What an action waits for beside its rank: forward (F) or gradient (G), stage, microbatch."""
    kind, stage, microbatch = action
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage > 0 else None
    if kind == "W":
        return None  # its I came before it on the same rank
    return ("G", stage + 1, microbatch) if stage + 1 < stages else ("F", stage, microbatch)


def _target(action: Action, stages: int) -> int | None:
    """The stage that waits for an action's result."""
    if action.kind == "F":
        return action.stage + 1 if action.stage + 1 < stages else None
    return action.stage - 1 if action.kind != "W" and action.stage > 0 else None


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
