"""Peers of `bench_swarm` that only average: one process tree each, which takes orders over a pipe.

A peer is started as a program (`swarm_bench_orders`), in a network namespace of its own where one
is named; the bench keeps the other end of its pipe. `started` ends all of them, by force where they
do not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from scripts.bench_peers import RunFailed

_ORDER_S = 400.0
_END_S = 12.0


@dataclass(frozen=True)
class PeerRound:
    """A round as one peer saw it."""

    call_s: float
    """Of `average`: the search for a group and the all-reduce."""
    reduce_s: float
    members: int
    fraction: float
    complete: bool
    sent_bytes: int
    digest: str
    """Of the tensors after the round."""
    shares: Mapping[str, float]
    """Part of the vector that each peer reduced, by peer id."""
    mbit: Mapping[str, float | None]
    """What the group took each link for, the lower of up and down."""

    @property
    def search_s(self) -> float:
        """Until the group was there, and the copies into and out of the averager's memory."""
        return self.call_s - self.reduce_s


class Peer:
    """The bench's end of a peer."""

    def __init__(self, folder: Path, name: str, prefix: Sequence[str] = ()) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.peer_id = ""
        self.addresses: list[str] = []
        self._log = self.folder / "output"
        self._connection, theirs = Pipe()
        words = [*prefix, sys.executable, "-m", "scripts.swarm_bench_orders", str(theirs.fileno())]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(),
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        theirs.close()

    def begin(self, order: str, *arguments: Any) -> None:
        """Give an order."""
        self._connection.send((order, arguments))

    def end(self, limit_s: float = _ORDER_S) -> Any:
        """What came of it. Raises RunFailed."""
        deadline = time.monotonic() + limit_s
        while not self._connection.poll(0.5):
            if self._process.poll() is not None:
                raise RunFailed(f"{self.name} ended: {last_line(self._log)}")
            if time.monotonic() > deadline:
                raise RunFailed(f"{self.name} did not answer in {limit_s:g} s")
        try:
            failed, value = self._connection.recv()
        except EOFError:
            raise RunFailed(f"{self.name} ended: {last_line(self._log)}") from None
        if failed:
            raise RunFailed(f"{self.name}: {failed}")
        return value

    def join(self, first: list[str], host: str) -> None:
        """Start its DHT."""
        self.begin("dht", first, host)
        self.peer_id, self.addresses = self.end()

    def close(self) -> None:
        """End it, all its processes by force where they do not."""
        with contextlib.suppress(RunFailed, OSError):
            self.begin("leave")
            self.end(_END_S)
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        end_group(self._process.pid)
        self._process.wait()


@contextlib.contextmanager
def started(folder: Path, places: Mapping[str, tuple[Sequence[str], str]]) -> Iterator[list[Peer]]:
    """Peers in one DHT: of each name the words before its program, and its host address."""
    peers: list[Peer] = []
    try:
        for name, (prefix, _) in places.items():
            peers.append(Peer(folder, name, prefix))
        for peer, (_, host) in zip(peers, places.values(), strict=True):
            peer.join(peers[0].addresses if peer is not peers[0] else [], host)
        yield peers
    finally:
        for peer in peers:
            peer.close()


def reopen(
    peers: Sequence[Peer], settings: Mapping[str, Any], parameters: int, *, adaptive: bool
) -> None:
    """A new transport at each of `peers`."""
    for number, peer in enumerate(peers):
        own = {**settings, "folder": peer.folder / "state"}
        peer.begin("open", own, parameters, number + 1, adaptive)
    for peer in peers:
        peer.end()


def one_round(peers: Sequence[Peer], epoch: int, timeout_s: float) -> list[PeerRound | None]:
    """A round of `peers`, in their order."""
    for peer in peers:
        peer.begin("average", epoch, timeout_s)
    return [peer.end() for peer in peers]


def environment() -> dict[str, str]:
    """Of a peer: one thread, and this repository first."""
    repository = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": repository}


def last_line(log: Path) -> str:
    """What a program said last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines or ["no output"])[-1][:200]


def group_of(group: int) -> list[int]:
    """Processes of a process group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def end_group(group: int) -> None:
    """Kill what is left of a process group that this bench started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
