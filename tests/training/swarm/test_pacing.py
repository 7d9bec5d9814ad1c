"""Parts by the slowest line, and a sender that does not run ahead of its answers."""

from __future__ import annotations

import asyncio

import pytest

from training.swarm import pacing
from training.swarm.pacing import AHEAD_S, LEAST_PART_BYTES, LEAST_PARTS, Pace, part_bytes
from training.swarm.shares import Link

MOST = 1 << 19


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((None, None), LEAST_PART_BYTES),
        ((1000.0, 5.0), LEAST_PART_BYTES),
        ((41.9, None), LEAST_PART_BYTES),
        ((42.0, 900.0), 2 * LEAST_PART_BYTES),  # 128 KiB are 1.05 Mbit: 25 ms at 42 Mbit/s
        ((1000.0, 900.0), MOST),
    ],
)
def test_a_part_takes_25_ms_on_the_slowest_line(
    rates: tuple[float | None, float | None], expected: int
) -> None:
    group = [Link("a", "node", 1000.0, rates[0]), Link("b", "client", rates[1], None)]
    if rates == (None, None):
        group = [Link("a", "node"), Link("b", "client")]
    assert part_bytes(group, MOST) == expected
    assert part_bytes(list(reversed(group)), MOST) == expected
    assert part_bytes(group, 1000) == 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pacing.time, "monotonic", lambda: now[0])
    return now


def send_all(pace: Pace, size: int) -> int:
    sent = 0
    while pace.may_send():
        pace.sent(size)
        sent += 1
    return sent


@pytest.mark.usefixtures("clock")
def test_without_an_answer_only_a_few_parts_are_under_way() -> None:
    pace = Pace()
    assert send_all(pace, 1000) == LEAST_PARTS
    pace.answered()
    assert send_all(pace, 1000) == 1


def test_what_is_under_way_follows_the_rate_of_answers(clock: list[float]) -> None:
    """10 parts of 1000 bytes a 0.1 s are 100,000 bytes/s, and 0.4 s of them 40 parts."""
    pace, size, under_way = Pace(), 1000, 0
    for _ in range(20):
        under_way += send_all(pace, size)
        clock[0] += 0.1
        for _ in range(min(10, under_way)):
            pace.answered()
            under_way -= 1
    under_way += send_all(pace, size)
    assert under_way == pytest.approx(AHEAD_S * 10 / 0.1, rel=0.15)
    clock[0] += 5.0  # nothing comes any more: nothing more goes
    assert pace.rate() == 0.0
    assert not pace.may_send()


def test_a_long_way_round_does_not_hold_a_fast_line_back(clock: list[float]) -> None:
    """Answers come 0.2 s after their parts: what is under way grows until the line is full."""
    pace, size, full = Pace(), 65_536, 100
    rounds = []
    for _ in range(12):
        rounds.append(min(send_all(pace, size), full))
        for _ in range(rounds[-1]):
            clock[0] += 0.2 / rounds[-1]
            pace.answered()
        while pace._under_way:
            pace.answered()
    assert rounds[0] == LEAST_PARTS
    assert max(rounds[-3:]) == full


def test_an_answer_makes_room_and_so_does_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_STALLED_S", 0.05)

    async def run() -> None:
        pace = Pace()
        send_all(pace, 1000)
        waiting = asyncio.ensure_future(pace.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        pace.answered()
        await asyncio.wait_for(waiting, 5.0)
        send_all(pace, 1000)
        await asyncio.wait_for(pace.room(), 5.0)  # nobody answers: the next part may go
        assert not pace.may_send()

    asyncio.run(run())
