"""The parts that the report's page is put together from, and names as a person reads them."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from models.languages import UNDETERMINED, table

# Direction marks, embeddings, overrides, isolates, and other characters that have no shape.
_INVISIBLE = re.compile("[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\t\n\r]")


@dataclass(frozen=True)
class Column:
    """kind: "name", "number", "text", "code" (a digest or a setting)."""

    title: str
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its heading. folded: closed at first."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """svg: markup, made by `report_charts`. legend: buckets in it."""

    caption: str
    svg: str
    legend: tuple[str, ...] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """charts stand one below the other; small ones side by side, behind the others."""

    id: str
    title: str
    intro: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    small: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


def visible(text: str) -> str:
    """A name or an address in which nothing hides: invisible characters by their number."""
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def language_name(code: str) -> str:
    """ "Bengali (bn)"; the bare code where the table does not know it."""
    if code == UNDETERMINED:
        return f"Undetermined ({code})"
    known = table().get(code)
    return f"{known.name} ({code})" if known else visible(code)


def counted(number: int, what: str) -> str:
    """ "1 host", "1,000 hosts"."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def columns(text: str) -> int:
    """Columns of a terminal that `text` takes: East Asian wide characters two, marks none."""
    return sum(map(_columns_of, text))


def cut_columns(text: str, most: int) -> str:
    """`text`, or its beginning where it takes more than `most` columns."""
    if columns(text) <= most:
        return text
    kept = ""
    while columns(kept) + _columns_of(text[len(kept)]) < most:
        kept += text[len(kept)]
    return kept + "…"


def _columns_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
