"""A sliding window over one run of uncompressed bytes, and where in it a record may begin.

A run is a stretch of text that nothing interrupts: it ends at the end of the file, at a range
that could not be read, or where a damaged member begins. Offsets named `rel` count from the
window's `position`; `ensure` reads on and keeps them valid.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from pipelines.containers import CHUNK_BYTES, Chunk, Gap, GapReason
from pipelines.wet_headers import BLANK, HEADER_LINES, VERSION_LINE, VERSION_LINE_BYTES

# The header lines up to one that names the type. Each alternative begins with another kind of
# byte, so that nothing is matched twice: linear on any text.
_TYPED_HEADER = re.compile(
    rb"(?:(?!(?i:warc-type)[ \t]*:)[^\s:][^\r\n:]*:[^\n]*\n|[ \t]+[^\s][^\n]*\n)*+"
    rb"(?i:warc-type)[ \t]*:"
)


class Items:
    """The chunks and gaps of a file, one step ahead."""

    def __init__(self, items: Iterator[Chunk | Gap]) -> None:
        self._items = items
        self.next: Chunk | Gap | None = None
        self.advance()

    def advance(self) -> Chunk | Gap | None:
        """The next item, which the one after it replaces."""
        item, self.next = self.next, next(self._items, None)
        return item


class Window:
    """The window. `text[position:]` is what has not been dealt with; `ended`: nothing follows it.

    `fault` is why the run's only member is not whole, None for text that can be trusted.
    """

    def __init__(self, first: Chunk, items: Items, max_header_bytes: int) -> None:
        self._items = items
        self._max_header_bytes = max_header_bytes
        self._base = 0  # bytes of the run before `text`
        self._exact = first.exact
        self.fault: GapReason | None = first.fault
        self.shows_damage = False  # something in it has turned out wrong
        self.has_digests = False  # a record in it has shown a right block digest
        self.text = first.data
        self.position = 0
        self.ended = False
        self._at, self._stored, self._member = first.at, first.stored, first.member
        self._ends = first.ends

    def ensure(self, size: int) -> int:
        """Read on until `size` bytes lie behind the position, if there are as many.

        Returns how many there are.
        """
        have = len(self.text) - self.position
        if have >= size or self.ended:
            return have
        # One byte before the position stays: it tells whether a line begins there.
        keep = max(0, self.position - 1)
        pieces = [self.text[keep:]]
        while have < size:
            chunk = self._items.next
            if not isinstance(chunk, Chunk) or chunk.starts_run:
                self.ended = True
                break
            self._items.advance()
            end = self._base + self.position + have
            self._at += [end + at for at in chunk.at]
            self._stored += chunk.stored
            self._member += chunk.member
            self._ends += chunk.ends
            pieces.append(chunk.data)
            have += len(chunk.data)
        self.text = b"".join(pieces)
        self._base += keep
        self.position -= keep
        passed = bisect_right(self._at, self._base) - 1
        for blocks in (self._at, self._stored, self._member, self._ends):
            del blocks[:passed]
        return have

    def skip_blank(self) -> bool:
        """Move over line ends. False at the end of the run."""
        while self.ensure(1):
            blank = BLANK.match(self.text, self.position)
            self.position = self.position if blank is None else blank.end()
            if self.position < len(self.text):
                return True
        return False

    @property
    def stored_end(self) -> int:
        """Offset in the stored file behind the last block that has been read."""
        return self._ends[-1]

    @property
    def untouched(self) -> bool:
        """Whether the position is still at the beginning of the run."""
        return self._base + self.position == 0

    def take_gap(self) -> int:
        """Pass over the gap that follows a run with a fault. Returns the offset behind it."""
        gap = self._items.advance()
        return gap.end if isinstance(gap, Gap) else self.stored_end

    def offset_of(self, rel: int) -> int:
        """Offset in the stored file of the block that holds the byte at `rel`.

        Exact in a plain file. The end of the run gives `stored_end`.
        """
        at = self._base + self.position + rel
        if rel >= len(self.text) - self.position:
            return self.stored_end
        block = bisect_right(self._at, at) - 1
        return self._stored[block] + (at - self._at[block] if self._exact else 0)

    def offset_behind(self, rel: int) -> int:
        """Offset in the stored file behind the block that holds the byte before `rel`."""
        at = self._base + self.position + rel
        if self._exact:
            return self.offset_of(rel)
        return self._ends[bisect_left(self._at, at) - 1]

    def member_of(self, rel: int) -> int:
        """Offset in the stored file of the member that holds the byte at `rel`.

        In a plain file the offset of that byte.
        """
        if self._exact:
            return self.offset_of(rel)
        return self._member[bisect_right(self._at, self._base + self.position + rel) - 1]

    def find_record(self, start: int, limit: int) -> int | None:
        """The first `rel` in [start, limit) where a record begins; None when there is none.

        A record begins at the beginning of a line or of a member, with a version line and header
        lines of which one is `WARC-Type`.
        """
        searched = start
        while searched < limit:
            # Doubling keeps the copying linear in what is searched.
            wanted = min(limit, max(2 * searched, searched + CHUNK_BYTES))
            have = self.ensure(wanted + VERSION_LINE_BYTES + self._max_header_bytes)
            top = min(have, wanted)
            for found in VERSION_LINE.finditer(
                self.text, self.position + searched, self.position + top + VERSION_LINE_BYTES
            ):
                rel = found.start() - self.position
                if rel >= top:
                    break
                if self._begins_line(rel) and self.is_typed(found.end()):
                    return rel
            if have <= wanted:
                return None
            searched = top
        return None

    def skip_to_record(self, start: int) -> bool:
        """Move to the first record at or behind `start`, or to the end of the run: then False."""
        while True:
            have = self.ensure(start + 1)
            if have <= start:
                self.position += have
                return False
            self.position += start
            found = self.find_record(0, CHUNK_BYTES)
            if found is not None:
                self.position += found
                return True
            start = CHUNK_BYTES

    def _begins_line(self, rel: int) -> bool:
        index = self.position + rel
        if index == 0 or self.text[index - 1] == 0x0A:
            return True
        return rel in self.member_starts(rel, rel + 1)

    def member_starts(self, start: int, stop: int) -> Iterator[int]:
        """Each `rel` in [start, stop) that is the first byte of a gzip member or zstd frame."""
        if self._exact:
            return
        base = self._base + self.position
        for block in range(bisect_left(self._at, base + start), bisect_left(self._at, base + stop)):
            if self._stored[block] == self._member[block]:
                yield self._at[block] - base

    def next_record_member(self, start: int, stop: int) -> int:
        """The first `rel` in [start, stop) where a member begins with a record, or `stop`."""
        for rel in self.member_starts(start, stop):
            if VERSION_LINE.match(self.text, self.position + rel):
                return rel
        return stop

    def is_typed(self, headers: int) -> bool:
        """Whether the header lines at `text[headers:]` name a type, or end with the data."""
        limit = headers + self._max_header_bytes
        if _TYPED_HEADER.match(self.text, headers, limit):
            return True
        lines = HEADER_LINES.match(self.text, headers, limit)
        stop = headers if lines is None else lines.end()
        return self.ended and b"\n" not in self.text[stop:limit] and len(self.text) < limit
