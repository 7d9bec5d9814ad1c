"""The reducer alone: the mean, the refusals, and that one sender's end is the end for all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st

from training.swarm.codecs import codec
from training.swarm.reduction import (
    Averaged,
    Limits,
    LinkUse,
    PartReducer,
    SenderFault,
    weighted_mean,
)

A, B, C = (PeerID(bytes([0x12, 0x20, *[number] * 32])) for number in (1, 2, 3))
WEIGHTS = {A: 1.0, B: 2.0, C: 5.0}


def reducer(
    *, name: str = "none", shapes: tuple[int, ...] = (4, 2), norm_cap: float | None = None
) -> PartReducer:
    compression = codec(name).compression
    return PartReducer(
        [torch.Size([length]) for length in shapes],
        [A, B, C],
        Limits(WEIGHTS, norm_cap, codec(name)),
        lambda _, mean: compression.compress(mean, CompressionInfo.from_tensor(mean)),
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
    from training.swarm import reduction

    clock = iter([10.0, 11.0, 14.0])
    monkeypatch.setattr(reduction.time, "monotonic", lambda: next(clock))
    link: Any = LinkUse()
    assert link.rate == 0.0
    link.count(sent=100)
    assert link.rate == 0.0
    link.count(received=200)
    link.count(sent=300)
    assert (link.sent_bytes, link.received_bytes, link.rate) == (400, 200, 150.0)
