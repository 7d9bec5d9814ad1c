"""Exact paragraph dedup over 64-bit keys: hash, judge, apply.

`hash` turns one WET file's paragraph keys into its sorted distinct keys. `judge` lays the keys of
all files side by side, one range of the 64-bit space at a time, and answers one bit for each
distinct key of each file: does this file keep it. `apply` turns the bits into paragraphs kept.
A kept key stays on one page only: the file's first page that has it. Everything is a pure
function on NumPy arrays; DESIGN §3 "Duplicates" has the policies, CCNet (Wenzek et al. 2020,
§3.1) the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any, Literal

import numpy as np
import xxhash

from models.errors import DamagedInput
from pipelines.arrays import ArrayFile, write_arrays
from pipelines.recipe import MAX_COMMON_PAGES

MAX_RANGES = 4096
_RANGE_SHIFT = np.uint64(64 - 12)  # the first 12 bits of a key name one of MAX_RANGES cells


@dataclass(frozen=True, slots=True)
class FileKeys:
    """The paragraph keys of one WET file.

    distinct: uint64, sorted, shape (d,). page_counts: uint16, shape (d,): pages of this file that
    have the key, saturating. inverse: uint32, shape (n,): which distinct key each paragraph has,
    in page order. offsets: int64, shape (pages + 1,): where each page's paragraphs begin.
    """

    distinct: np.ndarray
    page_counts: np.ndarray
    inverse: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, hashes: np.ndarray, offsets: np.ndarray) -> FileKeys:
        """From uint64 `hashes` in page order, shape (n,), and `offsets`, shape (pages + 1,)."""
        if hashes.size == 0:
            return cls(
                np.empty(0, np.uint64), np.empty(0, np.uint16), np.empty(0, np.uint32), offsets
            )
        order = np.argsort(hashes, kind="stable")
        in_order = hashes[order]
        pages = _page_of_paragraph(offsets)[order]
        new_key = np.empty(hashes.size, bool)
        new_key[0] = True
        np.not_equal(in_order[1:], in_order[:-1], out=new_key[1:])
        new_page = new_key.copy()
        new_page[1:] |= pages[1:] != pages[:-1]
        starts = np.flatnonzero(new_key)
        counts = np.add.reduceat(new_page, starts, dtype=np.int64)
        inverse = np.empty(hashes.size, np.uint32)
        inverse[order] = np.cumsum(new_key) - 1
        return cls(
            in_order[starts],
            np.minimum(counts, MAX_COMMON_PAGES).astype(np.uint16),
            inverse,
            offsets,
        )

    def write(self, url: str | PathLike[str], header: dict[str, Any]) -> None:
        """Write to an intermediate array file that `read_range` can slice."""
        cells = np.arange(MAX_RANGES, dtype=np.uint64) << _RANGE_SHIFT
        arrays = {
            "distinct": self.distinct,
            "page_counts": self.page_counts,
            "inverse": self.inverse,
            "offsets": self.offsets,
            "cells": np.append(np.searchsorted(self.distinct, cells), self.distinct.size),
        }
        write_arrays(url, arrays, header, durable=False)

    @classmethod
    def read(cls, file: ArrayFile) -> FileKeys:
        """Read back what `write` wrote."""
        names = ("distinct", "page_counts", "inverse", "offsets")
        return cls(*(file.read(name) for name in names))


@dataclass(frozen=True, slots=True)
class Block:
    """Sorted distinct keys of one file (or index) in one range, and how many pages have each."""

    keys: np.ndarray
    page_counts: np.ndarray

    @classmethod
    def empty(cls) -> Block:
        """A block without keys."""
        return cls(np.empty(0, np.uint64), np.empty(0, np.uint16))

    def to_bytes(self) -> bytes:
        """For a shuffle: 8 bytes and one bit for each key, 2 more for each on several pages.

        Layout, little endian: XXH3 of the rest (8 bytes); number of keys (4); the keys; one bit
        for each key, set where its page count is not 1; those counts.
        """
        several = self.page_counts != 1
        rest = b"".join(
            [
                np.uint32(self.keys.size).astype("<u4").tobytes(),
                self.keys.astype("<u8").tobytes(),
                np.packbits(several).tobytes(),
                self.page_counts[several].astype("<u2").tobytes(),
            ]
        )
        return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest

    @classmethod
    def from_bytes(cls, data: bytes) -> Block:
        """Read back what `to_bytes` wrote. Raises DamagedInput when it is cut or changed."""
        rest = memoryview(data)[8:]
        if len(rest) < 4 or xxhash.xxh3_64_intdigest(rest) != int.from_bytes(data[:8], "little"):
            raise DamagedInput("damaged_block", "a block of keys differs from its checksum")
        size = int.from_bytes(rest[:4], "little")
        keys = np.frombuffer(rest, "<u8", size, 4)
        bits = np.frombuffer(rest, np.uint8, -(-size // 8), 4 + 8 * size)
        page_counts = np.ones(size, np.uint16)
        several = np.unpackbits(bits, count=size).astype(bool)
        page_counts[several] = np.frombuffer(rest, "<u2", offset=4 + 8 * size + bits.size)
        return cls(keys, page_counts)


def _cells_of_range(part: int, parts: int) -> tuple[int, int]:
    """Cells [first, last) of range `part` of `parts`, a power of two up to MAX_RANGES."""
    return part * MAX_RANGES // parts, (part + 1) * MAX_RANGES // parts


def range_bounds(file: ArrayFile, part: int, parts: int) -> tuple[int, int]:
    """Positions [start, stop) of range `part` in the sorted keys of `file`."""
    first, last = _cells_of_range(part, parts)
    cells = file.read("cells", first, last + 1)
    return int(cells[0]), int(cells[-1])


def read_range(file: ArrayFile, part: int, parts: int) -> Block:
    """The block of range `part` of `parts` from a file of keys."""
    start, stop = range_bounds(file, part, parts)
    return Block(file.read("distinct", start, stop), file.read("page_counts", start, stop))


def read_all_ranges(file: ArrayFile, parts: int) -> list[Block]:
    """The blocks of all `parts` ranges from a file of keys, read once."""
    keys, page_counts, cells = (file.read(name) for name in ("distinct", "page_counts", "cells"))
    bounds = [int(cells[_cells_of_range(part, parts)[0]]) for part in range(parts)]
    return [
        Block(keys[start:stop], page_counts[start:stop])
        for start, stop in pairwise([*bounds, int(cells[-1])])
    ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `judge` found in one range.

    keep: for each block a bool array, one value for each of its keys. index: the keys of earlier
    crawls and of this one. distinct: different keys in the blocks. repeated: those of them on two
    pages or more, or in the index.
    """

    keep: list[np.ndarray]
    index: Block
    distinct: int
    repeated: int


