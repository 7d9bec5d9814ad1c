"""Held-out losses in processes of their own; spawned children import this file."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from models.tokenizer import load_tokenizer
from training.domains import load_corpus
from training.evaluate.domain_loss import DomainLoss
from training.evaluate.held_out import held_out_losses
from training.evaluate.unigrams import training_unigrams
from training.examples import make_builder
from training.networks import build_network
from training.objectives import Objective
from training.recipe import TrainRecipe


def losses(
    recipe: TrainRecipe, *, microbatch: int, rank: int = 0, ranks: int = 1, wrap: bool = False
) -> dict[str, DomainLoss]:
    """Of the recipe's untrained network."""
    tokenizer = load_tokenizer(recipe.model.tokenizer)
    objective: torch.nn.Module = Objective(build_network(recipe, tokenizer.get_vocab_size()))
    if wrap:
        objective = torch.nn.parallel.DistributedDataParallel(objective)
    corpus = load_corpus(recipe.data)
    return held_out_losses(
        objective,
        corpus,
        make_builder(recipe, tokenizer),
        data=recipe.data,
        limit=recipe.evaluation.examples,
        microbatch=microbatch,
        device="cpu",
        rank=rank,
        ranks=ranks,
        tokenizer=tokenizer,
        unigrams=training_unigrams(corpus, tokenizer, data=recipe.data),
    )


def run(rank: int, ranks: int, port: int, recipes: list[TrainRecipe], output: str) -> None:
    """Write this rank's losses for each recipe to `output`/RANK.json."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    try:
        found = [
            losses(recipe, microbatch=3, rank=rank, ranks=ranks, wrap=True) for recipe in recipes
        ]
        text = [{name: loss.to_json() for name, loss in one.items()} for one in found]
        (Path(output) / f"{rank}.json").write_text(json.dumps(text))
    finally:
        dist.destroy_process_group()
