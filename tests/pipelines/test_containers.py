"""Stored bytes to text: members, offsets, gaps, bounded memory and time."""

from __future__ import annotations

import gzip
import io
import random
import struct
import time
import tracemalloc
from itertools import pairwise

import pytest
import zstandard

from pipelines.containers import CHUNK_BYTES, Chunk, Gap, read

MEMBER = gzip.compress(b"WARC/1.0 first\n", mtime=0)


def chunks_and_gaps(data: bytes) -> tuple[list[Chunk], list[Gap]]:
    items = list(read(memoryview(data)))
    return (
        [item for item in items if isinstance(item, Chunk)],
        [item for item in items if isinstance(item, Gap)],
    )


def test_each_block_knows_its_offset_and_its_member() -> None:
    members = [gzip.compress(b"WARC/%d\n" % i, mtime=0) for i in range(3)]
    chunks, gaps = chunks_and_gaps(b"".join(members))
    assert gaps == []
    assert len(chunks) == 1
    ends = [len(members[0]), len(members[0] + members[1])]
    assert chunks[0].data == b"WARC/0\nWARC/1\nWARC/2\n"
    assert chunks[0].at == [0, 7, 14]
    assert chunks[0].stored == chunks[0].member == [0, *ends]
    assert chunks[0].stored_end == sum(map(len, members))


def test_a_large_member_is_streamed_in_chunks_with_block_offsets() -> None:
    text = b"".join(b"WARC/%08d\n" % i for i in range(400_000))
    stored = gzip.compress(text, 6, mtime=0)
    chunks, gaps = chunks_and_gaps(stored)
    assert gaps == []
    assert b"".join(chunk.data for chunk in chunks) == text
    assert max(len(chunk.data) for chunk in chunks) < 2 * CHUNK_BYTES
    offsets = [offset for chunk in chunks for offset in chunk.stored]
    assert offsets == sorted(set(offsets))
    assert offsets[0] == 0
    assert {member for chunk in chunks for member in chunk.member} == {0}
    assert not any(chunk.starts_run or chunk.fault for chunk in chunks)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("extra",), id="FEXTRA"),
        pytest.param(("name", "comment"), id="FNAME+FCOMMENT"),
    ],
)
def test_optional_gzip_header_fields(flags: tuple[str, ...]) -> None:
    bits = {"extra": 4, "name": 8, "comment": 16}
    head = bytes([0x1F, 0x8B, 8, sum(bits[flag] for flag in flags), 0, 0, 0, 0, 0, 3])
    if "extra" in flags:
        head += struct.pack("<H", 20_000) + b"sl" + bytes(19_998)
    head += b"name\0comment\0" if "name" in flags else b""
    chunks, gaps = chunks_and_gaps(head + MEMBER[10:] + MEMBER)
    assert gaps == []
    assert chunks[0].data == b"WARC/1.0 first\n" * 2
    assert chunks[0].stored == [0, len(head) + len(MEMBER) - 10]


def test_empty_members_and_zero_padding_are_harmless() -> None:
    empty = gzip.compress(b"", mtime=0)
    chunks, gaps = chunks_and_gaps(empty + MEMBER + bytes(512) + MEMBER + empty + bytes(7))
    assert gaps == []
    assert b"".join(chunk.data for chunk in chunks) == b"WARC/1.0 first\n" * 2
    assert chunks_and_gaps(empty) == ([], [])
    assert chunks_and_gaps(b"") == ([], [])


@pytest.mark.parametrize("part", ["crc", "length"])
def test_the_checksum_and_the_length_are_verified(part: str) -> None:
    damaged = bytearray(MEMBER)
    damaged[-8 if part == "crc" else -4] ^= 1
    chunks, gaps = chunks_and_gaps(MEMBER + bytes(damaged) + MEMBER)
    size = len(MEMBER)
    assert gaps == [Gap(size, 2 * size, "damaged_member")]
    assert [chunk.fault for chunk in chunks] == [None, "damaged_member", None]
    assert [chunk.starts_run for chunk in chunks] == [False, True, False]


