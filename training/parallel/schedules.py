"""The schedules of a pipeline: which stages a rank holds, what it does in which order.

The schedules are torch's (`torch.distributed.pipelining`); here stands what has to be known of
them before a process group exists. No torch at import. The orders of actions are asked of torch's
own classes, with stages that only take notes: what is planned with is what will run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

from models.errors import UserError

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Schedule:
    """What tells one schedule from another."""

    name: str
    torch_name: str
    """Class in torch.distributed.pipelining."""
    stages_per_rank: tuple[int, int | None]
    """Fewest and most; None: no bound."""
    placement: Literal["loop", "v"]
    """Stage s of p ranks: on rank s % p (loop), or there and back, the last one beside the first
    (v: ranks 0 .. p - 1, p - 1 .. 0)."""
    splits_backward: bool
    """Zero bubble: the gradients of weights are computed later than those of the inputs."""


SCHEDULES: dict[str, Schedule] = {
    one.name: one
    for one in (
        Schedule("gpipe", "ScheduleGPipe", (1, 1), "loop", False),
        Schedule("1f1b", "Schedule1F1B", (1, 1), "loop", False),
        Schedule("interleaved-1f1b", "ScheduleInterleaved1F1B", (2, None), "loop", False),
        Schedule("looped-bfs", "ScheduleLoopedBFS", (2, None), "loop", False),
        Schedule(
            "interleaved-zero-bubble", "ScheduleInterleavedZeroBubble", (1, None), "loop", True
        ),
        Schedule("zbv", "ScheduleZBVZeroBubble", (2, 2), "v", True),
        Schedule("dualpipe-v", "ScheduleDualPipeV", (2, 2), "v", True),
    )
}
"""GPipe: Huang et al. 2019; 1F1B and its interleaved form: Narayanan et al. 2021; breadth first:
Lamy-Poirier 2023; zero bubble and its V form: Qi et al. 2024; DualPipe: DeepSeek-V3, 2024."""


def rank_of(schedule: Schedule, stage: int, ranks: int) -> int:
    """The rank that holds `stage`."""
    place = stage % (2 * ranks) if schedule.placement == "v" else stage % ranks
    return place if place < ranks else 2 * ranks - 1 - place


class Action(NamedTuple):
    """Something that a rank computes: one stage, one microbatch."""

    kind: Kind
    """Forward pass, backward pass, or of a backward pass the gradients of the input (I) and later
    those of the weights (W)."""
    stage: int
    microbatch: int


def schedule_named(name: str) -> Schedule:
    """The schedule of that name; UserError where there is none."""
    if name not in SCHEDULES:
        raise UserError(f"no schedule '{name}': valid are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def check(schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """UserError where torch refuses these numbers, or where there is no pipeline.

    torch's own words come when the ranks have started; these before.
    """
    name, (fewest, most) = schedule.name, schedule.stages_per_rank
    if ranks < 2:
        raise UserError(
            f"a pipeline of '{ranks}' ranks: it needs 2 or more; one rank trains without a pipeline"
        )
    if stages_per_rank < fewest or (most is not None and stages_per_rank > most):
        valid = f"{fewest}" if fewest == most else f"{fewest} or more"
        raise UserError(
            f"schedule '{name}' with '{stages_per_rank}' stages on each rank: valid is {valid}"
        )
    if microbatches < 1:
        raise UserError(f"'{microbatches}' microbatches: valid is 1 or more")
    least = {"1f1b": ranks, "dualpipe-v": 2 * ranks}.get(name, 1)
    if microbatches < least:
        other = "gpipe" if name == "1f1b" else "zbv"
        raise UserError(
            f"schedule '{name}' on {ranks} ranks with '{microbatches}' microbatches: it needs "
            f"{least} or more; ask for more, or for '{other}', which takes any number"
        )
    if name.startswith("interleaved") and not _fits_rounds(ranks, microbatches):
        lower = next(n for n in range(microbatches, 0, -1) if _fits_rounds(ranks, n))
        upper = next(n for n in range(microbatches, 3 * microbatches) if _fits_rounds(ranks, n))
        raise UserError(
            f"schedule '{name}' on {ranks} ranks with '{microbatches}' microbatches: it goes in "
            f"equal rounds of at least {ranks}; the nearest valid numbers are {lower} and {upper}"
        )


@lru_cache(maxsize=256)
def actions(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """What each rank computes in a step, in order.

    For the numbers that `check` lets through, and for one rank where torch takes it.
    """
    if schedule.stages_per_rank == (1, 1):
        return tuple(_noted(schedule, ranks, rank, microbatches) for rank in range(ranks))
    stages = [_Noting(rank, ranks, ranks * stages_per_rank) for rank in range(stages_per_rank)]
    made = _torch_class(schedule)(stages, microbatches)
    return tuple(tuple(_flat(made.pipeline_order[rank])) for rank in range(ranks))


def in_flight(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[int, ...]:
    """By stage: the most microbatches whose activations it holds at once.

    Where the backward pass is split they count until the gradients of the weights are there,
    which need most of them.
    """
    most: Counter[int] = Counter()
    for order in actions(schedule, ranks, stages_per_rank, microbatches):
        for _, held in _walk(order):
            for stage, count in held.items():
                most[stage] = max(most[stage], count)
    return tuple(most[stage] for stage in range(ranks * stages_per_rank))


class Held(NamedTuple):
    """A moment of a rank: what it computes, and what it holds meanwhile."""

    stage: int
    """That computes."""
    backward: bool
    counts: tuple[tuple[int, int], ...]
    """(stage, microbatches whose activations are held, the one that is computed among them)."""


@lru_cache(maxsize=256)
def moments(
    schedule: Schedule, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[tuple[Held, ...], ...]:
    """By rank: the moments of its step in which it can hold the most, one of them its peak.

    Left out is a moment in which it does the same as in another and holds nothing more. The peaks
    of the stages of a rank need not come together, so they must not be added up.
    """
    return tuple(
        _hardest(order) for order in actions(schedule, ranks, stages_per_rank, microbatches)
    )


def _hardest(order: tuple[Action, ...]) -> tuple[Held, ...]:
    alike: dict[tuple[int, bool], dict[tuple[tuple[int, int], ...], None]] = {}
    for action, held in _walk(order):
        key = action.stage, action.kind != "F"
        alike.setdefault(key, {})[tuple(sorted(held.items()))] = None
    return tuple(
        Held(stage, backward, one)
        for (stage, backward), found in alike.items()
        for one in found
        if not any(other != one and _covers(dict(other), one) for other in found)
    )


def _covers(most: dict[int, int], counts: tuple[tuple[int, int], ...]) -> bool:
    return all(most.get(stage, 0) >= count for stage, count in counts)


def _fits_rounds(ranks: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // ranks) == 0


def _walk(order: tuple[Action, ...]) -> Iterator[tuple[Action, dict[int, int]]]:
    """Each action, with the microbatches of each stage whose activations are held during it."""
    held: dict[int, int] = {}
    for action in order:
        if action.kind == "F":
            held[action.stage] = held.get(action.stage, 0) + 1
        yield action, {stage: count for stage, count in held.items() if count}
        if action.kind in ("B", "W"):
            held[action.stage] -= 1


def _torch_class(schedule: Schedule) -> Any:
    from torch.distributed import pipelining  # noqa: PLC0415  (seconds: only where it is needed)

    return getattr(pipelining, schedule.torch_name)


def _flat(order: list[Any]) -> Iterator[Action]:
    """torch's actions as ours: without waiting, and overlapped ones one after the other, which is
    how torch runs them."""
    for action in order:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _flat(list(action.sub_actions))
        else:
            kind = cast(Kind, action.computation_type.value)
            yield Action(kind, action.stage_index, action.microbatch_index)


def _noted(schedule: Schedule, ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """What a schedule of one stage a rank does, noted while it does it.

    Not its `pipeline_order`: 1F1B's is off by one on the last rank, and nothing runs by it.
    """
    stage = _Noting(rank, ranks, ranks)
    made = _torch_class(schedule)(stage, microbatches)
    made._stage_forward_initialized = True  # nothing to prepare: there are no tensors
    made._step_microbatches()
    return tuple(stage.notes)


class _Noting:
    """Stands for a stage of torch's: sends nothing, computes nothing, notes what it is asked."""

    is_first = is_last = False
    submod = None

    def __init__(self, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = rank, stages
        self.group_rank, self.group_size = rank, ranks
        self.notes: list[Action] = []

    def get_fwd_recv_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.notes.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.notes.append(Action("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, _: int) -> None:
        pass
