"""Three peers on links of 200, 50 and 20 Mbit/s: network namespaces with token buckets.

Each peer has a namespace with one end of a pair of virtual Ethernet devices; the other ends meet
on a bridge in a namespace of its own, so that nothing of this machine's network is touched. Both
ends have a token bucket: what the peer sends and what it receives pass at its rate. The kernel
here has no netem: rates are real, latency and loss are not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench_parts import NotPermitted
from scripts.swarm_bench_peers import PeerRound, one_round, reopen, started

MBIT = (200, 50, 20)
PARAMETERS = 5_000_000
EQUAL_ROUNDS, ADAPTIVE_ROUNDS = 4, 10
_BUCKET = ("burst", "128kb", "latency", "100ms")
_NET = "10.217.0"
_SAME_SHARE = 0.03
_LEAST_JUDGED = 3
"""Rounds after the last change of shares that the medians need."""
_SETTINGS: dict[str, Any] = {
    "codec": "float16", "matchmaking_s": 2.0, "sender_timeout_s": 15.0,
    "allreduce_timeout_s": 90.0,
}  # fmt: skip
_SEARCH_S = 30.0


@dataclass(frozen=True)
class LinkRound:
    """A round over the links: seconds and shares by peer, in the order of `MBIT`."""

    seconds: tuple[float, ...]
    shares: tuple[float, ...]
    known_mbit: tuple[float | None, ...]
    whole: bool


@dataclass(frozen=True)
class LinksFound:
    """All rounds with equal and with adaptive shares."""

    mbit: tuple[int, ...]
    parameters: int
    part_bytes: int
    equal: tuple[LinkRound, ...]
    adaptive: tuple[LinkRound, ...]

    @property
    def learned_after(self) -> int | None:
        """Adaptive rounds before the shares were those of the last round and stayed so; None
        where fewer than three rounds came after."""
        last = self.adaptive[-1].shares
        count = len(self.adaptive)
        while count and _close(self.adaptive[count - 1].shares, last):
            count -= 1
        return count if len(self.adaptive) - count >= _LEAST_JUDGED else None

    def equal_s(self) -> tuple[float, ...]:
        """Median seconds of each peer with equal shares."""
        return medians(self.equal)

    def adaptive_s(self) -> tuple[float, ...]:
        """Median seconds of each peer once the rates are learned (else over all rounds)."""
        return medians(self.adaptive[self.learned_after or 0 :])


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= _SAME_SHARE for a, b in zip(one, other, strict=True))


def medians(rounds: Sequence[LinkRound]) -> tuple[float, ...]:
    """Of whole rounds, by peer; infinite where there is none."""
    whole = [one.seconds for one in rounds if one.whole]
    if not whole:
        return tuple(float("inf") for _ in MBIT)
    return tuple(statistics.median(column) for column in zip(*whole, strict=True))


def link_rounds(
    work: Path, *, parameters: int, equal: int, adaptive: int, part_bytes: int
) -> LinksFound:
    """The rounds. Raises NotPermitted, RunFailed."""
    settings = {**_SETTINGS, "part_bytes": part_bytes}
    with namespaces() as names:
        places = {
            f"{rate} Mbit": (["ip", "netns", "exec", name], f"{_NET}.{number}")
            for number, (rate, name) in enumerate(zip(MBIT, names, strict=True), 1)
        }
        with started(work / "links", places) as peers:
            ids = [peer.peer_id for peer in peers]
            found = []
            for kind, count in (("equal", equal), ("adaptive", adaptive)):
                reopen(peers, {**settings, "run": f"bench-{kind}"}, parameters,
                       adaptive=kind == "adaptive")  # fmt: skip
                rounds = [one_round(peers, epoch, _SEARCH_S) for epoch in range(count)]
                found.append(tuple(link_round(seen, ids) for seen in rounds))
    return LinksFound(MBIT, parameters, part_bytes, *found)


def link_round(seen: Sequence[PeerRound | None], ids: Sequence[str]) -> LinkRound:
    """A round as all its peers saw it; `ids` are theirs."""
    there = [one for one in seen if one is not None]
    whole = (
        len(there) == len(ids)
        and all(one.complete and one.members == len(ids) for one in there)
        and len({one.digest for one in there}) == 1
    )
    shares, mbit = (there[0].shares, there[0].mbit) if there else ({}, {})
    return LinkRound(
        tuple(float("inf") if one is None else one.reduce_s for one in seen),
        tuple(shares.get(peer, 0.0) for peer in ids),
        tuple(mbit.get(peer) for peer in ids),
        whole,
    )


@contextlib.contextmanager
def namespaces() -> Iterator[list[str]]:
    """A namespace for each rate of `MBIT`, on one bridge; all gone at the end.

    Raises NotPermitted.
    """
    if not shutil.which("ip") or not shutil.which("tc"):
        raise NotPermitted("the programs `ip` and `tc` are not here (Debian: iproute2)")
    if os.geteuid():
        raise NotPermitted("network namespaces need root")
    base = f"gm{os.getpid()}"
    bridge, names = f"{base}b", [f"{base}n{number}" for number in range(len(MBIT))]
    made: list[str] = []
    try:
        for name in (bridge, *names):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for number, (name, rate) in enumerate(zip(names, MBIT, strict=True), 1):
            _ip("link", "add", "eth0", "netns", name, "type", "veth",
                "peer", "name", f"p{number}", "netns", bridge)  # fmt: skip
            _ip("-n", bridge, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{_NET}.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            for where, device in ((name, "eth0"), (bridge, f"p{number}")):
                _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf",
                     "rate", f"{rate}mbit", *_BUCKET)  # fmt: skip
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1][:150]
        raise NotPermitted(f"`{' '.join(words)}`: {reason}")
