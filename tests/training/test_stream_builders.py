"""The stream with the real builders: each token of each page once an epoch, after any stop."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.tokenizer import CLS_ID, SEP_ID
from tests.training.corpora import Page, data, make_corpus
from tests.training.small_tokenizer import made_up_text, small_tokenizer
from training import lanes
from training.albert_examples import AlbertExamples
from training.batches import collate
from training.causal_examples import CausalExamples
from training.domains import Corpus, load_corpus, mixture
from training.examples import IGNORED, Example, ExampleBuilder
from training.recipe import Data, Examples
from training.sampler import ExampleStream, held_out_examples, merge_states, pages

PAGES, LANES = 24, 4
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of a few tokens, pages of some sequences, and some that fill dozens."""
    sizes = [1, 3, 6, 12, 40, 2] * (PAGES // 6)
    listed = [Page(made_up_text(seed, size)) for seed, size in enumerate(sizes)]
    return make_corpus(
        tmp_path_factory.mktemp("builders"), {"bn": listed, "en": listed[:3]}, row_group_rows=5
    )


def causal(length: int = 32) -> CausalExamples:
    return CausalExamples(small_tokenizer(), Examples(sequence_length=length))


def albert(length: int = 48) -> AlbertExamples:
    return AlbertExamples(small_tokenizer(), Examples(sequence_length=length))


def start(
    settings: Data, builder: ExampleBuilder, corpus: Corpus | None = None, **more: Any
) -> ExampleStream:
    corpus = corpus or load_corpus(settings)
    return ExampleStream(corpus, mixture(corpus, "uniform"), builder, data=settings, **more)


def documents(examples: list[Example], lane: int) -> list[Tokens]:
    """Whole documents of one lane of a causal stream, in order."""
    found: list[Tokens] = []
    ids = [
        token
        for one in examples
        if one.index % LANES == lane
        for token in one.arrays["input_ids"].tolist()
    ]
    first = 0
    for place, token in enumerate(ids):
        assert (token == CLS_ID) == (place == first)
        if token == SEP_ID:
            found.append(tuple(ids[first : place + 1]))
            first = place + 1
    return found


def test_each_page_of_a_causal_stream_comes_once_an_epoch(crawl: str) -> None:
    settings = data(crawl, lanes=LANES, languages=("bn",))
    builder = causal()
    texts = list(pages(load_corpus(settings), 0, data=settings, split="all"))
    every = {tuple(page.tolist()) for page in builder.encode(texts)}
    longest, total = max(map(len, every)), sum(map(len, every))
    assert len(every) == PAGES and longest > 10 * 32 > 32 > min(map(len, every))
    # Row P of the domain's sequence belongs to lane P % LANES, so in an epoch a lane has as many
    # pages as the others, though it may be in another epoch than they are.
    examples = start(settings, builder).take(6 * total // 32)
    of_lanes = [documents(examples, lane) for lane in range(LANES)]
    share = PAGES // LANES
    assert min(map(len, of_lanes)) >= 3 * share
    for epoch in range(3):
        chosen = slice(epoch * share, (epoch + 1) * share)
        found = [document for own in of_lanes for document in own[chosen]]
        assert len(found) == PAGES and set(found) == every


def original(one: Example) -> Tokens:
    """A and B of an ALBERT example as the page has them."""
    arrays = one.arrays
    ids = np.where(arrays["labels"] == IGNORED, arrays["input_ids"], arrays["labels"]).tolist()
    second = arrays["token_type_ids"].tolist().index(1)
    parts = ids[1 : second - 1], ids[second:-1]
    return tuple(parts[1] + parts[0] if arrays["swapped"] else parts[0] + parts[1])


def test_each_sentence_of_an_albert_stream_comes_once_an_epoch(crawl: str) -> None:
    settings = data(crawl, lanes=LANES, languages=("bn",))
    builder = albert()
    texts = list(pages(load_corpus(settings), 0, data=settings, split="all"))
    expected: Counter[Tokens] = Counter()
    skipped: Counter[str] = Counter()
    for page in builder.encode(texts):
        place, number = 0, 0
        while True:
            cut = builder.cut([page], place, number)
            skipped.update(cut.skipped)
            if cut.plan is not None:
                expected[tuple(page.ids[cut.plan.tokens].tolist())] += 1
            if cut.finished:
                break
            place, number = cut.start, number + 1
    assert max(expected.values()) == 1 and skipped["last_sentence"] + skipped["one_sentence"] < 9
    # One lane: an epoch ends where the next begins.
    epoch = expected.total()
    stream = start(settings.model_copy(update={"lanes": 1}), builder)
    first, second = stream.take(epoch), stream.take(epoch)
    for part in (first, second):
        assert Counter(map(original, part)) == expected
    masks = {original(one): one.arrays["labels"].tolist() for one in first}
    changed = [masks[original(one)] != one.arrays["labels"].tolist() for one in second]
    assert sum(changed) > 0.9 * epoch
    # Four lanes, each at its own place in the epochs: by the position of each example's page.
    many = start(settings, builder)
    epochs: dict[int, Counter[Tokens]] = {}
    for _ in range(8 * epoch):
        (one,) = many.take(1)
        position, used = many.state_dict()["cursors"][str(one.index % LANES)]["0"]
        number = (position if used else position - LANES) // PAGES
        epochs.setdefault(number, Counter())[original(one)] += 1
    assert epochs[0] == epochs[1] == expected


def same(one: Example, other: Example) -> bool:
    return (one.index, one.domain) == (other.index, other.domain) and all(
        np.array_equal(array, other.arrays[name]) for name, array in one.arrays.items()
    )


@pytest.mark.parametrize("make", [causal, albert])
def test_resumed_at_any_position(crawl: str, make: Any) -> None:
    settings = data(crawl, lanes=LANES)
    corpus, builder = load_corpus(settings), make()
    whole = start(settings, builder, corpus).take(200)
    state, position, inside = None, 0, 0
    for number, count in enumerate([1, 2, 3, 5, 8, 1, 1, 1, 13, 21, 34, 40, 1, 30, 20, 19]):
        ranks = 1 + number % 3
        streams = [
            start(settings, builder, corpus, rank=rank, ranks=ranks, state=state)
            for rank in range(ranks)
        ]
        parts = [one for stream in streams for one in stream.take(count)]
        expected = whole[position : position + count]
        parts.sort(key=lambda one: one.index)
        assert all(map(same, parts, expected)) and len(parts) == len(expected)
        position += count
        state = json.loads(json.dumps(merge_states([stream.state_dict() for stream in streams])))
        inside += sum(
            place[1] > 0 for places in state["cursors"].values() for place in places.values()
        )
    assert position == 200 and inside > 30  # many stops were inside a page


@pytest.mark.parametrize("make", [causal, albert])
def test_little_room_for_tokenised_pages_changes_nothing(
    crawl: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = data(crawl, lanes=LANES, held_out=0.1)
    roomy = start(settings, make())
    expected = roomy.take(120)
    monkeypatch.setattr(lanes, "_HELD_CHARS", 9000)
    narrow = start(settings, make())
    held = []
    for one in expected:
        (found,) = narrow.take(1)
        assert same(found, one)
        source = narrow._source
        assert isinstance(source, lanes.Lanes)
        queues = [len(cursor.queue) for places in source._cursors for cursor in places.values()]
        held.append(source._held_chars)
        assert sum(queues) > 0
    assert narrow.counts == roomy.counts and narrow.state_dict() == roomy.state_dict()
    longest = max(len(text) for text in pages(load_corpus(settings), 0, data=settings, split="all"))
    assert (
        max(held)
        <= 9000 + longest
        < sum(len(text) for text in pages(load_corpus(settings), 0, data=settings, split="all"))
    )


def test_a_short_held_out_domain_gives_a_short_example(tmp_path: Path) -> None:
    listed = [Page(made_up_text(seed, 2, (3, 5))) for seed in range(9)]
    settings = data(make_corpus(tmp_path, {"bn": listed}), held_out=0.5)
    corpus = load_corpus(settings)
    texts = list(pages(corpus, 0, data=settings, split="held_out"))
    builder = causal(512)
    tokens = np.concatenate(builder.encode(texts))
    assert 1 < len(texts) < 9 and len(tokens) < 512
    (only,) = held_out_examples(corpus, 0, builder, data=settings, limit=9)
    assert only.arrays["input_ids"].tolist() == tokens.tolist()
    batch = collate([only])
    assert int((batch["labels"] != IGNORED).sum()) == len(tokens) - len(texts)
    # A pass over more text: full examples, then the rest; every token is in one of them.
    found = list(held_out_examples(corpus, 0, causal(16), data=settings, limit=99))
    sizes = [len(one.arrays["input_ids"]) for one in found]
    assert set(sizes[:-1]) == {16} and len(tokens) - sum(sizes) <= 1
    joined = np.concatenate([one.arrays["input_ids"] for one in found])
    assert joined.tolist() == tokens[: len(joined)].tolist()
    assert collate(found)["input_ids"].shape == (len(found), 16)
