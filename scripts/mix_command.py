"""`gristmill mix`: a recipe, a plan, many small runs, and the mixture that they found."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from models.errors import UserError
from scripts.train_command import overrides_of
from training.mix.recipe import MixRecipe, load_recipe


def mix(arguments: argparse.Namespace) -> int:
    """Run the verb. 0 also when a signal stopped the mix: it was saved, to go on later."""
    recipe = load_recipe(arguments.recipe, _overrides(arguments))
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    jobs, processes = arguments.jobs or 1, arguments.processes or 1
    if ranks and arguments.processes:
        raise UserError(
            f"--processes {processes} inside torchrun, which started this process as "
            f"one of {ranks}: give one of the two"
        )
    if jobs > 1 and processes > 1:
        raise UserError(
            f"--jobs {jobs} and --processes {processes}: runs at once, or ranks for each run: "
            "give one of the two"
        )
    if arguments.dry_run:
        return _dry_run(recipe, ranks or processes, as_json=arguments.json)
    if processes > 1:
        from training.launch import launch  # noqa: PLC0415
        from training.mix.inputs import open_inputs  # noqa: PLC0415
        from training.prepare import strategy_of  # noqa: PLC0415

        open_inputs(recipe)  # a mistake is told once, before any rank starts
        strategy_of(recipe.run, processes)
        return launch(_for_ranks(arguments), processes)
    from training.mix.run import Stopped, run_mix  # noqa: PLC0415

    first = int(os.environ.get("RANK", "0")) == 0
    try:
        manifest = run_mix(recipe, jobs=jobs, restart=arguments.restart)
    except Stopped:
        if first:
            print("saved; run the same command again to go on", file=sys.stderr)
        return 0
    if first:
        from training.mix.table import table  # noqa: PLC0415

        print(manifest.to_json() if arguments.json else f"{table(manifest)}\n{_next(recipe)}")
    return 0


def _overrides(arguments: argparse.Namespace) -> list[str]:
    found = overrides_of(arguments)
    if arguments.method:
        found.append(f"mix.method={json.dumps(arguments.method)}")
    return found


def _for_ranks(arguments: argparse.Namespace) -> list[str]:
    """The command line of one rank."""
    words = ["mix", arguments.recipe]
    for override in _overrides(arguments):
        words += ["--set", override]
    return words + ["--restart"] * arguments.restart + ["--json"] * arguments.json


def _dry_run(recipe: MixRecipe, ranks: int, *, as_json: bool) -> int:
    """Print the recipe and what the mix would be; write nothing."""
    from training.mix.inputs import open_inputs  # noqa: PLC0415
    from training.mix.plan import make_plan  # noqa: PLC0415

    plan = make_plan(recipe, open_inputs(recipe), ranks)
    settings = recipe.model_dump(mode="json")
    if as_json:
        print(json.dumps({"recipe": settings, "plan": plan.to_json()}, ensure_ascii=False))
        return 0
    print(json.dumps(settings, indent=1, ensure_ascii=False))
    print(plan.table())
    for text in plan.warnings:
        print(f"warning: {text}", file=sys.stderr)
    return 0


def _next(recipe: MixRecipe) -> str:
    """Where the weights are, and how a model is trained on them."""
    weights = Path(recipe.output.directory) / "weights.json"
    command = ["gristmill", "train", "decoder-small", "--data", *recipe.data.manifests,
               "--tokenizer", recipe.model.tokenizer]  # fmt: skip
    for field in ("by", "languages", "buckets"):
        value = list(getattr(recipe.data, field))
        if value != list(type(recipe.data).model_fields[field].default):
            command += ["--set", f"data.{field}={json.dumps(value)}"]
    command += ["--set", f"data.weights={weights}", "--output", "out/model"]
    return f"weights: {weights}\nnext: {shlex.join(command)}"
