"""Reads the sources of the sample crawl: a readable text file for each host, and a table of faults.

`data_manifests/sample_crawl/FORMAT.md` describes the format. The parser is strict, so that a slip
in a file that is edited by hand is an error with file and line, never a strange page.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from models.errors import UserError

KINDS = ("good", "short", "list", "spam", "symbols", "mixed", "copy", "poem")
FaultKind = Literal[
    "nul_bytes",
    "invalid_utf8",
    "no_url",
    "wrong_length",
    "response_record",
    "damaged_member",
    "cut_member",
]
_SITE_KEYS = ("host", "language", "scheme", "identified")
_PAGE_KEYS = ("kind", "language", "identified")
_HOST = re.compile(r"([a-z0-9-]+\.)+example|([a-z0-9-]+\.)+example\.(org|com|net)")
_LANGUAGE = re.compile(r"[a-z]{2,3}")
_IDENTIFIED = re.compile(r"[a-z]{3}(,[a-z]{3}){0,2}")
_BLOCK = re.compile(r"== block: ([a-z0-9_-]+)")
_PAGE = re.compile(r"== page: (/[!-{}~]*)(?: \| (\S.*))?")


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


class RecordFault(BaseModel):
    """A fault with which the record of the page `url` is stored; see FORMAT.md for the kinds."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    url: str
    kind: FaultKind
    why: str
    short_by_bytes: int = 0


class _FaultFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fault: list[RecordFault] = []


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
        faults = _FaultFile.model_validate(tomllib.loads(file.read_text(encoding="utf-8"))).fault
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"faults.toml: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f'faults.toml: {where} is "{first["input"]}": {first["msg"]} (see FORMAT.md)'
        ) from error
    by_url = {page.url: page for page in pages}
    for fault in faults:
        if fault.url not in by_url:
            raise UserError(f'faults.toml: "{fault.url}" is not a page of the sample')
        longest = len(by_url[fault.url].body()) if fault.kind == "wrong_length" else 0
        if not min(longest, 1) <= fault.short_by_bytes <= longest:
            raise UserError(
                f'faults.toml: short_by_bytes of "{fault.url}" is {fault.short_by_bytes}; it is '
                "from 1 to the length of the body for wrong_length, and not given for other kinds"
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
        self._settings: dict[str, str] = {}
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
        into[key] = "" if (key, value) == ("identified", "none") else value

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
        self._settings = {}
        defaults = Page(
            url=url,
            language=self._header["language"],
            kind="good",
            identified=self._header.get("identified", ""),
            lines=(page[2],) if page[2] else (),
        )
        self.drafts.append(_Draft(self.file, defaults, []))

    def _page_line(self, number: int, line: str) -> None:
        draft = self.drafts[-1]
        if line.startswith("!"):
            if draft.items:
                self.fail(
                    number,
                    f'"{line}" after the text; a setting stands under "== page", text gets a \\',
                )
            self._setting(number, line.removeprefix("!"), self._settings, _PAGE_KEYS)
            changes: dict[str, Any] = dict(self._settings)
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
