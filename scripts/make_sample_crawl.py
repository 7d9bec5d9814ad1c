"""Turns the sample crawl's sources into WET shards, always the same bytes for the same zlib.

The shards look as Common Crawl's do today: one gzip member a record, CRLF headers, a warcinfo
record first. Left out on purpose: `WARC-Payload-Digest` and the operator's fields of the warcinfo
record, which nothing reads. `scripts/sample_sources.py` reads the sources.

    python -m scripts.make_sample_crawl DIR
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import os
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from importlib.resources.abc import Traversable
from pathlib import Path

from models.errors import UserError
from models.files import write_atomic
from scripts.sample_sources import (
    Page,
    RecordFault,
    read_faults,
    read_pages,
    reference_files,
    sources,
)

__all__ = ["main", "make", "reference_files"]

_NAME_TIME = "20260401000000-20260401030000"
_FIRST_DATE = datetime(2026, 4, 1, tzinfo=UTC)
_CRAWL_SECONDS = 3 * 3600
_BINARY = bytes([0, 0, 1, 2, 7, 0x1B, 0, 0x7F])


def make(
    output_dir: str | os.PathLike[str], *, shards: int = 4, root: Traversable | None = None
) -> list[Path]:
    """Write the sample crawl as `shards` WET files into `output_dir`; returns their paths in order.

    `root` is the folder of the sources; by default the one that the package carries.
    Raises UserError for a mistake in the sources or in `shards`.
    """
    if shards < 1:
        raise UserError(f'shards is "{shards}": the sample needs at least 1 shard')
    root = root if root is not None else sources()
    pages = read_pages(root)
    faults = read_faults(root, pages)
    paths = []
    for index, members in enumerate(_layout(pages, faults, shards)):
        name = f"CC-SAMPLE-{_NAME_TIME}-{index:05d}.warc.wet.gz"
        path = Path(output_dir) / name
        write_atomic(path, b"".join([_warcinfo(name), *members]))
        paths.append(path)
    return paths


def _layout(pages: Sequence[Page], faults: Sequence[RecordFault], shards: int) -> list[list[bytes]]:
    """The gzip members of each shard, warcinfo left out, in order."""
    by_url = {fault.url: fault for fault in faults}
    members: list[list[bytes]] = [[] for _ in range(shards)]
    damaged = cut = b""
    for number, page in enumerate(pages):
        fault = by_url.get(page.url)
        member = gzip.compress(_record(page, number, fault), mtime=0)
        if fault and fault.kind == "damaged_member":
            damaged = _overwritten(member)
        elif fault and fault.kind == "cut_member":
            cut = member[: len(member) * 2 // 3]
        else:
            members[number % shards].append(member)
    if damaged:
        members[0].insert(len(members[0]) // 2, damaged)
    if cut:
        members[-1].append(cut)
    return members


def _overwritten(member: bytes) -> bytes:
    """`member` with 64 bytes from its middle replaced, so that it does not inflate."""
    middle = len(member) // 2
    # 0xFF bytes hold no second gzip magic: a reader that looks for the next member finds it.
    return member[:middle] + b"\xff" * 64 + member[middle + 64 :]


def _record(page: Page, number: int, fault: RecordFault | None) -> bytes:
    """The WARC record of `page`, not compressed."""
    kind = fault.kind if fault else ""
    body = _faulty_body(page, kind)
    response = kind == "response_record"
    date = _FIRST_DATE + timedelta(seconds=number * 37 % _CRAWL_SECONDS)
    short_by_bytes = fault.short_by_bytes if fault else 0
    headers = {
        "WARC-Type": "response" if response else "conversion",
        "WARC-Target-URI": "" if kind == "no_url" else page.url,
        "WARC-Date": f"{date:%Y-%m-%dT%H:%M:%SZ}",
        "WARC-Record-ID": _record_id(f"conversion of {page.url}"),
        "WARC-Refers-To": "" if response else _record_id(page.url),
        "WARC-Block-Digest": "sha1:" + base64.b32encode(hashlib.sha1(body).digest()).decode(),
        "WARC-Identified-Content-Language": page.identified,
        "Content-Type": "application/http; msgtype=response" if response else "text/plain",
        "Content-Length": str(len(body) - short_by_bytes),
    }
    return _warc(headers, body)


def _faulty_body(page: Page, kind: str) -> bytes:
    if kind == "nul_bytes":
        body = page.body()
        middle = body.index(b" ", len(body) // 2)
        return body[:middle] + _BINARY + body[middle:]
    if kind == "invalid_utf8":
        try:
            body = page.body().decode().encode("windows-1252")
        except UnicodeEncodeError as error:
            raise UserError(f'faults.toml: "{page.url}" can\'t be invalid_utf8: {error}') from error
        if body.isascii():
            raise UserError(f'faults.toml: "{page.url}" is ASCII, so it stays valid UTF-8')
        return body
    if kind == "response_record":
        paragraphs = "".join(f"<p>{line}</p>\n" for line in page.lines)
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
        return f"{head}<html><body>\n{paragraphs}</body></html>\n".encode()
    return page.body()


def _warcinfo(name: str) -> bytes:
    """The first member of the shard `name`."""
    fields = {
        "Software-Info": "gristmill make_sample_crawl",
        "Extracted-Date": "Wed, 01 Apr 2026 03:00:00 GMT",
        "isPartOf": "CC-SAMPLE-2026-14",
        "description": "Sample crawl written for Gristmill, not Common Crawl data",
    }
    body = "".join(f"{key}: {value}\r\n" for key, value in fields.items()).encode()
    headers = {
        "WARC-Type": "warcinfo",
        "WARC-Date": "2026-04-01T03:00:00Z",
        "WARC-Filename": name,
        "WARC-Record-ID": _record_id(name),
        "Content-Type": "application/warc-fields",
        "Content-Length": str(len(body)),
    }
    return gzip.compress(_warc(headers, body), mtime=0)


def _warc(headers: dict[str, str], body: bytes) -> bytes:
    """A WARC record; headers with an empty value are left out."""
    lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items() if value)
    return f"WARC/1.0\r\n{lines}\r\n".encode() + body + b"\r\n\r\n"


def _record_id(name: str) -> str:
    return f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, name)}>"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the shards and print their paths; 0, or 2 for a mistake in the sources."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.make_sample_crawl", description="Write the sample crawl's shards."
    )
    parser.add_argument("output_dir", metavar="DIR", help="folder for the WET files")
    parser.add_argument("--shards", type=int, default=4, help="number of files (default: 4)")
    options = parser.parse_args(arguments)
    try:
        paths = make(options.output_dir, shards=options.shards)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
