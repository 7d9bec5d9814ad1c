"""Held-out losses against a naive loop, for any microbatch and number of ranks."""

from __future__ import annotations

import json
import math
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import UserError
from models.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from tests.training import forked, held_out_ranks
from tests.training.corpora import Page, make_corpus, random_pages
from training import sampler
from training.batches import collate
from training.domains import load_corpus
from training.evaluate.checkpoint_folder import find_checkpoints
from training.evaluate.domain_loss import DomainLoss, TermLoss, example_sums, mean, total
from training.evaluate.stand_alone import evaluate_held_out
from training.evaluate.tables import held_out_comparison, held_out_table
from training.evaluate.unigrams import Unigrams, training_unigrams
from training.examples import make_builder
from training.held_out import is_held_out
from training.networks import build_network
from training.objectives import Objective
from training.recipe import Data, TrainRecipe

FAMILIES = ["albert", "decoder"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A crawl of three languages, one of them with one page, and a tokenizer."""
    folder = tmp_path_factory.mktemp("held-out")
    pages = {
        "en": random_pages(60, seed=1),
        "de": random_pages(25, seed=2),
        "fr": [Page("Une phrase. Une autre. Et la fin.", url=_trained_on())],
    }
    make_corpus(folder / "crawl", pages)
    texts = [page.text for listed in pages.values() for page in listed]
    save_tokenizer(train_tokenizer(texts, vocab_size=120, at_most=True), folder / "tokenizer", {})
    return folder


def _trained_on() -> str:
    """The URL of a page that is not held out."""
    urls = (f"https://fr.example/{number}" for number in range(100))
    return next(url for url in urls if not is_held_out(url, 0.3))


def _recipe(place: Path, family: str, **evaluation: Any) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "data": {"manifests": [str(place / "crawl")], "held_out": 0.3, "lanes": 4},
            "examples": {"sequence_length": 32},
            "model": {
                "family": family, "size": "tiny", "tokenizer": str(place / "tokenizer")
            },
            "evaluation": evaluation,
        }
    )  # fmt: skip


def _naive(recipe: TrainRecipe) -> dict[str, dict[str, tuple[int, float, float]]]:
    """Labels, loss and its standard error of each term, example by example, float64."""
    tokenizer = load_tokenizer(recipe.model.tokenizer)
    objective = Objective(build_network(recipe, tokenizer.get_vocab_size())).double().eval()
    corpus = load_corpus(recipe.data)
    found: dict[str, dict[str, tuple[int, float, float]]] = {}
    for number, name in enumerate(corpus.names):
        rows: dict[str, list[tuple[float, float]]] = {term: [] for term in objective.terms}
        for example in sampler.held_out_examples(
            corpus, number, make_builder(recipe, tokenizer),
            data=recipe.data, limit=recipe.evaluation.examples,
        ):  # fmt: skip
            with torch.no_grad():
                losses = objective(collate([example]))
            for term, sums, counts in zip(objective.terms, losses.sums, losses.counts, strict=True):
                rows[term].append((float(sums), float(counts)))
        found[name] = {}
        for term, pairs in rows.items():
            labels = sum(count for _, count in pairs)
            if labels:
                loss = sum(one for one, _ in pairs) / labels
                squares = sum((one - loss * count) ** 2 for one, count in pairs)
                n = len(pairs)
                error = math.sqrt(squares * n / (n - 1)) / labels
                found[name][term] = (round(labels), loss, error)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_naive_loop(place: Path, family: str) -> None:
    recipe = _recipe(place, family)
    expected = _naive(recipe)
    assert expected["en"]
    for microbatch in (1, 7):
        found = held_out_ranks.losses(recipe, microbatch=microbatch)
        for name, terms in expected.items():
            assert found[name].terms.keys() == terms.keys()
            for term, (labels, loss, error) in terms.items():
                one = found[name].terms[term]
                assert one.count == labels
                assert one.loss == pytest.approx(loss, rel=1e-5)
                assert one.standard_error == pytest.approx(error, rel=1e-3)


def test_two_ranks_find_what_one_finds(place: Path, tmp_path: Path) -> None:
    """An odd number of examples in groups of 6: a rank runs out of them before the other."""
    recipes = [_recipe(place, family, examples=13) for family in FAMILIES]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked.start_ranks(held_out_ranks.run, (2, port, recipes, str(tmp_path)), 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for recipe, shared in zip(recipes, first, strict=True):
        alone = held_out_ranks.losses(recipe, microbatch=5)
        assert shared.keys() == alone.keys()
        assert alone["en"].examples == 13
        for name, loss in alone.items():
            _same(shared[name], loss.to_json())


def test_a_domain_without_held_out_pages_is_named(place: Path) -> None:
    found = held_out_ranks.losses(_recipe(place, "albert"), microbatch=4)
    empty = [name for name, loss in found.items() if not loss.examples]
    assert empty == ["fr"]
    assert found["fr"].terms == {}
    assert found["fr"].unigram_loss is None
    assert held_out_table("m", found).endswith("\n\nwithout a held-out example: fr")


def test_bits_per_byte_and_the_unigram_loss(place: Path) -> None:
    """Counted one by one; the frequencies are those of the training pages alone."""
    recipe = _recipe(place, "decoder")
    tokenizer = load_tokenizer(recipe.model.tokenizer)
    corpus = load_corpus(recipe.data)
    size = tokenizer.get_vocab_size()
    trained: dict[str, Counter[int]] = {}
    for number, name in enumerate(corpus.names):
        trained[name] = Counter()
        for page in sampler.pages(corpus, number, data=recipe.data, split="train"):
            trained[name].update(tokenizer.encode(page, add_special_tokens=False).ids)
    whole = sum(trained.values(), Counter[int]())
    own = trained["en"]
    counts: Counter[int] = Counter()
    text, nats = 0, 0.0
    seen = set()
    for example in sampler.held_out_examples(
        corpus, corpus.names.index("en"), make_builder(recipe, tokenizer),
        data=recipe.data, limit=256,
    ):  # fmt: skip
        ids = example.arrays["input_ids"].tolist()
        seen.add(tuple(ids))
        counts.update(one for one in ids if one not in (0, 2, 3, 4))
        for one in ids[1:]:
            if one > 4:
                text += len(str(tokenizer.id_to_token(one)).replace("\u2581", " ").encode())
    for one, times in counts.items():
        q = (whole[one] + 1) / (whole.total() + size - 4)
        nats -= times * math.log((own[one] + len(own) * q) / (own.total() + len(own)))
    found = held_out_ranks.losses(recipe, microbatch=4)["en"]
    assert len(seen) == found.examples < 256
    assert found.text_tokens == counts.total()
    assert found.unigram_loss == pytest.approx(nats / counts.total())
    term = found.terms["next_token"]
    assert found.bits_per_byte == pytest.approx(term.loss * term.count / math.log(2) / text)
    assert found.perplexity == pytest.approx(math.exp(term.loss))
    masked = held_out_ranks.losses(_recipe(place, "albert"), microbatch=4)["en"]
    assert (masked.perplexity, masked.bits_per_byte) == (None, None)


def test_masking_does_not_change_the_unigram_loss(place: Path) -> None:
    """It is of the text, not of what the mask left of it."""
    low, high = (
        held_out_ranks.losses(recipe.model_copy(update={"examples": examples}), microbatch=4)["en"]
        for recipe in [_recipe(place, "albert")]
        for share in (0.05, 0.6)
        for examples in [recipe.examples.model_copy(update={"masked": share, "swapped": 0.0})]
    )
    assert low.unigram_loss is not None
    assert low.unigram_loss == pytest.approx(high.unigram_loss)


def test_unigrams_are_counted_once_for_the_same_pages(tmp_path: Path) -> None:
    corpora = []
    for name, seed in (("one", 1), ("other", 2)):
        manifest = make_corpus(tmp_path / name, {"bn": random_pages(40, seed=seed)})
        data = Data(manifests=(manifest,), held_out=0.2, seed=seed)
        corpora.append((load_corpus(data), data))
    (one, data), (other, _) = corpora
    tokenizer = train_tokenizer([page.text for page in random_pages(40, seed=1)], vocab_size=90)
    found = training_unigrams(one, tokenizer, data=data)
    assert training_unigrams(load_corpus(data), tokenizer, data=data) is found
    more = data.model_copy(update={"held_out": 0.0})
    assert training_unigrams(one, tokenizer, data=more).domains[0][1].sum() > (
        found.domains[0][1].sum()
    )
    assert not np.array_equal(
        training_unigrams(other, tokenizer, data=data).domains[0][1], found.domains[0][1]
    )
    smaller = train_tokenizer([page.text for page in random_pages(40, seed=1)], vocab_size=70)
    assert training_unigrams(one, smaller, data=data).vocab_size == 70


def test_unigrams_by_hand() -> None:
    """Eight ids, four of them text: 3 and 1 tokens of ids 5 and 6 in the first domain, 4 of id 6 in
    the second, none in the third."""
    domains = tuple(
        (np.array(ids, dtype=np.int64), np.array(own)) for ids, own in
        [((5, 6), (3, 1)), ((6,), (4,)), ((), ())]
    )  # fmt: skip
    unigrams = Unigrams(domains, 8)
    # q = (count + 1) / (8 + 4): ids 1, 5, 6, 7 have 1, 4, 6, 1 twelfths.
    counts = np.array([0, 0, 0, 0, 0, 1, 0, 2])
    first = -math.log((3 + 2 * 4 / 12) / 6) - 2 * math.log((2 * 1 / 12) / 6)
    assert unigrams.nats(0, counts) == pytest.approx(first)
    second = -math.log((4 / 12) / 5) - 2 * math.log((1 / 12) / 5)
    assert unigrams.nats(1, counts) == pytest.approx(second)
    assert unigrams.nats(2, counts) == pytest.approx(-math.log(4 / 12) - 2 * math.log(1 / 12))
    for domain in range(3):  # the probabilities of the four sum to 1
        sums = [math.exp(-unigrams.nats(domain, np.eye(8)[one])) for one in (1, 5, 6, 7)]
        assert sum(sums) == pytest.approx(1)


def test_a_few_held_out_tokens_do_not_lower_the_baseline(place: Path) -> None:
    """Of 2 examples the tokens' own entropy is far below what any model could reach."""
    few, many = (
        held_out_ranks.losses(_recipe(place, "albert", examples=count), microbatch=4)["en"]
        for count in (2, 256)
    )
    assert few.unigram_loss == pytest.approx(many.unigram_loss, rel=0.15)


def test_checkpoints_side_by_side() -> None:
    def losses(*values: float) -> dict[str, DomainLoss]:
        return {
            name: _loss((4, 4 * value, 1)) for name, value in zip(("bn", "en"), values, strict=True)
        }

    found = [losses(2.0, 4.0), losses(1.5, 4.25)]
    assert held_out_comparison(["a", "b"], found, same_tokens=True).split("\n") == [
        "side by side: next token loss in nats",
        "",
        "domain          a      b  b less a",
        "bn          2.000  1.500    -0.500",
        "en          4.000  4.250    +0.250",
        "all labels  3.000  2.875    -0.125",
    ]
    bits = held_out_comparison(["a", "b"], found, same_tokens=False).split("\n")
    assert bits[0] == "side by side: bits by byte of text"
    # 8 nats in 8 bytes, and 6.
    assert bits[3] == "bn          1.4427  1.0820   -0.3607"
    masked = [{"bn": DomainLoss(1, {"masked_token": one["bn"].terms["next_token"]})}
              for one in found]  # fmt: skip
    assert "do not compare" in held_out_comparison(["a", "b"], masked, same_tokens=False)
    assert "objectives" in held_out_comparison(["a", "b"], [found[0], masked[0]], same_tokens=True)


def _loss(*examples: tuple[float, float, float]) -> DomainLoss:
    counts, losses, correct = np.array(examples, dtype=float).T[:, None, :]
    sums = example_sums(counts, losses, correct)[0]
    term = TermLoss(tuple(sums.tolist()), len(examples))
    return DomainLoss(len(examples), {"next_token": term}, 8, 8)


def test_sums_by_hand() -> None:
    """(labels, loss, correct): 2 and 4 labels with 3 and 9 nats, then a domain of one example."""
    first, second = _loss((2, 3, 1), (4, 9, 3)), _loss((2, 2, 2))
    term = first.terms["next_token"]
    assert term.loss == 2.0
    assert term.accuracy == pytest.approx(4 / 6)
    # Residuals 3 - 2 * 2 = -1 and 9 - 2 * 4 = 1: sqrt(2 * (2 / 1)) / 6.
    assert term.standard_error == pytest.approx(2 / 6)
    assert second.terms["next_token"].standard_error is None
    whole = total([first, second])
    assert whole.terms["next_token"].loss == pytest.approx(14 / 8)
    assert whole.examples == 3
    assert whole.bits_per_byte == pytest.approx(14 / math.log(2) / 16)
    plain = mean([first, second], "next_token")
    assert plain is not None
    assert (plain.domains, plain.loss, plain.standard_error) == (2, 1.5, None)
    both = mean([first, first], "next_token")
    assert both is not None
    assert both.standard_error == pytest.approx((2 / 6) / math.sqrt(2))
    assert mean([DomainLoss(0, {})], "next_token") is None


def test_a_checkpoint_alone_finds_what_the_loop_found(place: Path, tmp_path: Path) -> None:
    from training.loop import train

    for family in FAMILIES:
        recipe = _recipe(place, family, examples=9)
        tree = recipe.model_dump(mode="json")
        tree["schedule"] = {"steps": 3, "warmup_steps": 1}
        tree["batch"] = {"samples": 4, "microbatch": 2}
        tree["run"] = {"device": "cpu", "tensorboard": False}
        tree["output"] = {"directory": str(tmp_path / family)}
        train(TrainRecipe.model_validate(tree), quiet=True)
        manifest = json.loads((tmp_path / family / "manifest.json").read_text())
        (folder,) = find_checkpoints([str(tmp_path / family)])
        assert folder.name == family
        found = evaluate_held_out(folder, [str(place / "crawl")], ["evaluation.examples=9"])
        assert found.losses.keys() == manifest["held_out"]["domains"].keys()
        for name, loss in found.losses.items():
            _same(manifest["held_out"]["domains"][name], loss.to_json())
        _same(manifest["held_out"]["total"], total(found.losses.values()).to_json())


def test_mistakes(place: Path, tmp_path: Path) -> None:
    recipe = _recipe(place, "albert")
    tokenizer = load_tokenizer(recipe.model.tokenizer)
    network = build_network(recipe, tokenizer.get_vocab_size())
    network.save_pretrained(tmp_path / "plain")
    save_tokenizer(tokenizer, tmp_path / "plain", {})
    (folder,) = find_checkpoints([str(tmp_path / "plain")])
    said: list[str] = []
    settings = ["data.held_out=0.3", "examples.sequence_length=32"]
    found = evaluate_held_out(folder, [str(place / "crawl")], settings, said.append)
    alone = held_out_ranks.losses(recipe, microbatch=8)
    _same(found.losses["en"].to_json(), alone["en"].to_json())
    assert "made by no run of Gristmill" in said[0]
    with pytest.raises(UserError, match="give --data MANIFEST"):
        evaluate_held_out(folder, [])
    with pytest.raises(UserError, match="held no page out"):
        evaluate_held_out(folder, [str(place / "crawl")], ["data.held_out=0"])
    with pytest.raises(UserError, match="'600' is more than the 512 positions"):
        evaluate_held_out(folder, [str(place / "crawl")], ["examples.sequence_length=600"])


def _same(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Equal up to the rounding of float32."""
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, dict):
            _same(value, second[key])
        elif isinstance(value, float):
            assert second[key] == pytest.approx(value, rel=1e-4), key
        else:
            assert second[key] == value, key
