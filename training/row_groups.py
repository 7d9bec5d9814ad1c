"""Reading mined shards a row group at a time: footers when they are needed, two columns of 17.

A remote shard is read by range requests, each tried again as `models.remote` does. What a store
or disk does not give is a Fault; bytes that came and cannot be decoded are damage, which is named
and left out.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from models import files, remote
from models.errors import DamagedInput, Fault

if TYPE_CHECKING:
    from training.domains import Shard

DAMAGED_SHARD = "damaged_shard"
DAMAGED_ROW_GROUP = "damaged_row_group"
ENTRY_BYTES = 512  # about what Python's own objects take for a value that is held
_FOOTERS_KEPT = 64  # each takes some 50 kB

T = TypeVar("T")


class Cache:
    """Least recently used values, `max_bytes` of them in all; the last one stays at any size."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T], size_bytes: Callable[[T], int]) -> T:
        """The value of `key`, made when it is not held."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
            value: T = found[0]
            return value
        value = make()
        size = size_bytes(value) + ENTRY_BYTES
        # What gives way goes before the new value counts, but the new one was made by then: the
        # peak is one value above `max_bytes`.
        while self._held and self.held_bytes + size > self.max_bytes:
            _, (_, freed) = self._held.popitem(last=False)
            self.held_bytes -= freed
        self._held[key] = value, size
        self.held_bytes += size
        return value


class RowGroups:
    """Row groups of shards. `damage`: what could not be decoded, place -> why."""

    def __init__(self) -> None:
        self.damage: dict[str, str] = {}
        self._row_counts: dict[str, tuple[int, ...] | None] = {}
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()

    def row_counts(self, shard: Shard) -> tuple[int, ...] | None:
        """Rows of each row group; None when the footer is damaged. Raises Fault."""
        if shard.url not in self._row_counts:
            try:
                footer = self._footer(shard)
            except DamagedInput:
                self._row_counts[shard.url] = None
            else:
                self._row_counts[shard.url] = tuple(
                    footer.row_group(number).num_rows for number in range(footer.num_row_groups)
                )
        return self._row_counts[shard.url]

    def read(self, shard: Shard, group: int, columns: Sequence[str]) -> pa.Table:
        """`columns` of one row group. Raises DamagedInput, noted in `damage`, and Fault."""

        def decode() -> pa.Table:
            # pre_buffer=False: with it, pyarrow 25 now and then aborts at process exit
            with pq.ParquetFile(
                _open(shard),
                metadata=self._footer(shard),
                pre_buffer=False,
                page_checksum_verification=True,
            ) as file:
                table = file.read_row_group(group, columns=list(columns), use_threads=False)
            table.validate(full=True)  # UTF-8 too: a string is made of it later
            return table.select(list(columns))

        return self._checked(DAMAGED_ROW_GROUP, f"'{shard.url}' row group {group}", decode)

    def _footer(self, shard: Shard) -> pq.FileMetaData:
        footer = self._footers.get(shard.url)
        if footer is None:
            footer = self._checked(DAMAGED_SHARD, f"'{shard.url}'", lambda: _read_footer(shard))
            self._footers[shard.url] = footer
            if len(self._footers) > _FOOTERS_KEPT:
                self._footers.popitem(last=False)
        else:
            self._footers.move_to_end(shard.url)
        return footer

    def _checked(self, reason: str, place: str, decode: Callable[[], T]) -> T:
        try:
            return decode()
        except (pa.ArrowException, OSError, KeyError) as error:
            # Arrow gives an errno only to what the operating system or the store said.
            if isinstance(error, OSError) and error.errno is not None:
                # Arrow's own words name the file once more, with all its folders.
                said = str(error.strerror or error)
                why = os.strerror(error.errno) if "Detail: [errno" in said else said
                raise Fault(f"{place} cannot be read: {why}") from error
            detail = str(error).split("\n", 1)[0]
            self.damage[place] = detail
            raise DamagedInput(reason, f"{place}: {detail}") from error


def _read_footer(shard: Shard) -> pq.FileMetaData:
    footer = pq.read_metadata(_open(shard))
    if footer.num_rows != shard.rows:
        raise pa.ArrowInvalid(f"{footer.num_rows:,} rows, {shard.rows:,} in the manifest")
    return footer


def _open(shard: Shard) -> Any:
    if files.is_local(shard.url):
        return str(files.local_path(shard.url))
    return _RemoteFile(shard.url, shard.bytes)


class _RemoteFile(io.RawIOBase):
    """A remote file for Arrow, which reads a whole column of a row group at once."""

    def __init__(self, url: str, size_bytes: int) -> None:
        self._url = url
        self._size_bytes = size_bytes
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size_bytes}
        self._place = bases[whence] + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        stop = self._size_bytes if size < 0 else min(self._place + size, self._size_bytes)
        found = remote.read(self._url, self._place, stop)
        self._place += len(found)
        return found
