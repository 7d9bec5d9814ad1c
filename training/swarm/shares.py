"""Who reduces how much of the vector in a round: shares by the links, never worse than equal ones.

In a butterfly all-reduce every sender cuts its vector by the shares, sends each reducer its piece
and gets the average of it back; a reducer takes the pieces of all senders. With s senders, V bytes
and the share f, a link of u bytes/s up and d bytes/s down is busy for

- a sender: (1 - f) V of its own and (s - 1) f V for the others, both ways, together
  (1 + (s - 2) f) V / min(u, d); V / min(u, d) without a share, which is every client;
- an auxiliary, which has nothing of its own: s f V / min(u, d).

Both ways at once: `training.swarm.reduction` drops hivemind's rule that a sender without a share
gets no average before it has sent everything (`should_delay_results`, V / u + V / d), which made
hivemind's own shares (0 for slow peers) slower for exactly these. A part is done when all senders
gave theirs, and a stream that is not read stops: the busiest link sets the pace of everybody.

`share_out` solves the linear programme: the least T with busy_i(f_i) <= T for every peer that can
be reached, sum f = 1, floor <= f_i <= cap. What a link has to do depends on its own share alone, so
that the solution is a water level, found in whole numbers and fractions: the same on every peer,
whatever its processor and libraries. No solver in floating point promises that, and peers that
disagree about shares cannot average.

Left out: rates of single pairs (a link is one number each way), and two peers behind one line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from training.swarm.types import Role

FLOOR_TRAFFIC = Fraction(1, 100)
"""What the smallest share may add to the traffic of a node, as a part of the vector: no node is
without work, so that shares do not jump between none and much with every measurement."""
CAP = Fraction(1, 2)
"""The most that one peer reduces, while another can be reached."""
_FREE = Fraction(1, 1000)
"""With two senders a share costs a node nothing. A thousandth keeps the solution a single one."""
_UNKNOWN_KBIT = 1_000


@dataclass(frozen=True)
class Link:
    """A peer of the round and its rates in Mbit/s; None: nobody knows, taken as the median."""

    peer_id: str
    role: Role
    up_mbit: float | None = None
    down_mbit: float | None = None

    def __post_init__(self) -> None:
        for rate in (self.up_mbit, self.down_mbit):
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"a rate of '{rate}' Mbit/s: it must be above 0, or None")


def share_out(
    links: Sequence[Link],
    elements: int,
    *,
    floor_traffic: Fraction = FLOOR_TRAFFIC,
    cap: Fraction = CAP,
) -> tuple[int, ...]:
    """How many of the vector's `elements` each of `links` reduces, in their order; the sum is all.

    Clients get 0. By the model no round, and so no peer, takes longer than with `equal_shares`.
    Raises ValueError when no peer can reduce, or two have the same id.
    """
    equal = equal_shares(links, elements)
    senders, rates = _senders(links), _kbits(links)
    reachable = [number for number, link in enumerate(links) if link.role != "client"]
    most = max(cap, Fraction(1, len(reachable)))
    floor = max(floor_traffic / max(1, senders - 2), Fraction(1, elements))
    least = min(floor, Fraction(1, len(reachable)))
    lines = [_line(links[number].role, rates[number], senders, least) for number in reachable]
    parts = [Fraction(0)] * len(links)
    for number, part in zip(reachable, _level(lines, most), strict=True):
        parts[number] = part
    filled = _whole(links, parts, elements)
    # A node that rounding leaves one element more could be above a level that is almost equal.
    return filled if max(_busy(links, filled)) <= max(_busy(links, equal)) else equal


def equal_shares(links: Sequence[Link], elements: int) -> tuple[int, ...]:
    """The same share for every peer that can reduce: what `share_out` is never worse than."""
    if len({link.peer_id for link in links}) != len(links):
        raise ValueError("two peers of the group have the same id")
    if elements < 1:
        raise ValueError(f"a vector of {elements} elements has no parts to reduce")
    reachable = sum(link.role != "client" for link in links)
    if reachable == 0:
        raise ValueError("no peer of the group can reduce: all are clients")
    return _whole(links, [Fraction(link.role != "client", reachable) for link in links], elements)


def busy_s(links: Sequence[Link], shares: Sequence[int], vector_bytes: float) -> tuple[float, ...]:
    """For how long each link is busy in a round, by the model; the longest is the round's time."""
    kbit = Fraction(vector_bytes) * 8 / 1000
    return tuple(float(busy * kbit) for busy in _busy(links, shares))


