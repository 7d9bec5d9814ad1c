"""Peers that learn together over hivemind, and one after another of them is killed.

Two peers live through all of it; each victim joins them late, so each is a late joiner too. What
must hold at the end: both survivors have the same weights at every epoch, no epoch has fewer
samples than its target, and nothing of a victim runs on.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.training.swarm.learning_peers import SAMPLES, Told, loss_of
from tests.training.swarm.real_peers import Peer, descendants, hub, is_alive

pytestmark = pytest.mark.peers

TARGET = 24
WAIT_S = 120.0
OPTIONS = {"codec": "float16", "part_bytes": 1 << 14, "announcement_s": 12.0}
SETTINGS = {
    "target_batch": TARGET,
    "start_wait_s": 90.0,
    "announce_s": 0.3,
    "look_s": 0.1,
    "round_timeout_s": 8.0,
    "download_timeout_s": 30.0,
}
NEVER = 100_000


class Swarm:
    """The survivors, and idle processes that become victims."""

    def __init__(self, peers: list[Peer]) -> None:
        self.survivors, self._idle = peers[:2], peers[2:]
        self._begin(0, self.survivors[0], 2)
        self.survivors[0].end_start()
        self._begin(1, self.survivors[1], 2)
        self.survivors[1].end_start()
        self._next = 2

    def _begin(self, index: int, peer: Peer, min_peers: int, hold: str = "") -> None:
        first = [] if index == 0 else self.survivors[0].addresses
        role = "client" if index == 1 else "node"
        peer.begin_learn(
            first, {**OPTIONS, "role": role}, index=index, pause_s=0.05, steps=NEVER, hold=hold,
            settings={**SETTINGS, "min_peers": min_peers},
        )  # fmt: skip

    def joiner(self, hold: str = "") -> Peer:
        """A late peer."""
        peer = self._idle.pop(0)
        self._begin(self._next, peer, 1, hold)
        peer.end_start()
        self._next += 1
        return peer

    def told(self) -> list[Told]:
        found = [peer.do("told") for peer in self.survivors]
        assert [one.error for one in found] == ["", ""]
        return found

    def halted(self) -> list[Told]:
        """What they tell when they are in the middle of the same epoch."""
        while True:
            for peer in self.survivors:
                peer.do("hold", SAMPLES)
            wait_for(lambda: all(one.is_held for one in self.told()))
            one, two = self.told()
            if one.epoch == two.epoch:
                return [one, two]
            for peer in self.survivors:
                peer.do("release")

    def go_on(self, epochs: int = 2) -> None:
        """Wait until the survivors have taken so many steps from now on."""
        at = max(one.epoch for one in self.told())
        wait_for(lambda: min(one.epoch for one in self.told()) >= at + epochs)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def is_in(peer: Peer, members: int) -> bool:
    """Whether it has taken a step in a round of so many."""
    return any(len(one.result.members) == members for one in peer.do("told").applied)


def family(peer: Peer) -> list[int]:
    found = [peer.pid, *descendants(peer.pid)]
    assert len(found) >= 4  # the trainer, the DHT, its daemon, the averager
    return found


def gone(pids: list[int]) -> None:
    wait_for(lambda: not [pid for pid in pids if is_alive(pid)])


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Two peers at work, a node and a client."""
    with hub(tmp_path_factory.mktemp("kills"), 9) as peers:
        yield Swarm(peers)


def test_two_peers_learn(swarm: Swarm) -> None:
    swarm.go_on(1)


def test_killed_while_it_accumulates(swarm: Swarm) -> None:
    victim = swarm.joiner()
    wait_for(lambda: is_in(victim, 3))
    victim.do("hold", SAMPLES)
    wait_for(lambda: victim.do("told").is_held)
    pids = family(victim)
    victim.kill()
    swarm.go_on()  # what the victim had announced counts no more
    gone(pids)


def test_killed_while_it_matches(swarm: Swarm) -> None:
    victim = swarm.joiner()
    wait_for(lambda: is_in(victim, 3))
    for peer in swarm.survivors:
        peer.do("hold", "match")
    wait_for(lambda: all(one.is_held for one in swarm.told()))
    # Nobody else looks for a group, so it stays in its search.
    wait_for(lambda: victim.do("told").stage == "match")
    time.sleep(0.5)
    assert victim.do("told").stage == "match"
    pids = family(victim)
    victim.kill()
    for peer in swarm.survivors:
        peer.do("release")
    swarm.go_on()
    gone(pids)


def test_killed_while_it_reduces(swarm: Swarm) -> None:
    victim = swarm.joiner()
    wait_for(lambda: is_in(victim, 3))
    pids = family(victim)
    before = [len(told.lines) for told in swarm.told()]
    victim.do("poison", "die")  # at the second part that it sends
    gone(pids)
    swarm.go_on()
    # They saw that a part of it was missing, and took no such round.
    since = [told.lines[at:] for told, at in zip(swarm.told(), before, strict=True)]
    assert any("was averaged" in text for lines in since for stage, _, text in lines
               if stage == "check")  # fmt: skip


def test_killed_without_its_children(swarm: Swarm) -> None:
    victim = swarm.joiner()
    wait_for(lambda: is_in(victim, 3))
    pids = family(victim)
    os.kill(victim.pid, signal.SIGKILL)
    gone(pids)
    swarm.go_on()


@pytest.mark.slow  # with it the tests of real peers would take too long for `make test`
@pytest.mark.parametrize(
    ("child", "said"), [("averager", "averager's process has ended"), ("dht", "DHT's process has")]
)
def test_a_peer_that_loses_a_process_ends_with_a_word(swarm: Swarm, child: str, said: str) -> None:
    victim = swarm.joiner()
    wait_for(lambda: is_in(victim, 3))
    os.kill(victim.do("pid_of", child), signal.SIGKILL)
    wait_for(lambda: said in victim.do("told").error)
    victim.kill()
    swarm.go_on()


def test_nan_harms_nobody(swarm: Swarm) -> None:
    bad = swarm.joiner(hold=SAMPLES)
    bad.do("poison", "nan")
    bad.do("release")
    wait_for(lambda: any("was averaged" in text for _, _, text in bad.do("told").lines))
    swarm.go_on()
    told = bad.do("told")
    assert not any(len(one.result.members) == 3 for one in told.applied)
    ours = {digest for one in swarm.told() for digest in one.hashes.values()}
    assert told.hashes[told.epoch] in ours  # it follows them with good weights
    bad.kill()
    swarm.go_on(1)


def test_what_the_survivors_have_in_the_end(swarm: Swarm) -> None:
    one, two = swarm.halted()
    assert one.epoch == two.epoch
    both = one.hashes.keys() & two.hashes.keys()
    assert {epoch: one.hashes[epoch] for epoch in both} == {
        epoch: two.hashes[epoch] for epoch in both
    }
    everything = one.hashes | two.hashes
    assert sorted(everything) == list(range(one.epoch + 1))
    assert len(set(everything.values())) == len(everything)  # each step was one
    steps = [step for told in (one, two) for step in told.applied]
    assert {step.epoch for step in steps} == set(range(1, one.epoch + 1))
    for step in steps:
        assert step.taken and step.samples >= TARGET
        assert (step.result.complete, step.result.fraction) == (True, 1.0)
    losses = [loss_of([part]) for told in (one, two) for part in told.losses.values()]
    assert all(math.isfinite(loss) for loss in losses)
    assert loss_of(list(two.losses.values())[-20:]) < loss_of(list(two.losses.values())[:20])
