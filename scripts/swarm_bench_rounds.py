"""Part `allreduce` of `bench_swarm`: seconds and bytes of a round on this machine's loopback.

Peers are started once for a number of them; a change of codec or size makes a new transport in the
same DHT. The seconds of a round are those of its slowest peer. A round counts as whole when every
peer had all members, the fraction 1.0 and the same bits after it; only such rounds are timed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.swarm_bench_peers import PeerRound, one_round, reopen, started
from training.swarm.sizing import CODEC_BYTES

CODECS = tuple(CODEC_BYTES)
SIZES = (1_000_000, 18_105_474)
"""The second one: parameters of sahajBERT's ALBERT."""
COUNTS = (2, 4)
_MATCHMAKING_S = 1.0
_SEARCH_S = 20.0


@dataclass(frozen=True)
class RoundRow:
    """Rounds of one size, number of peers and codec."""

    parameters: int
    peers: int
    codec: str
    rounds: int
    whole: int
    search_s: float
    """Medians over whole rounds, here and below."""
    reduce_s: float
    least_s: float
    most_s: float
    fraction: float
    """The least of any peer in any round."""
    sent_bytes: float
    """Mean of the peers."""
    load: float

    @property
    def formula_bytes(self) -> float:
        """2 (n - 1) / n vectors, whatever the shares are: the mean of all peers."""
        return 2 * (self.peers - 1) / self.peers * self.parameters * CODEC_BYTES[self.codec]


def round_rows(
    work: Path, *, sizes: Sequence[int], counts: Sequence[int], codecs: Sequence[str], rounds: int
) -> list[RoundRow]:
    """A row for each size, number of peers and codec. Raises RunFailed."""
    rows = []
    for count in counts:
        here: tuple[list[str], str] = ([], "127.0.0.1")
        places = {f"peer {number}": here for number in range(count)}
        with started(work / f"allreduce-{count}", places) as peers:
            for size in sizes:
                for codec in codecs:
                    settings: dict[str, Any] = {
                        "run": f"bench-{size}-{codec}", "codec": codec,
                        "matchmaking_s": _MATCHMAKING_S, "sender_timeout_s": 10.0,
                    }  # fmt: skip
                    reopen(peers, settings, size, adaptive=True)
                    one_round(peers, 0, _SEARCH_S)  # the first one makes the connections
                    seen = [one_round(peers, epoch, _SEARCH_S) for epoch in range(1, rounds + 1)]
                    rows.append(round_row(size, count, codec, seen, os.getloadavg()[0]))
    order = {size: number for number, size in enumerate(sizes)}
    return sorted(rows, key=lambda row: (order[row.parameters], row.peers))


def round_row(
    parameters: int,
    count: int,
    codec: str,
    seen: Sequence[Sequence[PeerRound | None]],
    load: float,
) -> RoundRow:
    """What rounds come to, each a list of what its peers saw."""
    whole = [[one for one in peers if one is not None] for peers in seen if _is_whole(peers)]
    fractions = [0.0 if one is None else one.fraction for peers in seen for one in peers]
    slowest = [max(one.reduce_s for one in peers) for peers in whole]
    searches = [max(one.search_s for one in peers) for peers in whole]
    sent = [statistics.mean(one.sent_bytes for one in peers) for peers in whole]
    nothing = float("nan")
    return RoundRow(
        parameters, count, codec, len(seen), len(whole),
        search_s=statistics.median(searches) if whole else nothing,
        reduce_s=statistics.median(slowest) if whole else nothing,
        least_s=min(slowest, default=nothing), most_s=max(slowest, default=nothing),
        fraction=min(fractions, default=0.0),
        sent_bytes=statistics.median(sent) if whole else nothing,
        load=load,
    )  # fmt: skip


def _is_whole(peers: Sequence[PeerRound | None]) -> bool:
    there = [one for one in peers if one is not None]
    return (
        len(there) == len(peers)
        and all(one.complete and one.members == len(peers) for one in there)
        and len({one.digest for one in there}) == 1
    )