def traffic(links: Sequence[Link], shares: Sequence[int], vector_bytes: float) -> tuple[float, ...]:
    """Bytes that each peer sends in the round; it receives as many."""
    return tuple(float(part * Fraction(vector_bytes)) for part in _moved(links, shares))


def _senders(links: Sequence[Link]) -> int:
    return sum(link.role != "auxiliary" for link in links)


def _kbits(links: Sequence[Link]) -> list[int]:
    """What each link moves both ways at once, in whole kbit/s, so that nothing after is rounded.

    An unknown rate is the median (the lower one) of the known.
    """
    ups = _known([link.up_mbit for link in links])
    downs = _known([link.down_mbit for link in links])
    return [min(up, down) for up, down in zip(ups, downs, strict=True)]


def _known(rates_mbit: Sequence[float | None]) -> list[int]:
    kbits = [None if rate is None else max(1, round(rate * 1000)) for rate in rates_mbit]
    known = [rate for rate in kbits if rate is not None]
    typical = statistics.median_low(known) if known else _UNKNOWN_KBIT
    return [typical if rate is None else rate for rate in kbits]


def _moved(links: Sequence[Link], shares: Sequence[int]) -> list[Fraction]:
    """What each peer sends, and receives, as a part of the vector."""
    senders, elements = _senders(links), sum(shares)
    return [
        Fraction(senders * share, elements)
        if link.role == "auxiliary"
        else Fraction(elements + (senders - 2) * share, elements)
        for link, share in zip(links, shares, strict=True)
    ]


def _busy(links: Sequence[Link], shares: Sequence[int]) -> list[Fraction]:
    """Seconds that each link is busy, for one kbit of vector."""
    columns = zip(_moved(links, shares), _kbits(links), strict=True)
    return [moved / rate for moved, rate in columns]


@dataclass(frozen=True)
class _Line:
    """A peer's share at the level T: slope T - offset, but not under `least`."""

    slope: Fraction
    offset: Fraction
    least: Fraction

    def level_at(self, share: Fraction) -> Fraction:
        return (share + self.offset) / self.slope

    def at(self, level: Fraction, most: Fraction) -> Fraction:
        return min(max(self.slope * level - self.offset, self.least), most)


def _line(role: Role, kbit_s: int, senders: int, least: Fraction) -> _Line:
    if role == "auxiliary":  # without a share it has nothing to do, so that no floor helps it
        return _Line(Fraction(kbit_s, max(1, senders)), Fraction(0), Fraction(0))
    each = max(Fraction(senders - 2), _FREE)
    return _Line(kbit_s / each, 1 / each, least)


def _level(lines: Sequence[_Line], most: Fraction) -> list[Fraction]:
    """The shares at the water level at which they sum to 1, each between its least and `most`."""
    reached = [(line.level_at(line.least), 0, line) for line in lines]
    full = [(line.level_at(most), 1, line) for line in lines]
    fixed, offset, slope = (
        sum((line.least for line in lines), Fraction(0)),
        Fraction(0),
        Fraction(0),
    )
    for level, is_full, line in sorted(reached + full, key=lambda step: step[:2]):
        if slope > 0 and (1 - fixed + offset) / slope <= level:
            break
        sign = -1 if is_full else 1
        fixed += most if is_full else -line.least
        offset, slope = offset + sign * line.offset, slope + sign * line.slope
    # All full they would sum to 1 or more, so that the loop ended at its break.
    return [line.at((1 - fixed + offset) / slope, most) for line in lines]


def _whole(links: Sequence[Link], parts: Sequence[Fraction], elements: int) -> tuple[int, ...]:
    """`elements` by `parts` (of sum 1): the largest remainders get what is left, ties by id."""
    shares = [math.floor(part * elements) for part in parts]
    order = sorted(
        range(len(links)), key=lambda i: (shares[i] - parts[i] * elements, links[i].peer_id)
    )
    for number in order[: elements - sum(shares)]:
        shares[number] += 1
    return tuple(shares)
