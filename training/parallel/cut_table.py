"""A cut as a person reads it: what each stage holds and takes, and what bounds the step."""

from __future__ import annotations

import numpy as np

from training.parallel.ladder import size
from training.parallel.rank_memory import pipeline_memory
from training.parallel.schedules import in_flight, rank_of, schedule_named
from training.parallel.timing import Timing, step_time
from training.parallel.units import Cut, Pipe, Profile

_HEAD = ("stage", "rank", "units", "parameters", "in flight", "rank memory", "time", "sends")


def table(profile: Profile, cut: Cut, pipe: Pipe) -> str:
    """One line a stage, then the step; and which unit bounds it, where one does.

    Memory is the peak of the stage's rank, with all that it holds: the peaks of several stages
    come at different times and tied parameters are there once, so no stage has a part of it.
    """
    timing = step_time(profile, cut, pipe)
    schedule = schedule_named(pipe.schedule)
    flying = in_flight(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)
    memory = [one.total for one in pipeline_memory(profile, cut, pipe)]
    rows: list[tuple[str, ...]] = [_HEAD]
    for stage in range(cut.stages):
        first, end = cut.bounds[stage], cut.bounds[stage + 1]
        rank = rank_of(schedule, stage, pipe.ranks)
        sends = profile.units[end - 1].output_bytes if stage + 1 < cut.stages else 0
        rows.append(
            (
                str(stage),
                str(rank),
                _names(profile, first, end),
                f"{profile.parameters(first, end):,}",
                str(flying[stage]),
                size(memory[rank]),
                _time(timing.stage_s[stage], profile),
                size(sends),
            )
        )
    lines = _aligned(rows)
    lines.append(
        f"step by {pipe.schedule}, {pipe.microbatches} microbatches on {pipe.ranks} ranks: "
        f"{_time(timing.step_s, profile)}, bubble {timing.bubble:.1%}; "
        f"{_time(timing.ideal_s, profile)} if all stages were even"
    )
    lines.extend(_bound(profile, cut, pipe, timing))
    return "\n".join(lines)


def heavy_unit(profile: Profile, pipe: Pipe) -> int | None:
    """The unit that no cut makes shorter: alone it takes more than a rank's even share."""
    seconds = [unit.seconds for unit in profile.units]
    heaviest = int(np.argmax(seconds))
    return heaviest if seconds[heaviest] * pipe.ranks > sum(seconds) else None


def _bound(profile: Profile, cut: Cut, pipe: Pipe, timing: Timing) -> list[str]:
    heavy = heavy_unit(profile, pipe)
    if heavy is not None:
        unit, total = profile.units[heavy], sum(unit.seconds for unit in profile.units)
        advice = [f"fewer ranks ({max(1, int(total / unit.seconds))} at most keep up with it)"]
        if heavy == len(profile.units) - 1:
            advice.insert(0, "a smaller vocabulary, or a head that is split over the ranks")
        return [
            f"'{unit.name}' bounds the step: it takes {unit.seconds / total:.1%} of the time of a "
            f"microbatch, an even share of {pipe.ranks} ranks is {1 / pipe.ranks:.1%}, and no cut "
            f"divides it; what helps: {', '.join(advice)}"
        ]
    if timing.bound_by is None:
        return []
    names = _names(profile, cut.bounds[timing.bound_by], cut.bounds[timing.bound_by + 1])
    return [f"stage {timing.bound_by} ({names}) bounds the step: the others wait for it"]


def _names(profile: Profile, first: int, end: int) -> str:
    names = profile.units[first].name, profile.units[end - 1].name
    return names[0] if end - first == 1 else f"{names[0]} .. {names[1]}"


def _time(seconds: float, profile: Profile) -> str:
    """Seconds; of a profile that has only counted operations, operations."""
    scale = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("", 1.0))
    if profile.source == "operations":
        letter, one = next((pair for pair in scale if seconds >= pair[1]), scale[-1])
        return f"{seconds / one:.4g} {letter}FLOPs"
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name == "units" else cell.rjust(width)
            for name, cell, width in zip(_HEAD, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
