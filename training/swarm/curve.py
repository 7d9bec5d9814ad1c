"""The epochs of a run as a curve of a few hundred points, whatever their number.

`Bins` takes one epoch after the other. When it is full, neighbours are joined and a bin holds
twice as many epochs: the work for each epoch stays the same in a run of a hundred thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_BINS = 400


@dataclass
class Bin:
    """Neighbouring epochs. seconds: from the start of the first to the end of the last, less the
    gaps; loss_*: over those with a loss, the mean weighted by samples."""

    first: int
    last: int
    ended: float
    seconds: float
    samples: int
    peers: int
    loss_sum: float = 0.0
    loss_samples: int = 0
    loss_low: float | None = None
    loss_high: float | None = None
    fraction: float | None = None
    round_s: float | None = None
    owners: Counter[str] = field(default_factory=Counter)

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.loss_samples if self.loss_samples else None

    def join(self, other: Bin) -> Bin:
        """Both as one; `other` is the later one. Of peers, fractions and rounds the worst."""
        return Bin(
            first=self.first,
            last=other.last,
            ended=other.ended,
            seconds=self.seconds + other.seconds,
            samples=self.samples + other.samples,
            peers=min(self.peers, other.peers),
            loss_sum=self.loss_sum + other.loss_sum,
            loss_samples=self.loss_samples + other.loss_samples,
            loss_low=_worst(min, self.loss_low, other.loss_low),
            loss_high=_worst(max, self.loss_high, other.loss_high),
            fraction=_worst(min, self.fraction, other.fraction),
            round_s=_worst(max, self.round_s, other.round_s),
            owners=self.owners + other.owners,
        )


class Bins:
    """At most `most` (even) bins of `width` epochs each, aligned to multiples of the width."""

    def __init__(self, most: int = MOST_BINS) -> None:
        self.width = 1
        self._most = most
        self._bins: dict[int, Bin] = {}

    def add(self, found: Bin) -> None:
        """Take in one epoch; they come in rising order."""
        place = found.first // self.width
        before = self._bins.get(place)
        self._bins[place] = found if before is None else before.join(found)
        while len(self._bins) > self._most:
            self._halve()

    def copy(self) -> Bins:
        """As it is now; what is added to one of the two is not in the other."""
        found = Bins(self._most)
        found.width, found._bins = self.width, dict(self._bins)
        return found

    def bins(self) -> list[Bin]:
        return [self._bins[place] for place in sorted(self._bins)]

    def _halve(self) -> None:
        self.width *= 2
        joined: dict[int, Bin] = {}
        for place in sorted(self._bins):
            before = joined.get(place // 2)
            found = self._bins[place]
            joined[place // 2] = found if before is None else before.join(found)
        self._bins = joined


def of_epoch(row: Mapping[str, Any], owners: Mapping[str, int]) -> Bin:
    """A row of the table of epochs as a bin of one."""
    loss, samples = row["loss"], max(int(row["samples"]), 1)
    return Bin(
        first=row["epoch"],
        last=row["epoch"],
        ended=row["ended"],
        seconds=row["ended"] - row["started"],
        samples=row["samples"],
        peers=row["peers"],
        loss_sum=0.0 if loss is None else loss * samples,
        loss_samples=0 if loss is None else samples,
        loss_low=loss,
        loss_high=loss,
        fraction=row["fraction"],
        round_s=row["round_s"],
        owners=Counter(owners),
    )


def _worst(choose: Any, first: float | None, second: float | None) -> float | None:
    there = [value for value in (first, second) if value is not None]
    return choose(there) if there else None
