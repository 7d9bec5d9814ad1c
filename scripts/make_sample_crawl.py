"""Turns the sample crawl's sources into WET shards, always the same bytes for the same zlib.

`data_manifests/sample_crawl/FORMAT.md` describes the sources: a readable text file for each host,
and a table of faults. The shards look as Common Crawl's do today: one gzip member a record,
CRLF headers, a warcinfo record first. Left out on purpose: the `WARC-Payload-Digest` and the
operator's fields of the warcinfo record, which nothing reads.

    python -m scripts.make_sample_crawl DIR
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import os
import re
import sys
import tomllib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

from models.errors import UserError
from models.files import write_atomic

KINDS = ("good", "short", "list", "spam", "symbols", "mixed", "copy", "poem")
FAULT_KINDS = (
    "nul_bytes",
    "invalid_utf8",
    "no_url",
    "wrong_length",
    "response_record",
    "damaged_member",
    "cut_member",
)
_SITE_KEYS = ("host", "language", "scheme", "identified")
_PAGE_KEYS = ("kind", "language", "identified")
_HOST = re.compile(r"([a-z0-9-]+\.)+example|([a-z0-9-]+\.)+example\.(org|com|net)")
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_IDENTIFIED = re.compile(r"[a-z]{3}(,[a-z]{3}){0,2}")
_BLOCK = re.compile(r"== block: ([a-z0-9_-]+)")
_PAGE = re.compile(r"== page: (/[!-{}~]*)(?: \| (\S.*))?")
_NAME_TIME = "20260401000000-20260401030000"
_FIRST_DATE = datetime(2026, 4, 1, tzinfo=UTC)
_CRAWL_SECONDS = 3 * 3600
_BINARY = bytes([0, 0, 1, 2, 7, 0x1B, 0, 0x7F])


@dataclass(frozen=True)
class Page:
    """A page of the sample: its URL, what is known about it, and its lines in order.

    `identified` is the value of WARC-Identified-Content-Language, or "" for no such header.
    `lines` are the whole body: title first (if it has one), blocks and articles inserted.
    """

    url: str
    language: str
    kind: str
    identified: str
    lines: tuple[str, ...]

    def body(self) -> bytes:
        """The body of the page's WET record."""
        return "\n".join(self.lines).encode()


@dataclass(frozen=True)
class RecordFault:
    """A fault with which the record of the page `url` is stored; see FORMAT.md for the kinds."""

    url: str
    kind: str
    why: str
    short_by_bytes: int = 0


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


def sources() -> Traversable:
    """The folder of the sample's sources, in an editable install and in a wheel alike."""
    return resources.files("data_manifests").joinpath("sample_crawl")


def reference_files(root: Traversable | None = None) -> dict[str, Traversable]:
    """The prose that trains the demo's language models: one file for each language code."""
    folder = (root if root is not None else sources()).joinpath("reference")
    return {file.name.removesuffix(".txt"): file for file in _text_files(folder)}


def read_pages(root: Traversable | None = None) -> list[Page]:
    """Every page of the sample, in crawl order. Raises UserError, with file and line."""
    root = root if root is not None else sources()
    drafts: dict[str, _Draft] = {}
    hosts: dict[str, str] = {}
    for file in _text_files(root.joinpath("sites")):
        site = _SiteParser(file)
        if site.host in hosts:
            _fail(file.name, 1, f'the host "{site.host}" has a file already: {hosts[site.host]}')
        hosts[site.host] = file.name
        drafts |= {draft.page.url: draft for draft in site.drafts}
    if not drafts:
        raise UserError(f'no page in "{root}/sites": the sample needs at least one site file')
    by_address = {url.partition("://")[2]: draft for url, draft in drafts.items()}
    return [_finish(draft, by_address) for draft in drafts.values()]


