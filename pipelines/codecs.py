"""Decompressors of one member: the text of a gzip member or zstd frame, step by step, verified.

A zstd frame is fed block by block, so that it is known from which block each piece of text comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import zstandard
from isal import isal_zlib

FEED_BYTES = 8 << 10
# Inside the block of a damaged member where the decompressor gives up it is fed in small steps,
# because it withholds the text of a step that fails.
_FINE_FEED_BYTES = 16
_MAX_ZSTD_WINDOW_BYTES = 1 << 27
# isal's stub declares its error class as an instance of Exception.
InflateError: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]


class BrokenError(Exception):
    """A member could not be read on: `at` is the offset of the step that failed."""

    def __init__(self, at: int, end: int, *, hungry: bool) -> None:
        super().__init__()
        self.at = at
        self.end = end
        self.hungry = hungry  # nothing was wrong, the file ended


# (data, offset of the member, bytes a step, offset from which steps are fine) ->
# (offset behind the step, its text) ...; the last one ends exactly where the member ends.
Blocks = Callable[[memoryview, int, int, int], Iterator[tuple[int, bytes]]]


def gzip_blocks(
    data: memoryview, member: int, feed: int = FEED_BYTES, fine_from: int = -1
) -> Iterator[tuple[int, bytes]]:
    """The text of one gzip member; its CRC and length are verified. Raises BrokenError."""
    decompressor = isal_zlib.decompressobj(31)
    at, size, whole = member, len(data), False
    while not whole:
        if at >= size:
            raise BrokenError(at, at, hungry=True)
        step = data[at : at + (_FINE_FEED_BYTES if 0 <= fine_from <= at else feed)]
        try:
            text = decompressor.decompress(step)
        except InflateError:
            raise BrokenError(at, at + len(step), hungry=False) from None
        whole = decompressor.eof
        at += len(step) - len(decompressor.unused_data)
        yield at, text


class Zstd:
    """Reads zstd frames. One frame at a time: all share one decompression context."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)

    def blocks(
        self, data: memoryview, frame: int, _feed: int = 0, _fine_from: int = -1
    ) -> Iterator[tuple[int, bytes]]:
        """The text of one frame, block by block (RFC 8878, 3.1.1). Raises BrokenError."""
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
        stated = int.from_bytes(data[stop - content_size_bytes : stop], "little")
        stated += 256 if content_size_bytes == 2 else 0
        last, size_bytes = False, 0
        while True:
            try:
                text = decompressor.decompress(data[at:stop])
            except zstandard.ZstdError:
                raise BrokenError(at, stop, hungry=False) from None
            size_bytes += len(text)
            yield stop, text
            at = stop
            if last:
                break
            header = int.from_bytes(data[at : _behind(data, at, 3)], "little")
            last = bool(header & 1)
            kind, size = header >> 1 & 3, header >> 3
            checksum_bytes = 4 if last and descriptor & 4 else 0
            stop = _behind(data, at, 3 + (1 if kind == 1 else size) + checksum_bytes)
        # libzstd does not compare the sizes behind a last block that is empty.
        if not decompressor.eof or (content_size_bytes and size_bytes != stated):
            raise BrokenError(at, at, hungry=False)


def _behind(data: memoryview, at: int, size: int) -> int:
    if at + size > len(data):
        raise BrokenError(at, len(data), hungry=True)
    return at + size
