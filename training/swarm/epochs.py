"""What a peer decides in an epoch, from reports and rounds: pure functions, no network, no clock.

An epoch is one step of all peers. It goes through these stages, each told in one line:

    accumulate -> announce -> match -> reduce -> check -> apply -> publish

The rules that keep peers alike:

- Only reported samples of peers that still report count, and a round is taken only when those of
  its own members reach the target: what a dead peer had gathered is gathered again.
- A round is taken whole or not at all. What follows from it (`judge`, `too_long`) is decided from
  what all members of the round have in common.
- A peer with other weights than most peers of the newest epoch downloads theirs
  (`training.swarm.whereabouts`); nobody moves on with weights of his own.

The one thing that is not in common is whether a round was complete, since a connection may break
at one end only. Then some take the step and the others retry; the fewer of them download.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from training.swarm.types import ROLES, Member, RoundResult
from training.swarm.whereabouts import winner

_MOST_LABELS = 64.0
"""A member's labels per sample may be so many times the median of a round's members."""
_KNOWN_NORMS = 8
KEPT_NORMS = 32
"""Norms of the last steps: so many are needed before one is too long; so many are kept."""


class Stage(StrEnum):
    """Where a peer is in its epoch. `CATCH_UP`: downloading the weights of the others."""

    ACCUMULATE = "accumulate"
    ANNOUNCE = "announce"
    MATCH = "match"
    REDUCE = "reduce"
    CHECK = "check"
    APPLY = "apply"
    PUBLISH = "publish"
    CATCH_UP = "catch up"


@dataclass(frozen=True)
class Verdict:
    """Whether a round is taken; `reason` in words.

    `useless`: what this peer has gathered, for it has other weights or nobody would take it.
    `short`: too few samples, which no retry would change. `culprit`: the peer that keeps everybody
    in its rounds from taking them.
    """

    accepted: bool
    reason: str
    useless: bool = False
    short: bool = False
    culprit: str = ""


@dataclass(frozen=True)
class Brought:
    """What a member of a round says of itself, checked for form; `labels` by term of the loss.

    `weight`: of its tensors in the average. `active`: peers with gradients that it sees.
    """

    peer_id: str
    weight: float
    epoch: int
    samples: int
    state_hash: str
    role: str
    active: int
    attempt: int
    labels: tuple[float, ...]

    @property
    def counted(self) -> float:
        """Samples that count: no more than the weight that the round gave to its tensors."""
        return min(float(self.samples), self.weight)


def brought(member: Member) -> Brought | None:
    """What `member` says of itself; None where it is not of the form that peers send."""
    told = member.gathered
    numbers = [told.get(name) for name in ("epoch", "samples", "active", "attempt")]
    labels = told.get("labels")
    if not all(type(one) is int and one >= 0 for one in numbers):
        return None
    if not (math.isfinite(member.weight) and member.weight >= 0):
        return None
    if not isinstance(told.get("state_hash"), str) or told.get("role") not in ROLES:
        return None
    if not isinstance(labels, list | tuple) or not all(map(_is_amount, labels)):
        return None
    return Brought(
        member.peer_id, member.weight, int(told["epoch"]), int(told["samples"]),
        told["state_hash"], told["role"], int(told["active"]), int(told["attempt"]),
        tuple(float(one) for one in labels),
    )  # fmt: skip


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def judge(result: RoundResult, own: str, *, needed: float, attempts: int, terms: int) -> Verdict:
    """Whether the average of a round may be applied.

    terms: of the loss. needed: samples that members with the weights of the majority must have
    brought. Gradients of other weights are in no average that is applied: the majority tries again
    while whoever sent them downloads; the last of `attempts` takes what there is. Peers that are
    not more than half of those with gradients must not go on without the others, so that no two
    groups take different steps; the last attempt lets them.
    """
    members, fault = _members(result, terms)
    if fault is not None:
        return fault
    trainers = [member for member in members if member.role != "auxiliary"]
    right = winner(Counter(member.state_hash for member in trainers))
    alike = [member for member in trainers if member.state_hash == right]
    if own not in {member.peer_id for member in alike}:
        return Verdict(False, "this peer's weights are not those of the others", useless=True)
    counted = sum(member.counted for member in alike)
    if counted < needed:
        return Verdict(False, f"{counted:g} of {needed:g} samples in the round", short=True)
    contributing = len(alike)
    active = statistics.median_low([member.active for member in alike])
    last = max(member.attempt for member in alike) >= attempts
    foreign = sorted(one.peer_id for one in trainers if one.weight and one not in alike)
    if foreign and not last:
        return Verdict(False, f"peer '{foreign[0]}' has other weights")
    if 2 * contributing <= active and not last:
        return Verdict(False, f"only {contributing} of {active} peers in the round")
    return Verdict(True, f"{counted:g} samples of {contributing} of {active} peers")


def _members(result: RoundResult, terms: int) -> tuple[list[Brought], Verdict | None]:
    """What the members say of themselves; why the round is of no use, or None."""
    if not result.complete:
        return [], Verdict(False, f"only {result.fraction:.1%} was averaged")
    members = []
    for member in result.members:
        told = brought(member)
        if told is None or len(told.labels) != terms:
            reason = f"peer '{member.peer_id}' tells what no peer of this run tells"
            return [], Verdict(False, reason, culprit=member.peer_id)
        members.append(told)
    if any(member.epoch != result.epoch for member in members):
        return [], Verdict(False, "peers of different epochs in one round")
    if all(member.role == "auxiliary" for member in members):
        return [], Verdict(False, "nobody with gradients in the round")
    odd = _odd_labels(members, terms)
    if odd:
        reason = f"peer '{odd}' tells of labels that its samples can not have"
        return [], Verdict(False, reason, culprit=odd)
    return members, None


def _odd_labels(members: Sequence[Brought], terms: int) -> str:
    """A member whose labels per sample are far from everybody's, by which all divide; or ""."""
    sent = [member for member in members if member.samples]
    for term in range(terms):
        means = {member.peer_id: member.labels[term] / member.samples for member in sent}
        middle = statistics.median_low(means.values()) if means else 0.0
        for name, mean in sorted(means.items()):
            if mean > _MOST_LABELS * middle > 0:
                return name
    return ""


def too_long(norm: float, recent: Sequence[float], ratio: float) -> bool:
    """Whether a gradient of this norm is not to be taken: not finite, none, or far too long.

    recent: norms of the steps taken last, equal at every peer; few of them allow any length.
    """
    if not math.isfinite(norm) or norm == 0:
        return True
    return len(recent) >= _KNOWN_NORMS and norm > ratio * statistics.median(recent)
