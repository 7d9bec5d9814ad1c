"""From a WET record to a page that enters the pipeline, or a reason why it does not.

The hash pass and the clean pass both read pages through here, so that both see the same pages
with the same paragraphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.paragraphs import page_lines
from pipelines.recipe import Pages
from pipelines.wet import Record

_CONTROLS = bytes(c for c in [*range(0x20), 0x7F] if c not in b"\t\n\r")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Page:
    """A page before dedup.

    lines: its paragraphs, without outer white space; the title is among them except in profile
    "ccnet". chars: code points of the lines joined by line feeds. dropped: why the page does not
    enter, or "".
    """

    record: Record
    title: str
    lines: list[str]
    chars: int
    dropped: str


def read_page(record: Record, config: Pages) -> Page:
    """Decode and split `record`.

    Drops: `missing_url`, `not_text` (too many U+FFFD and control characters), `too_short`
    (no text, or fewer than `config.min_chars` code points, as CCNet before dedup).
    """
    body = record.body
    text = body.decode("utf-8", "replace")
    if config.profile == "ccnet":
        title, *lines = _ccnet_lines(text)
    else:
        lines = page_lines(text)
        while lines and not lines[-1]:
            lines.pop()
        title = lines[0] if lines else ""
    lines = lines or [""]
    chars = sum(map(len, lines)) + len(lines) - 1
    dropped = ""
    if not record.url:
        dropped = "missing_url"
    elif _unreadable(body, text) > config.max_unreadable * chars:
        dropped = "not_text"
    elif chars < max(config.min_chars, 1):
        dropped = "too_short"
    return Page(record, title, lines, chars, dropped)


def _ccnet_lines(text: str) -> list[str]:
    """Lines as CCNet's reader sees them: with the record's end, less two blank last lines."""
    lines = page_lines(text)
    lines.append("")  # the record's end is a blank line
    if len(lines) >= 2 and not lines[-1] and not lines[-2]:
        del lines[-2:]
    return lines or [""]


def _unreadable(body: bytes, text: str) -> int:
    """Characters that no text has: controls, NUL, and U+FFFD for bytes that are not UTF-8."""
    controls = len(body) - len(body.translate(None, _CONTROLS))
    return controls + (0 if body.isascii() else text.count(_REPLACEMENT))
