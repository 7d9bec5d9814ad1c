"""Which settings make a mix what it is: all that can change its result, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from models import files
from training.mix.recipe import MixRecipe

_OF_SMALL_RUNS = ("runs", "size", "steps", "concentration")


def published(recipe: MixRecipe) -> dict[str, Any]:
    """The recipe as the manifest shows it: without places on this machine, without the settings of
    the other method, and without what is set anew for every run of the mix.

    A file or run that the recipe names counts by its content, which stands elsewhere in the
    manifest: the first round's reference, the law's runs.
    """
    tree = recipe.published()
    for field in ("weights", "seed"):
        del tree["data"][field]
    del tree["run"]["seed"]
    # Here the held-out losses are the result, and not only a look at the run.
    tree["evaluation"] = {"examples": recipe.evaluation.examples}
    if recipe.mix.method == "doremi":
        del tree["regress"]
        if tree["doremi"]["reference"] not in ("proportional", "uniform") and isinstance(
            recipe.doremi.reference, str
        ):
            tree["doremi"]["reference"] = "a weights file"
        if recipe.doremi.reference_run is not None:
            tree["doremi"]["reference_run"] = "a finished run"
    else:
        del tree["doremi"]
        if recipe.regress.table is not None:
            tree["regress"]["table"] = "a table of runs"
            for field in _OF_SMALL_RUNS:
                del tree["regress"][field]
    return tree


def recipe_digest(recipe: MixRecipe) -> str:
    """XXH3 of the settings that can change the result (32 hex digits); see `published`."""
    tree = published(recipe)
    del tree["name"]
    return files.xxh3_bytes(json.dumps(tree, sort_keys=True).encode())
