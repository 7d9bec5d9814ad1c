"""Dedup against a plain Python oracle: every policy, every scope, the index."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import DamagedInput
from pipelines.arrays import open_arrays
from pipelines.dedup import (
    MAX_RANGES,
    Block,
    FileKeys,
    apply,
    judge,
    range_bounds,
    read_all_ranges,
    read_range,
)

Keep = Literal["first", "none"]
Within = Literal["first", "all"]
Files = list[list[list[int]]]  # files, pages, paragraph keys

# Few different keys, so that they meet; spread over the whole 64-bit space.
KEYS = st.sampled_from([0, 1, 2**20, 2**52, 2**63 - 1, 2**63, 3 * 2**62, 2**64 - 1])
FILES = st.lists(st.lists(st.lists(KEYS, max_size=5), max_size=4), min_size=1, max_size=4)


def naive(
    files: Files, keep: Keep, common_pages: int | None, within: Within, index: dict[int, int]
) -> list[list[list[bool]]]:
    """The policy as one would say it, page by page."""
    pages_with = dict(index)
    for file in files:
        for page in file:
            for key in set(page):
                pages_with[key] = pages_with.get(key, 0) + 1
    seen = set(index)
    result = []
    for file in files:
        of_file = []
        for page in file:
            kept, here = [], set()
            for key in page:
                good = key not in seen
                if keep == "none":
                    good = good and pages_with[key] == 1
                elif common_pages is not None:
                    good = good and pages_with[key] < common_pages
                if within == "first":
                    good = good and key not in here
                here.add(key)
                kept.append(good)
            seen |= here
            of_file.append(kept)
        result.append(of_file)
    return result


def keys_of(file: list[list[int]]) -> FileKeys:
    hashes = np.array([key for page in file for key in page], np.uint64)
    offsets = np.cumsum([0, *(len(page) for page in file)])
    return FileKeys.of(hashes, offsets)


def ours(
    files: Files,
    keep: Keep,
    common_pages: int | None,
    within: Within,
    index: Block | None,
    folder: Path,
    parts: int,
) -> tuple[list[list[list[bool]]], Block]:
    """The same through key files, ranges, bits."""
    all_keys = [keys_of(file) for file in files]
    for number, keys in enumerate(all_keys):
        keys.write(folder / f"{number}.arrays", {})
    bits: list[list[np.ndarray]] = [[] for _ in files]
    merged = []
    for part in range(parts):
        blocks = []
        for number in range(len(files)):
            with open_arrays(folder / f"{number}.arrays") as file:
                blocks.append(read_range(file, part, parts))
        width = 2**64 // parts
        of_part = None
        if index is not None:
            here = (index.keys // np.uint64(width)) == part if parts > 1 else index.keys >= 0
            of_part = Block(index.keys[here], index.page_counts[here])
        verdict = judge(blocks, keep=keep, common_pages=common_pages, index=of_part)
        merged.append(verdict.index)
        for number, piece in enumerate(verdict.keep):
            bits[number].append(piece)
    result = []
    for keys, pieces in zip(all_keys, bits, strict=True):
        mask = apply(keys, np.concatenate(pieces), within).mask.tolist()
        result.append([mask[a:b] for a, b in pairwise(keys.offsets.tolist())])
    index_out = Block(
        np.concatenate([block.keys for block in merged]),
        np.concatenate([block.page_counts for block in merged]),
    )
    return result, index_out


@settings(deadline=None, max_examples=150)
@given(
    files=FILES,
    policy=st.sampled_from([("none", None), ("first", None), ("first", 2), ("first", 3)]),
    within=st.sampled_from(["first", "all"]),
    earlier=st.none() | st.dictionaries(KEYS, st.integers(1, 3), max_size=3),
    parts=st.sampled_from([1, 2, 16, MAX_RANGES]),
)
def test_equals_naive(
    tmp_path_factory: pytest.TempPathFactory,
    files: Files,
    policy: tuple[Keep, int | None],
    within: Within,
    earlier: dict[int, int] | None,
    parts: int,
) -> None:
    keep, common_pages = policy
    parts = parts if parts < MAX_RANGES or len(files) == 1 else 16
    folder = tmp_path_factory.mktemp("keys")
    index = None
    if earlier is not None:
        keys = sorted(earlier)
        index = Block(
            np.array(keys, np.uint64), np.array([earlier[key] for key in keys], np.uint16)
        )
    got, index_out = ours(files, keep, common_pages, within, index, folder, parts)
    assert got == naive(files, keep, common_pages, within, earlier or {})
    counts = dict(earlier or {})
    for file in files:
        for page in file:
            for key in set(page):
                counts[key] = counts.get(key, 0) + 1
    assert dict(zip(index_out.keys.tolist(), index_out.page_counts.tolist(), strict=True)) == counts
    assert index_out.keys.tolist() == sorted(counts)


def test_file_keys_by_hand() -> None:
    keys = FileKeys.of(np.array([7, 5, 7, 7, 9], np.uint64), np.array([0, 3, 5]))
    assert keys.distinct.tolist() == [5, 7, 9]
    assert keys.page_counts.tolist() == [1, 2, 1]  # 7 stands twice in page 0, once in page 1
    assert keys.inverse.tolist() == [1, 0, 1, 1, 2]


def test_repeats_in_a_page_have_their_own_counter() -> None:
    keys = FileKeys.of(np.array([7, 5, 7, 7, 9], np.uint64), np.array([0, 3, 5]))
    kept = apply(keys, np.ones(3, bool), "first")
    assert kept.mask.tolist() == [True, True, False, False, True]
    assert kept.repeated_in_page.tolist() == [False, False, True, False, False]
    everything = apply(keys, np.ones(3, bool), "all")
    assert everything.mask.tolist() == [True, True, True, False, True]
    assert not everything.repeated_in_page.any()


def test_a_second_equal_crawl_loses_everything_a_disjoint_one_nothing() -> None:
    first = [keys_of([[1, 2], [3]]), keys_of([[4]])]
    blocks = [Block(keys.distinct, keys.page_counts) for keys in first]
    seen = judge(blocks, keep="first")
    assert [piece.tolist() for piece in seen.keep] == [[True, True, True], [True]]
    again = judge(blocks, keep="first", index=seen.index)
    assert not any(piece.any() for piece in again.keep)
    assert again.repeated == again.distinct == 4
    other = keys_of([[10, 11]])
    disjoint = judge([Block(other.distinct, other.page_counts)], keep="none", index=seen.index)
    assert disjoint.keep[0].all()
    assert (disjoint.distinct, disjoint.repeated) == (2, 0)
    assert disjoint.index.keys.tolist() == [1, 2, 3, 4, 10, 11]


def test_counts_of_keys() -> None:
    files = [keys_of([[1, 2], [2, 3]]), keys_of([[3, 4]])]
    verdict = judge([Block(keys.distinct, keys.page_counts) for keys in files], keep="first")
    assert (verdict.distinct, verdict.repeated) == (4, 2)


def test_ranges_cut_the_whole_space(tmp_path: Path) -> None:
    edges = [0, 2**52 - 1, 2**52, 2**63 - 1, 2**63, 2**64 - 1]
    keys_of([edges]).write(tmp_path / "keys", {})
    with open_arrays(tmp_path / "keys") as file:
        assert [range_bounds(file, part, 2) for part in (0, 1)] == [(0, 4), (4, 6)]
        assert range_bounds(file, 0, MAX_RANGES) == (0, 2)
        assert range_bounds(file, 1, MAX_RANGES) == (2, 3)
        assert read_range(file, MAX_RANGES - 1, MAX_RANGES).keys.tolist() == [2**64 - 1]


def test_wrong_number_of_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="2 bits for 1 distinct keys"):
        apply(keys_of([[1]]), np.ones(2, bool), "first")


COUNTS = st.dictionaries(st.integers(0, 2**64 - 1), st.integers(1, 65_535), max_size=40)


def block_of(counts: dict[int, int]) -> Block:
    keys = sorted(counts)
    return Block(np.array(keys, np.uint64), np.array([counts[key] for key in keys], np.uint16))


@settings(deadline=None)
@given(COUNTS)
def test_a_block_travels_as_bytes(counts: dict[int, int]) -> None:
    data = block_of(counts).to_bytes()
    back = Block.from_bytes(data)
    assert (back.keys.dtype, back.page_counts.dtype) == (np.uint64, np.uint16)
    assert dict(zip(back.keys.tolist(), back.page_counts.tolist(), strict=True)) == counts
    several = sum(count != 1 for count in counts.values())
    assert len(data) == 12 + 8 * len(counts) + -(-len(counts) // 8) + 2 * several


def test_the_bytes_of_a_block_are_fixed() -> None:
    # Little endian on every machine: checksum, size 2, keys 1 and 2**63, bits 01, count 3.
    data = block_of({1: 1, 2**63: 3}).to_bytes()
    rest = bytes.fromhex("02000000 0100000000000000 0000000000000080 40 0300")
    assert data[8:] == rest
    assert data[:8] == xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little")


@settings(deadline=None)
@given(COUNTS, st.data())
def test_a_changed_or_cut_block_is_refused(counts: dict[int, int], draw: st.DataObject) -> None:
    data = block_of(counts).to_bytes()
    place = draw.draw(st.integers(0, len(data) - 1))
    changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    for wrong in (changed, data[:place]):
        with pytest.raises(DamagedInput, match="differs from its checksum"):
            Block.from_bytes(wrong)


@pytest.mark.parametrize("parts", [1, 4, MAX_RANGES])
def test_all_ranges_at_once_are_the_ranges_one_by_one(parts: int, tmp_path: Path) -> None:
    hashes = np.random.default_rng(parts).integers(0, 2**64, 3000, np.uint64)
    FileKeys.of(np.append(hashes, hashes[:99]), np.array([0, 3000, 3099])).write(tmp_path / "k", {})
    with open_arrays(tmp_path / "k") as file:
        together = read_all_ranges(file, parts)
        assert len(together) == parts
        for part in range(0, parts, max(1, parts // 64)):
            alone = read_range(file, part, parts)
            assert together[part].keys.tolist() == alone.keys.tolist()
            assert together[part].page_counts.tolist() == alone.page_counts.tolist()


@settings(deadline=None)
@given(
    blocks=st.lists(st.dictionaries(KEYS, st.integers(1, 3), max_size=6), min_size=1, max_size=4),
    policy=st.sampled_from([("none", None), ("first", None), ("first", 2)]),
    index=st.none() | st.dictionaries(KEYS, st.integers(1, 3), max_size=4),
    step=st.integers(1, 5),
)
def test_steps_change_nothing(
    blocks: list[dict[int, int]],
    policy: tuple[Keep, int | None],
    index: dict[int, int] | None,
    step: int,
) -> None:
    rows = [block_of(counts) for counts in blocks]
    options: dict[str, Any] = {"keep": policy[0], "common_pages": policy[1]}
    options["index"] = None if index is None else block_of(index)
    whole = judge(rows, **options, keys_per_step=2**40)
    stepped = judge(rows, **options, keys_per_step=step)
    assert [kept.tolist() for kept in stepped.keep] == [kept.tolist() for kept in whole.keep]
    assert stepped.index.keys.tolist() == whole.index.keys.tolist()
    assert stepped.index.page_counts.tolist() == whole.index.page_counts.tolist()
    assert (stepped.distinct, stepped.repeated) == (whole.distinct, whole.repeated)
