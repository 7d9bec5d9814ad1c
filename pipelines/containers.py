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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import zstandard
from isal import isal_zlib

GapReason = Literal["damaged_member", "truncated_member", "garbage"]

CHUNK_BYTES = 256 << 10
_FEED_BYTES = 8 << 10
# Inside the block of a damaged member where the decompressor gives up it is fed in small steps,
# because it withholds the text of a step that fails.
_FINE_FEED_BYTES = 16
_PROBE_FEED_BYTES = 128
_CHEAP_PROBE_BYTES = 512
_MAX_ZSTD_WINDOW_BYTES = 1 << 27
_FAILED_WORK_FACTOR = 8
# isal's stub declares its error class as an instance of Exception.
_InflateError: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]
_WARC = b"WARC/"
_ZEROS = re.compile(rb"\0*")
_PLAIN_WARC = re.compile(rb"[\r\n]*WARC/\d")


@dataclass(slots=True)
class Chunk:
    """Uncompressed bytes that follow those of the chunk before, unless `starts_run`.

    `at`, `stored` and `member` describe the stored blocks that the bytes come from: where each
    begins in `data`, its offset in the stored file, and the offset of its member (in a plain
    file the block itself). `stored_end` is the offset behind the last block. `exact`: every byte
    of `data` is one stored byte.
    """

    data: bytes
    at: list[int]
    stored: list[int]
    member: list[int]
    stored_end: int
    fault: GapReason | None = None
    starts_run: bool = False
    exact: bool = False


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


class _BrokenError(Exception):
    """A member could not be read on: `at` is the offset of the step that failed."""

    def __init__(self, at: int, end: int, *, hungry: bool) -> None:
        super().__init__()
        self.at = at
        self.end = end
        self.hungry = hungry  # nothing was wrong, the file ended


# (data, offset of the member, bytes a step, offset from which steps are fine) ->
# (offset behind the step, its text) ...; the last one ends exactly where the member ends.
_Blocks = Callable[[memoryview, int, int, int], Iterator[tuple[int, bytes]]]


class _Codec(NamedTuple):
    magic: bytes
    starts: re.Pattern[bytes]
    blocks: _Blocks


