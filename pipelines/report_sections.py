"""What the report says: the sections on the funnel, languages, perplexity, length and hosts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from pipelines.buckets import BUCKETS, NO_BUCKET
from pipelines.manifest import LanguageCounts, Manifest
from pipelines.report import REASONS, meaning, share
from pipelines.report_charts import SMALL, Bar, bar_chart, histogram_chart
from pipelines.report_figures import Figures, Histogram
from pipelines.report_parts import Chart, Column, Section, Table, counted, language_name, visible
from pipelines.report_provenance import losses, provenance

SAMPLE_LANGUAGES = 40
_CHART_LANGUAGES = 15
_PERPLEXITY_CHARTS = 12
_PIPELINE_ORDER = {reason: place for place, reason in enumerate(REASONS)}


def by_pages(manifest: Manifest) -> list[tuple[str, LanguageCounts]]:
    """The languages, the largest first."""
    found = manifest.counts.by_language.items()
    return sorted(found, key=lambda item: (-item[1].pages, item[0]))


def buckets_in(manifest: Manifest) -> tuple[str, ...]:
    """The buckets that hold a page, in order of quality."""
    languages = manifest.counts.by_language.values()
    return tuple(
        bucket
        for bucket in (*BUCKETS, NO_BUCKET)
        if any(language.buckets.get(bucket) for language in languages)
    )


def sections(manifest: Manifest, figures: Figures) -> list[Section]:
    """All sections but the pages to read."""
    return [
        _funnel(manifest),
        _paragraphs(manifest),
        _languages(manifest),
        _perplexity(manifest, figures),
        _lengths(manifest, figures),
        _hosts(figures),
        losses(manifest),
        provenance(manifest),
    ]


def coverage(figures: Figures) -> str:
    """How much of the crawl the distributions are made of, in one sentence."""
    read, listed = figures.pages_read, figures.pages_listed
    if read == listed:
        return f"Counted over all {listed:,} pages."
    pages = f"{read:,} of {listed:,} pages ({share(read, listed)})"
    gone = f"{counted(len(figures.unreadable), 'Parquet file')} could not be read."
    if not figures.sampled:
        return f"Counted over {pages}: {gone}"
    chosen = "chosen by whole row groups within each language and bucket"
    return f"Estimated from {pages}, {chosen}" + (f"; {gone}" if figures.unreadable else ".")


def _funnel(manifest: Manifest) -> Section:
    records, pages = manifest.counts.records, manifest.counts.pages
    dropped = _in_order(pages.dropped)
    steps = [("read", pages.read, ""), *dropped, ("written", pages.written, "")]
    return Section(
        "funnel",
        "From records to pages",
        ("Each page that was read is either written or dropped for one reason.",),
        charts=_waterfall("Pages", pages.read, pages.dropped, "written", pages.written),
        tables=(
            Table(
                "Pages",
                (Column("step", "name"), Column("pages", "number"), Column("share", "number"),
                 Column("meaning")),
                tuple((name, f"{count:,}", share(count, pages.read), words)
                      for name, count, words in steps),
            ),
            Table(
                "Records",
                (Column("kind", "name"), Column("records", "number"), Column("meaning")),
                (
                    ("read", f"{records.read:,}", "delivered as pages"),
                    ("not pages", f"{records.not_pages:,}", "warcinfo and other types"),
                    ("lost", f"{records.lost:,}", "pages known to be lost in damage"),
                    ("length corrected", f"{records.length_corrected:,}",
                     "delivered although Content-Length was wrong"),
                ),
            ),
        ),
    )  # fmt: skip


def _paragraphs(manifest: Manifest) -> Section:
    paragraphs, keys = manifest.counts.paragraphs, manifest.counts.keys
    steps = [
        ("read", paragraphs.read, ""),
        *_in_order(paragraphs.dropped),
        ("kept", paragraphs.kept, ""),
    ]
    return Section(
        "paragraphs",
        "Paragraphs and duplicates",
        (
            f"{keys.distinct:,} different paragraphs were compared; {keys.repeated:,} of them "
            f"({share(keys.repeated, keys.distinct) or '0 %'}) stand on two pages or more, or in "
            "the index of earlier crawls.",
        ),
        charts=_waterfall(
            "Paragraphs", paragraphs.read, paragraphs.dropped, "kept", paragraphs.kept
        ),
        tables=(
            Table(
                "Paragraphs",
                (Column("step", "name"), Column("paragraphs", "number"), Column("share", "number"),
                 Column("meaning")),
                tuple((name, f"{count:,}", share(count, paragraphs.read), words)
                      for name, count, words in steps),
            ),
        ),
    )  # fmt: skip


def _in_order(dropped: Mapping[str, int]) -> list[tuple[str, int, str]]:
    """Reasons in the order in which the pipeline asks."""
    last = len(_PIPELINE_ORDER)
    reasons = sorted(dropped, key=lambda reason: (_PIPELINE_ORDER.get(reason, last), reason))
    return [(visible(reason), dropped[reason], visible(meaning(reason))) for reason in reasons]


def _waterfall(
    what: str, read: int, dropped: Mapping[str, int], end: str, left: int
) -> tuple[Chart, ...]:
    if not read:
        return ()
    bars = [Bar("read", f"{read:,}", ((0, read, "--all"),))]
    at = read
    for reason, count, _ in _in_order(dropped):
        bars.append(Bar(reason, f"{count:,} ({share(count, read)})", ((at - count, at, "--drop"),)))
        at -= count
    bars.append(Bar(end, f"{left:,} ({share(left, read)})", ((0, left, "--keep"),)))
    described = ", ".join(f"{bar.label} {bar.value}" for bar in bars)
    caption = f"{what}: what each step takes away, and what is {end}"
    svg = bar_chart(bars, f"{caption}. {described}.", full=read)
    return (Chart(caption, svg),)


def _languages(manifest: Manifest) -> Section:
    ordered, buckets = by_pages(manifest), buckets_in(manifest)
    if not ordered:
        return Section("languages", "Languages", ("No page was kept.",))
    shown = ordered[:_CHART_LANGUAGES]
    rest = len(ordered) - len(shown)
    largest = shown[0][1].pages
    more = f", the {len(shown)} largest of {len(ordered)}" if rest else ""
    charts = [_language_chart(f"Pages by language{more}", shown, buckets, full=largest)]
    pages = manifest.counts.pages.written
    intro = [f"{pages:,} pages in {counted(len(ordered), 'language')}."]
    in_buckets = buckets != (NO_BUCKET,)
    if in_buckets:
        charts.append(_share_chart(f"Bucket shares by language{more}", shown, buckets))
    else:
        intro.append(
            "No page has a bucket: head, middle and tail need language models (quality.models)."
        )
    names = [*buckets, "head below", "tail from"] if in_buckets else []
    columns = (
        Column("language", "name"),
        *(Column(name, "number")
          for name in ("pages", "share", "characters", "mean characters", *names)),
    )  # fmt: skip
    rows = []
    for code, language in ordered:
        row = [
            language_name(code), f"{language.pages:,}", share(language.pages, pages),
            f"{language.chars:,}", f"{language.chars / max(1, language.pages):,.0f}",
        ]  # fmt: skip
        if in_buckets:
            cutoffs = manifest.cutoffs.get(code)
            row += [f"{language.buckets.get(bucket, 0):,}" for bucket in buckets]
            row += [_perplexity_text(value) for value in cutoffs] if cutoffs else ["", ""]
        rows.append(tuple(row))
    whole = Table(f"Languages ({len(rows):,})", columns, tuple(rows), folded=bool(rest))
    return Section(
        "languages", "Languages and buckets", tuple(intro), tuple(charts), tables=(whole,)
    )


def _language_chart(
    caption: str,
    shown: Sequence[tuple[str, LanguageCounts]],
    buckets: tuple[str, ...],
    *,
    full: int,
) -> Chart:
    bars = [
        Bar(language_name(code), f"{language.pages:,}", _stacked(language, buckets))
        for code, language in shown
    ]
    described = ", ".join(f"{bar.label} {bar.value}" for bar in bars)
    legend = () if buckets == (NO_BUCKET,) else buckets
    return Chart(caption, bar_chart(bars, f"{caption}. {described}.", full=full), legend)


def _share_chart(
    caption: str, shown: Sequence[tuple[str, LanguageCounts]], buckets: tuple[str, ...]
) -> Chart:
    bars = []
    for code, language in shown:
        percents = [
            f"{100 * language.buckets.get(bucket, 0) / language.pages:.0f}" for bucket in buckets
        ]
        bars.append(
            Bar(
                language_name(code),
                " / ".join(percents) + " %",
                tuple(
                    (start / language.pages, stop / language.pages, colour)
                    for start, stop, colour in _stacked(language, buckets)
                ),
            )
        )
    order = " / ".join(buckets)
    described = ", ".join(f"{bar.label} {bar.value}" for bar in bars)
    return Chart(
        f"{caption} ({order}, in percent)",
        bar_chart(bars, f"{caption}: {order}. {described}.", full=1),
        buckets,
    )


def _stacked(
    language: LanguageCounts, buckets: tuple[str, ...]
) -> tuple[tuple[float, float, str], ...]:
    segments, at = [], 0
    for bucket in buckets:
        count = language.buckets.get(bucket, 0)
        segments.append((at, at + count, f"--{bucket}"))
        at += count
    return tuple(segments)


def _perplexity(manifest: Manifest, figures: Figures) -> Section:
    scored = [code for code, _ in by_pages(manifest) if code in figures.perplexity]
    if not scored:
        return Section("perplexity", "Perplexity", ("No page has a perplexity.",))
    shown = scored[:_PERPLEXITY_CHARTS]
    intro = [
        "Lower is closer to the text of the language model. Perplexities of two languages, or of "
        "two models, do not compare.",
        coverage(figures),
    ]
    if len(scored) > len(shown):
        intro.append(f"The {len(shown)} largest of {len(scored)} languages with a score.")
    unscored = sum(figures.unscored.values())
    if unscored:
        intro.append(f"{unscored:,} pages have no score: no model, or too short for one.")
    charts = []
    for code in shown:
        histogram, name = figures.perplexity[code], language_name(code)
        cutoffs = manifest.cutoffs.get(code)
        lines = {}
        if cutoffs:
            lines = {
                f"head < {_perplexity_text(cutoffs[0])}": cutoffs[0],
                f"tail ≥ {_perplexity_text(cutoffs[1])}": cutoffs[1],
            }
        described = f"Histogram of perplexity, {name}. " + "; ".join(lines)
        charts.append(
            Chart(
                name,
                histogram_chart(histogram, lines, described, sizes=[SMALL]),
                _in_quality_order(histogram),
                _bins(f"Perplexity, {name}", "perplexity", histogram, _perplexity_text),
            )
        )
    return Section("perplexity", "Perplexity", tuple(intro), small=tuple(charts))


def _lengths(manifest: Manifest, figures: Figures) -> Section:
    if figures.chars is None:
        return Section("length", "Page length", (_nothing_read(figures),))
    settings = manifest.recipe.get("pages", {})
    lines = {}
    for name, when in (("min_chars", "before"), ("min_chars_after", "after")):
        value = settings.get(name)
        if value:
            lines[f"{name} {value:,} ({when} dedup)"] = float(value)
    caption = "Pages by length in characters"
    described = f"Histogram: {caption.lower()}. " + "; ".join(lines)
    return Section(
        "length",
        "Page length",
        (
            "Length of the kept text, in code points; a page can fall below min_chars when dedup "
            "takes paragraphs out.",
            coverage(figures),
        ),
        charts=(
            Chart(
                caption,
                histogram_chart(figures.chars, lines, described),
                () if set(figures.chars.pages) == {NO_BUCKET} else _in_quality_order(figures.chars),
                _bins(caption, "characters", figures.chars, lambda value: f"{value:,.0f}"),
            ),
        ),
    )


def _in_quality_order(histogram: Histogram) -> tuple[str, ...]:
    return tuple(bucket for bucket in (*BUCKETS, NO_BUCKET) if bucket in histogram.pages)


def _bins(caption: str, unit: str, histogram: Histogram, text: Callable[[float], str]) -> Table:
    buckets = _in_quality_order(histogram)
    rows = []
    for place, (low, high) in enumerate(itertools.pairwise(histogram.edges)):
        counts = [histogram.pages[bucket][place] for bucket in buckets]
        rows.append((f"{text(low)} to {text(high)}", *(f"{count:,}" for count in counts)))
    columns = (Column(unit, "name"), *(Column(bucket, "number") for bucket in buckets))
    return Table(caption, columns, tuple(rows), folded=True)


def _perplexity_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _nothing_read(figures: Figures) -> str:
    if figures.pages_listed:
        return "Not known: no Parquet file of this crawl could be read."
    return "No page was kept."


def _hosts(figures: Figures) -> Section:
    if not figures.hosts:
        return Section("hosts", "Hosts", (_nothing_read(figures),))
    caption = f"The {len(figures.hosts)} hosts with the most pages"
    if len(figures.hosts) == figures.distinct_hosts:
        caption = "Pages by host"
    named = [(visible(host) or "(no host)", pages) for host, pages in figures.hosts]
    bars = [Bar(host, f"{pages:,}", ((0, pages, "--bar"),)) for host, pages in named]
    described = ", ".join(f"{bar.label} {bar.value}" for bar in bars[:5])
    rows = tuple((host, f"{pages:,}", share(pages, figures.pages_known)) for host, pages in named)
    columns = (Column("host", "name"), Column("pages", "number"), Column("share", "number"))
    return Section(
        "hosts",
        "Hosts",
        (f"{counted(figures.distinct_hosts, 'host')} seen. {coverage(figures)}",),
        charts=(
            Chart(
                caption,
                bar_chart(bars, f"{caption}. {described}.", full=figures.hosts[0][1]),
                table=Table(caption, columns, rows, folded=True),
            ),
        ),
    )
