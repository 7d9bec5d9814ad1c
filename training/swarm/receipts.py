"""Receipts: what each member of a round signs about it, and what a majority of them agrees on.

After a round that was complete and applied, every member signs {run, epoch, group, the weight of
each member, fraction} with its libp2p identity. That key hashes to the peer id, so a receipt needs
no other proof of who signed it. `tally` counts a contribution when more than half of the group, and
at least one peer other than the contributor, report the same weight.

What this proves: who was in which round with what weight, as seen by a majority of the group. What
it does not: that the gradients were computed, on which data, or that they were any good; and a
majority that colludes reports what it likes. It is accounting among people on an allowlist.
`training.swarm.ledger` holds the weights against the speed that the peer announces: its word too,
but one that everybody sees.

Weights are signed in thousandths and fractions in millionths: signed JSON has no floats.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from training.swarm import identity, keys
from training.swarm.keys import Untrusted
from training.swarm.types import RoundResult

KIND = "receipt"
WHOLE_PPM = 1_000_000
_MILLI = 1000
_MOST_MILLI = 1 << 53
_MOST_MEMBERS = 256
_MOST_CHARS = 32_768
_RUN = re.compile(r"[\w.-]{1,100}")
_GROUP = re.compile(r"[0-9a-f]{1,128}")
_FIELDS = {"run", "epoch", "group", "weights", "fraction", "public_key", "signature"}


class Signer(Protocol):
    """What `training.swarm.identity.Identity` is."""

    @property
    def peer_id(self) -> str: ...
    @property
    def public_key(self) -> bytes: ...
    def sign(self, kind: str, message: bytes) -> bytes: ...


@dataclass(frozen=True)
class Receipt:
    """What `signer` reports of a round. Make one with `sign`, or `read` one, which checks it.

    weights: (peer id, thousandths of a sample) in order of the ids; fraction: millionths of the
    vector that were averaged over all members, 0 for a round that was not complete.
    """

    run: str
    epoch: int
    group: str
    weights: tuple[tuple[str, int], ...]
    fraction: int
    signer: str
    text: str
    """The signed form: canonical JSON, what is sent and stored."""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(peer for peer, _ in self.weights)


@dataclass(frozen=True)
class Contribution:
    """`witnesses` of the `members` of a group report that `peer_id` gave `weight` samples to it."""

    group: str
    peer_id: str
    weight: float
    witnesses: int
    members: int


def sign(result: RoundResult, *, run: str, key: Signer) -> Receipt:
    """The receipt of `key`'s peer for a round that it applied. Raises ValueError."""
    weights = sorted((member.peer_id, _milli(member.weight)) for member in result.members)
    body = {
        "run": run,
        "epoch": result.epoch,
        "group": result.group_id,
        "weights": weights,
        "fraction": math.floor(result.fraction * WHOLE_PPM) if result.complete else 0,
    }
    signature = keys.encode(key.sign(KIND, keys.canonical(body)))
    signed = {**body, "public_key": keys.encode(key.public_key), "signature": signature}
    try:
        return read(keys.canonical(signed).decode())
    except Untrusted as error:
        raise ValueError(f"no receipt can be made of the round: {error}") from error


def read(text: str | bytes) -> Receipt:
    """The receipt in `text`, well formed and signed by one of its members. Raises Untrusted."""
    if len(text) > _MOST_CHARS:
        raise Untrusted(f"a receipt has at most {_MOST_CHARS} characters")
    body = keys.parsed(text)
    if not isinstance(body, dict) or body.keys() != _FIELDS:
        raise Untrusted(f"a receipt has the fields {', '.join(sorted(_FIELDS))}")
    public_key, signature = (_decoded(body.pop(name)) for name in ("public_key", "signature"))
    weights = _weights(body["weights"])
    _check_names(body)
    signer = identity.peer_id_of(public_key)
    if signer not in {peer for peer, _ in weights}:
        raise Untrusted("the receipt is signed by a peer that was not in the round")
    if not identity.is_signed(KIND, keys.canonical(body), signature, public_key):
        raise Untrusted("the receipt's signature is wrong")
    form = text if isinstance(text, str) else text.decode()
    return Receipt(
        body["run"], body["epoch"], body["group"], weights, body["fraction"], signer, form
    )


