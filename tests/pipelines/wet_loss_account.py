"""The account of what was lost: reasons, and how many pages are said to be lost with it."""

from __future__ import annotations

import re

import zstandard
from isal import isal_zlib

from pipelines.containers import Gap
from pipelines.wet import Loss, Record, WetReader
from tests.pipelines.wet_account import VERSION, Run

_CUT_VERSION = re.compile(rb"WARC/[\d.]*[ \t]*\r?\Z")
_OTHER_TYPE = re.compile(rb"(?i)\nwarc-type: (?:warcinfo|metadata)\r?\n")
_PAGE_TYPE = re.compile(rb"\nWARC-Type: conversion\r?\n")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_MAGIC = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd")


def check_losses(
    data: bytes,
    reader: WetReader,
    records: list[Record],
    items: list[Gap | Run],
    limits: dict[str, int],
) -> None:
    """Fails where a loss has a wrong reason, or more or fewer pages are lost than can be."""
    known = {(loss.offset, loss.bytes): loss for loss in reader.losses}
    at_most = 0
    before: Gap | Run | None = None
    for item in items:
        if isinstance(item, Run):
            at_most += _most_lost(item, records)
            if item.exact:
                _check_plain(item, reader, limits)
        else:
            _check_gap(data, item)
            if not (isinstance(before, Run) and before.fault):
                at_most += item.reason != "garbage"
                loss = known.get((item.offset, item.end - item.offset))
                if loss is not None:
                    _check_gap_loss(item, loss, reader, records)
        before = item
    assert reader.counts.lost <= at_most, f"lost {reader.counts.lost}, can be {at_most} at most"


def _most_lost(run: Run, records: list[Record]) -> int:
    """How many pages can have been lost in the text of `run`: each began with a version line."""
    starts = sum(run.begins_line(m.start()) for m in VERSION.finditer(run.text))
    end = run.blocks[-1].stored_end
    if run.exact or run.fault:
        first = run.blocks[0].stored
        starts -= sum(first <= one.warc_offset < end for one in records)
        starts = max(0, starts)
    if run.fault:
        # What precedes the first version line may be the rest of one; the gap is no other loss.
        return max(1, starts + (VERSION.match(run.text.lstrip(b"\r\n")) is None))
    return starts + (_CUT_VERSION.search(run.text[-32:]) is not None)


def _check_plain(run: Run, reader: WetReader, limits: dict[str, int]) -> None:
    """In a plain file each loss is one record, or a stretch that is none."""
    assert reader.counts.lost == sum(loss.record for loss in reader.losses)
    for loss in reader.losses:
        text = run.text[loss.offset : loss.offset + loss.bytes]
        if VERSION.match(text) is None:
            cut = _CUT_VERSION.match(text) is not None
            assert loss.reason == ("truncated_record" if cut else "not_warc"), loss
            assert loss.record == cut, loss
            continue
        assert loss.reason in ("truncated_record", "record_too_large", "header_too_large"), loss
        if loss.reason == "record_too_large":
            assert loss.bytes > limits.get("max_record_bytes", 64 << 20), loss
        if loss.reason == "header_too_large":
            assert loss.bytes > limits.get("max_header_bytes", 64 << 10), loss
        blank = _BLANK_LINE.search(text)
        header = text if blank is None else text[: blank.end()]
        header = header[: limits.get("max_header_bytes", 64 << 10)]
        others, pages = _OTHER_TYPE.search(header), _PAGE_TYPE.search(header)
        if bool(others) != bool(pages) and len(VERSION.findall(header)) == 1:
            assert loss.record == bool(pages), f"{loss} is of {header!r}"


def _check_gap(data: bytes, gap: Gap) -> None:
    """The reason of `gap` is what isal or zstandard say of its bytes at once."""
    stored = data[gap.offset : gap.end]
    magic = max(_MAGIC, key=lambda one: sum(a == b for a, b in zip(one, stored, strict=False)))
    equal = sum(a == b for a, b in zip(magic, stored, strict=False))
    if gap.reason == "garbage":
        return
    skippable = stored[1:4] == b"\x2a\x4d\x18"
    assert skippable or equal >= min(len(magic) - 1, len(stored)), f"{gap} is garbage"
    if gap.reason == "truncated_member":
        # A damaged one whose damage lets it seem longer than the file may be called so as well.
        assert gap.end == len(data), gap
    elif gap.end == len(data) and stored.startswith(magic) and not skippable:
        assert not _is_cut(stored), f"{gap} is not damaged but cut"


def _is_cut(stored: bytes) -> bool:
    """Whether nothing is wrong with a member but that its end is missing."""
    if stored[:1] == b"\x1f":
        if len(stored) > 3 and stored[3] >= 0x20:
            return False  # reserved flags
        one = isal_zlib.decompressobj(31)
    else:
        one = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    try:
        one.decompress(stored)
    except (isal_zlib.error, zstandard.ZstdError):
        return False
    return not one.eof


def _check_gap_loss(gap: Gap, loss: Loss, reader: WetReader, records: list[Record]) -> None:
    """Whether a page was lost with a member of which nothing can be read.

    It is taken for one that held a page when a complete record came before it.
    """
    assert loss.reason == gap.reason, f"{loss} is {gap}"
    pages = any(one.warc_offset < gap.offset for one in records)
    if gap.reason == "garbage" or (not pages and reader.counts.not_pages == 0):
        assert not loss.record, f"{loss} held no page"
    elif pages and reader.losses[0] is loss:
        assert loss.record, f"{loss} held a page"
