"""Part `soak` of `bench_swarm`: four peers, and each minute one is killed or one joins.

Sync mode, a tiny model, three seconds of compute an epoch. A kill is SIGKILL, to the whole tree or
to the main process alone, as the seed has it; joiners download the state from the others. Whoever
was the first peer can be killed like any other. Judged: the longest time without an epoch, epochs
that peers ended with other weights or fewer samples than the target, memory, what dead peers left
running.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench_peers import RunFailed
from scripts.swarm_bench_peers import end_group, group_of
from scripts.swarm_bench_processes import TrainerProcess
from scripts.swarm_bench_trainer import SAMPLES

PEERS, FEWEST = 4, 2
EVERY_S = 60.0
PARAMETERS = 10_000
MICROBATCH_S = 0.25
TARGET = PEERS * 12 * SAMPLES
_START_S = 120.0
_ORPHAN_S = 10.0
"""Children of a killed main process may take so long to end."""
_LOOK_S, _WEIGH_S = 0.5, 10.0
_SETTLED_S = 120.0
"""Memory of a younger peer is not judged."""
LONG_S = 600.0
"""A peer must be weighed for so long before a slope says anything."""


@dataclass(frozen=True)
class Happening:
    """What the bench did to the swarm, in seconds since its first epoch."""

    at_s: float
    what: str
    peer: str


@dataclass(frozen=True)
class EpochReport:
    """A peer had the weights `state_hash` at the start of `epoch`; samples None: downloaded."""

    peer: str
    at_s: float
    epoch: int
    state_hash: str
    samples: int | None
    members: int | None


@dataclass(frozen=True)
class Memory:
    """One peer's, over its life after the first minutes."""

    peer: str
    minutes: float
    first_bytes: int
    last_bytes: int
    most_bytes: int
    bytes_an_hour: float
    """Slope of the straight line that fits best."""

    @property
    def growth_an_hour(self) -> float:
        """As a part of what it held at first."""
        return self.bytes_an_hour / self.first_bytes


@dataclass(frozen=True)
class SoakFound:
    """What became of it."""

    minutes: float
    seed: int
    epochs: int
    longest_gap_s: float
    longest_gap_at_s: float
    median_gap_s: float
    lost: tuple[str, ...]
    healed: int
    """Epochs that a peer first had otherwise, and then as all others."""
    short: tuple[str, ...]
    fell: tuple[str, ...]
    """Peers that ended without being told to."""
    orphans: tuple[str, ...]
    joined_s: tuple[float, ...]
    """From the start of a joiner's program to its first weights."""
    never_joined: int
    happenings: tuple[Happening, ...]
    memory: tuple[Memory, ...]
    load: float


def next_act(draw: random.Random, trained: int, running: int) -> str:
    """One of "kill whole", "kill main", "join"; two peers that have trained are always left."""
    kinds = ["kill whole", "kill main"]
    if running >= PEERS:
        return draw.choice(kinds)
    if trained <= FEWEST:
        return "join"
    return draw.choice([*kinds, "join", "join"])


def longest_gap(times_s: Sequence[float], until_s: float) -> tuple[float, float, float]:
    """The longest and the median time between new epochs, and when the longest began.

    times_s: of the first report of each new epoch; the time to the end of the run counts too.
    """
    pairs = list(zip(times_s, [*times_s[1:], until_s], strict=True))
    gaps = [later - earlier for earlier, later in pairs]
    longest = max(gaps)
    return longest, statistics.median(gaps), pairs[gaps.index(longest)][0]


def first_reports(reports: Sequence[EpochReport]) -> list[tuple[int, float]]:
    """Each new epoch, higher than all before it, and when a peer first had it."""
    found: list[tuple[int, float]] = []
    for report in sorted(reports, key=lambda one: one.at_s):
        if not found or report.epoch > found[-1][0]:
            found.append((report.epoch, report.at_s))
    return found


