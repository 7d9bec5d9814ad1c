"""Domains, filters and weights from manifests, and what is said of a mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import files
from models.errors import UserError
from tests.training.corpora import Page, data, make_corpus, random_pages
from training.domains import HostGroup, load_corpus, mixture
from training.recipe import Data

WIKI = Page("wiki page " * 10, host="bn.wikipedia.org")
NEWS = Page("news page " * 30, host="news.example")
BLOG = Page("a blog", host="my.blog.example")


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("domains") / "first"
    return make_corpus(
        folder,
        {
            "bn": [*random_pages(70, bucket="head"), *random_pages(10, bucket="tail")],
            "en": [WIKI] * 3 + [NEWS] * 2 + [BLOG] * 5,
            "hi": random_pages(4, bucket="head"),
        },
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("domains") / "second"
    return make_corpus(folder, {"bn": random_pages(5, seed=9)})


def sizes(settings: Data) -> dict[str, int]:
    return {domain.name: domain.rows for domain in load_corpus(settings).domains}


def test_by_language(crawl: str) -> None:
    assert sizes(data(crawl)) == {"bn": 80, "en": 10, "hi": 4}
    assert sizes(data(crawl.removesuffix("/manifest.json"))) == {"bn": 80, "en": 10, "hi": 4}


def test_any_combination(crawl: str, other: str) -> None:
    assert sizes(data(crawl, by=())) == {"all": 94}
    assert sizes(data(crawl, by=("bucket",))) == {"all": 10, "head": 74, "tail": 10}
    expected = {"bn/head": 70, "bn/tail": 10, "en/all": 10, "hi/head": 4}
    assert sizes(data(crawl, by=("language", "bucket"))) == expected
    assert sizes(data(crawl, by=("bucket", "language"))) == expected
    both = data(crawl, other, by=("source", "language"), languages=("bn",))
    assert sizes(both) == {"first/bn": 80, "second/bn": 5}
    assert sizes(data(crawl, other, languages=("bn",))) == {"bn": 85}
    groups = {"wiki": ("*.wikipedia.org",), "blogs": ("*.blog.*",)}
    hosts = data(crawl, by=("language", "host"), host_groups=groups, languages=("en", "hi"))
    assert list(sizes(hosts)) == [
        "en/blogs",
        "en/other",
        "en/wiki",
        "hi/blogs",
        "hi/other",
        "hi/wiki",
    ]


def test_shards_name_their_files_and_sources(crawl: str, other: str) -> None:
    corpus = load_corpus(data(crawl, other, languages=("bn",)))
    (domain,) = corpus.domains
    assert [shard.source for shard in domain.shards] == [0, 0, 0, 1]
    assert [shard.rows for shard in domain.shards] == [64, 6, 10, 5]
    for shard in domain.shards:
        assert files.size_bytes(shard.url) == shard.bytes
    assert [source.digest for source in corpus.sources] == [
        files.sha256_file(crawl),
        files.sha256_file(other),
    ]


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    first = make_corpus(tmp_path / "a" / "docs", {"bn": random_pages(3)})
    second = make_corpus(tmp_path / "b" / "docs", {"bn": random_pages(4)})
    assert sizes(data(first, second, by=("source",))) == {"a/docs": 3, "b/docs": 4}


def test_the_first_matching_host_group_wins() -> None:
    groups = (("news", ("news.*", "*.news.example")), ("examples", ("*.example",)))
    hosts = ["news.org", "my.news.example", "blog.example", "example", "x.org"]
    assert HostGroup("news", groups).holds(hosts).tolist() == [True, True, False, False, False]
    assert HostGroup("examples", groups).holds(hosts).tolist() == [False, False, True, False, False]
    assert HostGroup("other", groups).holds(hosts).tolist() == [False, False, False, True, True]


def test_weights(crawl: str, tmp_path: Path) -> None:
    corpus = load_corpus(data(crawl, by=("language",)))
    chars = [sum(shard.chars for shard in domain.shards) for domain in corpus.domains]
    assert mixture(corpus, "proportional").tolist() == (np.array(chars) / sum(chars)).tolist()
    assert mixture(corpus, "uniform").tolist() == [1 / 3] * 3
    weights = {"hi": 0, "bn": 3, "en": 1}
    assert mixture(corpus, weights).tolist() == [0.75, 0.25, 0]
    for tree in (
        weights,
        {"weights": weights, "method": "law"},
        {"train_domain_weights": weights, "eval_domain_weights": {"bn": 1}},
    ):
        path = tmp_path / "weights.json"
        path.write_text(json.dumps(tree))
        assert mixture(corpus, str(path)).tolist() == [0.75, 0.25, 0]


def test_host_groups_weigh_by_their_own_characters(crawl: str) -> None:
    groups = {"wiki": "*.wikipedia.org", "news": "news.*"}
    settings = data(crawl, by=("host",), host_groups=groups, languages=("en",))
    corpus = load_corpus(settings)
    assert corpus.names == ("news", "other", "wiki")
    chars = np.array([2 * len(NEWS.text), 5 * len(BLOG.text), 3 * len(WIKI.text)])
    assert mixture(corpus, "proportional").tolist() == (chars / chars.sum()).tolist()


def test_a_remote_crawl() -> None:
    path = make_corpus("memory://domains/crawl", {"bn": random_pages(20)})
    assert sizes(data("memory://domains/crawl")) == {"bn": 20}
    corpus = load_corpus(data(path))
    assert corpus.domains[0].shards[0].url.startswith("memory://domains/crawl/pages/language=bn/")


def lines(action: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"languages": ("xx",)}, "data.languages: the crawl has no 'xx': it has bn, en, hi"),
        ({"buckets": ("best",)}, "data.buckets: the crawl has no 'best': it has all, head, tail"),
        ({"languages": ("en",), "buckets": ("tail",)}, "no page is in data.languages = 'en'"),
        ({"by": ("host",)}, "by = 'host' without data.host_groups"),
        ({"host_groups": {"a": ("*.a",)}}, "data.host_groups without 'host' in data.by"),
        ({"by": ("host",), "host_groups": {"other": ("*.a",)}}, "has a group 'other'"),
        ({"by": ("host",), "host_groups": {"a": ()}}, "'a' has no pattern"),
    ],
)
def test_mistakes_in_the_recipe(crawl: str, fields: dict[str, Any], says: str) -> None:
    assert says in lines(lambda: load_corpus(data(crawl, **fields)))


def test_mistakes_in_the_manifests(crawl: str, tmp_path: Path) -> None:
    assert "data.manifests is empty" in lines(lambda: load_corpus(data()))
    assert "no manifest at" in lines(lambda: load_corpus(data(str(tmp_path / "none"))))
    folder = crawl.removesuffix("/manifest.json")
    assert "is the same crawl as" in lines(lambda: load_corpus(data(crawl, folder)))
    tree = json.loads(Path(crawl).read_text())
    future = tmp_path / "manifest.json"
    future.write_text(json.dumps({**tree, "schema_version": 99}))
    assert "schema version '99'" in lines(lambda: load_corpus(data(str(future))))
    future.write_text(json.dumps({**tree, "outputs": []}))
    assert "no page in" in lines(lambda: load_corpus(data(str(future))))


def test_a_missing_or_short_shard_is_named(crawl: str, tmp_path: Path) -> None:
    shutil.copytree(Path(crawl).parent, tmp_path / "copy")
    settings = data(str(tmp_path / "copy"))
    shard = tmp_path / "copy/pages/language=en/bucket=all/part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    message = lines(lambda: load_corpus(settings))
    assert str(shard) in message and "bytes, not the" in message
    shard.unlink()
    assert f"shard '{shard}' is missing" in lines(lambda: load_corpus(settings))
    # A shard that is not asked for need not be there.
    assert sizes(data(str(tmp_path / "copy"), languages=("bn",))) == {"bn": 80}


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"bn": 1, "en": 1, "xx": 1}, "no domain 'xx': the domains are 'bn', 'en', 'hi'"),
        ({"bn": 1}, "no weight for 'en', 'hi'"),
        ({"bn": 1, "en": -1, "hi": 1}, "'en' = '-1' is no weight"),
        ({"bn": 1, "en": float("nan"), "hi": 1}, "'en' = 'nan' is no weight"),
        ({"bn": 0, "en": 0, "hi": 0}, "all domains come to '0'"),
        ("unifrom", "data.weights = 'unifrom' is not 'proportional', not 'uniform', and no file"),
    ],
)
def test_mistakes_in_weights(crawl: str, weights: Any, says: str) -> None:
    corpus = load_corpus(data(crawl))
    assert says in lines(lambda: mixture(corpus, weights))


def test_mistakes_in_a_weights_file(crawl: str, tmp_path: Path) -> None:
    corpus = load_corpus(data(crawl))
    path = tmp_path / "weights.json"
    for text, says in (
        ("{", "is no JSON"),
        ("[1, 2]", "holds no weights"),
        ('{"weights": {"bn": 1, "en": "much", "hi": 1}}', "'en' = 'much' is no weight"),
        ('{"weights": {"bn": 1, "en": 1}}', f"weights file '{path}': no weight for 'hi'"),
    ):
        path.write_text(text)
        assert says in lines(lambda: mixture(corpus, str(path)))
