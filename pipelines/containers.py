"""Stored bytes to text: gzip members, zstd frames or plain bytes, with the offset of each piece.

A stored file becomes chunks of uncompressed bytes, each with a map back to stored offsets, and
gaps: ranges that could not be read, with a reason. Nothing here knows about records, but for
one thing: after damage, a place where the text begins with `WARC/` is taken for a member.

Each gzip member is decompressed and its checksum verified before its text is passed on. One too
large to hold is decompressed twice, first to learn whether it is whole. The readable beginning
of a member that is not whole comes as chunks with a `fault`, and the member's gap follows.

Memory: a chunk, one held member, and what one step of the decompressor gives (deflate expands
at most 1,032 times, a zstd block holds at most 128 KiB).

Time: work that failed (members that turned out damaged, places that only look like a member) is
limited to a multiple of the file's size; past that, the search goes on behind what has been
tried instead of right behind its beginning. So it stays linear on any input.

Not an error, by decision: empty members, zstd skippable frames, and zero bytes between or after
members (padding; `gzip` ignores it too). Left out on purpose: zstd dictionaries and zstd windows
over 128 MiB (the frame is reported as damaged), and files that change their container midway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from isal import isal_zlib

from pipelines.codecs import FEED_BYTES, Blocks, BrokenError, InflateError, Zstd, gzip_blocks

GapReason = Literal["damaged_member", "truncated_member", "garbage"]

CHUNK_BYTES = 256 << 10
_PROBE_FEED_BYTES = 128
_CHEAP_PROBE_BYTES = 512
_FAILED_WORK_FACTOR = 8
_WARC = b"WARC/"
_ZEROS = re.compile(rb"\0*")
_PLAIN_WARC = re.compile(rb"[\r\n]*WARC/\d")


@dataclass(slots=True)
class Chunk:
    """Uncompressed bytes that follow those of the chunk before, unless `starts_run`.

    `at`, `stored`, `ends` and `member` describe the stored blocks that the bytes come from: where
    each begins in `data`, its offset in the stored file and the offset behind it (what has no
    text, as padding, belongs to no block), and the offset of its member (in a plain file the
    block itself). `exact`: every byte of `data` is one stored byte.
    """

    data: bytes
    at: list[int]
    stored: list[int]
    member: list[int]
    ends: list[int]
    fault: GapReason | None = None
    starts_run: bool = False
    exact: bool = False

    @property
    def stored_end(self) -> int:
        """The offset behind the last block."""
        return self.ends[-1]


@dataclass(frozen=True, slots=True)
class Gap:
    """Stored bytes `offset` to `end` that could not be read.

    After chunks with a `fault` it covers their whole member, the readable beginning included.
    """

    offset: int
    end: int
    reason: GapReason


def read(data: memoryview) -> Iterator[Chunk | Gap]:
    """The stored file `data` as chunks and gaps, in order. Raises nothing on bad bytes."""
    codec = _detect(data)
    return _plain(data) if codec is None else _members(data, codec)


class _Codec(NamedTuple):
    magic: bytes
    starts: re.Pattern[bytes]
    blocks: Blocks


def _detect(data: memoryview) -> _Codec | None:
    """The codec of `data`; None for plain bytes."""
    if not data:
        return None
    codecs = (
        _Codec(b"\x1f\x8b\x08", re.compile(rb"\x1f\x8b\x08(?=[\0-\x1f])"), gzip_blocks),
        _Codec(
            b"\x28\xb5\x2f\xfd",
            re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", re.DOTALL),
            Zstd().blocks,
        ),
    )
    for codec in codecs:
        if codec.starts.match(data) or codec.magic.startswith(bytes(data[: len(codec.magic) + 1])):
            return codec
    if not _PLAIN_WARC.match(data):
        # The beginning may be what is damaged.
        for codec in codecs:
            if _Trials(data, codec, only_warc=True).next_member(0) is not None:
                return codec
    return None


def _plain(data: memoryview) -> Iterator[Chunk]:
    for start in range(0, len(data), CHUNK_BYTES):
        piece = bytes(data[start : start + CHUNK_BYTES])
        yield Chunk(piece, [0], [start], [start], [start + len(piece)], exact=True)


class _Trials:
    """Looks for the next member behind damage, within the limit on failed work."""

    def __init__(self, data: memoryview, codec: _Codec, *, only_warc: bool = False) -> None:
        self._data = data
        self._codec = codec
        self._only_warc = only_warc
        self._left_bytes = _FAILED_WORK_FACTOR * len(data) + CHUNK_BYTES

    def resume_from(self, member: int, broken: BrokenError) -> int:
        """Where to look for the next member after the one at `member` failed."""
        self._left_bytes -= broken.end - member
        return member + 1 if self._left_bytes > 0 else max(member + 1, broken.end)

    def next_member(self, start: int) -> int | None:
        """Offset of the first member at or behind `start`; None when there is none.

        A member is a place with the magic number from where either text comes that begins with
        `WARC/`, or a whole member is read without an error.
        """
        for found in self._codec.starts.finditer(self._data, start):
            if self._is_member(found.start()):
                return found.start()
        return None

    def _is_member(self, at: int) -> bool:
        poor = self._left_bytes <= 0
        head, stop = b"", at
        try:
            for stop, text in self._codec.blocks(self._data, at, _PROBE_FEED_BYTES, -1):
                head = (head + text[: len(_WARC)])[: len(_WARC)]
                if head == _WARC:
                    return True
                if self._only_warc and len(head) == len(_WARC):
                    return False
                if poor and stop - at >= _CHEAP_PROBE_BYTES:
                    return False
                if not poor and stop - at > self._left_bytes:
                    self._left_bytes = 0
                    return False
        except BrokenError as broken:
            self._left_bytes -= broken.end - at
            return False
        return not self._only_warc


@dataclass(slots=True)
class _Batch:
    """Blocks on their way to become a chunk."""

    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    at: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    member: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, member: int, stored: int, stored_end: int, text: bytes) -> None:
        self.at.append(self.size)
        self.stored.append(stored)
        self.ends.append(stored_end)
        self.member.append(member)
        self.pieces.append(text)
        self.size += len(text)

    def flush(self, fault: GapReason | None = None, *, starts_run: bool = False) -> Iterator[Chunk]:
        if self.pieces:
            data = b"".join(self.pieces)
            yield Chunk(data, self.at, self.stored, self.member, self.ends, fault, starts_run)
            self.pieces, self.size = [], 0
            self.at, self.stored, self.member, self.ends = [], [], [], []


def _texts(blocks: Iterator[tuple[int, bytes]], start: int) -> Iterator[tuple[int, int, bytes]]:
    """(offset, offset behind, text) of each block.

    Those without text are joined to the next one, or at the end of the member to the last one.
    """
    held: list[tuple[int, int, bytes]] = []
    stop = start
    try:
        for stop, text in blocks:
            if text:
                yield from held
                held = [(start, stop, text)]
                start = stop
    except BrokenError:
        yield from held
        raise
    yield from ((block, stop, text) for block, _, text in held)


def _members(data: memoryview, codec: _Codec) -> Iterator[Chunk | Gap]:
    size, at = len(data), 0
    batch = _Batch()
    trials = _Trials(data, codec)
    while at < size:
        if codec.blocks is gzip_blocks:
            at = _small_gzip_members(data, at, batch)
            if batch.size >= CHUNK_BYTES:
                yield from batch.flush()
            if at == size:
                break
        if not codec.starts.match(data, at):
            padding = _ZEROS.match(data, at)
            if padding and padding.end() > at:
                at = padding.end()
                continue
            yield from batch.flush()
            end = trials.next_member(at + 1) or size
            yield Gap(at, end, _reason_without_magic(data, at, codec.magic))
            at = end
            continue
        try:
            end, held = _verified(data, codec, at)
        except BrokenError as broken:
            yield from batch.flush()
            end = trials.next_member(trials.resume_from(at, broken)) or size
            reason: GapReason = "damaged_member"
            if broken.hungry and end == size:
                reason = "truncated_member"
            gap = Gap(at, end, reason)
            yield from _readable_beginning(data, codec, gap, broken)
            yield gap
        else:
            blocks = _texts(codec.blocks(data, at, FEED_BYTES, -1), at) if held is None else held
            for block, stop, text in blocks:
                batch.add(at, block, stop, text)
                if batch.size >= CHUNK_BYTES:
                    yield from batch.flush()
        at = end
    yield from batch.flush()


def _small_gzip_members(data: memoryview, at: int, batch: _Batch) -> int:
    """Add the whole members at `at` of at most CHUNK_BYTES; gives the offset behind the last one.

    What `_verified` makes of them, in less time. It stops at another member and when it is full.
    """
    size = len(data)
    while batch.size < CHUNK_BYTES and at + 4 <= size and data[at + 3] < 0x20:
        decompress = isal_zlib.decompressobj(31)
        held: list[tuple[int, int, bytes]] = []
        start, stop, held_bytes = at, at, 0
        try:
            while not decompress.eof and held_bytes <= CHUNK_BYTES and stop < size:
                step = data[stop : stop + FEED_BYTES]
                text = decompress.decompress(step)
                stop += len(step) - len(decompress.unused_data)
                if text:
                    held.append((start, stop, text))
                    held_bytes += len(text)
                    start = stop
        except InflateError:
            break
        if not decompress.eof or held_bytes > CHUNK_BYTES:
            break
        for start, end, text in held[:-1]:
            batch.add(at, start, end, text)
        for start, _, text in held[-1:]:
            batch.add(at, start, stop, text)
        at = stop
    return at


def _verified(
    data: memoryview, codec: _Codec, member: int
) -> tuple[int, list[tuple[int, int, bytes]] | None]:
    """The offset behind a whole member, and its texts, or None when they are too large to hold.

    Raises BrokenError when the member is not whole.
    """
    held: list[tuple[int, int, bytes]] = []
    held_bytes, start, stop = 0, member, member
    for stop, text in codec.blocks(data, member, FEED_BYTES, -1):
        if text:
            held_bytes += len(text)
            if held_bytes <= CHUNK_BYTES:
                held.append((start, stop, text))
            start = stop
    if held:
        start, _, text = held[-1]
        held[-1] = start, stop, text
    return stop, held if held_bytes <= CHUNK_BYTES else None


def _readable_beginning(
    data: memoryview, codec: _Codec, gap: Gap, broken: BrokenError
) -> Iterator[Chunk]:
    """What the member in `gap` gives before it breaks, or before the next one begins."""
    batch = _Batch()
    member, end, fault = gap.offset, gap.end, gap.reason
    starts_run = True
    fine_from = -1 if broken.hungry else broken.at
    try:
        for block, stop, text in _texts(codec.blocks(data, member, FEED_BYTES, fine_from), member):
            if block >= end:
                break
            batch.add(member, block, min(stop, end), text)
            if batch.size >= CHUNK_BYTES:
                yield from batch.flush(fault, starts_run=starts_run)
                starts_run = False
    except BrokenError:
        pass
    yield from batch.flush(fault, starts_run=starts_run)


def _reason_without_magic(data: memoryview, at: int, magic: bytes) -> GapReason:
    """Why nothing can be read at `at`, where a member should begin but its magic number is not."""
    head = bytes(data[at : at + len(magic)])
    if at + len(magic) >= len(data) and magic.startswith(head):
        return "truncated_member"
    equal = sum(a == b for a, b in zip(head, magic, strict=False))
    return "damaged_member" if equal >= len(magic) - 1 else "garbage"
