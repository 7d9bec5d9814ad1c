"""The account of a stored WET file that has been read: is each byte of it explained?

Two floors, each checked by means of its own. The containers: gaps, and members that zlib or
zstandard decompress to the same text. The records: a walk over the text that the containers gave,
from record to record. Where no loss lies, it must find a delivered page with just these bytes and
this offset, a complete record of another type, or line ends; and nothing may be left over.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from dataclasses import dataclass

import zstandard

from pipelines import containers
from pipelines.containers import Chunk, Gap
from pipelines.wet import Loss, Record, WetReader

REASONS = {
    "damaged_member", "truncated_member", "garbage", "truncated_record", "not_warc",
    "record_too_large", "header_too_large",
}  # fmt: skip
_BLANK = re.compile(rb"[\r\n]*")
VERSION = re.compile(rb"WARC/\d{1,3}\.\d{1,3}[ \t]{0,8}\r?\n")
_BLANK_LINE = re.compile(rb"(?:^|(?<=\n))\r?\n")
_SPACE = " \t\r\x0c"
_MANY_LINE_ENDS = 4 << 10
_TYPE_FIRST = re.compile(rb"[^\n]*\n(?i:WARC-Type:)")


@dataclass
class Block:
    """Text [at, at of the next) comes from the stored bytes [stored, stored_end) of `member`."""

    at: int
    stored: int
    stored_end: int
    member: int


class Run:
    """A stretch of text that nothing interrupts."""

    def __init__(self, first: Chunk) -> None:
        self.exact = first.exact
        self.fault = first.fault
        self.text = b""
        self.blocks: list[Block] = []
        self.spans: set[tuple[int, int]] = set()
        """The text of each record that was read: [start, end), as far as the account knows."""

    def add(self, chunk: Chunk) -> None:
        blocks = zip(chunk.at, chunk.stored, chunk.ends, chunk.member, strict=True)
        for at, start, end, member in blocks:
            self.blocks.append(Block(len(self.text) + at, start, end, member))
        self.text += chunk.data

    def block_of(self, at: int) -> Block:
        low, high = 0, len(self.blocks)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.blocks[middle].at <= at else (low, middle)
        return self.blocks[low]

    def member_of(self, at: int) -> int:
        return at + self.block_of(0).stored if self.exact else self.block_of(at).member

    def begins_line(self, at: int) -> bool:
        if at == 0 or self.text[at - 1 : at] == b"\n":
            return True
        block = self.block_of(at)
        return not self.exact and block.at == at and block.stored == block.member


def check_account(data: bytes, reader: WetReader, records: list[Record]) -> list[Gap | Run]:
    """Fails unless pages, other records and losses explain `data`. Gives its gaps and runs."""
    losses = reader.losses
    _check_counts(len(data), reader, records)
    items = list(containers.read(memoryview(data)))
    _check_containers(data, items)
    runs: list[Run] = []
    found_items: list[Gap | Run] = []
    new = True
    for item in items:
        if isinstance(item, Gap):
            covered_from = item.offset
            if not new and runs[-1].fault:
                covered_from = runs[-1].blocks[-1].stored_end
            assert _is_lost(losses, covered_from, item.end), f"gap {item} is no loss"
            found_items.append(item)
            new = True
            continue
        if new or item.starts_run:
            runs.append(Run(item))
            found_items.append(runs[-1])
        runs[-1].add(item)
        new = False
    left, others = records, {0}
    for run in runs:
        size = _in_run(run, left)
        mine, left = left[:size], left[size:]
        found = _walk(run, mine, losses)
        others = {a + b for a in others for b in found}
    assert not left, f"{len(left)} pages from nowhere: {left[0]}"
    assert reader.counts.not_pages in others, f"not_pages {reader.counts.not_pages}, not {others}"
    return found_items


def _in_run(run: Run, records: list[Record]) -> int:
    end = run.blocks[-1].stored_end
    return next((i for i, one in enumerate(records) if one.warc_offset >= end), len(records))


def _check_counts(size: int, reader: WetReader, records: list[Record]) -> None:
    counts, losses = reader.counts, reader.losses
    assert counts.read == len(records)
    assert counts.length_corrected == sum(one.length_corrected for one in records)
    assert counts.lost >= sum(loss.record for loss in losses)
    assert counts.lost == 0 or any(loss.record for loss in losses)
    end = 0
    for loss in losses:
        assert loss.offset >= end, f"{loss} overlaps"
        assert loss.bytes > 0, f"{loss} is empty"
        assert loss.reason in REASONS
        end = loss.offset + loss.bytes
    assert end <= size, "a loss lies behind the end"
    offsets = [one.warc_offset for one in records]
    assert offsets == sorted(offsets)
    assert all(0 <= offset < size for offset in offsets)


def _is_lost(losses: list[Loss], start: int, end: int) -> bool:
    for loss in losses:
        if loss.offset <= start < loss.offset + loss.bytes:
            start = loss.offset + loss.bytes
    return start >= end


# Containers


def _check_containers(data: bytes, items: list[Chunk | Gap]) -> None:
    """Chunks and gaps lie in order, and all between them are members without text, or zeros."""
    at = 0
    texts: dict[int, list[bytes]] = {}
    ends: dict[int, int] = {}
    for item in items:
        if isinstance(item, Gap):
            assert item.offset < item.end <= len(data)
            assert item.offset >= at, f"{item} overlaps"
            _check_nothing(data[at : item.offset])
            at = item.end
        elif item.exact:
            assert item.stored == [at]
            assert item.data == data[at : item.stored_end]
            at = item.stored_end
        elif item.fault is None:
            if item.stored[0] > at:
                _check_nothing(data[at : item.stored[0]])
            bounds = zip(item.at, [*item.at[1:], len(item.data)], strict=True)
            for (a, b), member in zip(bounds, item.member, strict=True):
                texts.setdefault(member, []).append(item.data[a:b])
            for member, after in zip(item.member, [*item.member[1:], item.stored_end], strict=True):
                ends[member] = after
            assert item.stored == sorted(set(item.stored))
            at = item.stored_end
        else:
            assert item.stored == sorted(set(item.stored))
            assert item.stored[-1] < item.stored_end
    _check_nothing(data[at:])
    for member, pieces in texts.items():
        text, rest = _decompress(data[member : ends[member]])
        assert text == b"".join(pieces), f"wrong text in the member at {member}"
        _check_nothing(rest)


def _decompress(stored: bytes) -> tuple[bytes, bytes]:
    """The text of the first member of `stored`, and what follows the member."""
    one = (
        zlib.decompressobj(31)
        if stored[:1] == b"\x1f"
        else zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    )
    text = one.decompress(stored)
    assert one.eof
    return text, one.unused_data


def _check_nothing(stored: bytes) -> None:
    """Fails unless `stored` holds only padding, members without text and skippable frames."""
    while stored := stored.lstrip(b"\0"):
        if stored[1:4] == b"\x2a\x4d\x18" and stored[0] >> 4 == 5:
            stored = stored[8 + int.from_bytes(stored[4:8], "little") :]
            continue
        assert stored[:2] in (b"\x1f\x8b", b"\x28\xb5"), f"nobody explains {stored[:40]!r}"
        text, stored = _decompress(stored)
        assert text == b""


# Records


def _walk(run: Run, records: list[Record], losses: list[Loss]) -> set[int]:
    """All numbers of other records with which the text of `run` is explained."""
    text, lost = run.text, _lost_ranges(run, losses)
    states: dict[tuple[int, int], set[int]] = {(0, 0): {0}}
    came: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = {}
    ends: list[tuple[int, int]] = []
    furthest = (0, 0)
    done: set[int] = set()
    while states:
        state = at, used = min(states)
        others = states.pop(state)
        furthest = max(furthest, state)
        blank = _BLANK.match(text, at)
        assert blank is not None
        at = blank.end()
        if at == len(text):
            if used == len(records):
                done |= others
                ends.append(state)
            continue
        steps = _steps(run, at, records[used] if used < len(records) else None, lost)
        for to, page, other in steps:
            assert to > at
            states.setdefault((to, used + page), set()).update(n + other for n in others)
            came.setdefault((to, used + page), []).append((*state, at, bool(page + other)))
    if not done:
        at, used = furthest
        raise AssertionError(
            f"unexplained from text offset {at} (stored {run.block_of(at).stored}) with"
            f" {len(records) - used} pages left: {text[at : at + 200]!r}"
        )
    run.spans = _record_spans(came, ends)
    return done


def _record_spans(
    came: dict[tuple[int, int], list[tuple[int, int, int, bool]]], ends: list[tuple[int, int]]
) -> set[tuple[int, int]]:
    """[start, end) of the records on all ways that lead to one of `ends`."""
    spans, seen = set(), set(ends)
    while ends:
        state = ends.pop()
        for at, used, start, is_record in came.get(state, []):
            if is_record:
                spans.add((start, state[0]))
            if (at, used) not in seen:
                seen.add((at, used))
                ends.append((at, used))
    return spans


def _lost_ranges(run: Run, losses: list[Loss]) -> list[tuple[int, int]]:
    """The text that comes from lost blocks; in a plain file, the lost text."""
    if run.exact:
        return [(loss.offset, loss.offset + loss.bytes) for loss in losses]
    ranges: list[tuple[int, int]] = []
    ends = [*[block.at for block in run.blocks[1:]], len(run.text)]
    for block, end in zip(run.blocks, ends, strict=True):
        if _is_lost(losses, block.stored, block.stored_end):
            if ranges and ranges[-1][1] == block.at:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((block.at, end))
    return ranges


def _steps(
    run: Run, at: int, page: Record | None, lost: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Where a record or loss at `at` may end, with the pages and other records it stands for."""
    text, steps = run.text, []
    area = next((end for start, end in lost if start <= at < end), None)
    if area is not None:
        steps.append((area, 0, 0))
        if run.exact:
            return steps
        # In compressed text a loss takes whole blocks, and records may begin and end in them.
        steps += [
            (m.start(), 0, 0) for m in VERSION.finditer(text, at + 1, area + 32) if m.start() < area
        ]
    version = VERSION.match(text, at)
    blank = None if version is None else _BLANK_LINE.search(text, version.end())
    if version is None or blank is None:
        return steps
    fields = headers(text[at : blank.start()])
    body = blank.end()
    if fields.get("warc-type", "").lower() == "conversion":
        if page is not None and _is_record(run, at, body, fields, page):
            steps.append((body + len(page.body), 1, 0))
            if page.body == b"" and body == len(text):
                return [(len(text), 1, 0)]
        return steps
    length = content_length(fields)
    if length is not None and body + length <= len(text):
        steps.append((body + length, 0, 1))
    for found in VERSION.finditer(text, body):
        if run.begins_line(found.start()):
            steps.append((found.start(), 0, 1))
            if _TYPE_FIRST.match(text, found.start()):
                return steps
    steps.append((len(text), 0, 1))
    return steps