def lost_epochs(reports: Sequence[EpochReport], survivors: Sequence[str]) -> tuple[list[str], int]:
    """Epochs that peers have with different weights, or that none has; how many were mended.

    A peer that was killed counts for the epochs that it outlived, a survivor for all. What counts
    is what it had last of an epoch.
    """
    last: dict[int, dict[str, str]] = {}
    newest: dict[str, int] = {}
    changed = 0
    for report in sorted(reports, key=lambda one: one.at_s):
        of_epoch = last.setdefault(report.epoch, {})
        changed += of_epoch.get(report.peer, report.state_hash) != report.state_hash
        of_epoch[report.peer] = report.state_hash
        newest[report.peer] = max(newest.get(report.peer, 0), report.epoch)
    lost = []
    for epoch in range(min(last, default=0), max(last, default=-1) + 1):
        hashes = {
            digest
            for peer, digest in last.get(epoch, {}).items()
            if peer in survivors or newest[peer] > epoch
        }
        if len(hashes) > 1:
            lost.append(f"epoch {epoch}: {len(hashes)} different weights")
        elif not last.get(epoch):
            lost.append(f"epoch {epoch}: nobody had it")
    return lost, changed


def short_epochs(reports: Sequence[EpochReport], target: int) -> list[str]:
    """Steps that were taken with fewer samples than the target."""
    return [
        f"epoch {one.epoch} at {one.peer}: {one.samples} of {target} samples"
        for one in reports
        if one.samples is not None and one.samples < target
    ]


def memory_of(peer: str, weighed: Sequence[tuple[float, int]]) -> Memory | None:
    """`weighed`: seconds of the peer's life and bytes; None where it did not live for long."""
    settled = [(at, size) for at, size in weighed if at >= _SETTLED_S]
    if len(settled) < 2:
        return None
    times, sizes = zip(*settled, strict=True)
    slope = statistics.linear_regression(times, sizes).slope
    return Memory(peer, (times[-1] - times[0]) / 60, sizes[0], sizes[-1], max(sizes), 3600 * slope)


