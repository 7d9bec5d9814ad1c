"""Reads WET: the pages of one stored file, and what of the file could not be read.

Two parsers give the same. One pattern reads the header of a page just as Common Crawl writes it;
all else goes to a careful parser, in which each record accounts for its bytes: header,
Content-Length, and there the next record or the record's end. DESIGN has FastWARC read; it does
not, as it skips or clips odd records silently, and its headers cost more than all of this.

The rules, where the format leaves a choice or the file breaks it:

- A record is delimited by Content-Length, never by text. Only when no record and no end of data
  follows there is the length wrong; then the body ends at the next line `WARC/x.y` whose header
  has a WARC-Type, or at the end of the data, and the record says `length_corrected`. A body that
  is followed by CRLFCRLF or by the end of its member, or whose digest matches, is right whatever
  comes after.
- Headers by name, in any order and case; of a repeated one the first counts; folded lines are
  joined; lines without a colon are passed over. A page without a URI is a page with url "".
- A header line that ends with its member does not run on into a record that the next one begins.
- A record that the data ends in is lost, however much of it there is.
- The text of a member that is not whole is read up to the fault. Its last record is lost even if
  its length seems right, no length is corrected, and a record must be vouched for: by its SHA-1
  block digest, or, where no page has one, by being UTF-8 and standing before the first sign of
  damage. Only the digest is proof, and only of the body; Common Crawl writes one for each page.
- A record over `max_record_bytes`, or a header over `max_header_bytes`, is lost; reading goes on
  at the next record. Only the beginning of a line or member counts as one, but a too large body
  which itself holds records would be taken apart there.
- A member that was taken out of the file leaves no trace, and none is reported.

A loss is a range of the stored file. In a compressed file its bounds are those of the stored
blocks (8 KiB of gzip, a zstd block; never beyond the member) that hold the lost bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipelines import containers
from pipelines.containers import Gap, GapReason
from pipelines.wet_headers import (
    BLANK,
    BLANK_LINE,
    DIGEST_NAME,
    HEADER_LINES,
    USUAL_PAGE,
    VERSION_LINE,
    VERSION_LINE_BYTES,
    content_length,
    digest_is_right,
    is_page,
    may_be_page,
    parse_headers,
)
from pipelines.wet_window import Items, Window

LossReason = (
    GapReason | Literal["truncated_record", "not_warc", "record_too_large", "header_too_large"]
)

_LOOKAHEAD_BYTES = 4 << 10
_TRAILER = b"\r\n\r\n"
_USUAL_HEADER_BYTES = 4 << 10
_CUT_VERSION_LINE = re.compile(rb"WARC/[\d.]*[ \t]*\r?")


class Record(NamedTuple):
    """One `conversion` record: a page as crawled. Absent headers are ""."""

    url: str
    """WARC-Target-URI without `<` and `>`; it may hold spaces."""
    date: str
    digest: str
    record_id: str
    identified_language: str
    warc_offset: int
    """Offset in the stored file of the gzip member or zstd frame that holds the record's first
    byte; in an uncompressed file, of the record."""
    body: bytes
    length_corrected: bool
    """Content-Length was wrong or missing; the next record, or the end, ended the body."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A range of the stored file that could not be read."""

    offset: int
    bytes: int
    reason: LossReason
    record: bool
    """A `conversion` record is known to have been lost there (or one that hides its type)."""


@dataclass(slots=True)
class ReadCounts:
    """How many records a file gave. `lost` may exceed the losses: one range can hold several."""

    read: int = 0
    """Conversion records delivered."""
    not_pages: int = 0
    """Complete records of other types."""
    lost: int = 0
    """Conversion records known to be lost."""
    length_corrected: int = 0
    """Of those read, the ones with a wrong or missing Content-Length."""