def judge(
    blocks: Sequence[Block],
    *,
    keep: Literal["first", "none"],
    common_pages: int | None = None,
    index: Block | None = None,
    keys_per_step: int = 2_000_000,
) -> Verdict:
    """Decide for each block's each key whether that file keeps it.

    `blocks` stand in crawl order and cover one range. A key in `index` is kept nowhere.
    keep="none": kept when a single page in all blocks has it. keep="first": kept by the first
    block that has it, unless `common_pages` pages or more have it (`index` counts included).
    Works through the range in steps of about `keys_per_step` keys, which fit the processor's
    caches; beside the blocks and the verdict it holds some 50 bytes for each key of one step.
    """
    steps = _steps([*blocks] if index is None else [index, *blocks], keys_per_step)
    verdicts = [
        _judge_step(step, keep, common_pages, has_index=index is not None) for step in steps
    ]
    if len(verdicts) == 1:
        return verdicts[0]
    pieces = zip(*(verdict.keep for verdict in verdicts), strict=True)
    return Verdict(
        [np.concatenate(piece) for piece in pieces],
        Block(
            np.concatenate([verdict.index.keys for verdict in verdicts]),
            np.concatenate([verdict.index.page_counts for verdict in verdicts]),
        ),
        sum(verdict.distinct for verdict in verdicts),
        sum(verdict.repeated for verdict in verdicts),
    )


