"""Where a run's pipeline is cut: from its recipe and a profile of its network to the cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from training.parallel import cut_table, partition, tree
from training.parallel.chain import Chain
from training.parallel.profile import profile_chain, worst_batch
from training.parallel.schedules import SCHEDULES, check
from training.parallel.units import Cut, Pipe, Profile
from training.recipe import Pipeline, TrainRecipe

if TYPE_CHECKING:
    from training.strategy import Placement


def stages_per_rank(settings: Pipeline) -> int:
    """As the recipe says, or the fewest that the schedule knows."""
    return settings.stages_per_rank or SCHEDULES[settings.schedule].stages_per_rank[0]


def pipe_of(recipe: TrainRecipe, ranks: int, microbatches: int) -> Pipe:
    """The recipe's pipeline on `ranks` processes. Raises UserError where it cannot be."""
    settings = recipe.run.pipeline
    each = stages_per_rank(settings)
    check(SCHEDULES[settings.schedule], ranks, each, microbatches)
    # A backward pass is not split where blocks are recomputed, or use their weights several times.
    whole = recipe.run.activation_checkpointing or recipe.model.family == "albert"
    return Pipe(ranks, microbatches, settings.schedule, each, whole_backward=whole)


def key(recipe: TrainRecipe, ranks: int, microbatches: int) -> dict[str, Any]:
    """What a cut is for, as JSON: a run that goes on under the same keeps its cut."""
    settings = recipe.run.pipeline
    return {
        "ranks": ranks,
        "schedule": settings.schedule,
        "stages_per_rank": stages_per_rank(settings),
        "microbatches": microbatches,
        "cut": settings.cut,
        "costs": settings.costs,
    }


def choose(
    chain: Chain, recipe: TrainRecipe, place: Placement, microbatches: int, rows: int
) -> tuple[Cut, str]:
    """The recipe's cut of `chain` for microbatches of `rows` examples, and its table.

    Units are timed on the device of this rank, or their operations counted. Raises UserError.
    """
    measured = recipe.run.pipeline.costs == "measured"
    profile = profile_chain(
        chain,
        worst_batch(recipe, rows),
        bf16=recipe.run.precision == "bf16",
        device=place.device if measured else None,
    )
    pipe = pipe_of(recipe, place.copies, microbatches)
    if place.device.type == "cuda":
        pipe = replace(
            pipe,
            memory_bytes=torch.cuda.get_device_properties(place.device).total_memory,
            bytes_per_parameter=state_bytes(recipe, place.data_ranks),
        )
    found = cut(profile, recipe, pipe)
    return found, cut_table.table(profile, found, pipe)


def state_bytes(recipe: TrainRecipe, copies: int) -> float:
    """Bytes of a parameter on its rank: weights, gradients, two moments, and what bf16 and FSDP2
    keep beside them. copies: pipelines that share the examples."""
    low = 2.0 if recipe.run.precision == "bf16" else 0.0
    if recipe.run.pipeline.shard and copies > 1:
        # The shards of everything, and weights and gradients whole until the end of the step.
        return 16.0 / copies + 2 * (low or 4.0)
    return 16.0 + low


def cut(profile: Profile, recipe: TrainRecipe, pipe: Pipe) -> Cut:
    """The recipe's cut of a profiled network. Raises UserError."""
    way = recipe.run.pipeline.cut
    if way == "uniform":
        return partition.uniform(profile, pipe)
    if way == "tree":
        return tree.place(tree.profile_tree(profile), pipe.ranks).cut()
    return partition.optimal(profile, pipe)
