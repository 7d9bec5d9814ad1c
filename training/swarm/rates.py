"""How fast the links of a swarm are, learned from finished rounds and agreed on by each group.

All streams of a round end together: what a peer moved in it, by its seconds, says how fast the
slowest link was, and of all others only that they are not slower. So a reducer measures for how
long it stood waiting for each sender. Waited for through half of the time in which its own parts
were reduced, a sender sets the pace, and what it sent is the rate of its link; of another nothing
is concluded. A reducer that was done with its parts early concludes nothing about anybody.

Each peer tells its group (`LinkRates.gathered`) its own word and what it saw of the others.
`links` makes one figure of each peer's link of that: the same at every member, since all have the
same to go by, and the median, so that one false report among three moves nothing. A peer that
declares no rate is taken for twice what it carried without being waited for, until someone waits.
A peer whose own line is slow waits for all its senders: then it concludes nothing about them, and
its line down is what it measured, unless half of the group are in the same state. There, with most
links slow both ways, no waiting tells the fast ones: declare rates (`gristmill swarm doctor`).

Old evidence fades by half in `HALF_LIFE_S`, towards the peer's own word. Everything gathered is a
peer's word: what is no rate is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.swarm.shares import Link, traffic
from training.swarm.types import Role

HALF_LIFE_S = 1_800.0
PRIOR_S = 1.0
"""The weight of a peer's own word, in seconds of measurement."""
PROBE = 2.0
"""What an undeclared link that nobody waited for is taken for, as a multiple of what it carried."""
_SETS_PACE = 0.5
_DONE_EARLY = 0.3
"""Of the round: a reducer that needed less saw too little of it."""
_SHORTEST_S = 0.05
"""A shorter round measures the latency and the processors, not the links."""
_LEAST, _MOST_MBIT = 1e-3, 1e6
_MOST_SEEN = 256


@dataclass(frozen=True)
class SeenRound:
    """A complete round as one member saw it.

    `shares` as `share_out` gave them for `links`; `vector_bytes`: of the whole vector after the
    codec; `seconds`: of the all-reduce, without matchmaking; `waited_s`: for how long this member,
    as a reducer, stood waiting for the pieces of each sender; `reducing_s`: from its first piece to
    its last finished part.
    """

    links: Sequence[Link]
    shares: Sequence[int]
    vector_bytes: float
    seconds: float
    waited_s: Mapping[str, float] = field(default_factory=dict)
    reducing_s: float = 0.0


class _Fading:
    """A rate from several measurements: all that was moved by all the time, old ones less."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._mbit, self._seconds, self._at = 0.0, 0.0, 0.0

    def add(self, mbit_s: float, seconds: float, now: float) -> None:
        kept = self._kept(now)
        self._mbit = self._mbit * kept + mbit_s * seconds
        self._seconds = self._seconds * kept + seconds
        self._at = max(now, self._at)

    def rate(self) -> float | None:
        return self._mbit / self._seconds if self._seconds > 0 else None

    def seconds(self, now: float) -> float:
        return self._seconds * self._kept(now)

    def _kept(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self._at) / self._half_life_s))


@dataclass
class _Carried:
    """The most that a link carried, whoever set the pace; it fades."""

    mbit_s: float = 0.0
    at: float = 0.0

    def now(self, now: float, half_life_s: float) -> float:
        return float(self.mbit_s * 0.5 ** (max(0.0, now - self.at) / half_life_s))


class LinkRates:
    """What one peer knows of its own link and of those it received from.

    `up_mbit`, `down_mbit`: what the user declared, None where nothing. Times are seconds of any
    clock that only goes forward.
    """

    def __init__(
        self,
        me: str,
        up_mbit: float | None = None,
        down_mbit: float | None = None,
        *,
        half_life_s: float = HALF_LIFE_S,
    ) -> None:
        self._me, self._half_life_s = me, half_life_s
        self._declared = (up_mbit, down_mbit)
        self._carried = (_Carried(), _Carried())
        self._seen: dict[str, _Fading] = {}
        self._down, self._judged = _Fading(half_life_s), _Fading(half_life_s)

    def observe(self, seen: SeenRound, now: float) -> None:
        """Learn from a complete round; a very short one teaches nothing."""
        if seen.seconds < _SHORTEST_S:
            return
        moved = traffic(seen.links, seen.shares, seen.vector_bytes)
        mbit_s = {
            link.peer_id: bytes_ * 8e-6 / seen.seconds
            for link, bytes_ in zip(seen.links, moved, strict=True)
        }
        for carried in self._carried:
            if mbit_s[self._me] >= carried.now(now, self._half_life_s):
                carried.mbit_s, carried.at = mbit_s[self._me], now
        if self._can_judge(seen):
            self._judged.add(0.0, seen.seconds, now)
            self._judge(seen, mbit_s, now)

    def _can_judge(self, seen: SeenRound) -> bool:
        """A reducer of half an equal share has all its senders on the line for long enough."""
        if seen.reducing_s < _DONE_EARLY * seen.seconds:
            return False
        reducers = sum(link.role != "client" for link in seen.links)
        own = sum(s for link, s in zip(seen.links, seen.shares, strict=True) if self._is_me(link))
        return 2 * own * reducers >= sum(seen.shares)

    def _is_me(self, link: Link) -> bool:
        return link.peer_id == self._me

    def _judge(self, seen: SeenRound, mbit_s: Mapping[str, float], now: float) -> None:
        """Rate the senders that were waited for; this peer's own line where it was for all."""
        senders = [
            link.peer_id
            for link in seen.links
            if link.role != "auxiliary" and not self._is_me(link)
        ]
        enough_s = _SETS_PACE * seen.reducing_s
        slow = {one for one in senders if seen.waited_s.get(one, 0.0) >= enough_s}
        own_line = len(senders) > 1 and len(slow) == len(senders)
        _learn(self._down, mbit_s[self._me], seen.seconds, now, sets_pace=own_line)
        if own_line:
            return
        for sender in senders:
            fading = self._seen.setdefault(sender, _Fading(self._half_life_s))
            _learn(fading, mbit_s[sender], seen.seconds, now, sets_pace=sender in slow)

    def gathered(self, now: float) -> dict[str, Any]:
        """What this peer tells the group of its next round, for `links`: plain JSON."""
        words = [
            self._word(declared, carried.now(now, self._half_life_s))
            for declared, carried in zip(self._declared, self._carried, strict=True)
        ]
        views = {peer: _view(fading, now) for peer, fading in self._seen.items()}
        fresh = {peer: view for peer, view in views.items() if view is not None}
        newest = sorted(fresh, key=lambda peer: (-fresh[peer][1], peer))[:_MOST_SEEN]
        return {
            "up_mbit": words[0],
            "down_mbit": words[1],
            "seen_mbit": {peer: fresh[peer] for peer in newest},
            "down_seen_mbit": _view(self._down, now),
            "judged_s": round(self._judged.seconds(now), 3),
        }

    @staticmethod
    def _word(declared: float | None, carried: float) -> float | None:
        if declared is not None:
            return round(max(declared, carried), 3)
        return round(PROBE * carried, 3) if carried > 0.001 else None