def test_the_beginning_of_a_cut_member_is_read() -> None:
    text = b"".join(b"%d," % (i * i) for i in range(9_000))
    stored = gzip.compress(text, mtime=0)
    chunks, gaps = chunks_and_gaps(MEMBER + stored[: len(stored) // 2])
    assert gaps == [Gap(len(MEMBER), len(MEMBER) + len(stored) // 2, "truncated_member")]
    assert chunks[1].fault == "truncated_member"
    assert len(chunks[1].data) > len(text) // 3
    assert text.startswith(chunks[1].data)


def test_garbage_before_between_and_behind_members() -> None:
    junk = b"some junk, no member \x1f\x8b here" * 9
    size = len(MEMBER)
    chunks, gaps = chunks_and_gaps(junk + MEMBER + junk + MEMBER + junk)
    assert gaps == [
        Gap(0, len(junk), "garbage"),
        Gap(len(junk) + size, 2 * len(junk) + size, "garbage"),
        Gap(2 * len(junk) + 2 * size, 3 * len(junk) + 2 * size, "garbage"),
    ]
    assert b"".join(chunk.data for chunk in chunks) == b"WARC/1.0 first\n" * 2


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_damaged_magic_number_is_a_damaged_member(index: int) -> None:
    damaged = bytearray(MEMBER)
    damaged[index] ^= 0xFF
    _, gaps = chunks_and_gaps(MEMBER + bytes(damaged) + MEMBER)
    assert gaps == [Gap(len(MEMBER), 2 * len(MEMBER), "damaged_member")]


def test_a_verified_member_that_is_no_warc_ends_the_damage() -> None:
    # Records that span members, as in bgzip: no member but the first begins with WARC/.
    second = gzip.compress(b"the middle of a record", mtime=0)
    damaged = bytearray(second)
    damaged[12] ^= 0xFF
    chunks, gaps = chunks_and_gaps(MEMBER + bytes(damaged) + second)
    assert gaps == [Gap(len(MEMBER), len(MEMBER) + len(second), "damaged_member")]
    assert chunks[-1].data == b"the middle of a record"


def frame(text: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(text)


def test_zstd_frames_of_every_shape() -> None:
    text = b"WARC/" + bytes(range(256)) * 3_000
    streamed = io.BytesIO()
    with zstandard.ZstdCompressor(write_checksum=True).stream_writer(
        streamed, closefd=False
    ) as out:
        for start in range(0, len(text), 70_000):
            out.write(text[start : start + 70_000])
    skippable = b"\x53\x2a\x4d\x18" + struct.pack("<I", 5) + b"hello"
    zeros = b"WARC/" + bytes(300_000)
    frames = [
        frame(b"WARC/1\n"),
        skippable,
        frame(text, write_checksum=True),
        streamed.getvalue(),
        frame(b""),
        frame(zeros, write_content_size=False),
    ]
    chunks, gaps = chunks_and_gaps(b"".join(frames))
    assert gaps == []
    assert b"".join(chunk.data for chunk in chunks) == b"WARC/1\n" + text + text + zeros
    starts = [sum(map(len, frames[:i])) for i in (0, 2, 3, 5)]
    members = sorted({member for chunk in chunks for member in chunk.member})
    assert members == starts


def test_damaged_and_cut_zstd_frames() -> None:
    frames = [frame(b"WARC/%d\n" % i * 40, write_checksum=True) for i in range(4)]
    damaged = bytearray(frames[1])
    damaged[-1] ^= 1
    stored = frames[0] + bytes(damaged) + frames[2] + frames[3][:-5]
    _, gaps = chunks_and_gaps(stored)
    a, b, c = (sum(map(len, frames[:i])) for i in (1, 2, 3))
    assert gaps == [Gap(a, b, "damaged_member"), Gap(c, len(stored), "truncated_member")]


@pytest.mark.parametrize("size", [20_000, CHUNK_BYTES + 20_000])
def test_the_last_block_of_a_member_reaches_to_its_end(size: int) -> None:
    """The fuzzer's find: a checksum that is a step of its own belonged to no block."""
    text = random.Random(1).randbytes(size)
    extra = len(gzip.compress(text, 0)) % 8192
    members = (gzip.compress(text[: size - extra + more], 0) for more in range(40))
    member = next(one for one in members if len(one) % 8192 == 4)
    for stored in (member, member + MEMBER):
        chunks, gaps = chunks_and_gaps(stored)
        assert gaps == []
        blocks = [(a, b) for chunk in chunks for a, b in zip(chunk.stored, chunk.ends, strict=True)]
        assert [a for a, _ in blocks] == [0, *[b for _, b in blocks[:-1]]]
        assert blocks[-1][1] == len(stored)


@pytest.mark.parametrize("text", [b"", b"WARC/" + bytes(300), b"WARC/" + bytes(70_000)])
def test_a_zstd_frame_with_another_size_than_it_states_is_damaged(text: bytes) -> None:
    """The fuzzer's find: libzstd lets it pass when the last block is empty."""
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj(size=len(text))
    stored = compressor.compress(text)
    stored += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + compressor.flush()
    _, gaps = chunks_and_gaps(stored)
    assert gaps == []
    # The lowest byte of the size follows the descriptor, and the window where there is one.
    size_at = 5 if stored[4] & 0x20 else 6
    damaged = bytearray(stored)
    damaged[size_at] ^= 1
    _, gaps = chunks_and_gaps(bytes(damaged))
    assert gaps == [Gap(0, len(stored), "damaged_member")]


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_memory_stays_bounded_on_a_decompression_bomb(codec: str) -> None:
    zeros = bytes(1 << 20)
    out = io.BytesIO()
    if codec == "gzip":
        with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as file:
            for _ in range(200):
                file.write(zeros)
    else:
        with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as file:
            for _ in range(200):
                file.write(zeros)
    stored = memoryview(out.getvalue())
    tracemalloc.start()
    total = sum(len(item.data) for item in read(stored) if isinstance(item, Chunk))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 200 << 20
    assert peak < 40 << 20


def test_false_magic_numbers_cost_linear_time() -> None:
    magic = b"\x1f\x8b\x08" * 200_000
    began = time.process_time()
    chunks, gaps = chunks_and_gaps(MEMBER + magic + MEMBER)
    assert time.process_time() - began < 20
    assert gaps == [Gap(len(MEMBER), len(MEMBER) + len(magic), "damaged_member")]
    assert [chunk.data for chunk in chunks] == [b"WARC/1.0 first\n"] * 2


def test_members_inside_one_another_cost_linear_time() -> None:
    """Each false member is a stored block that runs over the following ones, up to the end.

    Tried one by one, 30,000 of them would decompress 30 GB.
    """
    unit = b"\x1f\x8b\x08\0\0\0\0\0\0\3\0" + struct.pack("<HH", 65_535, 0) + b"WARC/1.0\r\n"
    stored = unit.ljust(64, b"x") * 30_000
    began = time.process_time()
    chunks, gaps = chunks_and_gaps(stored)
    assert time.process_time() - began < 20
    assert gaps[0].offset == 0
    assert gaps[-1].end == len(stored)
    assert all(chunk.fault for chunk in chunks)
    assert all(one.end == two.offset for one, two in pairwise(gaps))
