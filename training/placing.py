"""How a run uses its devices: the strategy that `auto` stands for, and the objective under it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from training import checkpoint, microbatches
from training.objectives import Objective
from training.pipelined import Pipelined
from training.recipe import TrainRecipe
from training.strategy import Parallel, Placement
from training.together import on_first


def settle(
    recipe: TrainRecipe, place: Placement, vocab_size: int
) -> tuple[TrainRecipe, Placement, str]:
    """Recipe and place with what `run.strategy = "auto"` stands for, and a line that says why.

    The line is empty where the recipe stays as it stands: anything else is as it was asked for, or
    fits. The rank with the least memory decides; all ranks call it. Raises UserError.
    """
    if recipe.run.strategy != "auto":
        return recipe, place, ""
    # The planner profiles networks: a small run does without.
    from training.parallel import automatic  # noqa: PLC0415

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(place.ranks)))
    memory_bytes = min(place.gather(automatic.device_bytes(place.device, local_ranks)))
    rung = on_first(
        lambda: automatic.strategy_for(recipe, place.ranks, memory_bytes, vocab_size=vocab_size),
        "cannot choose a strategy",
    )
    chosen = automatic.applied(recipe, rung)
    as_it_stands = (
        rung.strategy == place.strategy
        and rung.checkpointing == recipe.run.activation_checkpointing
        and _passes(chosen, place) == _passes(recipe, place)
    )
    if as_it_stands:
        return recipe, place, ""
    copies = rung.stages.ranks if rung.stages is not None else 1
    place = replace(place, strategy=rung.strategy, copies=copies)
    return chosen, place, f"strategy: {rung.name}: {rung.why}"


def _passes(recipe: TrainRecipe, place: Placement) -> int:
    examples = recipe.batch.examples(recipe.examples.sequence_length)
    return microbatches.count(examples, recipe.batch.microbatch, place.ranks)


def put(
    objective: Objective,
    place: Placement,
    recipe: TrainRecipe,
    *,
    passes: int,
    newest: Path | None,
) -> Parallel | Pipelined:
    """The objective on the devices of the run; every rank calls it. It may be taken apart.

    passes: microbatches of a step, over all ranks. newest: the checkpoint to go on from.
    """
    if place.strategy != "pipeline":
        return Parallel(objective, place, recipe.run)
    saved = None if newest is None else checkpoint.read_state(newest)["state"].get("pipeline")
    examples = recipe.batch.examples(recipe.examples.sequence_length)
    return Pipelined(
        objective,
        place,
        recipe,
        microbatches=passes // place.data_ranks,
        rows=-(-examples // passes),
        saved=saved,
    )


def evaluated_at_once(parallel: Parallel | Pipelined, recipe: TrainRecipe) -> int:
    """Examples that a rank computes at once without gradients."""
    if isinstance(parallel, Pipelined):
        return parallel.evaluated_at_once
    return recipe.batch.microbatch
