"""Pages of one domain by their position in its order, as much of them in memory as is needed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from models.errors import DamagedInput, UserError
from training.domains import Domain
from training.held_out import held_out
from training.order import DomainOrder, Window
from training.row_groups import DAMAGED_ROW_GROUP, DAMAGED_SHARD, Cache, RowGroups

Split = Literal["train", "held_out", "all"]
_ROW_GROUP_BYTES = 16 << 20
"""Text in a row group as the miner writes them; where it is not so, runs of shards differ in
length, and nothing else."""
_SUSPICIOUS_ROWS = 256
"""Rows without a page, one after the other, that raise the question whether there is any."""
_ROWS_AT_ONCE = 256
_HERE, _OTHER_HOST, _OTHER_SPLIT, _DAMAGED = range(4)


class EmptyDomain(UserError):
    """A domain that is asked for pages or examples and has none. why: the reason alone."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"domain '{name}' {why}: leave it out or give it the weight 0")
        self.why = why


class Row(NamedTuple):
    """One page. passed: rows between the last one and this that gave none, by reason."""

    position: int
    text: str
    passed: Mapping[str, int]


class _Found(NamedTuple):
    """What stands at a position: a text; or none, with the reason if it counts as a loss."""

    text: str | None
    reason: str = ""


class _Group(NamedTuple):
    """The rows of one row group that this process may ask for.

    status: uint8 (rows,); place: int32 (rows,), where in `texts` a row of status _HERE is.
    """

    status: np.ndarray
    place: np.ndarray
    texts: pa.ChunkedArray

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self.status.nbytes + self.place.nbytes + int(self.texts.get_total_buffer_size())


