"""How a run uses its devices: the strategy that `auto` stands for, and the objective under it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from models.errors import UserError
from training import checkpoint, microbatches
from training.objectives import Objective
from training.pipelined import Pipelined
from training.prepare import strategy_of
from training.recipe import TrainRecipe
from training.strategy import Parallel, Placement
from training.together import on_first

if TYPE_CHECKING:
    from training.parallel.ladder import Rung


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
    from training.parallel import device_memory  # noqa: PLC0415

    memory_bytes = device_memory.least_bytes(place, recipe)
    rung = on_first(
        lambda: _rung(recipe, place.ranks, memory_bytes, vocab_size), "cannot choose a strategy"
    )
    if rung is None:
        return recipe, place, ""
    copies = rung.stages.ranks if rung.stages is not None else 1
    place = replace(place, strategy=rung.strategy, copies=copies)
    return _applied(recipe, rung), place, f"strategy: {rung.name}: {rung.why}"


def foreseen(recipe: TrainRecipe, ranks: int, vocab_size: int) -> tuple[TrainRecipe, str]:
    """What `settle` would do with `ranks` processes on this machine, for a run that is not
    started: the recipe, and a line where it would be another or could not be."""
    if recipe.run.strategy != "auto":
        return recipe, ""
    try:
        rung = _rung(recipe, ranks, memory_here(recipe, ranks), vocab_size)
    except UserError as error:
        return recipe, f"not on this machine: {error}"
    if rung is None:
        return recipe, ""
    return _applied(recipe, rung), f"{rung.name}: {rung.why}"


def memory_here(recipe: TrainRecipe, ranks: int) -> int:
    """`device_memory.device_bytes` of a rank of a run that is not started, on this machine."""
    from training.parallel import device_memory  # noqa: PLC0415

    cuda = recipe.run.device != "cpu" and torch.cuda.is_available()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    return device_memory.device_bytes(
        torch.device("cuda" if cuda else "cpu"), local_ranks, cache_bytes=recipe.data.cache_bytes
    )


def _rung(recipe: TrainRecipe, ranks: int, memory_bytes: int, vocab_size: int) -> Rung | None:
    """What `auto` takes; None: the recipe as it stands. Raises UserError."""
    from training.parallel import automatic  # noqa: PLC0415

    rung = automatic.strategy_for(recipe, ranks, memory_bytes, vocab_size=vocab_size)
    as_it_stands = (
        rung.strategy == strategy_of(recipe.run, ranks)
        and rung.checkpointing == recipe.run.activation_checkpointing
        and _passes(automatic.applied(recipe, rung), ranks) == _passes(recipe, ranks)
    )
    return None if as_it_stands else rung


def _applied(recipe: TrainRecipe, rung: Rung) -> TrainRecipe:
    from training.parallel import automatic  # noqa: PLC0415

    return automatic.applied(recipe, rung)


def _passes(recipe: TrainRecipe, ranks: int) -> int:
    examples = recipe.batch.examples(recipe.examples.sequence_length)
    return microbatches.count(examples, recipe.batch.microbatch, ranks)


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
