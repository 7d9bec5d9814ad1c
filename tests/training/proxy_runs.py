"""Proxy runs on a crawl of three domains, of which one takes a second; ranks import it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.tokenizer import save_tokenizer, train_tokenizer
from tests.training.corpora import make_corpus, random_pages
from tests.training.tiny_runs import Place, overrides
from training import loop
from training.doremi import ProxySettings, train_proxy
from training.recipe import Run, TrainRecipe, load_recipe
from training.strategy import placed

DOMAINS = ("bn", "en", "hi")
SMOOTHING = 0.01
_WORDS: dict[str, dict[str, Any]] = {
    "bn": {"words": ("grain", "mill", "stone")},
    "en": {},
    "hi": {"words": ("a", "of", "it", "is")},
}


def make_place(folder: Path) -> Place:
    """Three languages that are not equally easy, with pages of other lengths."""
    pages = {
        language: random_pages(
            60, seed=number, sentences=(1 + number, 4 + 3 * number), **_WORDS[language]
        )
        for number, language in enumerate(DOMAINS)
    }
    manifest = make_corpus(folder / "crawl", pages)
    texts = [page.text for listed in pages.values() for page in listed]
    save_tokenizer(train_tokenizer(texts, vocab_size=90), folder / "tokenizer", {})
    return Place(manifest, str(folder / "tokenizer"))


def sets(place: Place, output: Path, *fields: str) -> list[str]:
    """8 steps of 8 examples of a tiny decoder, all of a step in one microbatch."""
    return [
        *overrides(place, output), "model.family=decoder", "optimiser.name=adamw",
        "optimiser.learning_rate=1e-2", "batch.samples=8", "batch.microbatch=8",
        "run.log_every=1", "run.device=cpu", *fields,
    ]  # fmt: skip


def recipe(place: Place, output: Path, *fields: str) -> TrainRecipe:
    """The recipe of `sets`."""
    return load_recipe("demo", sets(place, output, *fields))


def make_reference(place: Place, folder: Path) -> Path:
    """A finished run of six steps in `folder`."""
    loop.train(recipe(place, folder, "schedule.steps=6", "run.seed=7"), quiet=True)
    return folder


def settings(reference: Path, **fields: Any) -> ProxySettings:
    """DoReMi's, with a larger c."""
    return ProxySettings(str(reference), **{"smoothing": SMOOTHING, **fields})


def proxy(place: Place, reference: Path, folder: Path, *fields: str, **more: Any) -> dict[str, Any]:
    """Train a proxy of the recipe of `sets`; its summary."""
    return train_proxy(recipe(place, folder, *fields), settings(reference), quiet=True, **more)


def make_finished(place: Place, reference: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A proxy with dropout, whose recipe asks for other weights than a proxy's."""
    return folder, proxy(
        place, reference, folder, "model.dropout=0.1", "data.weights={bn = 1, en = 7, hi = 2}"
    )


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of that kind in a run's metrics.jsonl."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def rank_process(
    rank: int, port: int, cases: Sequence[tuple[list[str], str]], results: str
) -> None:
    """One of two ranks: the proxy run of each case (--set, reference), all in one process group.

    Rank 0 writes the summaries to `results`.
    """
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2",
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    summaries: list[dict[str, Any]] = []
    with placed(Run(device="cpu")) as place:
        assert (place.rank, place.ranks) == (rank, 2)
        group = dist.group.WORLD
        for fields, reference in cases:
            settings = ProxySettings(reference, smoothing=SMOOTHING)
            summaries.append(train_proxy(load_recipe("demo", fields), settings, quiet=True))
            assert dist.is_initialized()
            assert dist.group.WORLD is group
    assert not dist.is_initialized()
    if rank == 0:
        Path(results).write_text(json.dumps(summaries))
