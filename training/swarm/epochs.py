"""What a peer decides in an epoch, from reports and rounds: pure functions, no network, no clock.

An epoch is one step of all peers. It goes through these stages, each told in one line:

    accumulate -> announce -> match -> reduce -> check -> apply -> publish

The rules that keep peers alike:

- Only reported samples of peers that still report count, and a round is taken only when those of
  its own members reach the target: what a dead peer had gathered is gathered again.
- A round is taken whole or not at all. What follows from it (`judge`, `too_long`) is decided from
  what all members of the round have in common.
- The weights are those that most peers of the newest epoch have (`elsewhere`). Who has others
  downloads them; nobody moves on with weights of his own.

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

from training.swarm.types import ROLES, Announcement, Member, RoundResult

_VOTES = 2
"""So many peers must agree on weights that another one shall download; one where there is one."""
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
class View:
    """What a peer sees of the swarm: its own state and the newest reports of the others.

    `state_hash`: "" while the weights of `epoch` are not known yet (delayed mode).
    """

    own: Announcement
    others: tuple[Announcement, ...]

    @property
    def here(self) -> list[Announcement]:
        """Peers with gradients that work on this peer's epoch."""
        everyone = (self.own, *self.others)
        return [
            one for one in everyone
            if one.epoch == self.own.epoch and one.peer.role != "auxiliary"
        ]  # fmt: skip

    @property
    def samples(self) -> int:
        """Reported in this epoch, all peers together."""
        return sum(one.samples for one in self.here)

    @property
    def closed(self) -> bool:
        """Whether a peer averages this epoch already, beside the next one (delayed mode)."""
        return any(
            one.epoch == self.own.epoch + 1 and not one.state_hash and one.peer.role != "auxiliary"
            for one in self.others
        )  # fmt: skip

    @property
    def contributors(self) -> int:
        """Peers with gradients that are in this epoch or beyond: whoever lags cannot take another
        step from here."""
        everyone = (self.own, *self.others)
        return sum(one.peer.role != "auxiliary" and one.epoch >= self.own.epoch for one in everyone)

    @property
    def left_behind(self) -> bool:
        """Whether the others are two epochs ahead, be it with weights that are not known yet.

        In delayed mode a hash is seen only between two rounds; until then a round of this epoch
        finds nobody.
        """
        ahead = sum(one.epoch > self.own.epoch + 1 for one in self.trainers)
        return ahead >= self.votes

    @property
    def trainers(self) -> list[Announcement]:
        """The others that have gradients."""
        return [one for one in self.others if one.peer.role != "auxiliary"]

    @property
    def votes(self) -> int:
        """Peers that must agree on weights, or on being ahead, before this one believes it."""
        return max(1, min(_VOTES, len(self.trainers)))

    @property
    def newest(self) -> int:
        """The epoch that most of the newest trainers work on, for a peer without weights.

        One that announces no hash averages the epoch before the one it gathers for.
        """
        at = sorted((one.epoch - (not one.state_hash) for one in self.trainers), reverse=True)
        return at[self.votes - 1] if at else self.own.epoch

    @property
    def alone(self) -> bool:
        """Whether no other peer has gradients."""
        return not self.trainers

    @property
    def shared(self) -> bool:
        """Whether another peer announces the weights that this one has."""
        own = self.own
        return any((one.epoch, one.state_hash) == (own.epoch, own.state_hash)
                   for one in self.others)  # fmt: skip


def view(own: Announcement, announcements: Sequence[Announcement]) -> View:
    """`own` is this peer's state now, in place of what it announced before."""
    others = [one for one in announcements if one.peer.peer_id != own.peer.peer_id]
    return View(own, tuple(sorted(others, key=lambda one: one.peer.peer_id)))


@dataclass(frozen=True)
class Elsewhere:
    """Weights that this peer must download, and who announces them."""

    epoch: int
    state_hash: str
    donors: tuple[str, ...]