def stored(text: str, signer: str) -> Receipt:
    """The receipt in `text`, which `read` has checked before: `signer` signed it."""
    body = json.loads(text)
    weights = tuple((peer, milli) for peer, milli in body["weights"])
    return Receipt(
        body["run"], body["epoch"], body["group"], weights, body["fraction"], signer, text
    )


def tally(receipts: Iterable[Receipt]) -> list[Contribution]:
    """What majorities agree on, of receipts of one run and epoch, in order of the peers.

    A peer counts once: in the group where most signed for it (then the larger, then by name).
    Rounds that were not complete count nothing, and of a second receipt of a signer for the same
    group the first is taken.
    """
    groups: dict[tuple[str, tuple[str, ...]], dict[str, Receipt]] = {}
    for receipt in receipts:
        if receipt.fraction == WHOLE_PPM:
            votes = groups.setdefault((receipt.group, receipt.members), {})
            votes.setdefault(receipt.signer, receipt)
    found: dict[str, Contribution] = {}
    for (group, members), votes in groups.items():
        for one in _agreed(group, members, list(votes.values())):
            before = found.get(one.peer_id)
            if before is None or _rank(one) < _rank(before):
                found[one.peer_id] = one
    return [found[peer] for peer in sorted(found)]


def _agreed(group: str, members: tuple[str, ...], votes: list[Receipt]) -> list[Contribution]:
    agreed = []
    for place, peer in enumerate(members):
        counts = Counter(vote.weights[place][1] for vote in votes)
        milli, count = counts.most_common(1)[0]
        others = any(vote.signer != peer and vote.weights[place][1] == milli for vote in votes)
        if 2 * count > len(members) and others:
            agreed.append(Contribution(group, peer, milli / _MILLI, count, len(members)))
    return agreed


def _rank(contribution: Contribution) -> tuple[int, int, str]:
    return -contribution.witnesses, -contribution.members, contribution.group


def _milli(weight: float) -> int:
    if not (math.isfinite(weight) and 0 <= weight * _MILLI <= _MOST_MILLI):
        raise ValueError(f"no receipt can be made of the round: the weight '{weight}'")
    return round(weight * _MILLI)


def _decoded(value: Any) -> bytes:
    if not isinstance(value, str):
        raise Untrusted("the receipt's key or signature is not text")
    return keys.decode(value)


def _weights(value: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_MEMBERS:
        raise Untrusted(f"a receipt names 1 to {_MOST_MEMBERS} members")
    pairs = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise Untrusted("a member of the receipt is not a peer and a weight")
        if not _is_count(pair[1]) or not identity.is_peer_id(pair[0]):
            raise Untrusted("a member of the receipt is not a peer and a weight")
        pairs.append((pair[0], pair[1]))
    if any(one[0] >= next_[0] for one, next_ in itertools.pairwise(pairs)):
        raise Untrusted("the members of the receipt are not in order")
    return tuple(pairs)


def _check_names(body: dict[str, Any]) -> None:
    if not isinstance(body["run"], str) or not _RUN.fullmatch(body["run"]):
        raise Untrusted("the receipt's run is not a name")
    if not isinstance(body["group"], str) or not _GROUP.fullmatch(body["group"]):
        raise Untrusted("the receipt's group is not hex")
    if not _is_count(body["epoch"]) or not _is_count(body["fraction"]):
        raise Untrusted("the receipt's epoch or fraction is not a count")
    if body["fraction"] > WHOLE_PPM:
        raise Untrusted("the receipt's fraction is above 1")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_MILLI