def _is_record(run: Run, at: int, body: int, fields: dict[str, str], page: Record) -> bool:
    url = fields.get("warc-target-uri", "")
    if not (
        page.warc_offset == run.member_of(at)
        and page.url == (url[1:-1] if url[:1] == "<" and url[-1:] == ">" else url)
        and page.digest == fields.get("warc-block-digest", "")
        and page.date == fields.get("warc-date", "")
        and page.record_id == fields.get("warc-record-id", "")
        and page.identified_language == fields.get("warc-identified-content-language", "")
        and run.text.startswith(page.body, body)
    ):
        return False
    length = content_length(fields)
    if page.length_corrected:
        return length is None or not _surely_ends(run, fields, body, body + length)
    return length == len(page.body) and _may_end(run, fields, page.body, body + length)


def _surely_ends(run: Run, fields: dict[str, str], body: int, end: int) -> bool:
    """Whether the format says that a record ends at `end`, so that its length is right."""
    if end > len(run.text):
        return False
    return (
        end == len(run.text)
        or run.text.startswith(b"\r\n\r\n", end)
        or _digest_is_right(fields, run.text[body:end]) is True
    )


def _may_end(run: Run, fields: dict[str, str], text: bytes, end: int) -> bool:
    """Whether a record of the body `text` can be believed to end at `end`."""
    blank = _BLANK.match(run.text, end)
    behind = end if blank is None else blank.end()
    right = _digest_is_right(fields, text)
    if run.fault:
        if right is None:
            text.decode()
        return right is not False and VERSION.match(run.text, behind) is not None
    return (
        right is True
        or behind == len(run.text)
        or behind - end >= _MANY_LINE_ENDS
        or run.text.startswith(b"\r\n\r\n", end)
        or VERSION.match(run.text, behind) is not None
        or any(b.stored == b.member and end <= b.at <= behind for b in run.blocks)
        or (len(run.text) - behind < 20 and run.text.startswith(b"WARC/", behind))
    )


def _digest_is_right(fields: dict[str, str], text: bytes) -> bool | None:
    name, colon, value = fields.get("warc-block-digest", "").partition(":")
    if not colon or name.lower() != "sha1":
        return None
    digest = hashlib.sha1(text, usedforsecurity=False).digest()
    return value.lower() in (digest.hex(), base64.b32encode(digest).decode().lower())


def headers(text: bytes) -> dict[str, str]:
    """The first value of each header, by its name in lower case; folded lines are joined."""
    fields: list[list[str]] = []
    for raw in text.decode("utf-8", "replace").split("\n")[1:]:
        if raw[:1] in (" ", "\t"):
            if fields:
                fields[-1][1] += " " + raw.strip(_SPACE)
        elif ":" in raw:
            name, value = raw.split(":", 1)
            fields.append([name.strip(_SPACE).lower(), value.strip(_SPACE)])
    return {name: value.strip(_SPACE) for name, value in reversed(fields)}


def content_length(fields: dict[str, str]) -> int | None:
    value = fields.get("content-length", "")
    return int(value) if re.fullmatch(r"[0-9]{1,18}", value) else None