class DomainRows:
    """Reads a domain in the order that `key` gives.

    key: another one for each domain that shares `cache`. share: of the pages that are held out.
    Only positions P with P % stride == residue may be asked for.
    """

    def __init__(
        self,
        domain: Domain,
        *,
        key: int,
        window_row_groups: int,
        share: float,
        split: Split,
        row_groups: RowGroups,
        cache: Cache,
        stride: int = 1,
        residue: int = 0,
    ) -> None:
        self.domain = domain
        self._key = key
        self._share, self._split = share, split
        self._row_groups, self._cache = row_groups, cache
        self._stride, self._residue = stride, residue
        self._has_page = False
        sizes = [max(1, round(shard.text_bytes / _ROW_GROUP_BYTES)) for shard in domain.shards]
        self._small = sum(sizes) <= window_row_groups
        self._order = DomainOrder(
            [shard.rows for shard in domain.shards],
            sizes,
            key=key,
            window_row_groups=window_row_groups,
            row_counts=lambda shard: row_groups.row_counts(domain.shards[shard]),
        )

    def walk(self) -> Iterator[str]:
        """Texts of one epoch, in order."""
        for start in range(0, self.domain.rows, _ROWS_AT_ONCE):
            positions = range(start, min(start + _ROWS_AT_ONCE, self.domain.rows))
            for found in self._find(positions):
                if found.text is not None:
                    yield found.text

    def fetch(self, wanted: Mapping[int, tuple[int, int]], step: int) -> dict[int, list[Row]]:
        """Pages for several lanes together, so that each row group is looked into once.

        wanted: for each lane, the position to start from and how many pages; its rows are `step`
        positions apart. Raises EmptyDomain when the domain has no page at all.
        """
        rows: dict[int, list[Row]] = {lane: [] for lane in wanted}
        passed: dict[int, Counter[str]] = defaultdict(Counter)
        idle: Counter[int] = Counter()
        next_position = {lane: position for lane, (position, _) in wanted.items()}
        while True:
            asked = [
                (lane, next_position[lane] + step * number)
                for lane, (_, count) in wanted.items()
                for number in range(count - len(rows[lane]))
            ]
            if not asked:
                return rows
            found = self._find([position for _, position in asked])
            for (lane, position), (text, reason) in zip(asked, found, strict=True):
                next_position[lane] = position + step
                if text is not None:
                    rows[lane].append(Row(position, text, passed.pop(lane, {})))
                    idle[lane] = 0
                    self._has_page = True
                    continue
                idle[lane] += 1
                if reason:
                    passed[lane][reason] += 1
            if not self._has_page and max(idle.values()) >= _SUSPICIOUS_ROWS:
                self._make_sure()

    def _find(self, positions: Sequence[int]) -> list[_Found]:
        found = [_Found(None, DAMAGED_SHARD)] * len(positions)
        inside: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        windows: dict[int, Window] = {}
        window: Window | None = None
        for number, position in enumerate(positions):
            if window is None or not 0 <= position - window.first < len(window.row):
                window = self._window(position)
                windows[window.first] = window
            offset = position - window.first
            group = int(window.group[offset])
            if group >= 0:
                inside[window.first, group].append((number, int(window.row[offset])))
        for (first, group), rows in inside.items():
            held = self._group(windows[first], group)
            for number, row in rows:
                found[number] = _at(held, row)
        return found

    def _window(self, position: int) -> Window:
        first = self._order.window_start(position)
        return self._cache.get(
            (self._key, first), lambda: self._order.window(position), lambda window: window.bytes
        )

    def _group(self, window: Window, group: int) -> _Group:
        # A domain that one window holds is needed again in each epoch: it is read once. Of a
        # larger one, only the rows of this process's lanes in this window are kept.
        shard, number = window.groups[group]

        def load() -> _Group:
            return self._load(shard, number, None if self._small else self._own_rows(window, group))

        key = (self._key, -1 if self._small else window.first, shard, number)
        return self._cache.get(key, load, lambda loaded: loaded.bytes)

    def _own_rows(self, window: Window, group: int) -> np.ndarray:
        offsets = np.flatnonzero(window.group == group)
        if self._stride > 1:
            offsets = offsets[(offsets + window.first) % self._stride == self._residue]
        return np.sort(window.row[offsets])

    def _load(self, shard: int, number: int, rows: np.ndarray | None) -> _Group:
        """One row group, or only `rows` (sorted) of it."""
        status, texts = self._read(shard, number, ["text"])
        if rows is None:
            rows = np.arange(len(status))
        rows = rows[status[rows] == _HERE]
        place = np.full(len(status), -1, np.int32)
        place[rows] = np.arange(len(rows), dtype=np.int32)
        if len(rows) < len(status):
            texts = texts.take(_as_arrow(rows)) if len(rows) else pa.chunked_array([], pa.string())
        return _Group(status, place, texts)

    def _read(self, shard: int, number: int, more: list[str]) -> tuple[np.ndarray, pa.ChunkedArray]:
        """Status of each row of a row group, and its texts if `more` asks for them."""
        file = self.domain.shards[shard]
        hosts, by_url = self.domain.hosts, self._share > 0 and self._split != "all"
        columns = [*more, *(["host"] if hosts else []), *(["url"] if by_url else [])]
        counts = self._row_groups.row_counts(file)
        count = 0 if counts is None else counts[number]
        status = np.full(count, _HERE, np.uint8)
        nothing = pa.chunked_array([], pa.string())
        try:
            table = self._row_groups.read(file, number, columns) if columns else None
        except DamagedInput:
            status[:] = _DAMAGED
            return status, nothing
        if self._split == "held_out":
            status[:] = _OTHER_SPLIT
        if table is None:
            return status, nothing
        if by_url:
            apart = held_out(table["url"].to_pylist(), self._share)
            status[apart] = _OTHER_SPLIT if self._split == "train" else _HERE
        if hosts:
            status[~hosts.holds(table["host"].to_pylist())] = _OTHER_HOST
        return status, table["text"] if "text" in more else nothing

    def _make_sure(self) -> None:
        """Raise EmptyDomain unless the domain has a page."""
        for number, shard in enumerate(self.domain.shards):
            for group in range(len(self._row_groups.row_counts(shard) or ())):
                if (self._read(number, group, [])[0] == _HERE).any():
                    self._has_page = True
                    return
        raise EmptyDomain(
            self.domain.name,
            f"has no page to train on: each of its {self.domain.rows:,} rows is held out "
            f"(data.held_out = '{self._share}'), of another host group, or damaged",
        )


def _as_arrow(rows: np.ndarray) -> pa.Array:
    """`rows` as int32; pa.array() would import pandas first, which takes a second."""
    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int32))
    return pa.Array.from_buffers(pa.int32(), len(rows), [None, buffer])


def _at(group: _Group, row: int) -> _Found:
    status = group.status[row]
    if status == _HERE:
        return _Found(group.texts[int(group.place[row])].as_py() or "")
    if status == _DAMAGED:
        return _Found(None, DAMAGED_ROW_GROUP)
    return _Found(None, "held_out" if status == _OTHER_SPLIT else "")
