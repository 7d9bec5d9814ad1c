"""One pass over a domain's pages: held-out examples and texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.corpora import Page, data, make_corpus, random_pages
from tests.training.test_sampler import plain
from tests.training.word_examples import SKIPPED, WordExamples
from training.domains import load_corpus
from training.held_out import is_held_out
from training.recipe import Data
from training.sampler import held_out_examples, pages


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Data:
    listed = {
        "bn": random_pages(200, seed=1),
        "en": [Page(f"page{n} " * 20, url=f"https://b.example/{n}") for n in range(90)],
        "hi": [Page(f"{SKIPPED} page{n}") for n in range(30)],
    }
    return data(make_corpus(tmp_path_factory.mktemp("passes"), listed), held_out=0.3)


def test_the_splits_divide_the_pages(settings: Data) -> None:
    corpus = load_corpus(settings)
    train, held, whole = (
        list(pages(corpus, 1, data=settings, split=split)) for split in ("train", "held_out", "all")
    )
    expected = {f"page{n} " * 20 for n in range(90)}
    apart = {f"page{n} " * 20 for n in range(90) if is_held_out(f"https://b.example/{n}", 0.3)}
    assert set(whole) == expected and len(whole) == 90
    assert set(held) == apart and len(held) == len(apart) > 10
    assert set(train) == expected - apart and len(train) == 90 - len(apart)
    assert whole != sorted(whole)
    assert list(pages(corpus, 1, data=settings)) == train


def test_held_out_examples(settings: Data) -> None:
    corpus = load_corpus(settings)
    texts = pages(corpus, 0, data=settings, split="held_out")
    words = " ".join(texts).split()
    found = list(held_out_examples(corpus, 0, WordExamples(), data=settings, limit=10_000))
    assert [one.index for one in found] == list(range(len(words) // 20))
    assert {one.domain for one in found} == {0}
    got = [word for one in found for word in one.arrays["words"]]
    assert got == words[: len(got)]
    assert len({int(one.arrays["key"]) for one in found}) == len(found)
    few = list(held_out_examples(corpus, 0, WordExamples(), data=settings, limit=7))
    assert plain(few) == plain(found[:7])


def test_held_out_examples_do_not_depend_on_the_stream(settings: Data) -> None:
    def found(**fields: object) -> object:
        changed = settings.model_copy(update=fields)
        corpus = load_corpus(changed)
        domain = corpus.names.index("bn")
        listed = held_out_examples(corpus, domain, WordExamples(), data=changed, limit=50)
        return plain(list(listed))

    assert found(seed=9, lanes=3, window_row_groups=1, languages=("bn",)) == found()


def test_a_pass_without_examples_ends(settings: Data) -> None:
    corpus = load_corpus(settings)
    assert list(held_out_examples(corpus, 2, WordExamples(), data=settings, limit=9)) == []
    none = settings.model_copy(update={"held_out": 0.0})
    assert list(held_out_examples(corpus, 0, WordExamples(), data=none, limit=9)) == []
    assert list(pages(corpus, 0, data=none, split="held_out")) == []


def test_a_remote_crawl_gives_the_same(tmp_path: Path) -> None:
    listed = {"bn": random_pages(60)}
    local = data(make_corpus(tmp_path, listed), held_out=0.2)
    remote = data(make_corpus("memory://passes", listed), held_out=0.2)
    for split in ("train", "held_out"):
        one, other = (
            list(pages(load_corpus(chosen), 0, data=chosen, split=split))
            for chosen in (local, remote)
        )
        assert one == other and one
