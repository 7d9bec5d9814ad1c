"""The order in which the pages of a domain come: a pure function of a key and a position.

A domain is an endless sequence of rows, one permutation of all its rows after the other (an
epoch each). Row P of it is found from P alone, so a reader's whole state is one number:

- in each epoch the shards are permuted, and cut into runs of about `window_row_groups` row groups
  by what the manifest says of their sizes: so a position leads to a run without any footer;
- the row groups of a run are permuted, and cut into windows of at most `window_row_groups`;
- the rows of a window are permuted.

The hashes are our own and fixed for good (SplitMix64: Steele, Lea and Flood, OOPSLA 2014):
a stream goes on after NumPy changes its generators.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1
_EPOCHS_KEPT = 8


def mix(*values: int) -> int:
    """64 bits that depend on all of `values` and their order."""
    state = 0
    for value in values:
        state = _scramble(((state ^ (value & _MASK)) + _GOLDEN) & _MASK)
    return state


def hashes(key: int, count: int) -> np.ndarray:
    """`count` 64-bit numbers of the generator that starts at `key`: uint64 (count,)."""
    return hashes_at(np.uint64(key), np.arange(count, dtype=np.uint64))


def hashes_at(keys: np.ndarray | np.uint64, places: np.ndarray) -> np.ndarray:
    """Numbers `places`, from 0, of the generators that start at `keys`: uint64, as `places`."""
    z = (places + np.uint64(1)) * np.uint64(_GOLDEN) + keys
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    found: np.ndarray = z ^ (z >> np.uint64(31))
    return found


def permutation(key: int, count: int) -> np.ndarray:
    """The numbers below `count` in a random order: int64 (count,)."""
    return np.argsort(hashes(key, count), kind="stable")


def _scramble(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are shuffled together.

    first: position of its first row in the domain's sequence. groups: (shard, row group) pairs.
    group, row: for each position in the window, which of `groups` (-1: the shard could not be
    read, the row is lost) and which row in it; int32 (rows,).
    """

    first: int
    groups: tuple[tuple[int, int], ...]
    group: np.ndarray
    row: np.ndarray

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self.group.nbytes + self.row.nbytes


@dataclass(frozen=True, slots=True)
class _Part:
    """A window before its rows are put in order."""

    first: int
    groups: tuple[tuple[int, int, int], ...]  # shard, row group, rows
    rows: int


class _Epoch:
    """One permutation of the shards, cut into runs; the row groups of a run as they are needed."""

    def __init__(self, order: DomainOrder, epoch: int) -> None:
        self._order = order
        self._key = mix(order.key, epoch)
        self._first = epoch * order.rows
        self._shards = permutation(self._key, len(order.shard_rows))
        sizes = order.shard_sizes[self._shards]
        total, runs = int(sizes.sum()), -(-int(sizes.sum()) // order.window_row_groups)
        middle = 2 * np.cumsum(sizes) - sizes
        run = middle * runs // (2 * total)
        self._run_starts = np.flatnonzero(np.diff(run, prepend=-1))
        before = np.cumsum(order.shard_rows[self._shards]) - order.shard_rows[self._shards]
        self._run_rows = before[self._run_starts].tolist()
        self._parts: dict[int, list[_Part]] = {}

    def part(self, position: int) -> _Part:
        """What becomes the window around `position` of the domain's sequence."""
        run = bisect_right(self._run_rows, position - self._first) - 1
        if run not in self._parts:
            if len(self._parts) >= _EPOCHS_KEPT:
                self._parts.pop(next(iter(self._parts)))
            self._parts[run] = self._cut(run)
        parts = self._parts[run]
        return parts[bisect_right(parts, position, key=lambda part: part.first) - 1]

    def _cut(self, run: int) -> list[_Part]:
        ends = [*self._run_starts[1:].tolist(), len(self._shards)]
        shards = self._shards[self._run_starts[run] : ends[run]].tolist()
        groups, lost = [], 0
        for shard in shards:
            rows = self._order.row_counts(shard)
            if rows is None:
                lost += int(self._order.shard_rows[shard])
            else:
                groups += [(shard, number, count) for number, count in enumerate(rows)]
        order = permutation(mix(self._key, run, 1), len(groups)).tolist()
        windows = -(-len(groups) // self._order.window_row_groups)
        first = self._first + self._run_rows[run]
        parts = []
        for number in range(windows):
            bounds = (len(groups) * n // windows for n in (number, number + 1))
            chosen = tuple(groups[place] for place in order[slice(*bounds)])
            rows_in = sum(count for _, _, count in chosen)
            if rows_in:
                parts.append(_Part(first, chosen, rows_in))
            first += rows_in
        if lost:
            parts.append(_Part(first, (), lost))
        return parts


class DomainOrder:
    """The sequence of one domain's rows.

    shard_rows, shard_sizes: rows and about how many row groups each shard has (shards,).
    row_counts: rows of each row group of a shard, which add up to its rows; None when the shard
    cannot be read. It is asked when the shard's turn comes.
    """

    def __init__(
        self,
        shard_rows: Sequence[int],
        shard_sizes: Sequence[int],
        *,
        key: int,
        window_row_groups: int,
        row_counts: Callable[[int], Sequence[int] | None],
    ) -> None:
        self.shard_rows = np.array(shard_rows, np.int64)
        self.shard_sizes = np.array(shard_sizes, np.int64)
        self.key = key
        self.window_row_groups = window_row_groups
        self.row_counts = row_counts
        self.rows = int(self.shard_rows.sum())
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()

    def window_start(self, position: int) -> int:
        """Position of the first row of the window around `position`."""
        return self._part(position).first

    def window(self, position: int) -> Window:
        """The window around `position` of the sequence."""
        part = self._part(position)
        if not part.groups:
            lost = np.full(part.rows, -1, np.int32)
            return Window(part.first, (), lost, lost)
        place = permutation(mix(self.key, part.first, 2), part.rows)
        ends = np.cumsum([rows for _, _, rows in part.groups])
        group = np.searchsorted(ends, place, side="right")
        row = place - (ends - [rows for _, _, rows in part.groups])[group]
        groups = tuple((shard, number) for shard, number, _ in part.groups)
        return Window(part.first, groups, group.astype(np.int32), row.astype(np.int32))

    def _part(self, position: int) -> _Part:
        number = position // self.rows
        epoch = self._epochs.get(number)
        if epoch is None:
            epoch = self._epochs[number] = _Epoch(self, number)
            if len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        else:
            self._epochs.move_to_end(number)
        return epoch.part(position)
