"""A peer that waits is heard, one that hangs is not, and one that left stays away."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from tests.training.swarm.watched_runs import announcement
from training.swarm.heartbeat import Heartbeat
from training.swarm.types import Announcement

SAID = announcement("QmA", 3, 40, time=1000.0)


class Told:
    """A transport that remembers what it was asked."""

    peer_id = "QmA"

    def __init__(self) -> None:
        self.announced: list[Announcement] = []
        self.asked: list[Any] = []

    def announce(self, one: Announcement) -> None:
        self.announced.append(one)

    def announcements(self) -> list[Announcement]:
        return self.announced

    def average(self, tensors: Any, **options: Any) -> None:
        self.asked.append((tensors, options))

    def leave_out(self, peer_id: str) -> None:
        self.asked.append(peer_id)

    def share_state(self, state: Any) -> str:
        self.asked.append(state)
        return "hash"

    def download_state(self, **options: Any) -> Any:
        self.asked.append(options)
        return "state"

    def leave(self) -> None:
        self.asked.append("left")


def test_beats() -> None:
    told, now = Told(), [100.0]
    heart = Heartbeat(told, every_s=5, longest_s=60, clock=lambda: now[0])
    assert not heart.beat()  # nothing was announced yet
    heart.announce(SAID)
    assert not heart.beat()
    now[0] += 5
    assert heart.beat()
    assert not heart.beat()
    again = told.announced[-1]
    assert replace(again, time=SAID.time) == SAID
    assert abs(again.time - time.time()) < 60
    now[0] += 55
    assert heart.beat()
    now[0] += 5
    assert not heart.beat()  # the trainer itself has said nothing for too long
    heart.announce(SAID)
    now[0] += 6
    assert heart.beat()


def test_who_left_is_silent() -> None:
    told, now = Told(), [0.0]
    heart = Heartbeat(told, every_s=5, longest_s=60, clock=lambda: now[0])
    heart.announce(SAID)
    heart.leave()
    now[0] += 10
    assert not heart.beat()
    assert (len(told.announced), told.asked) == (1, ["left"])


def test_the_thread() -> None:
    told = Told()
    heart = Heartbeat(told, every_s=0.02, longest_s=60)
    heart.start()
    heart.announce(SAID)
    until = time.monotonic() + 20
    while len(told.announced) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    heart.leave()
    assert len(told.announced) >= 3


def test_the_thread_outlives_a_transport_that_fails_once() -> None:
    class Failing(Told):
        fails = 1

        def announce(self, one: Announcement) -> None:
            if self.announced and self.fails:
                self.fails -= 1
                raise RuntimeError("the DHT is busy")
            super().announce(one)

    told = Failing()
    heartbeat = Heartbeat(told, every_s=0.02, longest_s=60.0)  # type: ignore[arg-type]
    heartbeat.announce(SAID)
    heartbeat.start()
    until = time.monotonic() + 20
    while len(told.announced) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    heartbeat.leave()
    assert told.fails == 0
    assert len(told.announced) >= 3


def test_all_else_is_the_transports() -> None:
    told = Told()
    heart = Heartbeat(told, every_s=5, longest_s=60)
    state: Any = "s"
    heart.average([], weight=2.0, epoch=3, gathered={"a": 4}, timeout_s=5)
    heart.leave_out("QmB")
    assert heart.share_state(state) == "hash"
    heart.download_state(expected_hash="h", donors=["d"], timeout_s=6)
    assert told.asked == [
        ([], {"weight": 2.0, "epoch": 3, "gathered": {"a": 4}, "timeout_s": 5}),
        "QmB",
        "s",
        {"expected_hash": "h", "donors": ["d"], "timeout_s": 6},
    ]
    assert (heart.peer_id, heart.announcements()) == ("QmA", [])
