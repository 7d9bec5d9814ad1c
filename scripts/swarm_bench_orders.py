"""A peer of `bench_swarm` that only averages: it takes orders over a pipe.

It makes its DHT once and a new `SwarmTransport` at each order `open`, so that a change of codec
costs two seconds and not a start.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from scripts.swarm_bench_peers import PeerRound
from training.swarm.averager import RoundReport
from training.swarm.transport import SwarmTransport, TransportSettings, start_dht

TENSORS = 8
"""A vector is cut into so many tensors, each long enough for 8 bits (`codecs.LONG_VALUES`)."""
_STOP_S = 2.0


class Orders:
    """What a peer does for the bench: each public method is an order."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._dht: Any = None
        self._reports: list[Any] = []

    def dht(self, first: list[str], host: str) -> tuple[str, list[str]]:
        """Join the DHT; the peer id and where others reach this peer."""
        self._dht = start_dht(first, role="node", host_addresses=[f"/ip4/{host}/tcp/0"])
        addresses = [str(address) for address in self._dht.get_visible_maddrs()]
        return self._dht.peer_id.to_base58(), addresses

    def open(self, settings: dict[str, Any], parameters: int, seed: int, adaptive: bool) -> None:
        """A new transport in place of the last; without `adaptive` it learns no rates, so that
        all shares stay equal."""
        reports = self._reports

        class Watched(SwarmTransport):
            def _learn(self, report: RoundReport) -> None:
                reports.append(report)
                if adaptive:
                    super()._learn(report)

        torch.set_num_threads(1)
        if self._transport is not None:
            # Its DHT is used on, so that it cannot leave; only its averager ends.
            self._transport._averager.stop(_STOP_S)
            self._transport = None
        generator = torch.Generator().manual_seed(seed)
        self._own = [torch.randn(size, generator=generator) * 0.01 for size in sizes(parameters)]
        self._work = [torch.empty_like(one) for one in self._own]
        self._transport = Watched(self._dht, TransportSettings(**settings), self._own)

    def average(self, epoch: int, timeout_s: float) -> PeerRound | None:
        """One round with this peer's numbers, which are the same in each; None: no group."""
        for work, own in zip(self._work, self._own, strict=True):
            work.copy_(own)
        self._reports.clear()
        started = time.monotonic()
        result = self._transport.average(
            self._work, weight=1.0, epoch=epoch, gathered={"samples": 1, "state_hash": "0" * 64},
            timeout_s=timeout_s,
        )  # fmt: skip
        call_s = time.monotonic() - started
        if result is None:
            return None
        shares: dict[str, float] = {}
        mbit: dict[str, float | None] = {}
        for report in self._reports:
            for link, share in zip(report.links, report.shares, strict=True):
                shares[link.peer_id] = share / sum(report.shares)
                known = [rate for rate in (link.up_mbit, link.down_mbit) if rate is not None]
                mbit[link.peer_id] = min(known, default=None)
        digest = hashlib.sha256()
        for work in self._work:
            digest.update(work.numpy().data)
        return PeerRound(
            call_s, result.seconds, len(result.members), result.fraction, result.complete,
            result.sent_bytes, digest.hexdigest(), shares, mbit,
        )  # fmt: skip

    def leave(self) -> None:
        """Stop all processes."""
        if self._transport is not None:
            self._transport.leave()
        elif self._dht is not None:
            self._dht.shutdown()


def sizes(parameters: int) -> list[int]:
    """`TENSORS` lengths that sum to `parameters`."""
    each, rest = divmod(parameters, TENSORS)
    return [each + (number < rest) for number in range(TENSORS)]


def main(arguments: list[str] | None = None) -> int:
    """A peer: obey until the pipe ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("pipe", type=int, help="file descriptor that the bench has opened")
    connection = Connection(parser.parse_args(arguments).pipe)
    orders = Orders()
    while True:
        try:
            order, given = connection.recv()
        except EOFError:
            orders.leave()
            return 0
        try:
            answer = ("", getattr(orders, order)(*given))
        except Exception as error:
            answer = (repr(error), None)
        connection.send(answer)
        if order == "leave":
            return 0


if __name__ == "__main__":
    sys.exit(main())
