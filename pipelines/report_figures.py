"""What a report needs beyond the manifest: distributions, hosts, pages to read, from the shards.

Only the columns that are counted are read, a row group at a time, so memory does not grow with
the crawl. Up to `PAGES_LOOKED_AT` pages every page counts. A larger crawl is sampled by whole row
groups: within each language and bucket the groups are chosen by a seed, and their counts are
scaled to the pages that the manifest lists there.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from models import files
from pipelines.manifest import Manifest, OutputEntry

PAGES_LOOKED_AT = 1_000_000
_HOSTS = 20
_SAMPLES = 2
_SAMPLE_CHARS = 700
_COUNTED = ("host", "perplexity", "chars")
_SHOWN = ("url", "text", "title", "language_score", "perplexity", "chars")

# Renard's preferred numbers (ISO 3): steps of the same ratio that are round in every decade.
_R20 = (1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8,
        3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0)  # fmt: skip
PERPLEXITY_EDGES = (
    *(float(f"{step * 10**decade:.12g}") for decade in range(6) for step in _R20),
    1e6,
)
CHARS_EDGES = tuple(
    sorted({float(round(step * 10**decade)) for decade in range(8) for step in _R20[::2]})
)


@dataclass(frozen=True)
class Histogram:
    """Pages by bin and bucket. edges: (n + 1,), bin i is [edges[i], edges[i + 1]), the ends are
    the outermost that are not empty; pages: for each bucket (n,)."""

    edges: tuple[float, ...]
    pages: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sample:
    """A page to read. text: its beginning; cut: there is more."""

    url: str
    title: str
    text: str
    cut: bool
    chars: int
    language_score: float
    perplexity: float | None


@dataclass
class Figures:
    """pages_read: looked at, of pages_listed in the manifest. pages_known: what the counts stand
    for, all but the pages of unreadable shards. sampled: not all was to be looked at.
    unreadable: shards that are missing
    or not what the manifest lists, a line each. unscored: pages without a perplexity, by
    language. hosts: the most frequent first."""

    pages_listed: int = 0
    pages_read: int = 0
    pages_known: int = 0
    sampled: bool = False
    unreadable: list[str] = field(default_factory=list)
    perplexity: dict[str, Histogram] = field(default_factory=dict)
    unscored: dict[str, int] = field(default_factory=dict)
    chars: Histogram | None = None
    hosts: list[tuple[str, int]] = field(default_factory=list)
    distinct_hosts: int = 0
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)


class _Stratum:
    """The pages of one language and bucket, counted."""

    def __init__(self, language: str, bucket: str) -> None:
        self.language, self.bucket = language, bucket
        self.listed = self.read = 0
        self.perplexity = np.zeros(len(PERPLEXITY_EDGES) - 1, np.int64)
        self.chars = np.zeros(len(CHARS_EDGES) - 1, np.int64)
        self.unscored = 0
        self.hosts: Counter[str] = Counter()

    def add(self, table: pa.Table) -> None:
        self.read += table.num_rows
        perplexity = table["perplexity"].to_numpy()
        scored = perplexity[~np.isnan(perplexity)]
        self.unscored += perplexity.size - scored.size
        self.perplexity += _binned(scored, PERPLEXITY_EDGES)
        self.chars += _binned(table["chars"].to_numpy(), CHARS_EDGES)
        for entry in pc.value_counts(table["host"].combine_chunks()).to_pylist():
            self.hosts[entry["values"] or ""] += entry["counts"]

    @property
    def scale(self) -> float:
        """Pages that stand for one page that was read."""
        return self.listed / self.read if self.read else 0.0


def _binned(values: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """Pages by bin; what lies outside counts in the outermost bins."""
    places = np.searchsorted(np.asarray(edges), values, side="right") - 1
    return np.bincount(np.clip(places, 0, len(edges) - 2), minlength=len(edges) - 1)


def look_at_shards(
    manifest: Manifest,
    folder: str,
    *,
    sample_languages: Iterable[str],
    pages: int = PAGES_LOOKED_AT,
) -> Figures:
    """Read the shards of `manifest` below `folder`: all of them up to `pages` pages, else a share.

    Pages to read are taken from `sample_languages`. The choice depends on the manifest alone.
    """
    figures = Figures(pages_listed=manifest.counts.pages.written)
    share = min(1.0, pages / max(1, figures.pages_listed))
    figures.sampled = share < 1
    wanted = frozenset(sample_languages)
    by_stratum: dict[tuple[str, str], list[OutputEntry]] = {}
    for output in manifest.outputs:
        by_stratum.setdefault((output.language, output.bucket), []).append(output)
    strata = []
    for (language, bucket), outputs in sorted(by_stratum.items()):
        stratum = _Stratum(language, bucket)
        _look_at(stratum, outputs, folder, figures, share=share, seed=manifest.recipe_digest,
                 samples=language in wanted)  # fmt: skip
        strata.append(stratum)
    _summarise(strata, figures)
    return figures


def _look_at(
    stratum: _Stratum,
    outputs: list[OutputEntry],
    folder: str,
    figures: Figures,
    *,
    share: float,
    seed: str,
    samples: bool,
) -> None:
    """Count about a `share` of the pages of `outputs`; put pages to read into `figures`."""
    stratum.listed = sum(output.rows for output in outputs)
    target = stratum.listed * share
    if share < 1:
        outputs = sorted(outputs, key=lambda one: files.xxh3_bytes(f"{seed}/{one.path}".encode()))
    found: list[Sample] = []
    for output in outputs:
        if stratum.read >= target:
            break
        choice = random.Random(f"{seed}/{output.path}")
        try:
            with _opened(files.join(folder, output.path)) as shard:
                if shard.metadata.num_rows != output.rows:
                    raise OSError(None, f"{shard.metadata.num_rows:,} rows, not {output.rows:,}")
                groups = shard.metadata.num_row_groups
                chosen = sorted(choice.sample(range(groups), math.ceil(groups * share)))
                tables = [
                    shard.read_row_group(group, list(_COUNTED), use_threads=False)
                    for group in chosen
                ]
                if samples and chosen and not found:
                    found = _samples(shard, choice.choice(chosen), choice)
        except (OSError, KeyError, pa.ArrowException) as error:
            reason = getattr(error, "strerror", None) or str(error).split("\n", 1)[0]
            figures.unreadable.append(f"{output.path}: {reason}")
            stratum.listed -= output.rows
            continue
        for table in tables:
            stratum.add(table)
    if found:
        figures.samples[stratum.language, stratum.bucket] = found


@contextlib.contextmanager
def _opened(url: str) -> Iterator[pq.ParquetFile]:
    """A shard, of which only what is asked for is read, near or far."""
    with contextlib.ExitStack() as stack:
        source: Any
        if files.is_local(url):
            source = pa.BufferReader(stack.enter_context(files.mapped(url)))
        else:
            system, path = files.filesystem(url)
            source = stack.enter_context(system.open(path))
        yield stack.enter_context(pq.ParquetFile(source, pre_buffer=False))


def _samples(shard: pq.ParquetFile, group: int, choice: random.Random) -> list[Sample]:
    table = shard.read_row_group(group, list(_SHOWN), use_threads=False)
    count = min(_SAMPLES, table.num_rows)
    rows = table.take(sorted(choice.sample(range(table.num_rows), count))).to_pylist()
    return [_sample(row) for row in rows]


def _sample(row: dict[str, Any]) -> Sample:
    text = row["text"]
    shown = text[:_SAMPLE_CHARS]
    if len(text) > len(shown):
        # Whole words, where the script has spaces.
        at = max(shown.rfind(" "), shown.rfind("\n"))
        shown = shown[:at] if at > _SAMPLE_CHARS * 0.9 else shown
    return Sample(
        url=row["url"],
        title=row["title"] or "",
        text=shown,
        cut=len(shown) < len(text),
        chars=row["chars"],
        language_score=row["language_score"],
        perplexity=row["perplexity"],
    )


def _summarise(strata: list[_Stratum], figures: Figures) -> None:
    hosts: dict[str, float] = {}
    chars: dict[str, np.ndarray] = {}
    perplexity: dict[str, dict[str, np.ndarray]] = {}
    unscored: Counter[str] = Counter()
    for stratum in strata:
        figures.pages_read += stratum.read
        figures.pages_known += stratum.listed if stratum.read else 0
        scale = stratum.scale
        for host, pages in stratum.hosts.items():
            hosts[host] = hosts.get(host, 0.0) + pages * scale
        bucket = stratum.bucket
        chars[bucket] = chars.get(bucket, np.zeros(stratum.chars.size)) + stratum.chars * scale
        if stratum.perplexity.any():
            perplexity.setdefault(stratum.language, {})[bucket] = stratum.perplexity * scale
        if stratum.unscored:
            unscored[stratum.language] += round(stratum.unscored * scale)
    figures.unscored = dict(unscored)
    figures.distinct_hosts = len(hosts)
    most = heapq.nsmallest(_HOSTS, hosts.items(), key=lambda item: (-item[1], item[0]))
    figures.hosts = [(host, round(pages)) for host, pages in most]
    figures.chars = _trimmed(CHARS_EDGES, chars)
    for language, buckets in perplexity.items():
        histogram = _trimmed(PERPLEXITY_EDGES, buckets)
        if histogram is not None:
            figures.perplexity[language] = histogram


def _trimmed(edges: tuple[float, ...], pages: dict[str, np.ndarray]) -> Histogram | None:
    if not pages or not any(counts.any() for counts in pages.values()):
        return None
    used = np.flatnonzero(sum(pages.values()))
    first, last = int(used[0]), int(used[-1]) + 1
    return Histogram(
        edges[first : last + 1],
        {
            bucket: tuple(int(count) for count in np.rint(counts[first:last]))
            for bucket, counts in sorted(pages.items())
        },
    )
