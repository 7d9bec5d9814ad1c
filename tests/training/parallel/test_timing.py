"""The simulated clock against schedules drawn by hand and the formulas of the papers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.parallel.chains import chain, profiles
from training.parallel.schedules import SCHEDULES, actions, rank_of, schedule_named
from training.parallel.timing import formula_s, stage_of, step_time
from training.parallel.units import Cut, Pipe, Profile, UnitCost


def _pairs(*pairs: tuple[float, float], output_bytes: int = 0) -> Profile:
    """Units of (forward, backward) seconds."""
    return Profile(
        tuple(
            UnitCost(f"unit {number}", forward, backward, 0, output_bytes=output_bytes)
            for number, (forward, backward) in enumerate(pairs)
        ),
        1,
        "given",
    )


def _each(units: int) -> Cut:
    return Cut(tuple(range(units + 1)))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 2), (4, 8), (3, 7)])
def test_even_stages_take_the_share_of_the_papers(ranks: int, microbatches: int) -> None:
    """(m + p - 1) / (m p) of one device's time: 5/8 for 2 ranks and 4 microbatches."""
    names = ["gpipe", "1f1b"] if microbatches >= ranks else ["gpipe"]
    for name in names:
        timing = step_time(chain([3.0] * ranks), _each(ranks), Pipe(ranks, microbatches, name))
        alone = 3.0 * ranks * microbatches
        share = (microbatches + ranks - 1) / (microbatches * ranks)
        assert timing.step_s == pytest.approx(share * alone)
        assert timing.ideal_s == pytest.approx(timing.step_s)
        assert timing.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        assert timing.bound_by is None


def test_interleaving_divides_the_bubble() -> None:
    """Narayanan et al. 2021, section 2.2: (p - 1) / m of the ideal time becomes that by v."""
    for stages in (2, 3):
        pipe = Pipe(4, 8, "interleaved-1f1b", stages)
        timing = step_time(chain([3.0] * 4 * stages), _each(4 * stages), pipe)
        ideal = 8 * 3.0 * stages
        assert timing.step_s == pytest.approx(ideal * (1 + 3 / 8 / stages))


def test_1f1b_by_hand() -> None:
    """Rank 0: F 0-1, F 1-2, B 4-6, B 7-9. Rank 1: F 1-2, B 2-4, F 4-5, B 5-7."""
    timing = step_time(_pairs((1, 2), (1, 2)), _each(2), Pipe(2, 2))
    assert timing.step_s == pytest.approx(9)
    assert timing.bubble == pytest.approx(1 - 12 / 18)
    # A slow first stage hides the round trip of the second: rank 0 F 0-2, F 2-4, B 4-8, B 8-12.
    uneven = _pairs((2, 4), (1, 1))
    timing = step_time(uneven, _each(2), Pipe(2, 2))
    assert timing.step_s == pytest.approx(12)
    assert (timing.stage_s, timing.bound_by) == (pytest.approx((6, 2)), 0)
    assert formula_s(uneven, _each(2), Pipe(2, 2)) == pytest.approx(14)


def test_gpipe_by_hand_with_transfers() -> None:
    """Rank 0: F 0-1, F 1-2. Rank 1: F 1.5-3.5, F 3.5-5.5, B 5.5-6.5, B 6.5-7.5. Rank 0: B 7-9,
    B 9-11."""
    pipe = Pipe(2, 2, "gpipe", bandwidth_bytes_s=10, latency_s=0.2)
    profile = _pairs((1, 2), (2, 1), output_bytes=3)
    assert step_time(profile, _each(2), pipe).step_s == pytest.approx(11)
    assert formula_s(profile, _each(2), pipe) == pytest.approx(3 + 6 + 2 * 0.5)


def test_a_wire_carries_one_thing_at_a_time() -> None:
    """3 s a transfer: there from 1 and 4, so F 4-5 and F 7-8; back from 9 and 12, so B 15-16."""
    pipe = Pipe(2, 2, "gpipe", bandwidth_bytes_s=1)
    profile = _pairs((1, 1), (1, 1), output_bytes=3)
    assert step_time(profile, _each(2), pipe).step_s == pytest.approx(16)


def test_zbv_by_hand() -> None:
    """F 0-1, 1-2, 2-3, 3-4 through the V; I 4-5 on stage 3, 5-6 on stage 2, then W 6-7 before
    stage 1's I 7-8 and the first stage's I and W, 8-10."""
    pipe = Pipe(2, 1, "zbv", 2)
    assert step_time(chain([3.0] * 4), _each(4), pipe).step_s == pytest.approx(10)


def test_a_backward_pass_that_cannot_be_split_is_done_in_its_first_part() -> None:
    """The same V: stage 3's gradient comes at 6 and not at 5, stage 2's at 8, stage 1's at 10."""
    pipe = Pipe(2, 1, "zbv", 2, whole_backward=True)
    assert step_time(chain([3.0] * 4), _each(4), pipe).step_s == pytest.approx(12)
    plain = Pipe(2, 4, whole_backward=True)
    assert step_time(chain([3.0] * 2), _each(2), plain).step_s == pytest.approx(3 * 5)


def test_the_first_stage_goes_on_with_w_after_i() -> None:
    """So that it does not matter in which of them torch computes."""
    for name, schedule in SCHEDULES.items():
        for ranks in (2, 3, 4, 5) if schedule.splits_backward else ():
            for microbatches in (2 * ranks, 4 * ranks):
                order = actions(schedule, ranks, 2, microbatches)[0]
                for one, after in pairwise(order):
                    if (one.kind, one.stage) == ("I", 0):
                        assert after == ("W", 0, one.microbatch), name


