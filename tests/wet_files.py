"""WET files made by hand, for tests: the simplest writer, and the simplest reader."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Doc:
    """One page: its address and its lines."""

    url: str
    text: str


def record(url: str, body: bytes, kind: str = "conversion") -> bytes:
    """One WARC record."""
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\n"
        "WARC-Date: 2026-04-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:0>\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body + b"\r\n\r\n"


def write_wet(path: Path, docs: Iterable[Doc]) -> Path:
    """A WET file with a warcinfo record and one gzip member for each record."""
    members = [record("", b"software: test\r\n", "warcinfo")]
    members += [record(doc.url, doc.text.encode()) for doc in docs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(gzip.compress(member, mtime=0) for member in members))
    return path


def naive_records(path: Path) -> list[tuple[str, bytes]]:
    """(url, body) of each conversion record of a well-formed file, the slow and simple way."""
    data = gzip.decompress(path.read_bytes())
    found = []
    at = 0
    while at < len(data):
        end = data.index(b"\r\n\r\n", at)
        lines = data[at:end].decode().split("\r\n")[1:]
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        start = end + 4
        stop = start + int(headers["content-length"])
        if headers["warc-type"] == "conversion":
            found.append((headers["warc-target-uri"], data[start:stop]))
        at = stop + 4
    return found


def member_bounds(path: Path) -> list[tuple[int, int]]:
    """[start, stop) of each gzip member."""
    import zlib

    data = path.read_bytes()
    bounds = []
    at = 0
    while at < len(data):
        inflate = zlib.decompressobj(wbits=31)
        inflate.decompress(data[at:])
        stop = len(data) - len(inflate.unused_data)
        bounds.append((at, stop))
        at = stop
    return bounds
