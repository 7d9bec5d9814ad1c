"""The reducer alone: the mean, the refusals, and that one sender's end is the end for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.compression import CompressionInfo
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hypothesis import given
from hypothesis import strategies as st

from training.swarm import reduction
from training.swarm.codecs import codec
from training.swarm.reduction import (
    Averaged,
    ExactRunner,
    Left,
    Limits,
    LinkUse,
    PartReducer,
    SenderFault,
    to_leave_out,
    weighted_mean,
)

A, B, C = (PeerID(bytes([0x12, 0x20, *[number] * 32])) for number in (1, 2, 3))
WEIGHTS = {A: 1.0, B: 2.0, C: 5.0}


def reducer(
    *,
    name: str = "none",
    shapes: tuple[int, ...] = (4, 2),
    norm_cap: float | None = None,
    encode: Any = None,
) -> PartReducer:
    compression = codec(name).compression
    return PartReducer(
        [torch.Size([length]) for length in shapes],
        [A, B, C],
        Limits(WEIGHTS, norm_cap, codec(name)),
        encode or (lambda _, mean: compression.compress(mean, CompressionInfo.from_tensor(mean))),
        C,
    )


async def give(
    target: PartReducer, number: int, values: dict[PeerID, torch.Tensor]
) -> list[Averaged | BaseException]:
    adds = [target.add(peer, number, part, WEIGHTS[peer]) for peer, part in values.items()]
    return await asyncio.gather(*adds, return_exceptions=True)


def full(value: float, length: int = 4) -> torch.Tensor:
    return torch.full((length,), value)


def test_the_mean_is_weighted_and_one_object_for_all() -> None:
    async def run() -> None:
        target = reducer()
        done = await give(target, 0, {C: full(4.0), A: full(1.0), B: full(2.0)})
        assert all(isinstance(one, Averaged) and one is done[0] for one in done)
        assert done[0].value.tolist() == [3.125] * 4  # type: ignore[union-attr]
        assert not target.finished.is_set() and target.fraction == 0.5
        await give(target, 1, {A: full(1.0, 2), B: full(1.0, 2), C: full(1.0, 2)})
        assert target.finished.is_set() and target.fraction == 1.0 and target.fault is None

    asyncio.run(run())


def test_what_the_reducer_keeps_is_what_it_sends() -> None:
    async def run() -> None:
        values = {peer: torch.tensor([0.1, 1e-9, 1 / 3, 1000.3]) for peer in (A, B, C)}
        (first, *_) = await give(reducer(name="float16"), 0, values)
        assert isinstance(first, Averaged)
        assert first.value.tolist() == values[A].half().float().tolist()

    asyncio.run(run())


BAD: dict[str, tuple[torch.Tensor, float, str]] = {
    "nan": (torch.tensor([1.0, float("nan"), 1.0, 1.0]), 2.0, "not finite"),
    "inf": (torch.tensor([1.0, float("inf"), 1.0, 1.0]), 2.0, "not finite"),
    "weight": (full(1.0), 200.0, "declared the weight 2 and sent 200"),
    "shape": (full(1.0, 1), 2.0, r"of the shape \(1,\)"),
    "norm": (full(60.0), 2.0, "norm above 100"),
    "type": (full(1.0).long(), 2.0, "type torch.int64"),
    "double": (full(1.0).double(), 2.0, "type torch.float64"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_part_against_the_rules_ends_the_round_for_all(kind: str) -> None:
    async def run() -> None:
        target = reducer(norm_cap=100.0)
        waiting = asyncio.ensure_future(target.add(A, 0, full(1.0), 1.0))
        await asyncio.sleep(0)
        part, weight, reason = BAD[kind]
        with pytest.raises(SenderFault, match=reason) as caught:
            await target.add(B, 0, part, weight)
        assert caught.value.peer_id == B and caught.value.violation
        target.fail(caught.value)  # what the runner does with it
        with pytest.raises(SenderFault, match=reason):
            await waiting
        with pytest.raises(SenderFault, match=reason):
            await target.add(C, 0, full(1.0), 5.0)
        assert target.finished.is_set() and target.fraction == 0.0

    asyncio.run(run())


def test_the_norm_counts_over_all_parts_of_a_sender() -> None:
    async def run() -> None:
        target = reducer(shapes=(4, 4), norm_cap=10.0)
        values = {A: full(1.0), B: full(4.0), C: full(1.0)}  # B: norm 8 in each part
        assert all(isinstance(one, Averaged) for one in await give(target, 0, values))
        with pytest.raises(SenderFault, match="norm above 10"):
            await target.add(B, 1, full(4.0), 2.0)

    asyncio.run(run())


def test_what_the_reducer_cannot_do_is_its_own_fault() -> None:
    def encode(number: int, mean: torch.Tensor) -> Any:
        raise OSError("no memory")

    async def run() -> None:
        target = reducer(encode=encode)
        done = await give(target, 0, {A: full(1.0), B: full(2.0), C: full(4.0)})
        for one in done:
            assert isinstance(one, SenderFault) and one.peer_id == C and not one.violation
        assert target.finished.is_set() and target.fraction == 0.0
        with pytest.raises(SenderFault, match="did not average part 0"):
            await target.add(A, 1, full(1.0, 2), 1.0)

    asyncio.run(run())


def test_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(reduction.time, "monotonic", lambda: now)

    async def run() -> None:
        nonlocal now
        target = reducer()
        for number, length in enumerate((4, 2)):
            first = [target.add(peer, number, full(1.0, length), WEIGHTS[peer]) for peer in (C, A)]
            waiting = [asyncio.ensure_future(one) for one in first]
            await asyncio.sleep(0)
            now += 3.0
            await target.add(B, number, full(1.0, length), 2.0)
            await asyncio.gather(*waiting)
            now += 2.0  # the answers to C and A are on their way: waited for, from the next part on
        assert target.waited_s == {C: 2.0, A: 2.0, B: 3.0 + 5.0}
        assert target.reducing_s == 3.0 + 2.0 + 3.0

    asyncio.run(run())


def test_a_sender_is_counted_once() -> None:
    async def run() -> None:
        target = reducer()
        first = asyncio.ensure_future(target.add(A, 0, full(1.0), 1.0))
        await asyncio.sleep(0)
        with pytest.raises(SenderFault, match="sent part 0 out of turn"):
            await target.add(A, 0, full(1.0), 1.0)
        with pytest.raises(SenderFault, match="sent part 1 out of turn"):
            await target.add(B, 1, full(1.0, 2), 2.0)
        first.cancel()

    asyncio.run(run())


def test_a_member_that_goes_away_does_not_take_the_average_with_it() -> None:
    async def run() -> None:
        target = reducer()
        gone = asyncio.ensure_future(target.add(A, 0, full(1.0), 1.0))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        done = await give(target, 0, {B: full(2.0), C: full(4.0)})
        assert [one.value.tolist() for one in done if isinstance(one, Averaged)] == [
            [3.125] * 4
        ] * 2

    asyncio.run(run())


def test_no_parts_and_no_senders_are_done_at_once() -> None:
    async def run() -> None:
        assert reducer(shapes=()).finished.is_set()
        assert reducer(shapes=()).fraction == 1.0

    asyncio.run(run())


class Target:
    """What a round is ended with."""

    fault: SenderFault | None = None

    def fail(self, fault: SenderFault) -> None:
        self.fault = fault


def judged(code: Any, accused: PeerID | None, target: Any = None) -> tuple[str, list[SenderFault]]:
    """What a member says and notes when the reducer A answers so."""
    runner = ExactRunner.__new__(ExactRunner)
    runner.ordered_peer_ids, runner.faults = [A, B, C], []
    runner.tensor_part_reducer = target
    answer = averaging_pb2.AveragingData(
        code=code, peer_id=b"" if accused is None else accused.to_bytes()
    )
    with pytest.raises(AllreduceException) as caught:
        runner._check_answer(A, answer)
    return str(caught.value), runner.faults


def test_an_accusation_is_hearsay() -> None:
    reason, (fault,) = judged(averaging_pb2.PROTOCOL_VIOLATION, B)
    assert fault.peer_id == B and not fault.violation and f"as {A} says" in reason


@pytest.mark.parametrize("code", [averaging_pb2.BAD_GROUP_ID, averaging_pb2.CANCELLED])
def test_who_has_ended_a_broken_round_is_not_blamed(code: Any) -> None:
    assert judged(code, None) == (f"{A} has ended the round already", [])


@pytest.mark.parametrize("who", [A, B])
def test_a_member_that_goes_away_says_so(who: PeerID) -> None:
    async def answers() -> list[Any]:
        return [one async for one in Left(who).rpc_aggregate_part(_nothing(), None)]  # type: ignore[arg-type]

    (message,) = asyncio.run(answers())
    target = Target()
    _, (fault,) = judged(message.code, PeerID(message.peer_id), target)
    assert fault.peer_id == who and fault.left and not fault.violation
    assert fault.accuser == (None if who == A else A)  # A is who answered
    assert target.fault is fault  # nobody waits for it


async def _nothing() -> AsyncIterator[Any]:
    for message in list[Any]():
        yield message


def test_of_two_that_accuse_each_other_one_is_left_out() -> None:
    by_a = SenderFault(B, "failed, as A says", accuser=A)
    by_b = SenderFault(A, "failed, as B says", accuser=B)
    (one,) = to_leave_out([by_a, by_b])
    assert one is max(by_a, by_b, key=lambda fault: fault.peer_id.to_base58())
    assert to_leave_out([by_b, by_a]) == [one]
    for alone in ([by_a], [by_b], [by_a, SenderFault(A, "sent nothing in time")]):
        assert to_leave_out(alone) == alone


weights = st.floats(0.01, 1e4)
values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3)


@given(st.lists(st.tuples(values, weights), min_size=1, max_size=6))
def test_the_mean_is_that_of_exact_arithmetic(pairs: list[tuple[list[float], float]]) -> None:
    from fractions import Fraction

    mean = weighted_mean([(torch.tensor(numbers), weight) for numbers, weight in pairs])
    total = sum(Fraction(weight) for _, weight in pairs)
    for place, found in enumerate(mean.tolist()):
        exact = (
            sum(Fraction(numbers[place]) * Fraction(weight) for numbers, weight in pairs) / total
        )
        largest = max(abs(numbers[place]) for numbers, _ in pairs)
        assert abs(Fraction(found) - exact) <= Fraction(largest) / 2**23 + Fraction(1, 10**40)


def test_link_use_is_bytes_over_the_time_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 14.0])
    monkeypatch.setattr(reduction.time, "monotonic", lambda: next(clock))
    link: Any = LinkUse()
    assert link.rate == 0.0
    link.count(sent=100)
    assert link.rate == 0.0
    link.count(received=200)
    link.count(sent=300)
    assert (link.sent_bytes, link.received_bytes, link.rate) == (400, 200, 150.0)