@dataclass
class Soak:
    """A run in progress."""

    work: Path
    minutes: float
    seed: int
    every_s: float = EVERY_S
    peers: dict[str, TrainerProcess] = field(default_factory=dict)
    dead: dict[str, float] = field(default_factory=dict)
    """Killed peers that may still have processes: since when."""
    fell: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    weighed: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    joiners: list[str] = field(default_factory=list)
    began_at: float = 0.0

    def run(self) -> SoakFound:
        """All of it. Raises RunFailed when the first peers do not begin."""
        draw = random.Random(self.seed)
        try:
            self._start()
            until, due, weigh = self.began_at + 60 * self.minutes, self.every_s, 0.0
            while time.time() < until:
                self._look()
                now_s = time.time() - self.began_at
                if now_s >= weigh:
                    self._weigh()
                    weigh += _WEIGH_S
                if now_s >= due:
                    self._act(draw, now_s)
                    due += self.every_s
                time.sleep(_LOOK_S)
            ended_at, load = time.time(), os.getloadavg()[0]
            survivors = [name for name in self._running() if self.peers[name].of_kind("started")]
            waiting = sum(
                not self.peers[name].of_kind("started")
                for name in self.joiners
                if self.peers[name].running and ended_at - self.peers[name].began_at > _START_S
            )
        finally:
            self._end()
        return self._judge(ended_at, survivors, waiting, load)

    def _start(self) -> None:
        for number in range(PEERS):
            self._add(f"peer-{number}", PEERS)
            if not number:
                self.peers["peer-0"].wait_for("address", _START_S)
        for peer in self.peers.values():
            peer.wait_for("epoch", _START_S)
        self.began_at = time.time()

    def _add(self, name: str, min_peers: int = 2) -> None:
        addresses = [
            address
            for other in self._running()
            for event in self.peers[other].of_kind("address")
            for address in event["addresses"]
        ]
        words = ["--seed", str(len(self.peers)), "--parameters", str(PARAMETERS),
                 "--compute-s", str(MICROBATCH_S), "--target", str(TARGET),
                 "--min-peers", str(min_peers), "--first", *addresses]  # fmt: skip
        self.peers[name] = TrainerProcess(self.work, name, words)

    def _running(self) -> list[str]:
        return [name for name, peer in self.peers.items() if peer.running]

    def _look(self) -> None:
        for name, peer in self.peers.items():
            peer.look()
            if not peer.running and name not in self.dead and name not in self.fell:
                self.fell.append(name)
                print(f"soak: {name} ended by itself: {peer.said}", file=sys.stderr)
        for name, since in self.dead.items():
            left = group_of(self.peers[name].group)
            if left and time.time() - since > _ORPHAN_S:
                self.orphans.append(f"{name}: {len(left)} processes after {_ORPHAN_S:g} s")
                end_group(self.peers[name].group)

    def _weigh(self) -> None:
        for name in self._running():
            peer = self.peers[name]
            age_s = time.time() - peer.began_at
            self.weighed.setdefault(name, []).append((age_s, peer.memory_bytes()))

    def _act(self, draw: random.Random, now_s: float) -> None:
        running = self._running()
        trained = [name for name in running if self.peers[name].of_kind("epoch")]
        act = next_act(draw, len(trained), len(running))
        if act == "join":
            name = f"peer-{len(self.peers)}"
            self._add(name)
            self.joiners.append(name)
        elif len(trained) > FEWEST:
            name = draw.choice(trained)
            self.dead[name] = time.time()
            self.peers[name].kill(whole=act == "kill whole")
        else:
            return
        self.happenings.append(Happening(now_s, act, name))
        print(f"soak: {now_s / 60:.1f} min: {act} {name}", file=sys.stderr)

    def _end(self) -> None:
        for peer in self.peers.values():
            peer.ask_to_leave()
        for name, peer in self.peers.items():
            left = peer.close()
            # One killed in the last seconds had no time yet.
            if left and time.time() - self.dead.get(name, 0.0) > _ORPHAN_S:
                self.orphans.append(f"{name}: {len(left)} processes after it had left")

    def _judge(
        self, ended_at: float, survivors: Sequence[str], waiting: int, load: float
    ) -> SoakFound:
        events = {name: peer.events for name, peer in self.peers.items()}
        reports = [one for one in reports_of(events, self.began_at)
                   if one.at_s <= ended_at - self.began_at]  # fmt: skip
        new = [(epoch, at) for epoch, at in first_reports(reports) if at >= 0]
        if not new:
            raise RunFailed("no epoch after the first one of each peer")
        lost, healed = lost_epochs(reports, survivors)
        gap_s, median_s, gap_at_s = longest_gap(
            [0.0, *(at for _, at in new)], ended_at - self.began_at
        )
        joined = []
        for name in self.joiners:
            if began := self.peers[name].of_kind("started"):
                joined.append(began[0]["at"] - self.peers[name].began_at)
        memory = [memory_of(name, weighed) for name, weighed in self.weighed.items()]
        return SoakFound(
            self.minutes, self.seed, len(new), gap_s, gap_at_s, median_s, tuple(lost), healed,
            tuple(short_epochs(reports, TARGET)), tuple(self.fell), tuple(self.orphans),
            tuple(joined), waiting, tuple(self.happenings),
            tuple(one for one in memory if one is not None), load,
        )  # fmt: skip


def reports_of(
    events: Mapping[str, Sequence[Mapping[str, Any]]], began_at: float
) -> list[EpochReport]:
    """What each peer said of the weights that it had."""
    found = []
    for name, lines in events.items():
        for event in lines:
            if event["kind"] in ("started", "epoch"):
                with contextlib.suppress(KeyError):
                    found.append(EpochReport(
                        name, event["at"] - began_at, event["epoch"], event["hash"],
                        event.get("samples"), event.get("members"),
                    ))  # fmt: skip
    return found
