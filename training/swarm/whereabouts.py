"""Where a peer stands among the others, by what all announce: pure functions, no clock.

The weights are those that most peers of the newest epoch have. Who has others downloads them
(`elsewhere`). That needs two peers that agree, so it says nothing where every peer has weights
that nobody else has, as when one of a group was killed in a round that only one of the rest has
whole. Who stays alone with his weights for long is stranded, and goes by weaker rules (`refuge`,
`View.outnumbered`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from training.swarm.types import Announcement

_VOTES = 2
"""So many peers must agree on weights that another one shall download; one where there is one."""


def done(one: Announcement) -> int:
    """Steps in the weights of a peer.

    One that announces no hash averages the epoch before the one that it gathers for (delayed mode).
    """
    return one.epoch - (not one.state_hash)


def _alike(one: Announcement, other: Announcement) -> bool:
    """Whether two peers have the same weights, as far as can be known."""
    hashes = {one.state_hash, other.state_hash} - {""}
    return done(one) == done(other) and len(hashes) < 2


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
    def trainers(self) -> list[Announcement]:
        """The others that have gradients."""
        return [one for one in self.others if one.peer.role != "auxiliary"]

    @property
    def partners(self) -> list[Announcement]:
        """The others that this peer takes its steps with.

        Newcomers, without a step, are none once there are two: they follow whoever is ahead.
        """
        return [one for one in self.trainers if done(one) or done(self.own) < 2]

    @property
    def alone(self) -> bool:
        """Whether no other peer takes part in the steps."""
        return not self.partners

    @property
    def votes(self) -> int:
        """Peers that must agree on weights, or on being ahead, before this one believes it.

        Newcomers do not count: a swarm of one, which two others join, is one all the same.
        """
        return max(1, min(_VOTES, sum(done(one) > 0 for one in self.trainers)))

    @property
    def left_behind(self) -> bool:
        """Whether the others are two epochs ahead, be it with weights that are not known yet.

        In delayed mode a hash is seen only between two rounds; until then a round of this epoch
        finds nobody.
        """
        ahead = sum(one.epoch > self.own.epoch + 1 for one in self.trainers)
        return ahead >= self.votes

    @property
    def newest(self) -> int:
        """The epoch that most of the newest trainers work on, for a peer without weights."""
        at = sorted(map(done, self.trainers), reverse=True)
        return at[self.votes - 1] if at else self.own.epoch

    @property
    def shared(self) -> bool:
        """Whether another peer with gradients announces the weights that this one has."""
        own = self.own
        return any((one.epoch, one.state_hash) == (own.epoch, own.state_hash)
                   for one in self.trainers)  # fmt: skip

    @property
    def stranded(self) -> bool:
        """Whether nobody else can have the weights that this peer has, though others are there."""
        return bool(self.partners) and not any(_alike(self.own, one) for one in self.partners)

    @property
    def ahead(self) -> list[Announcement]:
        """The others that have taken more steps, the newest first."""
        found = [one for one in self.partners if done(one) > done(self.own)]
        return sorted(found, key=done, reverse=True)

    @property
    def outnumbered(self) -> bool:
        """Whether two others go together, and so may pass this peer."""
        return any(_alike(*pair) for pair in itertools.combinations(self.partners, 2))


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

    Newer ones count when two peers announce them, or one where only one has taken steps. In one's
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
        state_hash = winner({name: votes for e, votes, name in found if e == epoch})
        return Elsewhere(epoch, state_hash, _donors(told, epoch, state_hash))
    if not seen.own.state_hash:
        return None
    here = [
        one for one in told if one.epoch == seen.own.epoch and one.peer.role != "auxiliary"
    ]  # fmt: skip
    state_hash = winner(Counter([seen.own.state_hash, *(one.state_hash for one in here)]))
    if state_hash == seen.own.state_hash:
        return None
    return Elsewhere(seen.own.epoch, state_hash, _donors(here, seen.own.epoch, state_hash))


def refuge(seen: View) -> Elsewhere | None:
    """The weights for a peer that has been stranded for long; None where none are known.

    Where several are ahead, those of the second one: its epoch is one that two have reached, and a
    liar far ahead draws nobody away. A single one is believed.
    """
    ahead = seen.ahead
    if not ahead:
        return None
    reached = done(ahead[min(_VOTES, len(ahead)) - 1])
    told = [one for one in ahead if done(one) == reached and one.state_hash]
    if not told:
        return None
    state_hash = winner(Counter(one.state_hash for one in told))
    return Elsewhere(reached, state_hash, _donors(told, reached, state_hash))


def winner(votes: dict[str, int]) -> str:
    """What most said; in a tie the smallest."""
    return min(votes, key=lambda name: (-votes[name], name))


def _donors(told: Sequence[Announcement], epoch: int, state_hash: str) -> tuple[str, ...]:
    return tuple(
        one.peer.peer_id for one in told if (one.epoch, one.state_hash) == (epoch, state_hash)
    )
