"""A report as one HTML page that needs nothing else, whatever it reports on.

No network and no foreign script: a Content-Security-Policy in the page allows its own style and
its own script (the theme switch), by digest, and nothing more. The template escapes all text;
drawings alone are markup, made by `report_charts` and `report_plots`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from models import files
from models.errors import UserError
from pipelines.manifest import MANIFEST_FILE
from pipelines.report_parts import Section, visible

# What HTML cannot hold: control characters, lone surrogates, noncharacters.
_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class Page:
    """What every report has. kind: "Mined crawl". tiles: (what, number, beside it)."""

    kind: str
    name: str
    summary: str
    tiles: Sequence[tuple[str, str, str]]
    notices: Sequence[str]
    sections: Sequence[Section]
    tool_version: str


def render_page(
    page: Page, *, template: str = "report_page.html", styles: Sequence[str] = (), **more: Any
) -> str:
    """The page as HTML text without lone surrogates.

    template: one that fills the blocks of report_page.html, from `more`. styles: further files of
    style, behind report_page.css.
    """
    import jinja2  # noqa: PLC0415
    from markupsafe import Markup  # noqa: PLC0415

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_data),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_showable,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {"visible": visible, "link": _link}
    style = "".join(map(_data, ("report_page.css", *styles)))
    script = _data("report_page.js")
    policy = (
        f"default-src 'none'; style-src '{_source(style)}'; script-src '{_source(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template(template).render(
        kind=page.kind,
        name=page.name,
        summary=page.summary,
        tiles=page.tiles,
        notices=page.notices,
        sections=page.sections,
        tool_version=page.tool_version,
        # Our own files, and drawings in which the renderer has escaped all text.
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        drawing=Markup,
        **more,
    )


def check_target(target: str) -> None:
    """Raises UserError when `target` is a folder or has the name of a file of ours."""
    if files.is_local(target) and files.local_path(target).is_dir():
        raise UserError(f"--html '{target}' is a folder: give the name of a file in it")
    if target.endswith((".parquet", ".json", "/")):
        raise UserError(
            f"--html '{target}' is no name for a page: give one that ends in .html, "
            f"so that no {MANIFEST_FILE} and no shard is overwritten"
        )


def write_page(text: str, target: str) -> int:
    """Write the page `text` to `target`, all or nothing; gives its size in bytes."""
    page = text.encode()
    try:
        files.write_atomic(target, page)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--html '{target}' cannot be written: {reason}") from None
    return len(page)


def _data(name: str) -> str:
    return resources.files("pipelines").joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """The CSP source expression of an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _showable(value: Any) -> Any:
    """What the template prints, without characters that HTML cannot hold."""
    if isinstance(value, str) and _UNSHOWABLE.search(value):
        return type(value)(_UNSHOWABLE.sub("\ufffd", value))
    return value


def _link(url: str) -> str:
    """`url` where it is safe to follow, else ""."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    safe = parts.scheme in ("http", "https") and parts.hostname and visible(url) == url
    return url if safe and not _UNSHOWABLE.search(url) and " " not in url else ""
