"""What a call of `training.loop.train` gives back: for `gristmill train --json`, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.recipe import TrainRecipe
from training.run_folder import MODEL_FOLDER
from training.run_manifest import RunManifest
from training.strategy import Placement


def summary(
    recipe: TrainRecipe,
    place: Placement,
    *,
    status: str,
    step: int,
    counters: Mapping[str, int],
    parameters: int,
    evaluation: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> dict[str, Any]:
    """Of a run that is 'finished' or 'stopped' after `step` steps. figures: of `metrics.Clock`."""
    directory = Path(recipe.output.directory)
    return {
        "status": status,
        "step": step,
        "steps": recipe.schedule.steps,
        **counters,
        "parameters": parameters,
        "evaluation": evaluation,
        "output": str(directory),
        "model": str(directory / MODEL_FOLDER) if status == "finished" else None,
        "ranks": place.ranks,
        "strategy": place.strategy,
        "device": str(place.device),
        "tokens_per_s": figures["tokens_per_s"],
        "mfu": figures["mfu"],
        "elapsed_s": figures["elapsed_s"],
    }


def already_finished(recipe: TrainRecipe, manifest: RunManifest) -> dict[str, Any]:
    """The summary of a run that has nothing left to do."""
    held_out = manifest.held_out
    return {
        "status": "already finished",
        "step": manifest.counts.steps,
        "steps": recipe.schedule.steps,
        "examples": manifest.counts.examples,
        "tokens": manifest.counts.tokens,
        "skipped_steps": manifest.counts.skipped_steps,
        "evaluation": {} if held_out is None else held_out.model_dump(mode="json"),
        "output": recipe.output.directory,
        "model": str(Path(recipe.output.directory) / MODEL_FOLDER),
    }
