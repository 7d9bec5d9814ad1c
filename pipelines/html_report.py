"""The report of a mined crawl as one HTML page.

What comes from the crawl is hostile: the page escapes all of it (`report_page`); characters that
turn text around are made visible in names and addresses, and confined to their line in page text.
Numbers come from the manifest; distributions, hosts and pages to read come from the shards. The
same crawl gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.languages import table
from pipelines.buckets import BUCKETS, NO_BUCKET
from pipelines.manifest import Manifest
from pipelines.report import share, size
from pipelines.report_charts import require_renderer
from pipelines.report_figures import Figures, Sample, look_at_shards
from pipelines.report_page import Page, check_target, render_page, write_page
from pipelines.report_parts import language_name
from pipelines.report_sections import SAMPLE_LANGUAGES, by_pages, sections


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
    check_target(target)
    require_renderer()
    largest = [code for code, _ in by_pages(manifest)[:SAMPLE_LANGUAGES]]
    figures = look_at_shards(manifest, folder, sample_languages=largest)
    return write_page(render(manifest, figures), target)


def render(manifest: Manifest, figures: Figures) -> str:
    """The page as HTML text without lone surrogates."""
    samples = _samples(manifest, figures)
    page = Page(
        kind="Mined crawl",
        name=str(manifest.recipe.get("name", "")),
        summary=_summary(manifest),
        tiles=_tiles(manifest),
        notices=_notices(manifest, figures),
        sections=sections(manifest, figures),
        tool_version=manifest.tool_version,
    )
    return render_page(
        page,
        template="report_page.crawl.html",
        samples=samples,
        samples_left_out=len(manifest.counts.by_language) - len(samples),
        unreadable=figures.unreadable,
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