def read_faults(root: Traversable, pages: Sequence[Page]) -> list[RecordFault]:
    """The faults of `faults.toml`, none when there is no such file. Raises UserError."""
    file = root.joinpath("faults.toml")
    if not file.is_file():
        return []
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        faults = [RecordFault(**table) for table in tables.pop("fault", [])]
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise UserError(f"faults.toml: {error}; see FORMAT.md for what is valid") from error
    if tables:
        raise UserError(f'faults.toml: unknown key "{min(tables)}"; only [[fault]] is valid')
    known = {page.url for page in pages}
    for fault in faults:
        if fault.kind not in FAULT_KINDS:
            raise UserError(f'faults.toml: kind "{fault.kind}" is not one of {FAULT_KINDS}')
        if fault.url not in known:
            raise UserError(f'faults.toml: "{fault.url}" is not a page of the sample')
        if (fault.kind == "wrong_length") != (fault.short_by_bytes > 0):
            raise UserError(
                f'faults.toml: short_by_bytes of "{fault.url}" is {fault.short_by_bytes}; '
                "it is above 0 for wrong_length and not given for other kinds"
            )
    if len({fault.url for fault in faults}) < len(faults):
        raise UserError("faults.toml: a page is named twice; one page has one fault")
    for kind in ("damaged_member", "cut_member"):
        if sum(fault.kind == kind for fault in faults) > 1:
            raise UserError(f'faults.toml: "{kind}" stands twice; it has one place only')
    return faults


