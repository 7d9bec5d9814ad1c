"""Part `share` of `bench_swarm`: how much of an epoch goes to averaging, sync and delayed.

Two peers, one million parameters, float16, compute that sleeps: 16 microbatches of 0.25 s are half
of a target batch, so an epoch has four seconds of it; the passes of the toy network, some 20 ms
each, are compute too. The rest of an epoch is blocked: waiting for the other peer's report, the
round, the step, the hash and the copy of the state that joiners may download.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.bench_peers import RunFailed
from scripts.swarm_bench_processes import TrainerProcess
from scripts.swarm_bench_trainer import SAMPLES, EpochSeconds

MODES = ("sync", "delayed")
PEERS = 2
PARAMETERS = 1_000_000
MICROBATCH_S = 0.25
MICROBATCHES = 16
_UNCOUNTED = 2
"""First epochs, in which connections are made and the peers fall into step."""
_START_S, _EPOCH_S = 90.0, 30.0


@dataclass(frozen=True)
class ShareRow:
    """Medians over epochs and peers, in seconds of an epoch."""

    mode: str
    epochs: int
    epoch_s: float
    compute_s: float
    search_s: float
    reduce_s: float
    blocked_s: float
    samples: float
    load: float

    @property
    def blocked_share(self) -> float:
        """Of the epoch."""
        return self.blocked_s / self.epoch_s


def share_rows(work: Path, epochs: int) -> list[ShareRow]:
    """A run of each mode. Raises RunFailed."""
    return [_run(work / f"share-{mode}", mode, epochs) for mode in MODES]


def _run(work: Path, mode: str, epochs: int) -> ShareRow:
    peers: list[TrainerProcess] = []
    addresses: list[str] = []
    try:
        for number in range(PEERS):
            words = ["--seed", str(number), "--mode", mode, "--parameters", str(PARAMETERS),
                     "--compute-s", str(MICROBATCH_S), "--epochs", str(epochs + _UNCOUNTED),
                     "--target", str(PEERS * MICROBATCHES * SAMPLES),
                     "--min-peers", str(PEERS), "--first", *addresses]  # fmt: skip
            peers.append(TrainerProcess(work, f"peer-{number}", words))
            addresses = addresses or peers[0].wait_for("address", _START_S)["addresses"]
        deadline = time.monotonic() + _START_S + (epochs + _UNCOUNTED) * _EPOCH_S
        while any(peer.running for peer in peers):
            if time.monotonic() > deadline:
                raise RunFailed(f"{mode}: {epochs} epochs were not done; {peers[0].said}")
            time.sleep(0.5)
        load = os.getloadavg()[0]
    finally:
        for peer in peers:
            peer.ask_to_leave()
        left = [pid for peer in peers for pid in peer.close()]
    if left:
        raise RunFailed(f"{mode}: {len(left)} processes ran on after their peer had left")
    seen = [
        (EpochSeconds(**event["seconds"]), event["samples"])
        for peer in peers
        for event in peer.of_kind("epoch")
        if event["epoch"] > _UNCOUNTED and event["samples"] is not None
    ]
    if len(seen) < PEERS * epochs // 2:
        raise RunFailed(f"{mode}: {len(seen)} of {PEERS * epochs} epochs were taken")
    return share_row(mode, seen, load)


def share_row(mode: str, seen: Sequence[tuple[EpochSeconds, int]], load: float) -> ShareRow:
    """Medians of epochs, each with its samples."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    seconds = [one for one, _ in seen]
    return ShareRow(
        mode, len(seen), median([one.wall for one in seconds]),
        median([one.compute for one in seconds]), median([one.search for one in seconds]),
        median([one.reduce for one in seconds]), median([one.blocked for one in seconds]),
        median([samples for _, samples in seen]), load,
    )  # fmt: skip


def hidden(rows: Sequence[ShareRow]) -> float:
    """Part of the seconds that block an epoch in sync mode that delayed mode hides."""
    by_mode = {row.mode: row for row in rows}
    return 1 - by_mode["delayed"].blocked_s / by_mode["sync"].blocked_s
