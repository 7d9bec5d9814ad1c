"""The stream of examples against a slow, plain one; any number of ranks; any stop."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import Fault, UserError
from tests.training.corpora import Page, data, make_corpus, random_pages
from tests.training.word_examples import SKIPPED, WordExamples
from training.domains import Corpus, Domain, load_corpus, mixture
from training.examples import Example
from training.held_out import is_held_out
from training.order import DomainOrder, mix
from training.recipe import Data
from training.row_groups import RowGroups
from training.sampler import ExampleStream, merge_states

WEIGHTS = {"bn": 0.5, "en": 0.3, "hi": 0.2, "unread": 0.0}
LANGUAGES = list(WEIGHTS)


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """bn: 2 shards of several row groups; en: some pages give nothing; hi: one page."""
    english = random_pages(40, seed=2)
    english[3] = english[17] = Page(f"{SKIPPED} page")
    return make_corpus(
        tmp_path_factory.mktemp("sampler"),
        {
            "bn": random_pages(100, seed=1),
            "en": english,
            "hi": random_pages(1, seed=3),
            "unread": random_pages(5, seed=4),
        },
        row_group_rows=12,
    )


def stream(settings: Data, corpus: Corpus | None = None, **more: Any) -> ExampleStream:
    corpus = corpus or load_corpus(settings)
    weights = mixture(corpus, WEIGHTS) if len(corpus.domains) == 4 else mixture(corpus, "uniform")
    return ExampleStream(corpus, weights, WordExamples(), data=settings, **more)


def plain(examples: list[Example]) -> list[tuple[int, int, str, int]]:
    return [
        (one.index, one.domain, " ".join(one.arrays["words"]), int(one.arrays["key"]))
        for one in examples
    ]


def slow_stream(corpus: Corpus, shares: list[float], settings: Data) -> Iterator[Any]:
    """One page at a time, one lane after the other, nothing kept: what the stream must give."""
    builder = WordExamples()
    lanes: dict[tuple[int, int], tuple[Iterator[str], list[Any], list[int]]] = {}

    def lane_pages(domain: Domain, lane: int) -> Iterator[str]:
        row_groups = RowGroups()
        name = xxhash.xxh3_64_intdigest(domain.name.encode())
        order = DomainOrder(
            [shard.rows for shard in domain.shards],
            [1 for _ in domain.shards],
            key=mix(settings.seed, 2, name),
            window_row_groups=settings.window_row_groups,
            row_counts=lambda shard: row_groups.row_counts(domain.shards[shard]),
        )
        position = lane
        while True:
            window = order.window(position)
            offset = position - window.first
            shard, group = window.groups[window.group[offset]]
            table = row_groups.read(domain.shards[shard], group, ["text", "url"])
            row = table.slice(int(window.row[offset]), 1).to_pylist()[0]
            if not is_held_out(row["url"], settings.held_out):
                yield row["text"]
            position += settings.lanes

    index = 0
    while True:
        lane = index % settings.lanes
        draw = mix(settings.seed, 0, index) / 2**64
        domain = next(d for d in range(len(shares)) if draw < sum(shares[: d + 1]))
        if (lane, domain) not in lanes:
            lanes[lane, domain] = (lane_pages(corpus.domains[domain], lane), [], [0])
        texts, pages, start = lanes[lane, domain]
        while True:
            cut = builder.cut(pages, start[0], mix(settings.seed, 1, index))
            del pages[: cut.finished]
            start[0] = cut.start
            if cut.plan is not None:
                break
            if not cut.finished:
                pages += builder.encode([next(texts)])
        yield index, domain, " ".join(cut.plan["words"]), int(cut.plan["key"])
        index += 1


@pytest.mark.parametrize(("lanes", "window", "seed"), [(1, 8, 0), (5, 2, 1), (6, 1, 2)])
def test_it_is_the_slow_stream(crawl: str, lanes: int, window: int, seed: int) -> None:
    settings = data(crawl, lanes=lanes, window_row_groups=window, seed=seed, held_out=0.15)
    corpus = load_corpus(settings)
    expected = slow_stream(corpus, mixture(corpus, WEIGHTS).tolist(), settings)
    found = plain(stream(settings).take(150))
    assert found == [next(expected) for _ in range(150)]


@dataclass(frozen=True, repr=False)
class Reference:
    settings: Data
    corpus: Corpus
    examples: list[Any]


@pytest.fixture(scope="module")
def reference(crawl: str) -> Reference:
    """What one rank gives, six lanes."""
    settings = data(crawl, lanes=6, held_out=0.1, seed=5)
    return Reference(settings, load_corpus(settings), plain(stream(settings).take(300)))


TAKES = st.lists(st.integers(0, 30), max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), TAKES), max_size=3))
def test_any_ranks_resumed_anywhere(
    reference: Reference, sections: list[tuple[int, list[int]]]
) -> None:
    """sections: so many ranks, which take so many examples each time, then all is stopped."""
    state: dict[str, Any] | None = None
    found: list[Any] = []
    counts: Counter[str] = Counter()
    position = 0
    for ranks, takes in [*sections, (1, [20])]:
        streams = [
            stream(reference.settings, reference.corpus, rank=rank, ranks=ranks, state=state)
            for rank in range(ranks)
        ]
        for take in takes:
            for rank, one in enumerate(streams):
                part = plain(one.take(take))
                assert all(example[0] % ranks == rank for example in part)
                found += part
            position += take
            assert {one.position for one in streams} == {position}
        for one in streams:
            counts.update(one.counts)
        state = json.loads(json.dumps(merge_states([one.state_dict() for one in streams])))
    assert sorted(found) == reference.examples[:position]
    if all(6 % ranks == 0 for ranks, _ in sections):  # then no lane is counted twice
        whole = stream(reference.settings, reference.corpus)
        whole.take(position)
        assert counts == whole.counts


def test_each_page_once_in_each_epoch(tmp_path: Path) -> None:
    # Pages of 20 words each: one example is one page.
    pages = [Page(" ".join([f"page{number}"] * 20)) for number in range(90)]
    path = make_corpus(tmp_path, {"bn": pages}, row_group_rows=7, shard_rows=30)
    for lanes, window in ((1, 2), (6, 2), (9, 8), (90, 2), (270, 1)):
        whole = stream(data(path, lanes=lanes, window_row_groups=window))
        for _ in range(3 if lanes <= 90 else 1):
            epochs = max(1, lanes // 90)
            words = [one.arrays["words"][0] for one in whole.take(90 * epochs)]
            assert Counter(words) == {f"page{number}": epochs for number in range(90)}


def test_the_window_changes_the_order_alone(crawl: str) -> None:
    def pages_of(window: int) -> list[str]:
        settings = data(crawl, languages=("bn",), lanes=1, window_row_groups=window)
        words = [word for one in stream(settings).take(1000) for word in one.arrays["words"]]
        return [word for word in words if word.startswith("Page")]

    one, other = pages_of(1)[:100], pages_of(4)[:100]
    assert one != other
    assert sorted(one) == sorted(other)
    assert len(set(one)) == 100


def test_shares_of_domains(crawl: str) -> None:
    found = Counter(one.domain for one in stream(data(crawl, lanes=48)).take(4000))
    assert set(found) == {0, 1, 2}  # a weight of 0 is never read
    for domain, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(found[domain] - 4000 * share) < 3 * (4000 * share * (1 - share)) ** 0.5
    assert [found[domain] for domain in range(3)] == [2026, 1178, 796]


def test_held_out_pages_never_come_and_stay_held_out_when_shards_are_added(tmp_path: Path) -> None:
    def words(count: int) -> set[str]:
        pages = [Page(f"page{n} " * 20, url=f"https://a.example/{n}") for n in range(count)]
        path = make_corpus(tmp_path / str(count), {"bn": pages})
        settings = data(path, held_out=0.2, lanes=4)
        found = {one.arrays["words"][0] for one in stream(settings).take(4 * count)}
        kept = {f"page{n}" for n in range(count) if not is_held_out(f"https://a.example/{n}", 0.2)}
        assert found == kept
        return kept

    assert 100 < len(words(150) & words(300)) < 140


def test_a_counted_stream_ends(crawl: str) -> None:
    settings = data(crawl)
    whole = plain(stream(settings).take(50))
    counted = stream(settings, count=50)
    assert plain(counted.take(45)) == whole[:45]
    assert plain(counted.take(45)) == whole[45:]
    assert counted.position == 50
    assert counted.take(45) == []
    ranks = [stream(settings, count=50, rank=rank, ranks=4) for rank in range(4)]
    assert [len(one.take(100)) for one in ranks] == [13, 13, 12, 12]


def test_another_seed_is_another_stream(crawl: str) -> None:
    one, other = (plain(stream(data(crawl, seed=seed)).take(200)) for seed in (0, 1))
    assert not {key for *_, key in one} & {key for *_, key in other}
    assert [domain for _, domain, *_ in one] != [domain for _, domain, *_ in other]


def test_pages_are_tokenised_in_batches_but_the_first_waits_for_none(crawl: str) -> None:
    settings = data(crawl, languages=("bn",), lanes=4)
    corpus = load_corpus(settings)
    builder = WordExamples()
    one = ExampleStream(corpus, np.ones(1), builder, data=settings)
    one.take(1)
    assert builder.encoded == [1]
    one.take(3000)
    assert max(builder.encoded) <= 256
    assert sum(builder.encoded) / len(builder.encoded) > 8
    assert sum(builder.encoded) < one.counts["pages"] + 4 * 2 * 64 + 4


def test_the_state_is_small(crawl: str) -> None:
    one = stream(data(crawl, lanes=48))
    one.take(2000)
    assert len(json.dumps(one.state_dict())) < 48 * 4 * 40


def test_a_state_of_another_stream_is_refused(crawl: str) -> None:
    state = stream(data(crawl)).state_dict()
    for fields in ({"seed": 1}, {"lanes": 8}, {"held_out": 0.5}, {"languages": ("bn",)}):
        with pytest.raises(UserError, match="another stream"):
            stream(data(crawl, **fields), state=state)
    part = stream(data(crawl), rank=0, ranks=2).state_dict()
    with pytest.raises(Fault, match="merge the states"):
        stream(data(crawl), state=part)
    later = stream(data(crawl), rank=1, ranks=2)
    later.take(10)
    with pytest.raises(Fault, match="not of one stream at one position"):
        merge_states([part, later.state_dict()])
