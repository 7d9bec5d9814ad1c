"""What the transport makes of the DHT's answers and of donors', without a process of hivemind."""

from __future__ import annotations

import asyncio
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time

from models.errors import Fault
from training.swarm import announcements, averager, transport
from training.swarm.averager import AveragerSettings, Nonsense, read_members
from training.swarm.codecs import codec
from training.swarm.state import NoState
from training.swarm.state_transfer import DonorFailed
from training.swarm.transport import SwarmTransport, TransportSettings
from training.swarm.types import Announcement, PeerInfo

A, B, C = (PeerID(bytes([0x12, 0x20, *[number] * 32])) for number in (1, 2, 3))
OLD, NEW = "a" * 64, "b" * 64


def told(peer: PeerID, epoch: int = 3, state_hash: str = NEW) -> Announcement:
    info = PeerInfo(peer.to_base58(), "one", "node", "cpu")
    return Announcement(info, epoch, 8, 1.0, state_hash, time.time(), 2.5, 1 << 20)


class Answers:
    """A DHT that answers as it is told."""

    def __init__(self) -> None:
        self.peer_id, self.alive, self.silent = A, True, False
        self.entries: dict[str, Any] = {}

    def is_alive(self) -> bool:
        return self.alive

    def put(self, one: Announcement, lasts_s: float = 10.0) -> None:
        self.entries[one.peer.peer_id] = SimpleNamespace(
            value=announcements.to_value(one), expiration_time=get_dht_time() + lasts_s
        )

    def get(self, key: str, **_: Any) -> Any:
        if self.silent:
            return SimpleNamespace(result=self._times_out)
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace(value=dict(self.entries)))
        return future

    @staticmethod
    def _times_out(timeout: float) -> Any:
        raise transport.FutureTimeout


class NoDonor:
    """An averager whose donors have nothing any more."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[str] = []

    def run_in_background(self, **_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as hivemind's does, in its caller

    def is_alive(self) -> bool:
        return True

    def ask(self, method: str, **arguments: Any) -> Any:
        self.asked.append(arguments["donor"])
        future: Future[Any] = Future()
        future.set_exception(DonorFailed("it has no such state (any more)"))
        return future


class Refusing:
    """A guard."""

    def allowed(self, peer_id: str) -> bool:
        return peer_id != B.to_base58()


@pytest.fixture
def dht() -> Answers:
    return Answers()


@pytest.fixture
def one(dht: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwarmTransport:
    monkeypatch.setattr(transport, "RoundAverager", NoDonor)
    settings = TransportSettings(run="run", folder=tmp_path, announcement_s=20.0)
    return SwarmTransport(dht, settings, [torch.zeros(3)])


def test_ctrl_c_is_heard_as_before(dht: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(transport, "RoundAverager", NoDonor)
    before = signal.getsignal(signal.SIGINT)
    SwarmTransport(dht, TransportSettings(run="run", folder=tmp_path), [torch.zeros(3)])
    assert signal.getsignal(signal.SIGINT) is before is not signal.SIG_IGN


def ids(heard: list[Announcement]) -> list[str]:
    return [one.peer.peer_id for one in heard]


def test_what_lasts_too_long_is_not_heard(one: SwarmTransport, dht: Answers) -> None:
    dht.put(told(B), lasts_s=12 * 3600.0)
    dht.put(told(C), lasts_s=40.0)
    assert ids(one.announcements()) == [C.to_base58()]


def test_whom_the_guard_refuses_is_not_heard(one: SwarmTransport, dht: Answers) -> None:
    one._guard = Refusing()  # type: ignore[assignment]
    for peer in (A, B, C):
        dht.put(told(peer))
    assert ids(one.announcements()) == sorted(peer.to_base58() for peer in (A, C))


def test_a_slow_dht_is_not_an_empty_swarm(
    one: SwarmTransport, dht: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dht.put(told(B))
    heard = one.announcements()
    dht.silent = True
    assert one.announcements() == heard != []
    later = time.monotonic() + 21.0
    monkeypatch.setattr(transport.time, "monotonic", lambda: later)
    with pytest.raises(Fault, match="the DHT does not answer any more"):
        one.announcements()


def test_a_dht_that_is_gone_is_told(one: SwarmTransport, dht: Answers) -> None:
    dht.alive = False
    with pytest.raises(Fault, match="the DHT's process has ended"):
        one.announcements()
    with pytest.raises(Fault, match="the DHT's process has ended"):
        one.announce(told(A))


def test_a_state_that_the_swarm_left_behind_is_not_waited_for(
    one: SwarmTransport, dht: Answers
) -> None:
    dht.put(told(A, 3, OLD))  # its own word does not count
    dht.put(told(B, 5))
    began = time.monotonic()
    with pytest.raises(NoState, match="nobody announces it any more"):
        one.download_state(expected_hash=OLD, donors=[B.to_base58()], timeout_s=60.0)
    assert time.monotonic() - began < 30.0
    dht.put(told(C, 3, OLD))  # somebody has it: it asks again and again
    with pytest.raises(NoState, match="no such state"):
        one.download_state(expected_hash=OLD, donors=[B.to_base58()], timeout_s=1.5)
    assert one._averager.asked.count(C.to_base58()) > 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"samples": 3}, False),
        ({"samples": "4"}, False),
        ({"weight": 9.0}, False),
        ({"weight": 1e9, "samples": 10**9}, False),
        ({"weight": float("nan")}, False),
        ({"role": "auxiliary", "weight": 0.0}, True),
        ({"role": "auxiliary"}, False),
        ({"epoch": None}, False),
    ],
)
def test_a_weight_is_that_of_the_samples(changes: dict[str, Any], good: bool) -> None:
    said = {"weight": 4.0, "samples": 4, "role": "node", "epoch": 1}
    group = GroupInfo(
        b"group", (A, B), tuple(MSGPackSerializer.dumps(one) for one in (said, said | changes))
    )
    settings = AveragerSettings(
        prefix="run", role="node", codec=codec("none"), matchmaking_s=1.0, sender_timeout_s=1.0,
        allreduce_timeout_s=1.0, exclusion_s=1.0, weight_cap=1e6, norm_cap=None, part_bytes=1024,
        donors_at_once=1, upload_limit_mbit=None,
    )  # fmt: skip
    if good:
        assert len(read_members(MSGPackSerializer, group, settings)) == 2
        return
    with pytest.raises(Nonsense, match=f"member {B} tells what no peer") as raised:
        read_members(MSGPackSerializer, group, settings)
    assert raised.value.peer_id == B


def test_who_finds_nobody_asks_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """hivemind asks the DHT again as soon as it was answered: 1.5 Mbit/s of a peer alone."""
    now, asked = [50.0], []

    async def sleep(seconds: float) -> None:
        now[0] += max(0.0, seconds)

    async def answer(*_: Any) -> list[Any]:
        asked.append(now[0])
        now[0] += 0.001
        return []

    async def run() -> None:
        original: Any = SimpleNamespace(
            dht=SimpleNamespace(peer_id=A), prefix="run", target_group_size=None
        )
        keys = averager.EpochKeys(cast(Any, None), original)
        for _ in range(5):
            assert await keys.get_averagers("run.0b1", only_active=True) == []

    monkeypatch.setattr(averager.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(averager.asyncio, "sleep", sleep)
    monkeypatch.setattr(averager.GroupKeyManager, "get_averagers", answer)
    asyncio.run(run())
    assert asked == pytest.approx([50.0, 50.1, 50.2, 50.3, 50.4])
