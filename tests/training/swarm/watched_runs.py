"""Swarms as a coordinator sees them, told without hivemind: announcements and rounds, by time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.swarm.collector import Collector, Watch
from training.swarm.metrics_store import CheckpointRow, MetricsStore, RunFacts
from training.swarm.types import Announcement, Member, PeerInfo, Role, RoundResult

BEGAN = 1_900_000_000.0
FACTS = RunFacts(name="sahajbert", target_batch=400, epochs=1000, recipe_digest="ab" * 16)


def announcement(
    peer_id: str, epoch: int, samples: int, *, time: float, name: str = "", role: Role = "node",
    device: str = "cpu", rate: float = 10.0, state_hash: str | None = None,
    loss: float | None = 2.0, rss_bytes: int = 700_000_000,
) -> Announcement:  # fmt: skip
    peer = PeerInfo(peer_id, name or peer_id, role, device)
    told = f"hash-{epoch}" if state_hash is None else state_hash
    return Announcement(peer, epoch, samples, rate, told, time, loss, rss_bytes)


def round_of(
    epoch: int, weights: dict[str, float], *, fraction: float = 1.0, group_id: str = "",
    seconds: float = 1.5, rates: dict[str, float] | None = None,
) -> RoundResult:  # fmt: skip
    members = tuple(Member(peer, weight, {}) for peer, weight in weights.items())
    return RoundResult(
        epoch, group_id or f"{epoch:04x}", members, fraction, seconds, 1000, rates or {},
        fraction == 1.0,
    )  # fmt: skip


@dataclass
class Peer:
    """A peer that computes `speed` samples in an epoch."""

    peer_id: str
    name: str
    speed: int
    role: Role = "node"
    device: str = "NVIDIA T4"
    arrives: int = 0
    leaves: int = 1 << 30


@dataclass
class Told:
    """A run in progress: a store and its collector, with a clock of its own."""

    store: MetricsStore
    facts: RunFacts = FACTS
    epoch_s: float = 20.0
    now: float = BEGAN
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.collector = Collector(
            self.store, self.facts, watch=Watch(active_s=30, poll_s=2), now=self.now, **self.options
        )

    def say(self, *announcements: Announcement, after_s: float = 1.0) -> list[str]:
        """One look; the keys of the new alarms."""
        self.now += after_s
        said = [one if one.time else replace(one, time=self.now) for one in announcements]
        return [alarm.key for alarm in self.collector.look(said, self.now)]

    def epochs(self, peers: list[Peer], first: int, stop: int) -> None:
        """Whole epochs: each peer works, then all average; two looks in each."""
        for epoch in range(first, stop):
            here = [peer for peer in peers if peer.arrives <= epoch < peer.leaves]
            for part in (0.5, 1.0):
                self.now += self.epoch_s / 2
                self.collector.look([self._said(peer, epoch, part) for peer in here], self.now)
            weights = {peer.peer_id: float(peer.speed) for peer in here}
            nodes = [peer for peer in here if peer.role != "client"]
            self.collector.round(
                round_of(epoch, weights, rates={peer.peer_id: 2.5e6 for peer in here[1:]}),
                here[0].peer_id,
                parts={peer.peer_id: 1 / len(nodes) for peer in nodes},
                now=self.now,
            )

    def _said(self, peer: Peer, epoch: int, part: float) -> Announcement:
        working = peer.role != "auxiliary"
        loss = 2.2 + 8 * math.exp(-epoch / 40) + 0.05 * math.sin(3.0 * epoch + len(peer.peer_id))
        return announcement(
            peer.peer_id, epoch, int(peer.speed * part), name=peer.name, role=peer.role,
            device=peer.device, rate=peer.speed / self.epoch_s if working else 0.0,
            loss=loss if working else None, time=self.now - 0.3,
        )  # fmt: skip


def told(folder: Path, **options: Any) -> Told:
    return Told(MetricsStore(folder / "metrics.sqlite"), **options)


HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'><b>"
BUSY = [
    Peer("QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKPbdG", "Asha's lab", 90, device="NVIDIA A100"),
    Peer("12D3KooWGrMmW4SPDVzQF3M8JWnyeErPZ5WTWFvYzcYq2mVrRzAx", "সাহাজ", 70, "client"),
    Peer("12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8", "colab-17", 45, "client"),
    Peer("12D3KooWEwDqCPYQy6bVVQEaCGCU2JMmA5hHnjRJMVJ5rrsXhdwB", "spot eu-west", 60, arrives=30),
    Peer("12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo", HOSTILE, 30, device=HOSTILE),
    Peer("12D3KooWLJtG8fd2hkQzTn96MrLvThmnNQjTUFZwGEsLRz5EmSzc", "\u202egnp.exe\u0301\u0301", 20),
    Peer("12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X", "old workstation", 15,
         device="Intel Xeon E5-2680 v4 @ 2.40GHz", arrives=60),
    Peer("12D3KooWH3uVF6wv47WnArKHk5p6cvgCJEb74UTmxztmQDc298L3", "Dipa", 25, leaves=150),
    Peer("12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xp", "W" * 90, 10, arrives=80),
    Peer("12D3KooWLJtG8fd2hkQzTn96MrLvThmnNQjTUFZwGEsLRz5EmSzd", "Ravi", 12, arrives=100),
    Peer("12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xq", "Mitali", 9, arrives=120),
    Peer("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN", "averager", 0, "auxiliary",
         device="2 x EPYC 7502"),
]  # fmt: skip


def busy(folder: Path, *, epochs: int = 200, now: float | None = None) -> Told:
    """Twelve peers for 200 epochs, one of which left, is astray or lies; all kinds of alarms."""
    facts = replace(FACTS, name=f"sahajbert {HOSTILE}", parameters=18_105_474, mode="sync")
    epoch_s = 20.0
    start = BEGAN if now is None else now - epochs * epoch_s - 30
    run = told(folder, facts=facts, epoch_s=epoch_s, now=start)
    run.epochs(BUSY, 0, epochs)
    run.collector.round(
        round_of(epochs - 1, {one.peer_id: 1.0 for one in BUSY}, fraction=0.9993, group_id="ff"),
        BUSY[0].peer_id, now=run.now,
    )  # fmt: skip
    for epoch in (100, 200):
        run.store.add_checkpoint(
            CheckpointRow(epoch, "5f3c" * 16, 9, 11, 217_000_000, run.now - (200 - epoch) * 20,
                          f"/run/checkpoints/step-{epoch:08d}")
        )  # fmt: skip
    here = [one for one in BUSY if one.leaves > epochs]
    said = [
        announcement(
            one.peer_id, epochs, int(one.speed * 0.6), name=one.name, role=one.role,
            device=one.device, rate=one.speed / 20, loss=None if one.role == "auxiliary" else 2.3,
            time=run.now + 9 + (5.5 if one.name == "Ravi" else -0.2),
            state_hash="astray" if one.name == "colab-17" else None,
        )
        for one in here
    ]  # fmt: skip
    run.say(*said, after_s=9)
    run.say(*[replace(one, loss=math.nan) if one.peer.name == HOSTILE else one for one in said])
    return run
