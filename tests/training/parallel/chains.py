"""Profiles that tests make up, and what a rank holds and takes, worked out the slow way."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from training.parallel.schedules import actions, rank_of, schedule_named
from training.parallel.units import Cut, Pipe, Profile, UnitCost


def chain(
    seconds: Sequence[float],
    *,
    parameters: int = 100,
    output_bytes: int = 0,
    tied: dict[str, tuple[int, Sequence[int]]] | None = None,
) -> Profile:
    """Units whose backward pass takes twice their forward pass. tied: elements and units."""
    shared: list[dict[str, int]] = [{} for _ in seconds]
    for name, (size, units) in (tied or {}).items():
        for unit in units:
            shared[unit][name] = size
    return Profile(
        tuple(
            UnitCost(
                f"unit {number}",
                time / 3,
                2 * time / 3,
                parameters + sum(shared[number].values()),
                shared[number],
                output_bytes,
            )
            for number, time in enumerate(seconds)
        ),
        microbatch=1,
        source="given",
    )


@st.composite
def profiles(draw: st.DrawFn, most_units: int = 9) -> Profile:
    """Chains of uneven units with memory, transfers and up to two groups of tied parameters."""
    count = draw(st.integers(4, most_units))
    shared: list[dict[str, int]] = [{} for _ in range(count)]
    for name in draw(st.sampled_from([(), ("a",), ("a", "b")])):
        size = draw(st.integers(1, 50))
        for unit in draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=3)):
            shared[unit][name] = size
    units = []
    for number in range(count):
        kept = draw(st.integers(0, 40))
        units.append(
            UnitCost(
                f"unit {number}",
                draw(st.integers(1, 9)) / 4,
                draw(st.integers(1, 18)) / 4,
                draw(st.integers(0, 50)) + sum(shared[number].values()),
                shared[number],
                draw(st.integers(0, 8)),
                kept,
                kept + draw(st.integers(0, 30)),
                kept + draw(st.integers(0, 60)),
                cached_bytes=draw(st.integers(0, 20)),
            )
        )
    side, batch = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return Profile(tuple(units), 1, "given", batch_bytes=batch, side_bytes=side)


def naive_peaks(profile: Profile, cut: Cut, pipe: Pipe) -> list[float]:
    """Bytes of each rank, action by action and unit by unit."""
    schedule = schedule_named(pipe.schedule)
    peaks = []
    for rank, order in enumerate(
        actions(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)
    ):
        own = [s for s in range(cut.stages) if rank_of(schedule, s, pipe.ranks) == rank]
        elements = {}
        buffers = profile.batch_bytes
        for stage in own:
            for number in cut.of(stage):
                unit = profile.units[number]
                elements[f"own {number}"] = unit.parameters - sum(unit.shared.values())
                elements.update({f"shared {name}": size for name, size in unit.shared.items()})
            if stage > 0:
                buffers += profile.units[cut.bounds[stage] - 1].output_bytes
            if stage + 1 < cut.stages:
                buffers += profile.units[cut.bounds[stage + 1] - 1].output_bytes
        held: set[tuple[int, int]] = set()
        most = 0
        for kind, stage, microbatch in order:
            others = 0
            for other, _ in held - {(stage, microbatch)}:
                kept = [profile.units[number].kept_bytes for number in cut.of(other)]
                others += profile.side_bytes + sum(kept)
            before, cached = profile.side_bytes, 0
            for number in cut.of(stage):
                unit = profile.units[number]
                cached += unit.cached_bytes
                moment = unit.forward_bytes + cached if kind == "F" else unit.backward_bytes
                if kind != "F":
                    moment += 4 * _between(profile, cut.of(stage), number)
                    if number == cut.of(stage)[-1] and stage + 1 < cut.stages:
                        moment -= unit.output_bytes  # comes in a buffer
                most = max(most, others + before + moment)
                before += unit.kept_bytes
            most = max(most, others + before)
            if kind == "F":
                held.add((stage, microbatch))
            elif kind in ("B", "W"):
                held.remove((stage, microbatch))
        peaks.append(
            pipe.bytes_per_parameter * sum(elements.values()) + pipe.microbatches * buffers + most
        )
    return peaks


def _between(profile: Profile, stage: range, number: int) -> int:
    """Elements of the parameters that a unit of the stage behind `number` uses, and one up to it:
    their gradients wait."""
    behind: dict[str, int] = {}
    before: set[str] = set()
    for unit in stage:
        if unit > number:
            behind.update(profile.units[unit].shared)
        else:
            before.update(profile.units[unit].shared)
    return sum(size for name, size in behind.items() if name in before)
