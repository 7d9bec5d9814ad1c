"""A crawl, a tokenizer and a recipe of which a run takes a second."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.tokenizer import save_tokenizer, train_tokenizer
from tests.training.corpora import make_corpus, random_pages
from training.recipe import TrainRecipe, load_recipe


@dataclass(frozen=True)
class Place:
    """Where the inputs of a run lie."""

    manifest: str
    tokenizer: str


def make_place(folder: Path) -> Place:
    """Two languages of made-up words, and a tokenizer of 100 pieces."""
    pages = {"bn": random_pages(120, seed=1), "hi": random_pages(80, seed=2)}
    manifest = make_corpus(folder / "crawl", pages)
    tokenizer = train_tokenizer((page.text for page in pages["bn"]), vocab_size=100)
    save_tokenizer(tokenizer, folder / "tokenizer", {})
    return Place(manifest, str(folder / "tokenizer"))


def recipe(place: Place, output: Path, *fields: str) -> TrainRecipe:
    """8 steps of 5 examples, in microbatches of 2; `fields` as for --set."""
    return load_recipe("demo", [*overrides(place, output), *fields])


def overrides(place: Place, output: Path) -> list[str]:
    """What `recipe` makes of the recipe 'demo', as for --set."""
    return [
        f"data.manifests={json.dumps(place.manifest)}",
        f"model.tokenizer={json.dumps(place.tokenizer)}",
        f"output.directory={json.dumps(str(output))}",
        "data.lanes=4",
        "data.held_out=0.1",
        "examples.sequence_length=32",
        "batch.samples=5",
        "batch.microbatch=2",
        "schedule.steps=8",
        "schedule.warmup_steps=2",
        "run.log_every=3",
        "run.tensorboard=false",
        "evaluation.every=5",
        "evaluation.examples=4",
        "checkpoint.every=100",
    ]


def without_times(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, apart from what a clock says."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in found:
        del line["times"]
    return found
