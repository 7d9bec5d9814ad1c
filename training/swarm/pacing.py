"""How large the parts of a round are, and how far a sender may run ahead of the answers it gets.

What a sender gives the network faster than its line carries waits in the socket, in front of
everything else of that connection, and yamux's notices that more may be sent travel there too: the
answers, which come the other way, then stand still. Measured on a line of 20 Mbit/s (bench_swarm,
`links`): 0.8 MB waiting to be sent held the line down at half of its rate until the line up was
idle, and a round took 6.3 s instead of 4.6.

So a stream has parts under way for `AHEAD_S` at the rate at which answers come, and at least
`LEAST_PARTS`: enough for a long way round, because the rate rises with what is under way until
the line is full. And parts are small on slow lines: every line stands still for the time of a part
at the begin and at the end of a round. On fast ones small parts cost processor time (18 million
numbers between three peers of one machine: 2.1 s with 64 KiB, 1.3 s with 512 KiB).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from training.swarm.shares import Link

LEAST_PART_BYTES = 1 << 16
PART_S = 0.025
"""What a part takes on the slowest line of a group."""
AHEAD_S = 0.4
LEAST_PARTS = 4
_RATE_OVER_S = 1.0
_BURST_S = 0.1
"""Answers come in bursts: a shorter time has no rate."""
_STALLED_S = 2.0


def part_bytes(links: Sequence[Link], most: int) -> int:
    """How large parts are in a round of `links`: at most `most`, small where no rate is known.

    The same at every member, as the links are: a reducer needs equal parts of all.
    """
    rates = [rate for link in links for rate in (link.up_mbit, link.down_mbit) if rate is not None]
    slowest = min(rates, default=0.0)
    size = LEAST_PART_BYTES
    while 2 * size * 8e-6 <= PART_S * slowest:
        size *= 2
    return min(size, most)


class Pace:
    """The parts of one stream to one reducer. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._under_way: deque[int] = deque()
        self._answered: deque[tuple[float, int]] = deque()
        self._answer = asyncio.Event()

    def sent(self, size: int) -> None:
        """A part of `size` bytes is given to the network."""
        self._under_way.append(size)

    def answered(self) -> None:
        """The average of the oldest part under way has come."""
        if self._under_way:
            self._answered.append((time.monotonic(), self._under_way.popleft()))
        self._answer.set()

    def may_send(self) -> bool:
        """Whether one more part may be under way."""
        if len(self._under_way) < LEAST_PARTS:
            return True
        return sum(self._under_way) < AHEAD_S * self.rate()

    def rate(self) -> float:
        """Bytes/s of parts that were answered in the last second; 0 before two were."""
        now = time.monotonic()
        while self._answered and self._answered[0][0] < now - _RATE_OVER_S:
            self._answered.popleft()
        if len(self._answered) < 2:
            return 0.0
        # The first one only says when the time begins.
        moved = sum(size for _, size in self._answered) - self._answered[0][1]
        return moved / max(now - self._answered[0][0], _BURST_S)

    async def room(self) -> None:
        """Return when the next part may be sent.

        After two seconds without an answer it may anyway: a stream that has ended at the other end
        says so only to one who sends.
        """
        while not self.may_send():
            self._answer.clear()
            try:
                await asyncio.wait_for(self._answer.wait(), _STALLED_S)
            except TimeoutError:
                return
