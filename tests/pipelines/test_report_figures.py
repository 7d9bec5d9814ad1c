"""Figures of the report against a naive count of the same rows."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.report_figures import (
    CHARS_EDGES,
    PERPLEXITY_EDGES,
    Histogram,
    _binned,
    look_at_shards,
)
from pipelines.report_sections import coverage
from tests.pipelines.report_crawl import page, write_crawl

PAGES = [
    page(number, language, bucket, text="x" * (13 * number + 1), perplexity=perplexity)
    for number, (language, bucket, perplexity) in enumerate(
        [("bn", "head", 20.0 + n) for n in range(30)]
        + [("bn", "tail", 200.0 * 1.5**n) for n in range(20)]
        + [("ar", "all", None) for n in range(9)]
    )
]


def naive(values: list[float], edges: tuple[float, ...]) -> dict[tuple[float, float], int]:
    return {
        (low, high): count
        for low, high in itertools.pairwise(edges)
        if (count := sum(low <= value < high for value in values))
    }


def shown(histogram: Histogram, bucket: str) -> dict[tuple[float, float], int]:
    bins = itertools.pairwise(histogram.edges)
    return {
        edges: count
        for edges, count in zip(bins, histogram.pages[bucket], strict=True)
        if count
    }  # fmt: skip


def test_everything_is_counted(tmp_path: Path) -> None:
    manifest = write_crawl(tmp_path, PAGES, row_group_pages=7, file_pages=16)
    figures = look_at_shards(manifest, str(tmp_path), sample_languages=["bn"])
    assert (figures.pages_read, figures.pages_listed, figures.unreadable) == (59, 59, [])
    for bucket in ("head", "tail"):
        rows = [one for one in PAGES if one["bucket"] == bucket]
        perplexities = [one["perplexity"] for one in rows]
        assert shown(figures.perplexity["bn"], bucket) == naive(perplexities, PERPLEXITY_EDGES)
    assert figures.chars is not None
    for bucket in ("head", "tail", "all"):
        lengths = [one["chars"] for one in PAGES if one["bucket"] == bucket]
        assert shown(figures.chars, bucket) == naive(lengths, CHARS_EDGES)
    assert set(figures.perplexity) == {"bn"}
    assert figures.unscored == {"ar": 9}
    hosts = Counter(one["host"] for one in PAGES)
    assert figures.hosts == sorted(hosts.items(), key=lambda item: (-item[1], item[0]))
    assert figures.distinct_hosts == len(hosts) == 7
    # Pages to read: two of each bucket of the languages asked for, whole rows of the crawl.
    assert {key: len(found) for key, found in figures.samples.items()} == {
        ("bn", "head"): 2, ("bn", "tail"): 2,
    }  # fmt: skip
    for (_, bucket), samples in figures.samples.items():
        for sample in samples:
            (row,) = (one for one in PAGES if one["url"] == sample.url)
            assert row["bucket"] == bucket
            assert (sample.chars, sample.perplexity) == (row["chars"], row["perplexity"])
            assert sample.text == row["text"][:700]
            assert sample.cut == (len(row["text"]) > 700)


def test_a_large_crawl_is_sampled_by_row_groups_and_scaled(tmp_path: Path) -> None:
    pages = [page(n, "bn", "head", perplexity=50.0) for n in range(600)]
    pages += [page(n, "sw", "all") for n in range(600, 640)]
    manifest = write_crawl(tmp_path, pages, row_group_pages=10, file_pages=200)
    figures = look_at_shards(manifest, str(tmp_path), sample_languages=["sw"], pages=128)
    # A fifth of each file of 200 pages is four row groups of ten; of 40 pages, one.
    assert figures.pages_read == 3 * 40 + 10
    assert figures.chars is not None
    assert {b: sum(n) for b, n in figures.chars.pages.items()} == {"head": 600, "all": 40}
    assert shown(figures.perplexity["bn"], "head") == {(50.0, 56.0): 600}
    assert figures.unscored == {"sw": 40}
    assert sum(count for _, count in figures.hosts) == pytest.approx(640, abs=4)
    again = look_at_shards(manifest, str(tmp_path), sample_languages=["sw"], pages=128)
    assert again == figures
    of_all = "130 of 640 pages (20.3 %), chosen by whole row groups within each language and bucket"
    assert coverage(figures) == f"Estimated from {of_all}."
    (tmp_path / next(part.path for part in manifest.outputs if part.language == "sw")).unlink()
    without = look_at_shards(manifest, str(tmp_path), sample_languages=["sw"], pages=128)
    # Hosts are scaled to all pages but those of the lost shard, and so is what they are a share of.
    assert without.pages_known == 600
    assert sum(count for _, count in without.hosts) == pytest.approx(600, abs=4)
    assert coverage(without) == (
        f"Estimated from {of_all.replace('130', '120').replace('20.3', '18.8')}; "
        "1 Parquet file could not be read."
    )


def test_missing_and_foreign_shards_are_left_out_and_named(tmp_path: Path) -> None:
    manifest = write_crawl(tmp_path, PAGES)
    head, tail = (
        next(output for output in manifest.outputs if output.bucket == bucket)
        for bucket in ("head", "tail")
    )
    (tmp_path / head.path).unlink()
    (tmp_path / tail.path).write_bytes(b"not Parquet")
    short = write_crawl(tmp_path / "other", PAGES[-9:-1])
    every = next(output for output in manifest.outputs if output.bucket == "all")
    (tmp_path / every.path).write_bytes((tmp_path / "other" / short.outputs[0].path).read_bytes())
    figures = look_at_shards(manifest, str(tmp_path), sample_languages=["bn", "ar"])
    assert figures.pages_read == 0
    assert figures.pages_listed == 59
    assert [line.split(": ", 1)[0] for line in figures.unreadable] == [
        every.path, head.path, tail.path,
    ]  # fmt: skip
    assert "8 rows, not 9" in figures.unreadable[0]
    assert (figures.chars, figures.hosts, figures.samples) == (None, [], {})


@given(st.lists(st.floats(min_value=0, max_value=1e12), max_size=50))
def test_no_value_falls_between_the_bins(values: list[float]) -> None:
    counts = _binned(np.array(values), PERPLEXITY_EDGES)
    assert counts.sum() == len(values)
    for place in np.flatnonzero(counts[1:-1]) + 1:
        low, high = PERPLEXITY_EDGES[place], PERPLEXITY_EDGES[place + 1]
        assert counts[place] == sum(low <= value < high for value in values)


def test_edges_rise_and_are_round() -> None:
    for edges in (PERPLEXITY_EDGES, CHARS_EDGES):
        assert list(edges) == sorted(set(edges))
    assert PERPLEXITY_EDGES[:4] == (1.0, 1.12, 1.25, 1.4)
    assert CHARS_EDGES[:12] == (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25)
