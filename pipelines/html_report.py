"""The report of a mined crawl as one HTML page that needs nothing else.

No network and no foreign script: a Content-Security-Policy in the page allows its own style and
its own script (the theme switch), by digest, and nothing more. What comes from the crawl is
hostile: the template escapes all of it; characters that turn text around are made visible in
names and addresses, and confined to their line in page text. Numbers come from the manifest;
distributions, hosts and pages to read come from the shards. The same crawl gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from models import files
from models.errors import UserError
from models.languages import table
from pipelines.buckets import BUCKETS, NO_BUCKET
from pipelines.manifest import MANIFEST_FILE, Manifest
from pipelines.report import share, size
from pipelines.report_charts import require_renderer
from pipelines.report_figures import Figures, Sample, look_at_shards
from pipelines.report_parts import language_name, visible
from pipelines.report_sections import SAMPLE_LANGUAGES, by_pages, sections

# What HTML cannot hold: control characters, lone surrogates, noncharacters.
_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class _LanguageSamples:
    """Pages of one language to read, by bucket. lang: BCP 47, for the browser's fonts."""

    name: str
    lang: str
    buckets: tuple[tuple[str, list[Sample]], ...]


def write_html_report(manifest: Manifest, folder: str, target: str) -> int:
    """Write the page of `manifest`, whose shards lie below `folder`, to `target`, all or nothing.

    Gives its size in bytes. Raises UserError when `target` is a folder or a file of the crawl, or
    when the extra `report` is not installed.
    """
    _check_target(target)
    require_renderer()
    largest = [code for code, _ in by_pages(manifest)[:SAMPLE_LANGUAGES]]
    page = render(manifest, look_at_shards(manifest, folder, sample_languages=largest)).encode()
    try:
        files.write_atomic(target, page)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--html '{target}' cannot be written: {reason}") from None
    return len(page)


def render(manifest: Manifest, figures: Figures) -> str:
    """The page as HTML text without lone surrogates."""
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
    style, script = _data("report_page.css"), _data("report_page.js")
    policy = (
        f"default-src 'none'; style-src '{_source(style)}'; script-src '{_source(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    samples = _samples(manifest, figures)
    return environment.get_template("report_page.html").render(
        name=str(manifest.recipe.get("name", "")),
        summary=_summary(manifest),
        tiles=_tiles(manifest),
        notices=_notices(manifest, figures),
        sections=sections(manifest, figures),
        samples=samples,
        samples_left_out=len(manifest.counts.by_language) - len(samples),
        unreadable=figures.unreadable,
        tool_version=manifest.tool_version,
        # Our own files, and drawings in which the renderer has escaped all text.
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        drawing=Markup,
    )


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


def _check_target(target: str) -> None:
    if files.is_local(target) and files.local_path(target).is_dir():
        raise UserError(f"--html '{target}' is a folder: give the name of a file in it")
    if target.endswith((".parquet", ".json", "/")):
        raise UserError(
            f"--html '{target}' is no name for a page: give one that ends in .html, "
            f"so that no {MANIFEST_FILE} and no shard is overwritten"
        )


def _summary(manifest: Manifest) -> str:
    pages, languages = manifest.counts.pages, len(manifest.counts.by_language)
    if not pages.read:
        return "No page was read."
    if not pages.written:
        return f"{pages.read:,} pages were read; none was kept. The reasons stand below."
    return (
        f"{pages.written:,} of {pages.read:,} pages ({share(pages.written, pages.read)}) were kept,"
        f" in {languages:,} language{'' if languages == 1 else 's'}."
    )


def _tiles(manifest: Manifest) -> list[tuple[str, str, str]]:
    counts = manifest.counts
    chars = sum(language.chars for language in counts.by_language.values())
    return [
        ("pages read", f"{counts.pages.read:,}", ""),
        ("pages kept", f"{counts.pages.written:,}", share(counts.pages.written, counts.pages.read)),
        ("paragraphs kept", f"{counts.paragraphs.kept:,}",
         share(counts.paragraphs.kept, counts.paragraphs.read)),
        ("characters kept", f"{chars:,}", ""),
        ("WET files", f"{len(manifest.inputs):,}",
         size(sum(entry.bytes for entry in manifest.inputs))),
        ("Parquet files", f"{len(manifest.outputs):,}",
         size(sum(output.bytes for output in manifest.outputs))),
    ]  # fmt: skip


def _notices(manifest: Manifest, figures: Figures) -> list[str]:
    failed = sum(bool(entry.failed) for entry in manifest.inputs)
    found = []
    if failed:
        found.append(f"{failed:,} of {len(manifest.inputs):,} inputs could not be read.")
    if manifest.losses:
        found.append(f"Bytes were lost in {len({loss.name for loss in manifest.losses}):,} files.")
    if figures.unreadable:
        found.append(
            f"{len(figures.unreadable):,} of {len(manifest.outputs):,} Parquet files are missing "
            "or differ from the manifest: distributions, hosts and pages to read leave them out."
        )
    found += [f"The manifest contradicts itself: {fault}." for fault in manifest.faults()]
    return found


def _samples(manifest: Manifest, figures: Figures) -> list[_LanguageSamples]:
    found = []
    for code, _ in by_pages(manifest):
        buckets = tuple(
            (bucket, figures.samples[code, bucket])
            for bucket in (*BUCKETS, NO_BUCKET)
            if (code, bucket) in figures.samples
        )
        if buckets:
            known = table().get(code)
            lang = (known.iso639_1 or known.iso639_3) if known else ""
            found.append(_LanguageSamples(language_name(code), lang, buckets))
    return found
