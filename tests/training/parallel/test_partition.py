"""Cuts against every other cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from models.errors import UserError
from tests.training.parallel.chains import chain, naive_peaks, profiles
from training.parallel import partition
from training.parallel.partition import least_formula, optimal, smallest, uniform
from training.parallel.schedules import rank_of, schedule_named
from training.parallel.timing import formula_s, stage_of, step_time
from training.parallel.units import Cut, Pipe, Profile

_SINGLE = st.sampled_from([("gpipe", 2, 1, 3), ("1f1b", 2, 1, 4), ("1f1b", 3, 1, 5)])
_SEVERAL = st.sampled_from(
    [
        ("zbv", 2, 2, 4),
        ("dualpipe-v", 2, 2, 4),
        ("looped-bfs", 2, 2, 3),
        ("interleaved-1f1b", 2, 2, 4),
        ("interleaved-zero-bubble", 2, 2, 4),
    ]
)


def _all_cuts(profile: Profile, pipe: Pipe) -> list[Cut]:
    """Those that the memory allows."""
    count = len(profile.units)
    found = []
    for inner in combinations(range(1, count), pipe.stages - 1):
        cut = Cut((0, *inner, count))
        peaks = naive_peaks(profile, cut, pipe)
        if pipe.memory_bytes is None or max(peaks) <= pipe.memory_bytes:
            found.append(cut)
    return found


def _naive_formula(profile: Profile, cut: Cut, pipe: Pipe) -> float:
    stages = [
        sum(profile.units[unit].forward_s + profile.units[unit].backward_s for unit in cut.of(s))
        for s in range(cut.stages)
    ]
    total = (pipe.microbatches - 1) * max(stages) + sum(stages)
    bandwidth = pipe.bandwidth_bytes_s or float("inf")
    for end in cut.bounds[1:-1]:
        total += 2 * (profile.units[end - 1].output_bytes / bandwidth + pipe.latency_s)
    holders: dict[str, set[int]] = {}
    groups: dict[str, tuple[int, ...]] = {}
    for number, unit in enumerate(profile.units):
        for name in unit.shared:
            holders.setdefault(name, set()).add(stage_of(cut, number))
            groups[name] = (*groups.get(name, ()), number)
    latencies = {}
    for name, stages_of in holders.items():
        size = next(unit.shared[name] for unit in profile.units if name in unit.shared)
        total += (len(stages_of) - 1) * size * 4 / bandwidth
        latencies[groups[name]] = (len(stages_of) - 1) * 2 * pipe.latency_s
    return total + sum(latencies.values())


@st.composite
def _problems(
    draw: st.DrawFn, which: st.SearchStrategy[tuple[str, int, int, int]], most_units: int
) -> tuple[Profile, Pipe]:
    name, ranks, stages_per_rank, microbatches = draw(which)
    pipe = Pipe(
        ranks,
        microbatches,
        name,
        stages_per_rank,
        draw(st.sampled_from([None, 5.0])),
        draw(st.sampled_from([0.0, 0.5])),
        draw(st.sampled_from([None, 1500, 2500, 4000])),
    )
    profile = draw(profiles(most_units))
    assume(len(profile.units) >= pipe.stages)
    return profile, pipe


def _same_as_the_best_of_all(
    problem: tuple[Profile, Pipe],
    solve: Callable[[Profile, Pipe], Cut],
    judge: Callable[[Profile, Cut, Pipe], float],
) -> None:
    profile, pipe = problem
    cuts = _all_cuts(profile, pipe)
    if not cuts:
        with pytest.raises(UserError) as refusal:
            solve(profile, pipe)
        assert str(refusal.value).startswith("no cut into ")
        assert "\n" not in str(refusal.value)
        return
    found = solve(profile, pipe)
    assert found in cuts
    least = min(judge(profile, cut, pipe) for cut in cuts)
    assert judge(profile, found, pipe) == pytest.approx(least)


@settings(max_examples=150, deadline=None)
@given(_problems(_SINGLE, 10))
def test_the_formulas_best_is_exact(problem: tuple[Profile, Pipe]) -> None:
    _same_as_the_best_of_all(problem, least_formula, _naive_formula)


@settings(max_examples=60, deadline=None)
@given(_problems(st.one_of(_SINGLE, _SEVERAL), 8))
def test_the_shortest_step_is_found(problem: tuple[Profile, Pipe]) -> None:
    _same_as_the_best_of_all(problem, optimal, lambda *three: step_time(*three).step_s)


@settings(max_examples=60, deadline=None)
@given(_problems(_SINGLE, 10))
def test_the_formula_is_the_naive_one(problem: tuple[Profile, Pipe]) -> None:
    profile, pipe = problem
    cut = uniform(profile, pipe)
    assert formula_s(profile, cut, pipe) == pytest.approx(_naive_formula(profile, cut, pipe))


@settings(max_examples=80, deadline=None)
@given(_problems(st.one_of(_SINGLE, _SEVERAL), 10))
def test_a_cut_that_is_climbed_to_is_never_worse_than_uniform(
    problem: tuple[Profile, Pipe],
) -> None:
    """What large chains get, on chains that are small enough to know the best."""
    profile, pipe = problem
    cuts = _all_cuts(profile, pipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_ALL_CUTS", 0)
        try:
            found = optimal(profile, pipe)
        except UserError:
            assert not cuts or pipe.stages_per_rank > 1
            return
    assert found in cuts
    taken = step_time(profile, found, pipe).step_s
    plain = uniform(profile, pipe)
    if plain in cuts:
        assert taken <= step_time(profile, plain, pipe).step_s * (1 + 1e-9)
    if pipe.stages_per_rank == 1:
        exact = least_formula(profile, pipe)
        assert taken <= step_time(profile, exact, pipe).step_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(_problems(st.one_of(_SINGLE, _SEVERAL), 8))
def test_the_smallest_cut_is_found(problem: tuple[Profile, Pipe]) -> None:
    profile, pipe = problem
    found = max(naive_peaks(profile, smallest(profile, pipe), pipe))
    cuts = _all_cuts(profile, replace(pipe, memory_bytes=None))
    assert found == pytest.approx(min(max(naive_peaks(profile, one, pipe)) for one in cuts))


def test_uniform_counts_units() -> None:
    profile = chain([1.0] * 11)
    assert uniform(profile, Pipe(2, 4)) == Cut((0, 6, 11))
    assert uniform(profile, Pipe(4, 4)) == Cut((0, 3, 6, 9, 11))


def test_an_unbalanced_network_gains() -> None:
    """An embedding, eight layers and a head of five layers' time, as a small model with a large
    vocabulary has: an even number of units leaves the first rank waiting."""
    profile = chain([0.1, *[1.0] * 8, 5.0])
    pipe = Pipe(2, 8)
    cut = optimal(profile, pipe)
    assert cut == Cut((0, 8, 10))
    taken = step_time(profile, cut, pipe).step_s
    assert taken == pytest.approx(8 * 7.1 + 4 + 2 / 3 * 0.5, rel=0.02)
    assert taken < 0.85 * step_time(profile, uniform(profile, pipe), pipe).step_s


def test_memory_moves_a_cut() -> None:
    """All parameters in the first units: the fastest cut does not fit, the best that does is
    found, and below what any cut wants the stage and its bytes are told."""
    units = chain([1.0] * 8, parameters=0).units
    heavy = Profile(
        (*(replace(unit, parameters=100) for unit in units[:4]), *units[4:]), 1, "given"
    )
    assert optimal(heavy, Pipe(2, 4)) == Cut((0, 4, 8))
    assert optimal(heavy, Pipe(2, 4, memory_bytes=4800)) == Cut((0, 3, 8))
    with pytest.raises(UserError) as refusal:
        optimal(heavy, Pipe(2, 4, memory_bytes=3000))
    told = str(refusal.value)
    assert "at best stage 0 ('unit 0' to 'unit 1') on rank 0 wants 3.12 KiB" in told
    assert "'2.93 KiB'" in told
    assert smallest(heavy, Pipe(2, 4)) == Cut((0, 2, 8))  # not the fastest
    assert "more ranks" in told


def test_tied_units_of_a_large_chain_are_on_one_rank_where_transfers_are_dear() -> None:
    """Both ends, a pair, and three with others between them; a copy's gradient takes as
    long on the wire as 20 units."""
    ties = {"ends": (5, (0, 99)), "pair": (5, (30, 31)), "three": (5, (60, 62, 64))}
    profile = chain([1.0] * 100, tied=ties)
    pipe = Pipe(8, 16, "zbv", 2, bandwidth_bytes_s=1.0)
    cut = optimal(profile, pipe)
    taken = step_time(profile, cut, pipe)
    for _, units in ties.values():
        assert len({rank_of(schedule_named("zbv"), stage_of(cut, u), 8) for u in units}) == 1
    assert taken.step_s < 1.15 * taken.ideal_s


def test_more_stages_than_units() -> None:
    with pytest.raises(UserError, match="'8' stages needs as many units, and the network has 6"):
        optimal(chain([1.0] * 6), Pipe(4, 8, "zbv", 2))


def test_the_formula_is_for_one_stage_a_rank() -> None:
    with pytest.raises(UserError, match="'2' stages on each rank: the formula is for 1"):
        least_formula(chain([1.0] * 6), Pipe(2, 8, "zbv", 2))


@pytest.mark.parametrize(
    "pipe",
    [
        Pipe(8, 32, bandwidth_bytes_s=1e3),
        Pipe(8, 64, "gpipe", memory_bytes=600_000),
        Pipe(8, 32, "zbv", 2, bandwidth_bytes_s=1e3),
        Pipe(8, 32, "interleaved-1f1b", 4),
    ],
    ids=lambda pipe: pipe.schedule,
)
def test_a_hundred_units_are_cut_in_a_moment(pipe: Pipe) -> None:
    seconds = [1 + (number * 37 % 17) / 10 for number in range(100)]
    profile = chain(seconds, output_bytes=30)
    step_time(profile, uniform(profile, pipe), pipe)  # torch is imported
    start = time.process_time()
    cut = optimal(profile, pipe)
    assert time.process_time() - start < 2.0
    taken = step_time(profile, cut, pipe)
    assert taken.step_s < step_time(profile, uniform(profile, pipe), pipe).step_s
    assert taken.step_s < 1.10 * taken.ideal_s