def elsewhere(seen: View) -> Elsewhere | None:
    """The weights that a peer must have instead of its own; None where its own are right.

    Newer ones count when two peers announce them, or one where only one has gradients. In one's
    own epoch most peers with gradients are right, oneself among them; in a tie the smallest hash.
    """
    told = [one for one in seen.others if one.state_hash]
    needed = seen.votes
    newer = Counter(
        (one.epoch, one.state_hash) for one in told if one.epoch > seen.own.epoch
    )  # fmt: skip
    found = [(epoch, votes, name) for (epoch, name), votes in newer.items() if votes >= needed]
    if found:
        epoch = max(found)[0]
        state_hash = _winner({name: votes for e, votes, name in found if e == epoch})
        return Elsewhere(epoch, state_hash, _donors(told, epoch, state_hash))
    if not seen.own.state_hash:
        return None
    here = [
        one for one in told if one.epoch == seen.own.epoch and one.peer.role != "auxiliary"
    ]  # fmt: skip
    state_hash = _winner(Counter([seen.own.state_hash, *(one.state_hash for one in here)]))
    if state_hash == seen.own.state_hash:
        return None
    return Elsewhere(seen.own.epoch, state_hash, _donors(here, seen.own.epoch, state_hash))


def _winner(votes: dict[str, int]) -> str:
    return min(votes, key=lambda name: (-votes[name], name))


def _donors(told: Sequence[Announcement], epoch: int, state_hash: str) -> tuple[str, ...]:
    return tuple(
        one.peer.peer_id for one in told if (one.epoch, one.state_hash) == (epoch, state_hash)
    )


@dataclass(frozen=True)
class Verdict:
    """Whether a round is taken; `reason` in words.

    `useless`: what this peer has gathered, for it has other weights or nobody would take it.
    `short`: too few samples, which no retry would change.
    """

    accepted: bool
    reason: str
    useless: bool = False
    short: bool = False


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
    brought. Peers that are not more than half of those with gradients must not go on without the
    others, so that no two groups take different steps; the last of `attempts` lets them.
    """
    members, fault = _members(result, terms)
    if fault:
        return Verdict(False, fault)
    trainers = [member for member in members if member.role != "auxiliary"]
    right = _winner(Counter(member.state_hash for member in trainers))
    alike = [member for member in trainers if member.state_hash == right]
    if own not in {member.peer_id for member in alike}:
        return Verdict(False, "this peer's weights are not those of the others", useless=True)
    counted = sum(member.counted for member in alike)
    if counted < needed:
        return Verdict(False, f"{counted:g} of {needed:g} samples in the round", short=True)
    contributing = len(alike)
    active = statistics.median_low([member.active for member in alike])
    last = max(member.attempt for member in alike) >= attempts
    if 2 * contributing <= active and not last:
        return Verdict(False, f"only {contributing} of {active} peers in the round")
    return Verdict(True, f"{counted:g} samples of {contributing} of {active} peers")


def _members(result: RoundResult, terms: int) -> tuple[list[Brought], str]:
    """What the members say of themselves; why the round is of no use, or ""."""
    if not result.complete:
        return [], f"only {result.fraction:.1%} was averaged"
    members = []
    for member in result.members:
        told = brought(member)
        if told is None or len(told.labels) != terms:
            return [], f"peer '{member.peer_id}' tells what no peer of this run tells"
        members.append(told)
    if any(member.epoch != result.epoch for member in members):
        return [], "peers of different epochs in one round"
    if all(member.role == "auxiliary" for member in members):
        return [], "nobody with gradients in the round"
    return members, ""


def too_long(norm: float, recent: Sequence[float], ratio: float) -> bool:
    """Whether a gradient of this norm is not to be taken: not finite, or far out of the usual.

    recent: norms of the steps taken last, equal at every peer; few of them allow any length.
    """
    if not math.isfinite(norm):
        return True
    return len(recent) >= _KNOWN_NORMS and norm > ratio * statistics.median(recent)
