"""Reading of shards: only what is needed, within the bytes that are allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import remote
from tests.training.corpora import data, make_corpus, random_pages
from tests.training.test_sampler import plain
from tests.training.word_examples import WordExamples
from training import row_groups, sampler
from training.domains import load_corpus
from training.recipe import Data
from training.row_groups import ENTRY_BYTES, Cache, RowGroups
from training.sampler import ExampleStream


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20))))
def test_the_cache_is_bounded_and_forgets_what_was_used_longest_ago(
    most: int, asked: list[tuple[int, int]]
) -> None:
    cache = Cache(most)
    held: list[tuple[int, int]] = []  # oldest use first
    for key, size in asked:
        known = next((pair for pair in held if pair[0] == key), None)
        made: list[int] = []

        def make(size: int = size, made: list[int] = made) -> int:
            made.append(size)
            return size

        value = cache.get(key, make, lambda size: size - ENTRY_BYTES)
        assert bool(made) == (known is None)
        if known is None:
            held = [*held, (key, size)]
            while len(held) > 1 and sum(size for _, size in held) > most:
                held.pop(0)
        else:
            held = [*(pair for pair in held if pair[0] != key), known]
        assert value == held[-1][1]
        assert cache.held_bytes == sum(size for _, size in held) <= max(most, value)


def watched(cache: type[Cache], peaks: list[int]) -> Callable[[int], Cache]:
    class Watched(cache):  # type: ignore[misc, valid-type]
        def get(self, *arguments: Any) -> Any:
            value = super().get(*arguments)
            peaks.append(self.held_bytes)
            return value

    return Watched


def test_a_small_cache_changes_nothing_but_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_corpus(tmp_path, {"bn": random_pages(400), "en": random_pages(200, seed=1)})

    def found(settings: Data) -> tuple[list[Any], int]:
        peaks: list[int] = []
        monkeypatch.setattr("training.lanes.Cache", watched(Cache, peaks))
        corpus = load_corpus(settings)
        one = ExampleStream(corpus, np.array([0.5, 0.5]), WordExamples(), data=settings)
        return plain(one.take(1500)), max(peaks)

    whole, needed = found(data(path))
    for cache_bytes in (60_000, 1):
        bounded, peak = found(data(path, cache_bytes=cache_bytes))
        assert bounded == whole
        # One row group of 16 pages and its window: 20 kB at most.
        assert peak <= max(cache_bytes, 20_000) < needed / 2


def test_a_rank_holds_its_own_pages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_corpus(tmp_path, {"bn": random_pages(512)}, row_group_rows=128, shard_rows=256)
    settings = data(path, lanes=8, window_row_groups=1)
    corpus = load_corpus(settings)
    peaks: dict[int, int] = {}
    for ranks in (1, 8):
        held: list[int] = []
        monkeypatch.setattr("training.lanes.Cache", watched(Cache, held))
        ExampleStream(corpus, np.ones(1), WordExamples(), data=settings, ranks=ranks).take(800)
        peaks[ranks] = max(held)
    assert peaks[8] < peaks[1] / 4


def test_starting_reads_little_of_a_remote_crawl(monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_corpus("memory://little", {"bn": random_pages(400)}, shard_rows=20)
    reads: list[tuple[str, int]] = []
    read = remote.read

    def counted(url: str, start: int = 0, stop: int | None = None) -> bytes:
        found = read(url, start, stop)
        reads.append((url, len(found)))
        return found

    monkeypatch.setattr(row_groups.remote, "read", counted)
    settings = data(path)
    corpus = load_corpus(settings)
    assert not [url for url, _ in reads if url.endswith(".parquet")]
    one = ExampleStream(corpus, np.ones(1), WordExamples(), data=settings)
    assert not [url for url, _ in reads if url.endswith(".parquet")]
    one.take(1)
    # The footers of one run of 8 shards, and one or two row groups of the 20 shards.
    assert len({url for url, _ in reads if url.endswith(".parquet")}) <= 8


def test_only_needed_columns_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: set[tuple[str, ...]] = set()
    read = RowGroups.read

    def noted(self: RowGroups, shard: Any, group: int, columns: Any) -> Any:
        asked.add(tuple(columns))
        table = read(self, shard, group, columns)
        assert table.column_names == list(columns)
        return table

    monkeypatch.setattr(RowGroups, "read", noted)
    path = make_corpus(tmp_path, {"bn": random_pages(20)})
    for fields, columns in (
        ({}, ("text",)),
        ({"held_out": 0.1}, ("text", "url")),
        ({"by": ("host",), "host_groups": {"a": ("bn.*",)}}, ("text", "host")),
    ):
        asked.clear()
        settings = data(path, **fields)
        list(sampler.pages(load_corpus(settings), 0, data=settings))
        assert asked == {columns}
