"""How the coordinator hears of rounds that it is no member of: receipts in the DHT.

Each peer keeps the receipts of its last rounds under its own id, as JSON: signed for the ledger,
with what its page shows beside it (how long the round took), which is the peer's own word.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from training.swarm import receipts
from training.swarm.keys import Untrusted
from training.swarm.receipts import Receipt
from training.swarm.types import Member, RoundResult

_KEPT = 8
_MOST_CHARS = 1 << 17
_TOLD_CHARS = 12_000
"""hivemind's pipe to the DHT process takes up to 16 KiB in one piece, and has many writers."""
_LIFE_S = 600.0
_LONGEST_S = 24 * 3600.0


def dht_key(run: str) -> str:
    """Where they are, by peer id."""
    return f"{run}_receipts"


@dataclass(frozen=True)
class Told:
    """A round as `receipt.signer` tells it; seconds: that it took."""

    receipt: Receipt
    seconds: float

    def result(self) -> RoundResult:
        """For the collector."""
        receipt = self.receipt
        fraction = receipt.fraction / receipts.WHOLE_PPM
        members = tuple(Member(peer, milli / 1000, {}) for peer, milli in receipt.weights)
        return RoundResult(
            receipt.epoch, receipt.group, members, fraction, self.seconds, 0, {}, fraction == 1.0
        )


class Teller:
    """A peer's side: `tell` after each round that it applied."""

    def __init__(self, dht: Any, run: str, key: receipts.Signer) -> None:
        self._dht, self._run, self._key = dht, run, key
        self._last: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def tell(self, result: RoundResult, now: float) -> None:
        """Put the receipt of `result` into the DHT, without waiting for it."""
        if not result.group_id:
            return  # the peer was alone: nobody else can bear witness
        receipt = receipts.sign(result, run=self._run, key=self._key)
        self._last.append({"receipt": receipt.text, "seconds": round(result.seconds, 3)})
        text = json.dumps(list(self._last))
        while len(text) > _TOLD_CHARS and len(self._last) > 1:
            self._last.popleft()
            text = json.dumps(list(self._last))
        self._dht.store(
            dht_key(self._run), text, subkey=self._key.peer_id,
            expiration_time=now + _LIFE_S, return_future=True,
        )  # fmt: skip


def heard(records: Mapping[str, Any], *, allowed: Callable[[str], bool]) -> Iterable[Told]:
    """The rounds in the DHT's values by peer id; what is none, or another's, is left out.

    `allowed`: whether a peer takes part now (`guard.Guard.allowed`); of others nothing is read.
    """
    for peer_id, text in records.items():
        if not isinstance(text, str) or len(text) > _MOST_CHARS or not allowed(peer_id):
            continue
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError):
            continue
        for entry in entries[:_KEPT] if isinstance(entries, list) else []:
            told = _told(entry, peer_id)
            if told is not None:
                yield told


def _told(entry: Any, peer_id: str) -> Told | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("receipt"), str):
        return None
    seconds = entry.get("seconds")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return None
    if not 0 <= seconds <= _LONGEST_S:
        return None
    try:
        receipt = receipts.read(entry["receipt"])
    except Untrusted:
        return None
    return Told(receipt, float(seconds)) if receipt.signer == peer_id else None
