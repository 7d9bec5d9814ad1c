"""The coordinator keeps what most peers have, and says so when it is on disk."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch

from training.swarm.keeper import Keeper
from training.swarm.metrics_store import CheckpointRow
from training.swarm.state import NoState, state_hash
from training.swarm.types import Announcement, PeerInfo, State

LAST = 8


def state(epoch: int, value: float = 1.0) -> State:
    return State(epoch, {"network.w": torch.full((3,), value)}, {"samples": 100 * epoch})


def said(peer: str, one: State, *, epoch: int | None = None, role: str = "node") -> Announcement:
    info = PeerInfo(peer, peer, role, "cpu")  # type: ignore[arg-type]
    at = one.epoch if epoch is None else epoch
    return Announcement(info, at, 0, 1.0, state_hash(one), time.time(), None, 0)


class Transport:
    """States by their hash; some take long."""

    peer_id = "coordinator"

    def __init__(self, *states: State, seconds: float = 0.0) -> None:
        self.states = {state_hash(one): one for one in states}
        self.seconds, self.asked = seconds, list[str]()
        self.shared: list[State] = []

    def download_state(
        self, *, expected_hash: str | None, donors: Collection[str] = (), timeout_s: float
    ) -> State:
        self.asked.append(str(expected_hash))
        time.sleep(self.seconds)
        if expected_hash not in self.states:
            raise NoState("nobody has it")
        return self.states[expected_hash]

    def share_state(self, state: State) -> str:
        self.shared.append(state)
        return state_hash(state)


class Checkpoints:
    """As a checkpointer whose disk may be full."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.trouble = full, None if not full else "No space"
        self.held: State | None = None
        self.counters: Mapping[str, int] = {}
        self.written: list[int] = []

    @property
    def holding(self) -> bool:
        return self.held is not None

    def due(self, epoch: int) -> bool:
        return epoch > 0 and epoch % 4 == 0

    def hold(
        self, state: State, hash_of_it: str, *, counters: Mapping[str, int], now: float
    ) -> None:
        self.held, self.counters = state, counters

    def look(self, announcements: Any, now: float) -> CheckpointRow | None:
        one, self.held = self.held, None
        if one is None or self.full:
            return None
        self.written.append(one.epoch)
        return CheckpointRow(one.epoch, state_hash(one), 2, 3, 10, now, "there")


def keeper(checkpoints: Checkpoints, transport: Transport) -> Keeper:
    return Keeper(
        checkpoints, transport, last=LAST, length=64, active_s=30.0, timeout_s=60.0  # type: ignore[arg-type]
    )  # fmt: skip


def look(one: Keeper, announcements: list[Announcement], now: float) -> CheckpointRow | None:
    """A look, and one more when what it has begun has come."""
    first = one.look(announcements, now)
    until = time.monotonic() + 10
    while one.busy and time.monotonic() < until:
        download = one._download
        if download is not None and not download.ended.is_set():
            time.sleep(0.01)
            continue
        return one.look(announcements, now) or first
    return first


def test_what_most_have_is_kept() -> None:
    checkpoints, transport = Checkpoints(), Transport(state(4))
    one = keeper(checkpoints, transport)
    row = look(one, [said(name, state(4)) for name in "ab"] + [said("c", state(3))], 10.0)
    assert row is not None and row.epoch == one.epoch == 4
    assert checkpoints.counters == {"examples": 400, "tokens": 25_600}
    assert [shared.epoch for shared in transport.shared] == [4]
    assert not one.done


@pytest.mark.parametrize(
    "liar",
    [
        said("c", state(10**12, 2.0)),  # far ahead, with a hash that it serves
        said("c", state(LAST, 2.0)),  # the run is over, it says
        said("c", state(4, 2.0)),  # other weights of a due epoch
    ],
)
def test_one_peer_decides_nothing(liar: Announcement) -> None:
    theirs = [state(10**12, 2.0), state(LAST, 2.0), state(4, 2.0)]
    transport = Transport(*theirs)
    one = keeper(Checkpoints(), transport)
    assert look(one, [said("a", state(3)), said("b", state(3)), liar], 10.0) is None
    assert (transport.asked, one.epoch, one.done) == ([], 0, False)


def test_an_auxiliary_has_no_vote() -> None:
    transport = Transport(state(4))
    one = keeper(Checkpoints(), transport)
    helpers = [said(name, state(4), role="auxiliary") for name in "cde"]
    assert look(one, [said("a", state(3)), said("b", state(3)), *helpers], 10.0) is None
    assert transport.asked == []


def test_a_state_of_another_epoch_is_refused() -> None:
    """Its hash is right, since the hash says nothing of what the peers call it."""
    transport = Transport(state(5))
    one = keeper(Checkpoints(), transport)
    assert look(one, [said(name, state(5), epoch=4) for name in "abc"], 10.0) is None
    assert one.trouble == "No copy of epoch 4: it is of epoch 5"


def test_the_last_epoch_is_done_when_it_is_written() -> None:
    checkpoints, transport = Checkpoints(full=True), Transport(state(LAST))
    one = keeper(checkpoints, transport)
    everybody = [said(name, state(LAST)) for name in "abc"]
    look(one, everybody, 10.0)
    assert (one.done, one.trouble) == (False, "No space")
    look(one, everybody, 11.0)
    assert len(transport.asked) == 1  # not at once
    checkpoints.full = False
    look(one, everybody, 20.0)
    assert one.done and checkpoints.written == [LAST]


def test_peers_may_be_counted_one_after_the_other() -> None:
    """The first to publish the last epoch is alone with it for a while."""
    checkpoints, transport = Checkpoints(), Transport(state(LAST))
    one = keeper(checkpoints, transport)
    look(one, [said("a", state(LAST)), said("b", state(7)), said("c", state(7))], 10.0)
    assert (transport.asked, one.done) == ([], False)
    look(one, [said("a", state(LAST)), said("b", state(LAST)), said("c", state(7))], 11.0)
    assert one.done and checkpoints.written == [LAST]


def test_a_slow_download_holds_nothing_up() -> None:
    checkpoints, transport = Checkpoints(), Transport(state(4), seconds=0.5)
    one = keeper(checkpoints, transport)
    everybody = [said(name, state(4)) for name in "abc"]
    began = time.monotonic()
    for second in range(5):
        assert one.look(everybody, 10.0 + second) is None
    assert time.monotonic() - began < 0.4
    assert len(transport.asked) == 1  # one at a time
    assert look(one, everybody, 16.0) is not None


def test_a_failed_download_is_tried_again_while_peers_have_it() -> None:
    transport = Transport()
    one = keeper(Checkpoints(), transport)
    everybody = [said(name, state(4)) for name in "abc"]
    look(one, everybody, 10.0)
    assert one.trouble == "No copy of epoch 4: nobody has it"
    transport.states = {state_hash(state(4)): state(4)}
    assert look(one, everybody, 20.0) is not None
    assert one.trouble is None