# --- The text format -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """A page whose inserted articles are not resolved yet.

    `items` are (line number, kind, text); kind is "own", "block" or "article".
    """

    file: str
    page: Page
    items: list[tuple[int, str, str]]


class _SiteParser:
    """Reads one site file: header, blocks and pages."""

    def __init__(self, file: Traversable) -> None:
        self.file = file.name
        self.drafts: list[_Draft] = []
        self._blocks: dict[str, list[str]] = {}
        self._header: dict[str, str] = {}
        self._open_block: list[str] | None = None
        lines = _numbered_lines(file)
        body = next((at for at, (_, line) in enumerate(lines) if line.startswith("==")), len(lines))
        for number, line in lines[:body]:
            self._setting(number, line, self._header, _SITE_KEYS)
        self._check_header()
        for number, line in lines[body:]:
            self._line(number, line)
        if not self.drafts:
            self.fail(1, 'the file has no page; write one as "== page: /path | Title"')

    def fail(self, number: int, message: str) -> NoReturn:
        _fail(self.file, number, message)

    def _setting(self, number: int, line: str, into: dict[str, str], valid: Sequence[str]) -> None:
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or not value or key not in valid:
            self.fail(number, f'"{line}" is not "key: value" with a key of {", ".join(valid)}')
        if key in into:
            self.fail(number, f'"{key}" is given twice')
        if key == "language" and not _LANGUAGE.fullmatch(value):
            self.fail(number, f'language "{value}" is not a code of two or three small letters')
        if key == "identified" and value != "none" and not _IDENTIFIED.fullmatch(value):
            self.fail(number, f'identified "{value}" is not 1 to 3 codes as in "eng" or "rus,eng"')
        if key == "kind" and value not in KINDS:
            self.fail(number, f'kind "{value}" is not one of {", ".join(KINDS)}')
        if key == "scheme" and value not in ("http", "https"):
            self.fail(number, f'scheme "{value}" is not http or https')
        into[key] = value

    def _check_header(self) -> None:
        for key in ("host", "language"):
            if key not in self._header:
                self.fail(1, f'the header has no "{key}: ..." line')
        self.host = self._header["host"]
        if not _HOST.fullmatch(self.host):
            self.fail(1, f'host "{self.host}" does not end in .example or .example.org, .com, .net')
        language = self._header["language"]
        if not self.file.startswith(f"{language}-"):
            self.fail(1, f'language "{language}" is not what the file name begins with')

    def _line(self, number: int, line: str) -> None:
        if line.startswith("=="):
            self._open(number, line)
        elif self._open_block is not None:
            if line.startswith(("@", "!")):
                self.fail(number, f'"{line}" in a block: only text stands there; escape it with \\')
            self._open_block.append(line.removeprefix("\\"))
        else:
            self._page_line(number, line)

    def _open(self, number: int, line: str) -> None:
        if block := _BLOCK.fullmatch(line):
            if block[1] in self._blocks or block[1] == "article":
                self.fail(number, f'the block name "{block[1]}" is taken')
            self._open_block = self._blocks[block[1]] = []
            return
        page = _PAGE.fullmatch(line)
        if not page:
            self.fail(number, f'"{line}" is neither "== block: name" nor "== page: /path | Title"')
        self._open_block = None
        url = f"{self._header.get('scheme', 'https')}://{self.host}{page[1]}"
        if any(draft.page.url == url for draft in self.drafts):
            self.fail(number, f'the path "{page[1]}" has a page already')
        self._settings: dict[str, str] = {}
        defaults = Page(
            url=url,
            language=self._header["language"],
            kind="good",
            identified=self._header.get("identified", "").replace("none", ""),
            lines=(page[2],) if page[2] else (),
        )
        self.drafts.append(_Draft(self.file, defaults, []))

    def _page_line(self, number: int, line: str) -> None:
        draft = self.drafts[-1]
        if line.startswith("!"):
            if draft.items:
                self.fail(number, f'"{line}" after the text: it stands under the "== page" line')
            self._setting(number, line.removeprefix("!"), self._settings, _PAGE_KEYS)
            changes: dict[str, Any] = dict(self._settings)
            if changes.get("identified") == "none":
                changes["identified"] = ""
            self.drafts[-1] = replace(draft, page=replace(draft.page, **changes))
        elif line.startswith("@article "):
            draft.items.append((number, "article", line.removeprefix("@article ").strip()))
        elif line.startswith("@"):
            name = line.removeprefix("@")
            if name not in self._blocks:
                self.fail(number, f'no block "{name}" stands above; known: {sorted(self._blocks)}')
            draft.items.extend((number, "block", text) for text in self._blocks[name])
        else:
            draft.items.append((number, "own", line.removeprefix("\\")))


def _finish(draft: _Draft, by_address: dict[str, _Draft]) -> Page:
    """The page of `draft`, with its articles inserted and its digits filled in."""
    lines = list(draft.page.lines)
    for number, kind, text in draft.items:
        if kind != "article":
            lines.append(text)
            continue
        if text not in by_address:
            _fail(draft.file, number, f'"{text}" is not host/path of a page of the sample')
        lines.extend(line for _, kind, line in by_address[text].items if kind == "own")
    if not lines:
        _fail(draft.file, 1, f'the page "{draft.page.url}" is empty; give it a title or text')
    seed = int.from_bytes(hashlib.sha1(draft.page.url.encode()).digest()[:4])
    year, number4 = str(2019 + seed % 8), str(1000 + seed % 9000)
    filled = (line.replace("{year}", year).replace("{number}", number4) for line in lines)
    return replace(draft.page, lines=tuple(filled))


def _numbered_lines(file: Traversable) -> list[tuple[int, str]]:
    """The lines that say something, stripped, with their numbers from 1."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        _fail(file.name, 1, f"the file is not UTF-8: {error}")
    numbered = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


def _text_files(folder: Traversable) -> list[Traversable]:
    if not folder.is_dir():
        raise UserError(f'no folder "{folder}": the sample crawl needs it')
    files = (file for file in folder.iterdir() if file.name.endswith(".txt"))
    return sorted(files, key=lambda file: file.name)


def _fail(file: str, number: int, message: str) -> NoReturn:
    raise UserError(f"{file}:{number}: {message} (see data_manifests/sample_crawl/FORMAT.md)")


# --- WARC --------------------------------------------------------------------------------------


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
