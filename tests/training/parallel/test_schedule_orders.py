"""The orders of actions are torch's, and what is said of them before torch is asked is true."""

from __future__ import annotations

import subprocess
import sys

import pytest

from models.errors import UserError
from training.parallel.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    actions,
    check,
    in_flight,
    moments,
    rank_of,
    schedule_named,
)


def _text(order: tuple[Action, ...]) -> str:
    return " ".join(f"{stage}{kind}{microbatch}" for kind, stage, microbatch in order)


def test_orders_of_one_stage_a_rank_as_drawn_in_the_papers() -> None:
    gpipe = actions(SCHEDULES["gpipe"], 2, 1, 3)
    assert [_text(one) for one in gpipe] == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    one_forward_one_back = actions(SCHEDULES["1f1b"], 3, 1, 4)
    assert [_text(one) for one in one_forward_one_back] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_orders_of_several_stages_a_rank() -> None:
    zbv = actions(SCHEDULES["zbv"], 2, 2, 2)
    assert [_text(one) for one in zbv] == [
        "0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
        "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1",
    ]
    first = actions(SCHEDULES["looped-bfs"], 2, 2, 2)[0]
    assert _text(first) == "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0"


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_check_refuses_what_torch_refuses_and_the_rest_is_whole(schedule: Schedule) -> None:
    fine = refused = 0
    for ranks in (2, 3, 4):
        for stages in (1, 2, 3):
            for microbatches in range(1, 14):
                try:
                    check(schedule, ranks, stages, microbatches)
                except UserError as error:
                    assert "\n" not in str(error)
                    refused += 1
                    if schedule.placement == "loop" and not _in_range(schedule, stages):
                        continue  # nothing of torch's refuses: it is another schedule, or none
                    with pytest.raises(ValueError, match=r"microbatch|exactly 2 stages"):
                        actions(schedule, ranks, stages, microbatches)
                    continue
                fine += 1
                _assert_whole(schedule, ranks, stages, microbatches)
    assert fine > 10
    assert refused > 10


def _in_range(schedule: Schedule, stages_per_rank: int) -> bool:
    fewest, most = schedule.stages_per_rank
    return fewest <= stages_per_rank <= (most or stages_per_rank)


def _assert_whole(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Every stage does every microbatch once, on the rank that holds it, forward first."""
    found: dict[tuple[int, int], str] = {}
    for rank, order in enumerate(actions(schedule, ranks, stages_per_rank, microbatches)):
        for kind, stage, microbatch in order:
            assert rank_of(schedule, stage, ranks) == rank
            found[stage, microbatch] = found.get((stage, microbatch), "") + kind
    assert len(found) == ranks * stages_per_rank * microbatches
    assert set(found.values()) <= {"FB", "FIW"}
    assert schedule.splits_backward == ("FIW" in found.values())


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("1f1b", (1, 1, 4), "a pipeline of '1' ranks"),
        ("1f1b", (2, 2, 4), "'2' stages on each rank: valid is 1"),
        ("looped-bfs", (2, 1, 4), "'1' stages on each rank: valid is 2 or more"),
        ("zbv", (2, 3, 4), "'3' stages on each rank: valid is 2"),
        ("gpipe", (2, 1, 0), "'0' microbatches: valid is 1 or more"),
        ("1f1b", (4, 1, 3), "it needs 4 or more; ask for more, or for 'gpipe'"),
        ("dualpipe-v", (3, 2, 5), "it needs 6 or more; ask for more, or for 'zbv'"),
        ("interleaved-1f1b", (4, 2, 9), "the nearest valid numbers are 8 and 10"),
        ("interleaved-zero-bubble", (2, 1, 5), "the nearest valid numbers are 4 and 6"),
    ],
)
def test_a_refusal_says_what_is_valid(name: str, numbers: tuple[int, int, int], says: str) -> None:
    with pytest.raises(UserError) as refusal:
        check(schedule_named(name), *numbers)
    assert says in str(refusal.value)


def test_an_unknown_schedule_is_told_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no schedule '1F1B': valid are gpipe, 1f1b, .*dualpipe-v"):
        schedule_named("1F1B")


def test_microbatches_in_flight() -> None:
    for ranks in (2, 3, 5):
        for microbatches in (1, 2, 4, 7):
            gpipe = in_flight(SCHEDULES["gpipe"], ranks, 1, microbatches)
            assert gpipe == (microbatches,) * ranks
            if microbatches >= ranks:
                expected = tuple(min(microbatches, ranks - stage) for stage in range(ranks))
                assert in_flight(SCHEDULES["1f1b"], ranks, 1, microbatches) == expected
    assert in_flight(SCHEDULES["zbv"], 4, 2, 8) == (8, 7, 6, 5, 4, 3, 2, 1)
    # The first stage of an interleaved rank keeps more, the last one fewer than 1F1B would.
    assert in_flight(SCHEDULES["interleaved-1f1b"], 4, 2, 8) == (8, 8, 7, 5, 4, 4, 3, 1)


def test_moments_leave_out_only_what_is_covered() -> None:
    """Per rank the hardest is among them: of 1F1B's first rank `ranks` microbatches, both ways."""
    first = moments(SCHEDULES["1f1b"], 3, 1, 6)[0]
    assert sorted(first) == [(0, False, ((0, 3),)), (0, True, ((0, 3),))]
    # ZBV's ranks hold stages whose peaks do not come together.
    for rank, found in enumerate(moments(SCHEDULES["zbv"], 4, 2, 8)):
        alone = [in_flight(SCHEDULES["zbv"], 4, 2, 8)[stage] for stage in (rank, 7 - rank)]
        assert max(sum(count for _, count in one.counts) for one in found) < sum(alone)


def test_torch_is_not_imported_before_it_is_needed() -> None:
    program = (
        "import sys; import training.parallel.cut_table, training.parallel.tree, "
        "training.parallel.partition; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
