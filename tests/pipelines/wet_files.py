"""Builds small WET files, whole and damaged, and reads whole ones the simplest way."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zstandard

from pipelines.wet import WetReader

NEVER = re.compile(rb"(?!)")
"""Matches nothing: in place of `wet.USUAL_PAGE` it leaves all to the careful parser."""


@dataclass(frozen=True)
class Page:
    """What a reader has to deliver for one conversion record."""

    url: str
    body: bytes


def sha1(body: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(body, usedforsecurity=False).digest()).decode()


def record(
    body: bytes,
    url: str = "http://a.example/",
    *,
    kind: str = "conversion",
    eol: bytes = b"\r\n",
    length: int | str | None = None,
    headers: tuple[str, ...] = (),
    trailer: bytes | None = None,
    digest: bool = True,
) -> bytes:
    """One WARC record; `length` replaces the right Content-Length ("" leaves it out)."""
    lines = ["WARC/1.0", f"WARC-Type: {kind}", f"WARC-Target-URI: {url}", *headers]
    if digest:
        lines.append(f"WARC-Block-Digest: {sha1(body)}")
    if length != "":
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    head = eol.join(line.encode() for line in [*lines, "", ""])
    return head + body + (eol * 2 if trailer is None else trailer)


def warcinfo(eol: bytes = b"\r\n") -> bytes:
    return record(b"isPartOf: TEST" + eol, kind="warcinfo", eol=eol)


def text_body(number: int, lines: int = 12) -> bytes:
    """Text that does not repeat itself from page to page and takes a few hundred bytes."""
    words = [hashlib.md5(b"%d %d" % (number, i)).hexdigest() for i in range(lines)]
    return (f"Page {number} বাংলা\n" + "\n".join(words) + "\n").encode()


def sample_records(pages: int = 6, *, digest: bool = True, lines: int = 12) -> list[bytes]:
    """A warcinfo record and `pages` pages."""
    return [warcinfo()] + [
        record(text_body(i, lines), f"http://p{i}.example/", digest=digest) for i in range(pages)
    ]


def gzip_members(records: list[bytes]) -> list[bytes]:
    return [gzip.compress(one, 6, mtime=0) for one in records]


def zstd_frames(records: list[bytes]) -> list[bytes]:
    return [zstandard.ZstdCompressor(write_checksum=True).compress(one) for one in records]


def write_wet(path: Path, pages: Iterable[Page]) -> Path:
    """A WET file as Common Crawl writes it: a gzip member for each record."""
    records = [warcinfo()] + [record(page.body, page.url) for page in pages]
    path.write_bytes(b"".join(gzip_members(records)))
    return path


def member_bounds(data: bytes) -> list[tuple[int, int]]:
    """[start, stop) of each gzip member."""
    bounds, at = [], 0
    while at < len(data):
        inflate = zlib.decompressobj(wbits=31)
        inflate.decompress(data[at:])
        stop = len(data) - len(inflate.unused_data)
        bounds.append((at, stop))
        at = stop
    return bounds


def naive(raw: bytes) -> list[Page]:
    """The pages of well-formed uncompressed WET."""
    pages, at = [], 0
    while at < len(raw):
        end = re.compile(rb"\r?\n\r?\n").search(raw, at)
        assert end is not None
        head = raw[at : end.start()].decode()
        length = int(re.search(r"(?im)^content-length:\s*(\d+)", head)[1])
        body = raw[end.end() : end.end() + length]
        if re.search(r"(?im)^warc-type:\s*conversion", head):
            url = re.search(r"(?im)^warc-target-uri:[ \t]*(.*?)\r?$", head)[1]
            pages.append(Page(url, body))
        at = end.end() + length
        while raw[at : at + 1] in (b"\r", b"\n"):
            at += 1
    return pages


def read(data: bytes, **limits: int) -> tuple[list[Page], WetReader]:
    """All pages of `data`, and the reader; checks what must hold for any bytes."""
    reader = WetReader(data, **limits)
    records = list(reader)
    counts, losses = reader.counts, reader.losses
    assert counts.read == len(records)
    assert counts.length_corrected == sum(one.length_corrected for one in records)
    assert counts.lost >= sum(loss.record for loss in losses)
    assert counts.lost == 0 or any(loss.record for loss in losses)
    end = 0
    for loss in losses:
        assert loss.offset >= end
        assert loss.bytes > 0
        end = loss.offset + loss.bytes
    assert end <= len(data)
    offsets = [one.warc_offset for one in records]
    assert offsets == sorted(offsets)
    if b"\x28\xb5\x2f\xfd" not in data and b"\x1f\x8b\x08" not in data:
        _check_plain_account(data, reader, records)
    return [Page(one.url, one.body) for one in records], reader


def losses(reader: WetReader) -> list[tuple[int, int, str, bool]]:
    return [(one.offset, one.bytes, one.reason, one.record) for one in reader.losses]


def _check_plain_account(data: bytes, reader: WetReader, records: list) -> None:
    """Pages and losses explain an uncompressed file; between them only other records stand."""
    taken = [(loss.offset, loss.offset + loss.bytes) for loss in reader.losses]
    for one in records:
        head = re.compile(rb"\r?\n\r?\n").search(data, one.warc_offset)
        assert head is not None
        assert data[head.end() : head.end() + len(one.body)] == one.body
        taken.append((one.warc_offset, head.end() + len(one.body)))
    at, others = 0, 0
    for start, end in [*sorted(taken), (len(data), len(data))]:
        between = data[at:start].strip(b"\r\n")
        assert start >= at
        assert not between or re.match(rb"WARC/\d+\.\d+[ \t]*\r?\n", between)
        others += bool(between)
        at = end
    assert others <= reader.counts.not_pages


def store(records: list[bytes], container: str) -> bytes:
    raw = b"".join(records)
    return {
        "gzip members": lambda: b"".join(gzip_members(records)),
        "one gzip member": lambda: gzip.compress(raw),
        "zstd frames": lambda: b"".join(zstd_frames(records)),
        "one zstd frame": lambda: zstandard.ZstdCompressor().compress(raw),
        "plain": lambda: raw,
    }[container]()


CONTAINERS = ["gzip members", "one gzip member", "zstd frames", "one zstd frame", "plain"]


PAGES = 6
RECORDS = sample_records(PAGES)
RAW = b"".join(RECORDS)
EXPECTED = naive(RAW)
MEMBERS = gzip_members(RECORDS)
STORED = b"".join(MEMBERS)
STARTS = [sum(map(len, MEMBERS[:i])) for i in range(len(MEMBERS) + 1)]
NEXT = record(b"the next page\n", "http://next.example/")
NEXT_PAGE = Page("http://next.example/", b"the next page\n")
A = record(b"first page\n", "http://first.example/")
A_PAGE = Page("http://first.example/", b"first page\n")
