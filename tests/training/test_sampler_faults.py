"""Damaged shards, domains without pages, stores that fail: counted, named, never a hang."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from models.errors import Fault, UserError
from tests.training.corpora import Page, data, make_corpus, random_pages
from tests.training.word_examples import SKIPPED, WordExamples
from training.domains import load_corpus
from training.held_out import is_held_out
from training.recipe import Data
from training.sampler import ExampleStream, merge_states, pages

WORDS = 20


def page_of(number: int) -> Page:
    return Page(" ".join([f"page{number}"] * WORDS), url=f"https://a.example/{number}")


def stream(settings: Data, **more: Any) -> ExampleStream:
    corpus = load_corpus(settings)
    weights = np.ones(len(corpus.domains)) / len(corpus.domains)
    return ExampleStream(corpus, weights, WordExamples(WORDS), data=settings, **more)


@pytest.fixture
def crawl(tmp_path: Path) -> str:
    """90 pages: 3 shards of 30, each in row groups of 10."""
    listed = {"bn": [page_of(number) for number in range(90)]}
    return make_corpus(tmp_path, listed, row_group_rows=10, shard_rows=30)


def damage(shard: Path, row_group: int) -> None:
    column = pq.read_metadata(shard).row_group(row_group)
    text = next(
        column.column(number)
        for number in range(column.num_columns)
        if column.column(number).path_in_schema == "text"
    )
    content = bytearray(shard.read_bytes())
    middle = text.data_page_offset + text.total_compressed_size // 2
    content[middle : middle + 8] = b"\xff" * 8
    shard.write_bytes(content)


def shard_of(crawl: str, part: int) -> Path:
    return Path(crawl).parent / f"pages/language=bn/bucket=all/part-{part:05d}.parquet"


def test_a_damaged_row_group_is_passed_over_counted_and_named(crawl: str) -> None:
    damage(shard_of(crawl, 1), 2)
    settings = data(crawl, lanes=1)
    whole = stream(settings)
    words = Counter(one.arrays["words"][0] for one in whole.take(161))
    kept = {f"page{n}": 2 for n in range(90) if not 50 <= n < 60}
    assert len(words - Counter(kept)) == 1  # the first of the third epoch
    assert +(words - Counter(words - Counter(kept))) == kept
    assert 20 <= whole.counts.pop("damaged_row_group") <= 30
    (place,) = whole.damage
    assert place == f"'{shard_of(crawl, 1)}' row group 2"
    assert len(list(pages(load_corpus(settings), 0, data=settings))) == 80


def test_ranks_agree_on_damage(crawl: str) -> None:
    damage(shard_of(crawl, 1), 2)
    settings = data(crawl, lanes=6)
    expected = stream(settings)
    words = [one.arrays["words"][0] for one in expected.take(160)]
    ranks = [stream(settings, rank=rank, ranks=2) for rank in range(2)]
    parts = [one for rank in ranks for one in rank.take(100)]
    state = merge_states([rank.state_dict() for rank in ranks])
    parts += stream(settings, state=state).take(60)
    assert [one.arrays["words"][0] for one in sorted(parts, key=lambda one: one.index)] == words


def test_a_damaged_footer_loses_its_shard_alone(crawl: str) -> None:
    shard = shard_of(crawl, 0)
    content = bytearray(shard.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[footer : footer + 100] = b"\xff" * 100
    shard.write_bytes(content)
    whole = stream(data(crawl, lanes=1))
    words = Counter(one.arrays["words"][0] for one in whole.take(120))
    assert words == {f"page{n}": 2 for n in range(30, 90)}
    assert 30 <= whole.counts["damaged_shard"] <= 60
    assert list(whole.damage) == [f"'{shard}'"]


def test_rows_and_manifest_must_agree(crawl: str) -> None:
    one, other = shard_of(crawl, 0), shard_of(crawl, 1)
    settings = data(crawl)
    corpus = load_corpus(settings)
    table = pq.read_table(other, pre_buffer=False).slice(0, 20)
    pq.write_table(table, one)
    found = list(pages(corpus, 0, data=settings))
    assert len(found) == 60


def test_a_domain_without_a_page_is_a_mistake_and_no_endless_loop(tmp_path: Path) -> None:
    held = next(n for n in range(1000) if is_held_out(f"https://a.example/{n}", 0.1))
    path = make_corpus(tmp_path, {"bn": [page_of(held)], "en": [page_of(held)] * 400})
    for language in ("bn", "en"):
        for lanes in (1, 4096):
            settings = data(path, languages=(language,), lanes=lanes, held_out=0.1)
            with pytest.raises(UserError) as caught:
                stream(settings).take(1)
            assert f"domain '{language}' has no page to train on" in str(caught.value)
            assert "\n" not in str(caught.value)
    groups = {"none": ("*.nowhere",)}
    settings = data(path, by=("host",), host_groups=groups, lanes=8)
    with pytest.raises(UserError, match="domain 'none' has no page"):
        stream(settings.model_copy(update={"weights": {"none": 1, "other": 1}})).take(20)


def test_a_domain_without_an_example_is_a_mistake(tmp_path: Path) -> None:
    listed = {
        "bn": [Page(f"{SKIPPED} page")],
        "en": [Page("")] * 3,
        "hi": [Page("one two")],
        "th": [Page(f"{SKIPPED} page")] * 50 + [page_of(1)],
    }
    path = make_corpus(tmp_path, listed)
    for language in ("bn", "en"):
        for lanes in (1, 100):
            with pytest.raises(UserError, match=f"domain '{language}' gives no example"):
                stream(data(path, languages=(language,), lanes=lanes)).take(1)
    # A short page is repeated until an example is full, and a rare page is found.
    for language in ("hi", "th"):
        for lanes in (1, 100):
            assert len(stream(data(path, languages=(language,), lanes=lanes)).take(5)) == 5


def test_a_shard_that_goes_away_is_a_fault_that_names_it(crawl: str) -> None:
    settings = data(crawl)
    one = stream(settings)
    for part in range(3):
        shard_of(crawl, part).unlink()
    with pytest.raises(
        Fault, match=re.escape("part-0000") + r"\d.parquet' cannot be read: No such"
    ):
        one.take(1)


def test_a_remote_shard_that_goes_away_is_a_fault_that_names_it() -> None:
    path = make_corpus("memory://faults", {"bn": random_pages(40)})
    settings = data(path)
    one = stream(settings)
    fsspec.filesystem("memory").rm("/faults/pages", recursive=True)
    with pytest.raises(Fault, match=r"'memory://faults/pages/.*' cannot be read: "):
        one.take(1)


def test_a_domain_that_has_nothing_leaves_its_share_to_the_others(tmp_path: Path) -> None:
    held = next(n for n in range(1000) if is_held_out(f"https://a.example/{n}", 0.1))
    listed = {
        "bn": [page_of(held)],
        "en": random_pages(50),
        "hi": [Page(f"{SKIPPED} page", url=f"https://a.example/{held + 1}")],
        "th": random_pages(50, seed=1),
    }
    settings = data(make_corpus(tmp_path, listed), held_out=0.1, lanes=6, weights="uniform")
    whole = stream(settings)
    found = whole.take(400)
    domains = Counter(one.domain for one in found)
    assert set(domains) == {1, 3} and abs(domains[1] - 200) < 40
    assert sorted(whole.empty) == ["bn", "hi"]
    assert "has no page to train on" in whole.empty["bn"]
    assert "none came of its 1 pages" in whole.empty["hi"]
    assert "skipped" not in whole.counts
    # Each rank finds out by itself, after a resume too.
    ranks = [stream(settings, rank=rank, ranks=3) for rank in range(3)]
    parts = [one for rank in ranks for one in rank.take(150)]
    state = merge_states([rank.state_dict() for rank in ranks])
    parts += stream(settings, state=state).take(250)
    parts.sort(key=lambda one: one.index)
    assert [str(one) for one in parts] == [str(one) for one in found]
    chosen = settings.model_copy(update={"weights": dict.fromkeys(listed, 1.0)})
    with pytest.raises(UserError, match=r"domain '(bn|hi)' .*: leave it out or give it the weight"):
        stream(chosen).take(400)