def test_stages_on_one_rank_send_nothing() -> None:
    """The turn of a V: of three borders of 2 ranks, one is inside rank 1."""
    pipe = Pipe(2, 1, "zbv", 2, bandwidth_bytes_s=1)
    there_and_back = 2 * 2 * 5
    timing = step_time(chain([3.0] * 4, output_bytes=5), _each(4), pipe)
    assert timing.step_s == pytest.approx(10 + there_and_back)


def test_tied_copies_cost_an_all_reduce() -> None:
    profile = chain([3.0] * 4, tied={"weight": (10, (0, 3))})
    plain = step_time(chain([3.0] * 4), Cut((0, 2, 4)), Pipe(2, 4)).step_s
    pipe = Pipe(2, 4, bandwidth_bytes_s=8, latency_s=0.0)
    assert step_time(profile, Cut((0, 2, 4)), pipe).step_s == pytest.approx(plain + 10 * 4 / 8)
    # On the two ends of a V they are one tensor.
    zbv = Pipe(2, 4, "zbv", 2, bandwidth_bytes_s=8)
    alone = step_time(chain([3.0] * 4), _each(4), zbv).step_s
    assert step_time(profile, _each(4), zbv).step_s == pytest.approx(alone)
    # A ring of 4: 2 (4 - 1) / 4 of its bytes each.
    all_four = chain([3.0] * 4, tied={"weight": (10, (0, 1, 2, 3))})
    four = step_time(all_four, _each(4), Pipe(4, 4, bandwidth_bytes_s=8)).step_s
    assert four == pytest.approx(3.0 * 7 + 1.5 * 10 * 4 / 8)


def test_the_busiest_rank_counts_and_not_the_slowest_stage() -> None:
    profile = chain([3.0, 4.0, 4.0, 3.5])
    timing = step_time(profile, _each(4), Pipe(2, 4, "looped-bfs", 2))
    assert timing.bound_by is None  # 3 + 4 against 4 + 3.5
    v = step_time(chain([1.0, 3.0, 4.0, 1.0]), _each(4), Pipe(2, 4, "zbv", 2))
    assert v.bound_by == 2


def test_stage_of_a_unit() -> None:
    cut = Cut((0, 2, 3, 7))
    assert [stage_of(cut, unit) for unit in range(7)] == [0, 0, 1, 2, 2, 2, 2]


@settings(max_examples=60, deadline=None)
@given(
    profiles(most_units=8),
    st.sampled_from(
        [
            ("gpipe", 2, 1),
            ("1f1b", 3, 1),
            ("looped-bfs", 2, 2),
            ("interleaved-1f1b", 2, 2),
            ("interleaved-zero-bubble", 2, 2),
            ("zbv", 2, 2),
            ("dualpipe-v", 2, 2),
        ]
    ),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([None, 4.0]),
    st.data(),
)
def test_the_clock_is_that_of_a_naive_one(
    profile: Profile,
    which: tuple[str, int, int],
    microbatches: int,
    bandwidth: float | None,
    data: st.DataObject,
) -> None:
    name, ranks, stages_per_rank = which
    pipe = Pipe(ranks, microbatches, name, stages_per_rank, bandwidth, 0.25)
    inner = data.draw(
        st.lists(
            st.integers(1, len(profile.units) - 1),
            min_size=pipe.stages - 1,
            max_size=pipe.stages - 1,
            unique=True,
        )
    )
    cut = Cut((0, *sorted(inner), len(profile.units)))
    untied = Profile(
        tuple(
            UnitCost(one.name, one.forward_s, one.backward_s, 1, output_bytes=one.output_bytes)
            for one in profile.units
        ),
        1,
        "given",
    )
    assert step_time(untied, cut, pipe).step_s == pytest.approx(_ticked(untied, cut, pipe))


def _ticked(profile: Profile, cut: Cut, pipe: Pipe) -> float:
    """Round and round the ranks: each does its next action when what it needs has come."""
    schedule = schedule_named(pipe.schedule)
    orders = [
        list(one) for one in actions(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)
    ]
    free = [0.0] * pipe.ranks
    wire: dict[tuple[int, int], float] = {}
    came: dict[tuple[str, int, int], float] = {}
    last = cut.stages - 1

    def send(what: str, stage: int, to: int, microbatch: int, at: float) -> None:
        here, there = (rank_of(schedule, one, pipe.ranks) for one in (stage, to))
        if here != there:
            size = profile.units[cut.bounds[max(stage, to)] - 1].output_bytes
            start = max(at, wire.get((here, there), 0.0))
            wire[here, there] = start + size / (pipe.bandwidth_bytes_s or float("inf"))
            at = wire[here, there] + pipe.latency_s
        came[what, to, microbatch] = at

    while any(orders):
        for rank, order in enumerate(orders):
            if not order:
                continue
            kind, stage, microbatch = order[0]
            units = [profile.units[number] for number in cut.of(stage)]
            forward = sum(unit.forward_s for unit in units)
            backward = sum(unit.backward_s for unit in units)
            at = free[rank]
            if kind == "F" and stage > 0:
                if ("F", stage, microbatch) not in came:
                    continue
                at = max(at, came["F", stage, microbatch])
            if kind in "BI" and stage < last:
                if ("B", stage, microbatch) not in came:
                    continue
                at = max(at, came["B", stage, microbatch])
            half = backward / 2
            end = at + {"F": forward, "B": backward, "I": half, "W": half}[kind]
            if kind == "F" and stage < last:
                send("F", stage, stage + 1, microbatch, end)
            if kind in "BI" and stage > 0:
                send("B", stage, stage - 1, microbatch, end)
            free[rank] = end
            order.pop(0)
    return max(free)