class WetReader:
    """Iterates over the pages of a stored WET file: gzip, zstd or plain, told by its bytes.

    `data` is the whole stored file, for instance memory-mapped (`models.files.mapped`). Memory
    is bounded by the limits, not by the file. Bad bytes never raise. `counts` and `losses`
    (sorted, disjoint) are complete when the iteration is; each iteration begins anew.

    >>> page = b"WARC/1.0\\r\\nWARC-Type: conversion\\r\\nContent-Length: 2\\r\\n\\r\\nhi"
    >>> reader = WetReader(page)
    >>> [record.body for record in reader], reader.counts.read, reader.losses
    ([b'hi'], 1, [])
    """

    def __init__(
        self,
        data: memoryview | bytes,
        *,
        max_record_bytes: int = 64 << 20,
        max_header_bytes: int = 64 << 10,
    ) -> None:
        self._data = memoryview(data)
        self._max_record_bytes = max_record_bytes
        self._max_header_bytes = max_header_bytes
        self._expects_record = False
        self.counts = ReadCounts()
        self.losses: list[Loss] = []

    def __iter__(self) -> Iterator[Record]:
        self.counts = ReadCounts()
        self.losses = []
        # Whether a record should begin at the place that has been reached: the file has shown
        # records, and the last one was complete.
        self._expects_record = False
        items = Items(containers.read(self._data))
        while (item := items.advance()) is not None:
            if isinstance(item, Gap):
                known = self._expects_record and item.reason != "garbage"
                self._lose(item.offset, item.end, item.reason, known)
            else:
                yield from self._records(Window(item, items, self._max_header_bytes))

    def _records(self, window: Window) -> Iterator[Record]:
        while window.skip_blank():
            if window.fault is None:
                start = window.position
                yield from self._usual_records(window)
                if window.position > start:
                    continue
            record = self._careful_record(window)
            if record is not None:
                yield record

    def _usual_records(self, window: Window) -> Iterator[Record]:
        """The pages at the position that lie in the window and are as Common Crawl writes them.

        What `_careful_record` makes of them, at a fraction of the time.
        """
        text, start = window.text, window.position
        header_bytes = min(self._max_header_bytes, _USUAL_HEADER_BYTES)
        while (header := USUAL_PAGE.match(text, start, start + header_bytes)) is not None:
            url, date, record_id, digest, language, length = header.groups(b"")
            body = header.end()
            end = body + int(length)
            if end - body > self._max_record_bytes or not text.startswith(_TRAILER, end):
                return
            member = window.member_of(0)
            window.position = start = end + len(_TRAILER)
            self._expects_record = True
            self.counts.read += 1
            yield Record(
                _address(url.decode("utf-8", "replace")),
                date.decode("utf-8", "replace"),
                digest.decode("utf-8", "replace"),
                record_id.decode("utf-8", "replace"),
                language.decode("utf-8", "replace"),
                member,
                text[body:end],
                False,
            )

    def _careful_record(self, window: Window) -> Record | None:
        """The record at the position, if it is a page and can be read. Always moves on."""
        have = window.ensure(self._max_header_bytes + _LOOKAHEAD_BYTES)
        version = VERSION_LINE.match(window.text, window.position)
        if version is None:
            self._lose_not_warc(window, have)
            return None
        limit = window.position + self._max_header_bytes
        lines = HEADER_LINES.match(window.text, version.end(), limit)
        stop = version.end() if lines is None else lines.end()
        # A line that a member cuts does not run on into the record of the next one.
        begin = version.end() - window.position
        cut = window.next_record_member(begin, stop - window.position) + window.position
        header = window.text[window.position : cut]
        blank = BLANK_LINE.match(window.text, stop, limit) if cut == stop else None
        if blank is None:
            nested = cut < stop or VERSION_LINE.match(window.text, stop) is not None
            too_large = have > self._max_header_bytes and not nested
            reason: LossReason = "header_too_large" if too_large else "truncated_record"
            self._lose_to_next(window, begin, reason, may_be_page(header))
            return None
        body = blank.end() - window.position
        return self._careful_body(window, parse_headers(header), body, may_be_page(header))

    def _careful_body(
        self, window: Window, fields: dict[str, str], body: int, page: bool
    ) -> Record | None:
        """The record whose headers are `fields` and whose body begins at `body`."""
        length = content_length(fields)
        if length is not None and length <= self._max_record_bytes:
            end = body + length
            have = window.ensure(
                end + _LOOKAHEAD_BYTES + VERSION_LINE_BYTES + self._max_header_bytes
            )
            if have >= end and _closes(window, fields, body, end):
                text = window.text[window.position + body : window.position + end]
                if window.fault is not None and not _is_vouched_for(window, fields, text, end):
                    self._lose_to_next(window, end, window.fault, page)
                    return None
                return self._take(window, fields, text, end, corrected=False)
        if window.fault is not None:
            self._lose_to_next(window, body, window.fault, page)
            return None
        limit = body + self._max_record_bytes + len(_TRAILER)
        found = window.find_record(body, limit + 1)
        have = window.ensure(limit + 1)
        if found is None and have <= limit:
            if length is not None and length > have - body:
                self._lose_to_next(window, have, "truncated_record", page)
                return None
            found = have
        text = (
            b"" if found is None else window.text[window.position + body : window.position + found]
        )
        text = text.removesuffix(_TRAILER if text.endswith(_TRAILER) else b"\n\n")
        if found is None or len(text) > self._max_record_bytes:
            self._lose_to_next(window, body, "record_too_large", page)
            return None
        return self._take(window, fields, text, found, corrected=True)

    def _take(
        self, window: Window, fields: dict[str, str], body: bytes, end: int, *, corrected: bool
    ) -> Record | None:
        record = self._accept(fields, window.member_of(0), body, corrected)
        window.position += end
        return record

    def _accept(
        self, fields: dict[str, str], warc_offset: int, body: bytes, corrected: bool
    ) -> Record | None:
        """Count a complete record; the record itself when it is a page."""
        self._expects_record = True
        if not is_page(fields):
            self.counts.not_pages += 1
            return None
        self.counts.read += 1
        self.counts.length_corrected += corrected
        return Record(
            url=_address(fields.get("WARC-Target-URI", "")),
            date=fields.get("WARC-Date", ""),
            digest=fields.get("WARC-Block-Digest", ""),
            record_id=fields.get("WARC-Record-ID", ""),
            identified_language=fields.get("WARC-Identified-Content-Language", ""),
            warc_offset=warc_offset,
            body=body,
            length_corrected=corrected,
        )

    def _lose_not_warc(self, window: Window, have: int) -> None:
        """Pass over bytes that are no record."""
        cut = have < VERSION_LINE_BYTES and _CUT_VERSION_LINE.fullmatch(
            window.text, window.position
        )
        if cut:
            self._lose_to_next(window, have, "truncated_record", True)
            return
        # The first record of a member whose very beginning is damaged.
        known = window.fault is not None and window.untouched and self._expects_record
        self._lose_to_next(window, 1, "not_warc", known)

    def _lose_to_next(self, window: Window, start: int, reason: LossReason, record: bool) -> None:
        """Lose the bytes from the position to the next record at or behind `start`."""
        offset = window.offset_of(0)
        # What a member that is not whole has lost is one loss, as long as nothing lies between.
        joins = window.fault is not None and window.shows_damage
        window.shows_damage = True
        if window.skip_to_record(start):
            end = window.offset_behind(0)
        elif window.fault is None:
            end = window.stored_end
            self._expects_record = False
        else:
            end = window.take_gap()
            reason = window.fault
        self._lose(offset, end, reason, record, joins=joins)

    def _lose(
        self, offset: int, end: int, reason: LossReason, record: bool, *, joins: bool = False
    ) -> None:
        self.counts.lost += record
        if self.losses:
            last = self.losses[-1]
            last_end = last.offset + last.bytes
            if end <= last_end or (joins and offset <= last_end):
                # It lies in the blocks of the loss before, or right behind it.
                if record and not last.record:
                    last = Loss(last.offset, last.bytes, reason, True)
                size = max(end, last_end) - last.offset
                self.losses[-1] = Loss(last.offset, size, last.reason, last.record)
                return
            offset = max(offset, last_end)
        self.losses.append(Loss(offset, end - offset, reason, record))


