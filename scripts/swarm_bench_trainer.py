"""A peer of `bench_swarm` that trains: the swarm's optimiser on a toy network that computes by
sleeping, so that two cores carry four peers and seconds of compute are known exactly.

It writes one JSON line for each thing that happens to `events.jsonl` in its folder: its address,
each epoch, with where its seconds went, each stage that failed. SIGTERM makes it leave.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.objectives import Losses
from training.optimisers import Lamb
from training.swarm.epochs import Stage
from training.swarm.heartbeat import Heartbeat
from training.swarm.optimiser import CollaborativeOptimiser
from training.swarm.settings import Collaboration
from training.swarm.transport import SwarmTransport, TransportSettings, start_dht
from training.swarm.types import PeerInfo, RoundResult

RUN = "bench-training"
EVENTS = "events.jsonl"
SAMPLES = 1
"""Of a microbatch."""
_RATE = 0.01


@dataclass(frozen=True)
class EpochSeconds:
    """Where one peer's time between two steps went."""

    wall: float
    compute: float
    """Asleep, in place of a large network's passes, and in those of the toy."""
    search: float
    """For a group, and to copy the tensors; beside the compute in delayed mode, as `reduce`."""
    reduce: float

    @property
    def blocked(self) -> float:
        """Without compute, whatever the reason."""
        return self.wall - self.compute


class Timed(SwarmTransport):
    """The real transport; it remembers how long its rounds searched and reduced."""

    searched_s = reduced_s = 0.0

    def average(
        self,
        tensors: Sequence[Tensor],
        *,
        weight: float,
        epoch: int,
        gathered: Mapping[str, Any],
        timeout_s: float,
    ) -> RoundResult | None:
        """One round, timed."""
        started = time.monotonic()
        result = super().average(
            tensors, weight=weight, epoch=epoch, gathered=gathered, timeout_s=timeout_s
        )
        took_s = time.monotonic() - started
        reduce_s = 0.0 if result is None else result.seconds
        self.reduced_s += reduce_s
        self.searched_s += took_s - reduce_s
        return result

    def taken(self) -> tuple[float, float]:
        """Seconds of search and of all-reduce since the last call."""
        found = (self.searched_s, self.reduced_s)
        self.searched_s = self.reduced_s = 0.0
        return found


class Toy(nn.Module):
    """A square matrix that learns to turn a vector round; one loss a sample."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(math.isqrt(parameters), math.isqrt(parameters), bias=False)

    def losses(self, first: int, count: int) -> Losses:
        """Of `count` samples from number `first` on."""
        width = self.layer.in_features
        inputs = torch.stack([
            torch.randn(width, generator=torch.Generator().manual_seed(first + one))
            for one in range(count)
        ])  # fmt: skip
        sums = (self.layer(inputs) - inputs.flip(1)).square().mean(dim=1).unsqueeze(0)
        counts = torch.ones(sums.shape, dtype=torch.float64)
        return Losses(sums, counts, torch.zeros_like(counts))


class Trainer:
    """One peer, from its start to its end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: Path = options.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._events = (self._folder / EVENTS).open("a", buffering=1)
        self.ended = threading.Event()

    def tell(self, kind: str, **facts: Any) -> None:
        """One line for the bench."""
        self._events.write(json.dumps({"at": time.time(), "kind": kind, **facts}) + "\n")

    def run(self) -> None:
        """Train until the epochs are done or a signal came; then leave."""
        given = self._options
        network = Toy(given.parameters)
        settings = TransportSettings(
            run=RUN, codec="float16", matchmaking_s=given.matchmaking_s, sender_timeout_s=3.0,
            allreduce_timeout_s=30.0, exclusion_s=10.0, announcement_s=15.0,
            folder=self._folder / "state",
        )  # fmt: skip
        dht = start_dht(given.first, role="node", host_addresses=["/ip4/127.0.0.1/tcp/0"])
        try:
            transport = Timed(dht, settings, list(network.parameters()))
        except BaseException:
            dht.shutdown()
            raise
        collaboration = Collaboration(
            mode=given.mode, target_batch=given.target, min_peers=given.min_peers,
            start_wait_s=180.0, announce_s=0.5, look_s=0.25, round_timeout_s=15.0,
            download_timeout_s=30.0,
        )  # fmt: skip
        beating = Heartbeat(transport, every_s=3.0, longest_s=60.0)
        try:
            beating.start()
            self.tell("address", addresses=[str(one) for one in dht.get_visible_maddrs()])
            optimiser = CollaborativeOptimiser(
                network, Lamb(network.parameters(), lr=_RATE), transport=beating,
                peer=PeerInfo(transport.peer_id, self._folder.name, "node", "cpu"),
                settings=collaboration, terms=1, rate=lambda step: _RATE, tell=self._hear,
            )  # fmt: skip
            optimiser.start()
            self.tell("started", epoch=optimiser.epoch, hash=optimiser.state_hash)
            self._train(network, optimiser, transport.taken)
        finally:
            beating.leave()
            self.tell("left")

    def _hear(self, stage: Stage, epoch: int, text: str) -> None:
        if stage is Stage.CATCH_UP or "refused" in text or "dropped" in text:
            self.tell("trouble", stage=str(stage), epoch=epoch, text=text)

    def _train(
        self,
        network: Toy,
        optimiser: CollaborativeOptimiser,
        taken: Callable[[], tuple[float, float]],
    ) -> None:
        given = self._options
        sample = given.seed * 1_000_000
        compute_s, since, known = 0.0, time.monotonic(), optimiser.epoch
        lingers_until = math.inf
        while not self.ended.is_set() and time.monotonic() < lingers_until:
            if optimiser.epoch < given.epochs and optimiser.wants_samples:
                began = time.monotonic()
                time.sleep(given.compute_s)
                optimiser.backward(network.losses(sample, SAMPLES))
                compute_s += time.monotonic() - began
                sample += SAMPLES
            applied = optimiser.step()
            now = time.monotonic()
            if optimiser.epoch == known:
                continue
            known = optimiser.epoch
            search_s, reduce_s = taken()
            self.tell(
                "epoch", epoch=optimiser.epoch, hash=optimiser.state_hash,
                samples=None if applied is None else applied.samples,
                members=None if applied is None else len(applied.result.members),
                taken=None if applied is None else applied.taken,
                seconds=asdict(EpochSeconds(now - since, compute_s, search_s, reduce_s)),
            )  # fmt: skip
            compute_s, since = 0.0, now
            if optimiser.epoch >= given.epochs:  # others may still need what came of the last step
                lingers_until = min(lingers_until, now + given.linger_s)


def main(arguments: list[str] | None = None) -> int:
    """A peer until it is told to leave."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--first", nargs="*", default=[])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--compute-s", type=float, default=0.25, help="of a microbatch")
    parser.add_argument("--target", type=int, required=True, help="samples of an epoch")
    parser.add_argument("--epochs", type=int, default=1 << 40)
    parser.add_argument("--min-peers", type=int, default=1)
    parser.add_argument("--matchmaking-s", type=float, default=1.0)
    parser.add_argument("--linger-s", type=float, default=3.0)
    torch.set_num_threads(1)
    trainer = Trainer(parser.parse_args(arguments))
    signal.signal(signal.SIGTERM, lambda number, frame: trainer.ended.set())
    trainer.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
