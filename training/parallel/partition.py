"""Where to cut a chain into the stages of a pipeline.

A small chain is cut in every way that there is; all cuts go through the simulation of `timing` at
once, so the best one is the best. A large one starts from a handful of cuts, each the exact best
of something simpler (dynamic programming over contiguous segments), and moves their bounds while
that helps. For one stage a rank the usual formula's exact best is among them: `least_formula`,
whose maximum is enumerated as in Alpa (Zheng et al. 2022, section 5).

Left out: a different number of data-parallel copies for each stage (PipeDream), and units that
are split inside (tensor parallelism).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.errors import UserError
from training.parallel.ladder import size
from training.parallel.schedules import check, rank_of, schedule_named
from training.parallel.stage_memory import (
    ranks_bytes,
    segments,
    stage_bytes,
)
from training.parallel.timing import (
    Floats,
    Ints,
    copy_s,
    costs_of,
    tied_groups,
    times_of,
    transfer_s,
)
from training.parallel.units import Cut, Pipe, Profile

Mask = NDArray[np.bool_]

_ALL_CUTS = 1_500_000
"""Cuts times actions up to which all cuts are tried: about half a second."""
_MOVES = 40
"""Most times that bounds are moved."""
_WIDEST, _EACH_MOVE = 16, 500_000
"""Cuts that are moved side by side: the most, and cuts times actions that a move may look at."""
_SAME = 1e-9
"""Times that differ by less are the same."""


def uniform(profile: Profile, pipe: Pipe) -> Cut:
    """As many units for each stage, the first ones one more where they do not come out even."""
    _check(profile, pipe)
    least, more = divmod(len(profile.units), pipe.stages)
    sizes = [least + (stage < more) for stage in range(pipe.stages)]
    return Cut((0, *np.cumsum(sizes).tolist()))


def optimal(profile: Profile, pipe: Pipe) -> Cut:
    """The cut whose step is the shortest, of those that fit into the memory of the ranks.

    Of equally short ones the one with the evenest stages. Where there are too many cuts to try
    them all it may miss the best; it is never worse than `uniform`, and for one stage a rank than
    `least_formula`, where those fit. Units that use one parameter may be on different ranks, each
    with a copy, which costs memory and time. UserError, one line, where no cut fits.
    """
    search = _Search(profile, pipe)
    actions = 3 * pipe.microbatches * pipe.stages
    if comb(search.count - 1, pipe.stages - 1) * actions <= _ALL_CUTS:
        return search.best_of(search.every())
    return search.climb(search.starts())


def smallest(profile: Profile, pipe: Pipe) -> Cut:
    """The cut whose fullest rank holds the least, whatever the memory and the time.

    Exact for one stage a rank, and for several where all cuts can be tried; else the best that
    moving bounds finds.
    """
    search = _Search(profile, replace(pipe, memory_bytes=None))
    if pipe.stages_per_rank == 1:
        path = search.path(search.bytes, fits=False, worst=True)
        assert path is not None  # there are as many units as stages
        return Cut(path.bounds)
    few = comb(search.count - 1, pipe.stages - 1) <= _ALL_CUTS // 100
    best = search.fullest_least(search.every() if few else search.starts())
    while not few:
        better = search.fullest_least(np.concatenate([best, _neighbours(best[:, 0])], axis=1))
        if np.array_equal(better, best):
            break
        best = better
    return _cut(best[:, 0])


def least_formula(profile: Profile, pipe: Pipe) -> Cut:
    """The cut with the least `timing.formula_s` that fits: exact, for one stage a rank."""
    search = _Search(profile, pipe)
    if pipe.stages_per_rank != 1:
        raise UserError(
            f"'{pipe.stages_per_rank}' stages on each rank: the formula is for 1; use optimal()"
        )
    found = search.least_formula()
    if found is None:
        raise search.misfit()
    return found


class _Path(NamedTuple):
    cost: float
    bounds: tuple[int, ...]


class _Search:
    """A chain and a pipe, with what all ways to look for a cut need."""

    def __init__(self, profile: Profile, pipe: Pipe) -> None:
        _check(profile, pipe)
        self.profile, self.pipe = profile, pipe
        self.count = len(profile.units)
        self.parts = segments(profile)
        self.groups = tied_groups(profile)
        self.schedule = schedule_named(pipe.schedule)
        seconds = np.concatenate([[0.0], np.cumsum([unit.seconds for unit in profile.units])])
        self.seconds: Floats = seconds[None, :] - seconds[:, None]
        self.bytes = [stage_bytes(self.parts, pipe, stage) for stage in range(pipe.stages)]
        self.allowed = [self._allowed(stage) for stage in range(pipe.stages)]

    # --- cuts that are exact for something ---

    def path(self, costs: list[Floats], *, fits: bool = True, worst: bool = False) -> _Path | None:
        """The allowed cut with the least sum of costs[stage][first, end], or the least worst of
        them. fits: only segments that fit into a rank alone."""
        join = np.maximum if worst else np.add
        best = np.full(self.count + 1, np.inf)
        best[0] = 0.0
        chosen = []
        for stage, cost in enumerate(costs):
            open_ = self.allowed[stage] & self._fits(stage) if fits else self.allowed[stage]
            totals = join(best[:, None], np.where(open_, cost, np.inf))
            chosen.append(totals.argmin(axis=0))
            best = totals.min(axis=0)
        if not np.isfinite(best[-1]):
            return None
        bounds = [self.count]
        for first in reversed(chosen):
            bounds.append(int(first[bounds[-1]]))
        return _Path(float(best[-1]), tuple(reversed(bounds)))

    def least_formula(self) -> Cut | None:
        extra = self._extra()
        least = self.path(extra)
        if least is None:
            return None
        after = self.pipe.microbatches - 1
        found, best = least, np.inf
        for longest in self._longest():
            if after * longest + least.cost >= best:
                break
            path = self.path([np.where(self.seconds <= longest, one, np.inf) for one in extra])
            if path is not None and after * longest + path.cost < best:
                found, best = path, after * longest + path.cost
        return Cut(found.bounds)

    def starts(self) -> Ints:
        """A few cuts to begin with, (stages + 1, cuts)."""
        mean = self.seconds[0, -1] / self.pipe.stages or 1.0
        even = (self.seconds / mean) ** 2
        heavy = max(float(one[0, -1]) for one in self.bytes) / self.pipe.stages or 1.0
        light = [(one / heavy) ** 2 for one in self.bytes]
        alone = self.pipe.stages_per_rank == 1
        weights = (0.0, 0.1, 1.0, 10.0)
        mixed = [[even + weight * one for one in light] for weight in weights]
        paths = [self.path(one, fits=alone) for one in (*mixed, light)]
        paths.append(self.path(self.bytes, fits=alone, worst=True))
        found = {path.bounds for path in paths if path is not None}
        formula = self.least_formula() if alone else None
        if formula is not None:
            found.add(formula.bounds)
        elif alone:
            raise self.misfit()
        found.add(uniform(self.profile, self.pipe).bounds)
        return np.array(sorted(found)).T

    # --- cuts by their simulated time ---

    def every(self) -> Ints:
        """All cuts."""
        inner = list(combinations(range(1, self.count), self.pipe.stages - 1))
        bounds = np.zeros((self.pipe.stages + 1, len(inner)), dtype=np.int64)
        bounds[1:-1] = np.array(inner).T
        bounds[-1] = self.count
        return bounds

    def best_of(self, bounds: Ints) -> Cut:
        """The shortest step of those that fit."""
        bounds = bounds[:, self._over(bounds) <= 0]
        if bounds.shape[1] == 0:
            raise self.misfit()
        times = times_of(costs_of(self.profile, bounds, self.pipe), self.pipe)
        bounds = bounds[:, times <= times.min() * (1 + _SAME)]
        uneven = (np.diff(_sums(self.profile)[bounds], axis=0) ** 2).sum(axis=0)
        return _cut(bounds[:, int(uneven.argmin())])

    def climb(self, bounds: Ints) -> Cut:
        """Moves the bounds of the best of these while that makes one fit better or last shorter."""
        inner = self.pipe.stages - 1
        work = 3 * self.pipe.microbatches * self.pipe.stages * 2 * inner**2
        width = max(1, min(_WIDEST, _EACH_MOVE // max(1, work)))
        best, over = self._best(bounds, width)
        for _ in range(_MOVES):
            moved = np.concatenate([best, *(_neighbours(one) for one in best.T)], axis=1)
            better, over = self._best(moved, width)
            if np.array_equal(better, best):
                break
            best = better
        if over > 0:
            raise self.misfit(_cut(best[:, 0]).bounds)
        return _cut(best[:, 0])

    def _best(self, bounds: Ints, width: int) -> tuple[Ints, float]:
        """The `width` best of these, the very best first; bytes that it wants above the memory."""
        bounds = np.unique(bounds, axis=1)
        over = np.maximum(self._over(bounds), 0.0)
        times = times_of(costs_of(self.profile, bounds, self.pipe), self.pipe)
        order = np.lexsort((times, over))[:width]
        return bounds[:, order], float(over[order[0]])

    def fullest_least(self, bounds: Ints) -> Ints:
        """Of these the one whose fullest rank holds the least, as one column."""
        peaks = ranks_bytes(self.parts, bounds, self.pipe).max(axis=0)
        return bounds[:, [int(peaks.argmin())]]

    # --- what is allowed ---

    def _over(self, bounds: Ints) -> Floats:
        """By cut: bytes that its ranks want above their memory; below 0 where they fit."""
        if self.pipe.memory_bytes is None or bounds.shape[1] == 0:
            return np.full(bounds.shape[1], -1.0)
        over = ranks_bytes(self.parts, bounds, self.pipe) - self.pipe.memory_bytes
        return np.asarray(np.where(over.max(axis=0) <= 0, -1.0, np.maximum(over, 0).sum(axis=0)))

    def _fits(self, stage: int) -> Mask:
        cap = np.inf if self.pipe.memory_bytes is None else self.pipe.memory_bytes
        return np.asarray(self.bytes[stage] <= cap)

    def _allowed(self, stage: int) -> Mask:
        """At [i, j]: whether the units i .. j - 1 can be that stage: the others need units too."""
        first, end = np.indices((self.count + 1, self.count + 1))
        open_ = (first >= stage) & (end > first)
        return np.asarray(open_ & (end <= self.count - (self.pipe.stages - 1 - stage)))

    # --- the formula's parts ---

    def _extra(self) -> list[Floats]:
        """By stage and segment: what it adds to the formula beside its time."""
        added = np.zeros_like(self.seconds)
        for group in self.groups:
            used = np.zeros((self.count + 1, self.count + 1), dtype=bool)
            for first in range(group.units[0] + 1, self.count):
                later = [unit for unit in group.units if unit >= first]
                if later:
                    used[first, later[0] + 1 :] = True
            added += used * copy_s(group, self.pipe)
        sent = [2 * transfer_s(unit.output_bytes, self.pipe) for unit in self.profile.units]
        goes = added + np.array([0.0, *sent])[None, :]
        return [*[goes] * (self.pipe.stages - 1), added]

    def _longest(self) -> Floats:
        """The times that the slowest stage can have, from the shortest with which a cut fits."""
        times = np.unique(self.seconds[np.triu_indices(self.count + 1, 1)])
        shortest = self.path([self.seconds] * self.pipe.stages, worst=True)
        return times if shortest is None else times[times >= shortest.cost]

    # --- when there is no cut ---

    def misfit(self, bounds: tuple[int, ...] | None = None) -> UserError:
        """What to say when nothing fits. bounds: the nearest that was found."""
        exact = bounds is None and self.pipe.stages_per_rank == 1
        if bounds is None and exact:
            path = self.path(self.bytes, fits=False, worst=True)
            bounds = path.bounds if path is not None else uniform(self.profile, self.pipe).bounds
        elif bounds is None:
            every = self.every()
            over = self._over(every)
            bounds = _cut(every[:, int(over.argmin())]).bounds
        peaks = ranks_bytes(self.parts, np.array([bounds]).T, self.pipe)[:, 0]
        rank = int(peaks.argmax())
        own = [
            stage
            for stage in range(self.pipe.stages)
            if rank_of(self.schedule, stage, self.pipe.ranks) == rank
        ]
        held = " and ".join(
            f"stage {stage} ({_units(self.profile, bounds[stage], bounds[stage + 1])})"
            for stage in own
        )
        return UserError(
            f"no cut into {self.pipe.stages} stages fits: at best {held} on rank {rank} wants "
            f"{size(float(peaks[rank]))} of '{size(self.pipe.memory_bytes or 0)}'; more "
            "ranks, smaller microbatches, activation checkpointing, or bfloat16 or sharded weights "
            "and moments would help"
        )


def _check(profile: Profile, pipe: Pipe) -> None:
    schedule = schedule_named(pipe.schedule)
    check(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)
    if len(profile.units) < pipe.stages:
        raise UserError(
            f"a pipeline of '{pipe.stages}' stages needs as many units, and the network has "
            f"{len(profile.units)}: take fewer ranks or fewer stages on each"
        )


def _neighbours(bounds: Ints) -> Ints:
    """A cut with one inner bound, or two of them, moved by one unit to either side."""
    inner = len(bounds) - 2
    moves = np.concatenate([np.eye(inner, dtype=np.int64), -np.eye(inner, dtype=np.int64)])
    pairs = (moves[:, None, :] + moves[None, :, :]).reshape(-1, inner)
    every = np.unique(np.concatenate([moves, pairs]), axis=0)
    moved = np.repeat(bounds[:, None], len(every), axis=1)
    moved[1:-1] += every.T
    return np.asarray(moved[:, (np.diff(moved, axis=0) > 0).all(axis=0)])


def _units(profile: Profile, first: int, end: int) -> str:
    names = [profile.units[unit].name for unit in (first, end - 1)]
    return f"'{names[0]}'" if end - first == 1 else f"'{names[0]}' to '{names[1]}'"


def _sums(profile: Profile) -> Floats:
    return np.concatenate([[0.0], np.cumsum([unit.seconds for unit in profile.units])])


def _cut(bounds: Ints) -> Cut:
    return Cut(tuple(int(one) for one in bounds))
