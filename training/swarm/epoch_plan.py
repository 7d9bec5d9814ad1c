"""What an epoch of a swarm's recipe costs: parameters, samples, bytes that a peer sends."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AlbertForPreTraining, LlamaForCausalLM

from training.networks import network_config
from training.swarm.recipe import SwarmRecipe
from training.swarm.sizing import CODEC_BYTES

DEFAULT_VOCABULARY = 32_000


def parameters_of(recipe: SwarmRecipe, vocabulary: int) -> int:
    """Parameters of the recipe's network with so many tokens; none is allocated."""
    config = network_config(recipe, vocabulary)
    kind: Any = AlbertForPreTraining if recipe.model.family == "albert" else LlamaForCausalLM
    with torch.device("meta"):
        network = kind(config)
    return sum(one.numel() for one in network.parameters())


def plan_of(recipe: SwarmRecipe, vocabulary: int) -> dict[str, int | str]:
    """The run in numbers.

    round_bytes: one gradient vector as it travels; in a round of n peers with equal shares each
    sends and receives 2 (n - 1) / n times as much.
    """
    settings = recipe.settings()
    parameters = parameters_of(recipe, vocabulary)
    parted = recipe.model.family == "albert" and not settings.labels_per_sample
    vectors = 2 if parted and settings.mode != "diloco" else 1
    local = settings.diloco.local_steps * int(settings.diloco.local_batch or 0)
    return {
        "parameters": parameters,
        "epochs": recipe.schedule.steps,
        "mode": settings.mode,
        "samples_of_an_epoch": local if settings.mode == "diloco" else settings.target_batch,
        "round_bytes": parameters * vectors * CODEC_BYTES[recipe.swarm.codec],
        "shortest_useful_epoch_s": str(3 * recipe.swarm.matchmaking_s),
    }