def _steps(rows: list[Block], keys_per_step: int) -> list[list[Block]]:
    """All rows cut at the same keys, which lie evenly between the smallest and the largest."""
    count = sum(row.keys.size for row in rows) // keys_per_step
    if count < 2:
        return [rows]
    low = min(int(row.keys[0]) for row in rows if row.keys.size)
    high = max(int(row.keys[-1]) for row in rows if row.keys.size)
    edges = np.array([low + (high - low) * i // count for i in range(1, count)], np.uint64)
    cuts = [[0, *np.searchsorted(row.keys, edges).tolist(), row.keys.size] for row in rows]
    return [
        [
            Block(row.keys[cut[i] : cut[i + 1]], row.page_counts[cut[i] : cut[i + 1]])
            for row, cut in zip(rows, cuts, strict=True)
        ]
        for i in range(count)
    ]


def _judge_step(
    rows: list[Block], keep: Literal["first", "none"], common_pages: int | None, *, has_index: bool
) -> Verdict:
    earlier = int(has_index)
    lengths = [block.keys.size for block in rows]
    total = sum(lengths)
    if total == 0:
        return Verdict([np.empty(0, bool) for _ in rows[earlier:]], Block.empty(), 0, 0)
    keys = np.concatenate([block.keys for block in rows])
    order = np.argsort(keys, kind="stable")  # equal keys stay in crawl order, the index first
    in_order = keys[order]
    new_key = np.empty(total, bool)
    new_key[0] = True
    np.not_equal(in_order[1:], in_order[:-1], out=new_key[1:])
    starts = np.flatnonzero(new_key)
    counts = np.concatenate([block.page_counts for block in rows])[order]
    pages = np.add.reduceat(counts, starts, dtype=np.int64)
    if keep == "none":
        wanted = pages == 1
    elif common_pages is not None:
        wanted = pages < common_pages
    else:
        wanted = np.ones(starts.size, bool)
    known = order[starts] < (lengths[0] if has_index else 0)
    wanted &= ~known
    kept = np.zeros(total, bool)
    kept[order[starts]] = wanted
    pieces = np.split(kept, np.cumsum(lengths)[:-1])[earlier:]
    sizes = np.diff(np.append(starts, total))
    only_index = known & (sizes == 1)
    return Verdict(
        pieces,
        Block(in_order[starts], np.minimum(pages, MAX_COMMON_PAGES).astype(np.uint16)),
        int(starts.size - only_index.sum()),
        int(((known & (sizes > 1)) | (~known & (pages > 1))).sum()),
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """Which paragraphs of one file stay: bool arrays in page order, shape (n,).

    repeated_in_page marks the dropped ones whose only fault is an earlier copy in the same page.
    """

    mask: np.ndarray
    repeated_in_page: np.ndarray


def apply(keys: FileKeys, bits: np.ndarray, within_page: Literal["first", "all"]) -> Kept:
    """Turn one bit for each distinct key (bool, shape (d,)) into the paragraphs that stay."""
    count = keys.inverse.size
    if bits.size != keys.distinct.size:
        raise ValueError(f"{bits.size} bits for {keys.distinct.size} distinct keys")
    position = np.arange(count)
    first = np.zeros(keys.distinct.size, np.int64)
    first[keys.inverse[::-1]] = position[::-1]  # the last assignment wins: the first occurrence
    page = _page_of_paragraph(keys.offsets)
    owner = first[keys.inverse]
    on_owner_page = bits[keys.inverse] & (page == page[owner])
    repeated = on_owner_page & (position != owner)
    if within_page == "all":
        return Kept(on_owner_page, np.zeros(count, bool))
    return Kept(on_owner_page & ~repeated, repeated)


def _page_of_paragraph(offsets: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