def _learn(fading: _Fading, mbit_s: float, seconds: float, now: float, *, sets_pace: bool) -> None:
    """A link that set the pace has that rate; another one at least, if it had a lower one."""
    before = fading.rate()
    if sets_pace or (before is not None and mbit_s > before):
        fading.add(mbit_s, seconds, now)


def _view(fading: _Fading, now: float) -> list[float] | None:
    """Rate and seconds of evidence; None once it has faded."""
    rate, seconds = fading.rate(), fading.seconds(now)
    return None if rate is None or seconds < 0.01 else [round(rate, 3), round(seconds, 3)]


def links(roles: Sequence[tuple[str, Role]], gathered: Sequence[Any]) -> list[Link]:
    """The links of a group from what its members gathered, in the order of `roles`.

    The same for every member that has the same `gathered`; nothing in it makes this fail.
    """
    said = {
        peer: theirs if isinstance(theirs, Mapping) else {}
        for (peer, _), theirs in zip(roles, gathered, strict=True)
    }
    alone = _few_wait_for_all(said)
    return [Link(peer, role, _up(peer, said), _down(said[peer], alone)) for peer, role in roles]


def _up(peer: str, said: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The median (the lower one) of what the others saw and of the peer's own word.

    One that could judge and has seen nothing slow in the peer is a vote for its word.
    """
    word = _number(said[peer].get("up_mbit"))
    votes = [] if word is None else [word]
    for observer, theirs in said.items():
        if observer == peer:
            continue
        seen = _blended(_of(theirs.get("seen_mbit"), peer), word)
        if seen is not None:
            votes.append(seen)
        elif word is not None and _judges(theirs):
            votes.append(word)
    return statistics.median_low(votes) if votes else None


def _few_wait_for_all(said: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether those that wait for all their senders are a minority of those that can judge.

    Then it is their own lines. Where most do it, the senders can be as slow, or everybody is.
    """
    judges = [theirs for theirs in said.values() if _judges(theirs)]
    waiting = [theirs for theirs in judges if _blended(theirs.get("down_seen_mbit"), None)]
    return 2 * len(waiting) < len(judges)


def _down(mine: Mapping[str, Any], alone: bool) -> float | None:
    """The peer's word; what it measured, where it waits for all its senders and few others do."""
    word = _number(mine.get("down_mbit"))
    measured = _blended(mine.get("down_seen_mbit"), word) if alone else None
    return word if measured is None else measured


def _judges(theirs: Mapping[str, Any]) -> bool:
    return (_number(theirs.get("judged_s")) or 0.0) > PRIOR_S


def _of(views: Any, peer: str) -> Any:
    return views.get(peer) if isinstance(views, Mapping) else None


def _blended(view: Any, word: float | None) -> float | None:
    """A view of rate and seconds, mixed with the peer's own word; None where it is no view.

    The mean of the times that a megabit takes, so that a word far too high weighs little.
    """
    if not isinstance(view, list | tuple) or len(view) != 2:
        return None
    rate, seconds = _number(view[0]), _number(view[1])
    if rate is None or seconds is None:
        return None
    if word is None:
        return rate
    return (seconds + PRIOR_S) / (seconds / rate + PRIOR_S / word)


def _number(value: Any) -> float | None:
    """A rate or a time, where `value` can be one: what `gathered` rounds to 0 is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if _LEAST <= value <= _MOST_MBIT else None
