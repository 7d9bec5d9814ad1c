"""What a person sees of a mined crawl: the funnel, the languages, the losses, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipelines.buckets import BUCKETS, NO_BUCKET
from pipelines.manifest import Manifest

_LOSSES_SHOWN = 20

REASONS = {
    "missing_url": "record without an address",
    "not_text": "too many control or undecodable characters",
    "too_short": "shorter than pages.min_chars",
    "emptied_by_dedup": "no paragraph left after dedup",
    "too_short_after_dedup": "shorter than pages.min_chars_after",
    "language_below_threshold": "language not certain enough",
    "language_not_wanted": "language not asked for",
    "duplicate": "also on another page, or in index_in",
    "repeated_in_page": "earlier in the same page",
    "empty": "white space and punctuation only",
}


def funnel(manifest: Manifest) -> str:
    """The whole report of `gristmill inspect`, as aligned lines."""
    counts = manifest.counts
    records, pages, paragraphs = counts.records, counts.pages, counts.paragraphs
    steps: list[Row] = [
        ("records", "", "", ""),
        *_steps("read", records.read, records.read),
        ("  not pages", f"{records.not_pages:,}", "", "warcinfo and other types"),
        ("  pages lost in damage", f"{records.lost:,}", "", "see losses"),
        ("  length corrected", f"{records.length_corrected:,}", "", "kept"),
        ("pages", "", "", ""),
        *_steps("read", pages.read, pages.read, pages.dropped),
        *_steps("written", pages.written, pages.read),
        ("paragraphs", "", "", ""),
        *_steps("read", paragraphs.read, paragraphs.read, paragraphs.dropped),
        *_steps("kept", paragraphs.kept, paragraphs.read),
        ("keys", "", "", ""),
        *_steps("distinct", counts.keys.distinct, counts.keys.distinct),
        *_steps("on two pages or more", counts.keys.repeated, counts.keys.distinct),
    ]
    sections = [
        [f"{manifest.recipe['name']}: {_files(manifest)}"],
        _table(steps),
        _languages(manifest),
        list(_losses(manifest)),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _files(manifest: Manifest) -> str:
    failed = sum(bool(entry.failed) for entry in manifest.inputs)
    stored = sum(entry.bytes for entry in manifest.inputs)
    text = f"{len(manifest.inputs):,} WET files, {size(stored)}"
    if failed:
        text += f" ({failed:,} could not be read)"
    written = sum(output.bytes for output in manifest.outputs)
    return f"{text} -> {len(manifest.outputs):,} Parquet files, {size(written)}"


Row = tuple[str, str, str, str]


def _steps(name: str, count: int, of: int, dropped: Mapping[str, int] | None = None) -> list[Row]:
    rows = [(f"  {name}", f"{count:,}", share(count, of), "")]
    for reason, number in (dropped or {}).items():
        rows.append((f"  - {reason}", f"{number:,}", share(number, of), meaning(reason)))
    return rows


def meaning(reason: str) -> str:
    """What a reason of the manifest says, in words."""
    return REASONS.get(reason) or f"page dropped: {REASONS.get(reason[5:], reason[5:])}"


def share(count: int, of: int) -> str:
    """`count` in percent of `of`; empty when there is nothing to share."""
    return f"{100 * count / of:.1f} %" if of else ""


def _languages(manifest: Manifest) -> list[str]:
    by_language = manifest.counts.by_language
    if not by_language:
        return ["no page was kept: see the reasons above"]
    names = [
        bucket
        for bucket in (*BUCKETS, NO_BUCKET)
        if any(bucket in language.buckets for language in by_language.values())
    ]
    rows: list[Sequence[str]] = [("language", "pages", "characters", *names, "cutoffs")]
    ordered = sorted(by_language.items(), key=lambda item: (-item[1].pages, item[0]))
    for code, language in ordered:
        cutoffs = manifest.cutoffs.get(code)
        rows.append(
            (
                code,
                f"{language.pages:,}",
                f"{language.chars:,}",
                *(f"{language.buckets.get(name, 0):,}" for name in names),
                f"{cutoffs[0]:.1f} / {cutoffs[1]:.1f}" if cutoffs else "",
            )
        )
    return _table(rows)


def _losses(manifest: Manifest) -> Iterator[str]:
    for entry in manifest.inputs:
        if entry.failed:
            yield f"not read: {entry.name}: {entry.failed}"
    for loss in manifest.losses[:_LOSSES_SHOWN]:
        yield f"lost: {loss.name}: {loss.bytes:,} bytes at {loss.offset:,}: {loss.reason}"
    if len(manifest.losses) > _LOSSES_SHOWN:
        yield f"lost: {len(manifest.losses) - _LOSSES_SHOWN:,} more places (--json lists all)"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned: names to the left, numbers to the right, a last column of words left."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def size(count: int) -> str:
    """Bytes in the unit that suits them, of powers of 1000."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
