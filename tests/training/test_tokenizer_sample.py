"""The tokenizer's sample: shares, bounds, shards, held-out pages; fertility; the command."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from models.files import sha256_file
from models.tokenizer import UNK_ID, load_tokenizer, profile_of, train_tokenizer
from scripts.cli import main
from tests.training.corpora import Page, data, make_corpus, random_pages
from training import fertility
from training.domains import load_corpus
from training.held_out import is_held_out
from training.tokenizer_sample import (
    ParagraphSample,
    allotments,
    paragraphs_of,
    shares,
    smallest_hashes,
    train_on_crawls,
)

BENGALI = [
    "নদী", "জল", "দিন", "রাত", "বই", "মেঘ", "গাছ", "পাতা", "ফুল",
    "পথ", "গ্রাম", "শহর", "মাঠ", "ধান", "নৌকা", "আকাশ", "বাতাস", "বৃষ্টি",
]  # fmt: skip


def _pages() -> dict[str, list[Page]]:
    return {
        "bn": random_pages(60, seed=1, words=BENGALI, stop="।"),
        "en": random_pages(240, seed=2),
    }


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_corpus(tmp_path_factory.mktemp("crawl"), _pages())


def _sample(manifest: str, chars: int, weights: Any = "proportional", **fields: Any) -> Any:
    asked = data(manifest, **fields)
    corpus = load_corpus(asked)
    sample = ParagraphSample(corpus, shares(corpus, weights), data=asked, chars=chars)
    return list(sample), sample.drawn


def test_domains_get_their_shares(crawl: str) -> None:
    for weights, expected in (
        ("uniform", {"bn": 0.5, "en": 0.5}),
        ({"bn": 3, "en": 1}, {"bn": 0.75, "en": 0.25}),
    ):
        texts, drawn = _sample(crawl, 8000, weights)
        for name, share in expected.items():
            assert drawn[name].share == share
            longest = max(map(len, texts))
            assert 8000 * share <= drawn[name].chars < 8000 * share + longest
        assert sum(map(len, texts)) == sum(part.chars for part in drawn.values())
        assert len(texts) == sum(part.paragraphs for part in drawn.values())


def test_smoothed_shares(crawl: str) -> None:
    corpus = load_corpus(data(crawl))
    sizes = np.array([sum(shard.chars for shard in domain.shards) for domain in corpus.domains])
    roots = np.sqrt(sizes)
    np.testing.assert_allclose(shares(corpus, "smoothed"), roots / roots.sum())
    np.testing.assert_allclose(shares(corpus, "proportional"), sizes / sizes.sum())


def test_a_small_domain_leaves_its_rest_to_the_others(crawl: str) -> None:
    corpus = load_corpus(data(crawl))
    bengali = sum(shard.chars for shard in corpus.domains[0].shards)
    _, drawn = _sample(crawl, 2 * bengali + 20_000, "uniform")
    line_feeds = sum(page.text.count("\n") for page in _pages()["bn"])
    assert drawn["bn"].chars == bengali - line_feeds  # all of it
    assert drawn["bn"].pages_read == 60
    assert bengali + 20_000 <= drawn["en"].chars < bengali + 21_000


def test_a_weight_of_zero_reads_nothing(crawl: str) -> None:
    _, drawn = _sample(crawl, 5000, {"bn": 0, "en": 1})
    assert (drawn["bn"].pages_read, drawn["bn"].chars) == (0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(1, 3000),
)
def test_allotments(domains: list[tuple[int, int]], total: int) -> None:
    sizes, weights = [size for size, _ in domains], np.array([float(w) for _, w in domains])
    parts = allotments(sizes, weights, total)
    assert all(0 <= part <= size for part, size in zip(parts, sizes, strict=True))
    reachable = sum(size for size, weight in domains if weight)
    assert min(total, reachable) - len(parts) <= sum(parts) <= min(total, reachable)
    scale = [
        part / w for part, size, w in zip(parts, sizes, weights, strict=True) if part < size and w
    ]
    if scale:  # those that are not used up have parts in the ratio of their weights
        assert max(scale) - min(scale) <= 1


@given(st.lists(st.text(min_size=1, max_size=9), max_size=30), st.integers(1, 120), st.randoms())
def test_smallest_hashes(texts: list[str], chars: int, order: random.Random) -> None:
    def naive() -> list[str]:
        chosen: list[str] = []
        for text in sorted(texts, key=lambda t: (xxhash.xxh3_64_intdigest(t.encode(), seed=5), t)):
            if sum(map(len, chosen)) < chars:
                chosen.append(text)
        return chosen

    expected = naive()
    assert list(smallest_hashes(iter(texts), chars, 5)) == expected
    order.shuffle(texts)
    assert list(smallest_hashes(iter(texts), chars, 5)) == expected


def test_a_long_stream_takes_little_memory() -> None:
    texts = (f"{number} {'grain ' * 160}" for number in range(20_000))  # 20 MB
    tracemalloc.start()
    drawn = list(smallest_hashes(texts, 50_000, 0))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 50_000 <= sum(map(len, drawn)) < 51_000
    assert peak_bytes < 500_000


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 4000))
def test_paragraphs(lengths: list[int], word: int) -> None:
    page = "\n".join(("x" * word + " ") * (length // (word + 1)) for length in lengths)
    parts = list(paragraphs_of(page))
    assert all(0 < len(part) <= 2000 and part == part.strip() for part in parts)
    assert "".join(parts).replace(" ", "") == "".join(page.split())
    if word <= 2000:
        assert {piece for part in parts for piece in part.split()} <= {"x" * word}  # cut at spaces


def test_the_sample_depends_on_text_and_seed_not_on_shards(crawl: str, tmp_path: Path) -> None:
    other = make_corpus(tmp_path / "other", _pages(), row_group_rows=3, shard_rows=11)
    once, _ = _sample(crawl, 40_000, held_out=0.1)
    again, _ = _sample(other, 40_000, held_out=0.1)
    assert once == again
    another_seed, _ = _sample(crawl, 40_000, held_out=0.1, seed=1)
    assert set(another_seed) != set(once)


def test_held_out_pages_are_left_out(tmp_path: Path) -> None:
    pages = [
        Page(f"page number {n}\nits second line {n}", f"https://a.example/{n}") for n in range(300)
    ]
    manifest = make_corpus(tmp_path, {"en": pages})
    texts, drawn = _sample(manifest, 1_000_000, held_out=0.2)
    expected = {
        line for page in pages if not is_held_out(page.url, 0.2) for line in page.text.split("\n")
    }
    assert set(texts) == expected
    assert 0 < drawn["en"].pages_read < 300


def test_of_a_domain_that_is_much_larger_some_shards_are_read(tmp_path: Path) -> None:
    manifest = make_corpus(tmp_path, {"en": random_pages(200, seed=3)}, shard_rows=10)
    texts, drawn = _sample(manifest, 4000)
    assert 4000 <= sum(map(len, texts)) < 4500
    assert 10 <= drawn["en"].pages_read < 100
    _, other_seed = _sample(manifest, 4000, seed=9)
    assert other_seed["en"].pages_read < 100


def _naive_fertility(tokenizer: Any, pages: list[str]) -> tuple[int, int, int, int]:
    ids = [i for page in pages for i in tokenizer.encode(page, add_special_tokens=False).ids]
    words = sum(1 for page in pages for _ in page.split())
    return sum(len(page) for page in pages), words, len(ids), ids.count(UNK_ID)


def test_fertility_is_a_plain_count() -> None:
    pages = [page.text for page in random_pages(150, seed=4)] + ["ꙮ grain ꙮꙮ"]
    tokenizer = train_tokenizer(pages[:150], vocab_size=200, at_most=True)
    row = fertility.measure(tokenizer, pages, "en", max_chars=10**9)
    chars, words, tokens, unknown = _naive_fertility(tokenizer, pages)
    assert (row.pages, row.chars, row.words, row.tokens, row.unknown) == (
        151, chars, words, tokens, unknown
    )  # fmt: skip
    assert unknown == 2
    assert row.tokens_per_word == tokens / words
    assert row.tokens_per_char == tokens / chars
    assert row.chars_per_token == chars / tokens
    assert row.unknown_share == unknown / tokens
    limited = fertility.measure(tokenizer, pages, "en", max_chars=len(pages[0]) + 1)
    assert limited.pages == 2
    thai = fertility.measure(tokenizer, pages, "th", max_chars=10**9)
    assert (thai.words, thai.tokens_per_word) == (0, None)
    assert [fertility.is_unspaced(code) for code in ("ja", "zh", "th", "km", "my", "bo", "lo")] == [
        True
    ] * 7
    assert not any(map(fertility.is_unspaced, ("bn", "ko", "en", "vi", "und")))


def test_the_table() -> None:
    rows = {
        "th": fertility.Fertility(2, 1000, 0, 400, 1),
        "bn": fertility.Fertility(3, 2000, 300, 450, 0),
        "xx": fertility.Fertility(0, 0, 0, 0, 0),
    }
    assert fertility.table(rows).splitlines() == [
        "language     pages tokens/word tokens/char chars/token  unknown",
        "bn               3        1.50       0.225        4.44   0.000%",
        "th               2           -       0.400        2.50   0.250%",
        "xx               0 no text to measure",
    ]


def _train(manifest: str, directory: Path, **fields: Any) -> dict[str, Any]:
    facts, _ = train_on_crawls(
        data(manifest, **{"held_out": 0.1, "weights": "smoothed", **fields}),
        str(directory),
        profile="bn-v2",
        vocab_size=95,
        character_coverage=None,
        sample_chars=30_000,
    )
    return facts


def test_a_tokenizer_from_a_crawl(crawl: str, tmp_path: Path) -> None:
    steps: list[str] = []
    facts, measured = train_on_crawls(
        data(crawl, held_out=0.1, weights="smoothed"),
        str(tmp_path / "t"),
        profile="bn-v2",
        vocab_size=95,
        character_coverage=None,
        sample_chars=30_000,
        progress=steps.append,
    )
    assert json.loads((tmp_path / "t" / "manifest.json").read_text()) == facts
    tokenizer = load_tokenizer(tmp_path / "t")
    assert profile_of(tokenizer) == facts["profile"] == "bn-v2"
    assert tokenizer.get_vocab_size() == facts["vocab_size"] == 95
    assert facts["sha256"] == sha256_file(tmp_path / "t" / "tokenizer.json")
    assert facts["sources"] == [sha256_file(crawl)]
    assert facts["fertility_on"] == "held_out"
    for language, pages in _pages().items():
        urls = [f"https://{language}.example/{language}/all/{n}" for n in range(len(pages))]
        held = [page.text for page, url in zip(pages, urls, strict=True) if is_held_out(url, 0.1)]
        row = measured[language]
        assert (row.pages, row.chars) == (len(held), sum(map(len, held)))
        assert (row.chars, row.words, row.tokens, row.unknown) == _naive_fertility(tokenizer, held)
        assert facts["fertility"][language]["tokens"] == row.tokens
    assert str(tmp_path) not in json.dumps(facts)
    assert [step.split()[0] for step in steps] == ["reading", "reading", "choosing", "measuring"]


def test_the_same_crawl_and_seed_give_the_same_files(crawl: str, tmp_path: Path) -> None:
    assert _train(crawl, tmp_path / "a") == _train(crawl, tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (
        _train(crawl, tmp_path / "c", seed=1)["sha256"] != _train(crawl, tmp_path / "a")["sha256"]
    )


def test_without_held_out_pages_it_is_measured_on_the_training_pages(
    crawl: str, tmp_path: Path
) -> None:
    facts = _train(crawl, tmp_path, held_out=0.0)
    assert facts["fertility_on"] == "train"
    assert facts["fertility"]["bn"]["pages"] == 60


def test_weights_of_a_file_are_told_without_its_path(crawl: str, tmp_path: Path) -> None:
    weights = tmp_path / "weights.json"
    weights.write_text('{"weights": {"bn": 1, "en": 3}}')
    facts = _train(crawl, tmp_path / "t", weights=str(weights))
    assert facts["sample"]["weights"] == "file"
    assert facts["sample"]["domains"]["bn"]["share"] == 0.25
    assert str(tmp_path) not in json.dumps(facts)


def test_the_command(crawl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["models", "train-tokenizer", crawl, "--languages", "bn", "--profile", "bn-v2",
             "--vocab-size", "auto", "--held-out", "0.1", "--weights", "bn=1"]  # fmt: skip
    assert main([*words, "--output", str(tmp_path / "t")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    size = load_tokenizer(tmp_path / "t").get_vocab_size()
    assert lines[0] == f"{size:,} pieces, profile bn-v2: {tmp_path / 't'}"
    assert lines[1].split()[0] == "language"
    assert lines[2].split()[0] == "bn"
    assert len(lines) == 3
    assert "reading 'bn'" in err
    assert main([*words, "--output", str(tmp_path / "u"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert printed["sample"]["weights"] == {"bn": 1.0}


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "plain text": (["TEXT"], ["prose.txt'", "train-sentencepiece"]),
    "no crawl": (["nowhere"], ["'nowhere/manifest.json'"]),
    "language": (["CRAWL", "--languages", "xx"], ["'xx'", "bn, en"]),
    "profile": (["CRAWL", "--profile", "bengali"], ["'bengali'", "'bn-v2'"]),
    "vocabulary": (["CRAWL", "--vocab-size", "many"], ["'many'", "'auto'"]),
    "small vocabulary": (["CRAWL", "--vocab-size", "9"], ["'9'", "too small"]),
    "large vocabulary": (["CRAWL", "--vocab-size", "90000"], ["'90000'", "too large", "at most"]),
    "weights word": (["CRAWL", "--weights", "bn=1", "en"], ["'en'", "DOMAIN=SHARE"]),
    "weights twice": (["CRAWL", "--weights", "bn=1", "bn=2"], ["'bn=2'", "once"]),
    "negative weight": (["CRAWL", "--weights", "bn=-1", "en=1"], ["'bn=-1'"]),
    "weights of some": (["CRAWL", "--weights", "bn=1"], ["'en'"]),
    "weights file": (["CRAWL", "--weights", "w.json"], ["'w.json'"]),
    "held out": (["CRAWL", "--held-out", "1"], ["'1.0'"]),
    "coverage": (["CRAWL", "--character-coverage", "2"], ["'2.0'"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(
    mistake: str, crawl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "prose.txt"
    text.write_text("plain\n")
    words, expected = MISTAKES[mistake]
    words = [{"TEXT": str(text), "CRAWL": crawl}.get(word, word) for word in words]
    assert main(["models", "train-tokenizer", *words, "--output", str(tmp_path / "t")]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == ""
    assert last.startswith("gristmill: ")
    for part in expected:
        assert part in last
    assert not (tmp_path / "t").exists()