def _address(uri: str) -> str:
    return uri[1:-1] if uri.startswith("<") and uri.endswith(">") else uri


def _closes(window: Window, fields: dict[str, str], body: int, end: int) -> bool:
    """Whether a record that begins at the position can end at `end`."""
    text, at = window.text, window.position + end
    blank = BLANK.match(text, at, at + _LOOKAHEAD_BYTES)
    behind = at if blank is None else blank.end()
    version = VERSION_LINE.match(text, behind)
    if version and window.is_typed(version.end()):
        return True
    if window.fault is not None:
        return False
    return (
        behind == len(text)
        or behind == at + _LOOKAHEAD_BYTES
        or text.startswith(_TRAILER, at)
        or any(window.member_starts(end, behind - window.position + 1))
        or (
            len(text) - behind < VERSION_LINE_BYTES
            and bool(_CUT_VERSION_LINE.fullmatch(text, behind))
        )
        or digest_is_right(fields, text[window.position + body : at]) is True
    )


def _is_vouched_for(window: Window, fields: dict[str, str], body: bytes, end: int) -> bool:
    """Whether a record with a right length, from a member that is not whole, can be believed.

    `end` counts from the position, like all offsets in a window.
    """
    right = digest_is_right(fields, body)
    if right is not None:
        window.has_digests |= right and is_page(fields)
        return right
    if window.shows_damage:
        return False
    if is_page(fields) and (
        window.has_digests or DIGEST_NAME in window.text[window.position + end :]
    ):
        return False
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