def _detect(data: memoryview) -> _Codec | None:
    """The codec of `data`; None for plain bytes."""
    if not data:
        return None
    codecs = (
        _Codec(b"\x1f\x8b\x08", re.compile(rb"\x1f\x8b\x08(?=[\0-\x1f])"), _gzip_blocks),
        _Codec(
            b"\x28\xb5\x2f\xfd",
            re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", re.DOTALL),
            _Zstd().blocks,
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
        yield Chunk(piece, [0], [start], [start], start + len(piece), exact=True)


def _gzip_blocks(
    data: memoryview, member: int, feed: int = _FEED_BYTES, fine_from: int = -1
) -> Iterator[tuple[int, bytes]]:
    """The text of one gzip member; its CRC and length are verified. Raises _BrokenError."""
    decompressor = isal_zlib.decompressobj(31)
    at, size, whole = member, len(data), False
    while not whole:
        if at >= size:
            raise _BrokenError(at, at, hungry=True)
        step = data[at : at + (_FINE_FEED_BYTES if 0 <= fine_from <= at else feed)]
        try:
            text = decompressor.decompress(step)
        except _InflateError:
            raise _BrokenError(at, at + len(step), hungry=False) from None
        whole = decompressor.eof
        at += len(step) - len(decompressor.unused_data)
        yield at, text


class _Zstd:
    """Reads zstd frames. One frame at a time: all share one decompression context."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)

    def blocks(
        self, data: memoryview, frame: int, _feed: int = 0, _fine_from: int = -1
    ) -> Iterator[tuple[int, bytes]]:
        """The text of one frame, block by block (RFC 8878, 3.1.1). Raises _BrokenError."""
        at = frame
        if data[at] != 0x28:  # a skippable frame
            yield _behind(data, at, 8 + int.from_bytes(data[at + 4 : at + 8], "little")), b""
            return
        decompressor = self._context.decompressobj()
        descriptor = data[_behind(data, at, 5) - 1]
        single_segment = descriptor >> 5 & 1
        content_size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
        dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
        stop = _behind(data, at, 6 - single_segment + dictionary_bytes + content_size_bytes)
        last = False
        while True:
            try:
                text = decompressor.decompress(data[at:stop])
            except zstandard.ZstdError:
                raise _BrokenError(at, stop, hungry=False) from None
            yield stop, text
            at = stop
            if last:
                break
            header = int.from_bytes(data[at : _behind(data, at, 3)], "little")
            last = bool(header & 1)
            kind, size = header >> 1 & 3, header >> 3
            checksum_bytes = 4 if last and descriptor & 4 else 0
            stop = _behind(data, at, 3 + (1 if kind == 1 else size) + checksum_bytes)
        if not decompressor.eof:
            raise _BrokenError(at, at, hungry=False)


def _behind(data: memoryview, at: int, size: int) -> int:
    if at + size > len(data):
        raise _BrokenError(at, len(data), hungry=True)
    return at + size


class _Trials:
    """Looks for the next member behind damage, within the limit on failed work."""

    def __init__(self, data: memoryview, codec: _Codec, *, only_warc: bool = False) -> None:
        self._data = data
        self._codec = codec
        self._only_warc = only_warc
        self._left_bytes = _FAILED_WORK_FACTOR * len(data) + CHUNK_BYTES

    def resume_from(self, member: int, broken: _BrokenError) -> int:
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
        except _BrokenError as broken:
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

    def add(self, member: int, stored: int, text: bytes) -> None:
        self.at.append(self.size)
        self.stored.append(stored)
        self.member.append(member)
        self.pieces.append(text)
        self.size += len(text)

    def flush(
        self, end: int, fault: GapReason | None = None, *, starts_run: bool = False
    ) -> Iterator[Chunk]:
        if self.pieces:
            data = b"".join(self.pieces)
            yield Chunk(data, self.at, self.stored, self.member, end, fault, starts_run)
            self.pieces, self.size = [], 0
            self.at, self.stored, self.member = [], [], []


def _texts(blocks: Iterator[tuple[int, bytes]], start: int) -> Iterator[tuple[int, int, bytes]]:
    """(offset, offset behind, text) of each block, those without text joined to the next."""
    for stop, text in blocks:
        if text:
            yield start, stop, text
            start = stop


def _members(data: memoryview, codec: _Codec) -> Iterator[Chunk | Gap]:
    size, at = len(data), 0
    batch = _Batch()
    trials = _Trials(data, codec)
    while at < size:
        if codec.blocks is _gzip_blocks:
            at = _small_gzip_members(data, at, batch)
            if batch.size >= CHUNK_BYTES:
                yield from batch.flush(at)
            if at == size:
                break
        if not codec.starts.match(data, at):
            padding = _ZEROS.match(data, at)
            if padding and padding.end() > at:
                at = padding.end()
                continue
            yield from batch.flush(at)
            end = trials.next_member(at + 1) or size
            yield Gap(at, end, _reason_without_magic(data, at, codec.magic))
            at = end
            continue
        try:
            end, held = _verified(data, codec, at)
        except _BrokenError as broken:
            yield from batch.flush(at)
            end = trials.next_member(trials.resume_from(at, broken)) or size
            reason: GapReason = "damaged_member"
            if broken.hungry and end == size:
                reason = "truncated_member"
            gap = Gap(at, end, reason)
            yield from _readable_beginning(data, codec, gap, broken)
            yield gap
        else:
            blocks = _texts(codec.blocks(data, at, _FEED_BYTES, -1), at) if held is None else held
            for block, stop, text in blocks:
                batch.add(at, block, text)
                if batch.size >= CHUNK_BYTES:
                    yield from batch.flush(stop)
        at = end
    yield from batch.flush(size)


def _small_gzip_members(data: memoryview, at: int, batch: _Batch) -> int:
    """Add the whole members at `at` of at most CHUNK_BYTES; gives the offset behind the last one.

    What `_verified` makes of them, in less time. It stops at another member and when it is full.
    """
    size = len(data)
    while batch.size < CHUNK_BYTES and at + 4 <= size and data[at + 3] < 0x20:
        decompress = isal_zlib.decompressobj(31)
        held: list[tuple[int, bytes]] = []
        start, stop, held_bytes = at, at, 0
        try:
            while not decompress.eof and held_bytes <= CHUNK_BYTES and stop < size:
                step = data[stop : stop + _FEED_BYTES]
                text = decompress.decompress(step)
                stop += len(step) - len(decompress.unused_data)
                if text:
                    held.append((start, text))
                    held_bytes += len(text)
                    start = stop
        except _InflateError:
            break
        if not decompress.eof or held_bytes > CHUNK_BYTES:
            break
        for start, text in held:
            batch.add(at, start, text)
        at = stop
    return at


def _verified(
    data: memoryview, codec: _Codec, member: int
) -> tuple[int, list[tuple[int, int, bytes]] | None]:
    """The offset behind a whole member, and its texts, or None when they are too large to hold.

    Raises _BrokenError when the member is not whole.
    """
    held: list[tuple[int, int, bytes]] = []
    held_bytes, start, stop = 0, member, member
    for stop, text in codec.blocks(data, member, _FEED_BYTES, -1):
        if text:
            held_bytes += len(text)
            if held_bytes <= CHUNK_BYTES:
                held.append((start, stop, text))
            start = stop
    return stop, held if held_bytes <= CHUNK_BYTES else None


def _readable_beginning(
    data: memoryview, codec: _Codec, gap: Gap, broken: _BrokenError
) -> Iterator[Chunk]:
    """What the member in `gap` gives before it breaks, or before the next one begins."""
    batch = _Batch()
    member, end, fault = gap.offset, gap.end, gap.reason
    starts_run, stop = True, member
    fine_from = -1 if broken.hungry else broken.at
    try:
        for block, stop, text in _texts(codec.blocks(data, member, _FEED_BYTES, fine_from), member):
            if block >= end:
                break
            batch.add(member, block, text)
            if batch.size >= CHUNK_BYTES:
                yield from batch.flush(min(stop, end), fault, starts_run=starts_run)
                starts_run = False
    except _BrokenError:
        pass
    yield from batch.flush(min(stop, end), fault, starts_run=starts_run)


def _reason_without_magic(data: memoryview, at: int, magic: bytes) -> GapReason:
    """Why nothing can be read at `at`, where a member should begin but its magic number is not."""
    head = bytes(data[at : at + len(magic)])
    if at + len(magic) >= len(data) and magic.startswith(head):
        return "truncated_member"
    equal = sum(a == b for a, b in zip(head, magic, strict=False))
    return "damaged_member" if equal >= len(magic) - 1 else "garbage"
