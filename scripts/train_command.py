"""`gristmill train`: a recipe, a plan, a run on one process or several."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from models.errors import UserError
from training.recipe import TrainRecipe, load_recipe


def train(arguments: argparse.Namespace) -> int:
    """Run the verb. 0 also when a signal stopped the run: it was saved, to go on later."""
    recipe = load_recipe(arguments.recipe, overrides_of(arguments))
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if ranks and arguments.processes:
        raise UserError(
            f"--processes {arguments.processes} inside torchrun, which started this process as "
            f"one of {ranks}: give one of the two"
        )
    if arguments.dry_run:
        return _dry_run(recipe, ranks or arguments.processes or 1, as_json=arguments.json)
    if arguments.processes and arguments.processes > 1:
        from training.launch import launch  # noqa: PLC0415
        from training.prepare import check_pipeline, prepare  # noqa: PLC0415

        prepare(recipe)  # a mistake is told once, before any rank starts
        check_pipeline(recipe, arguments.processes)
        return launch(_for_ranks(arguments), arguments.processes)
    from training.loop import train as run_training  # noqa: PLC0415

    summary = run_training(recipe, restart=arguments.restart)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(summary) if arguments.json else _report(summary))
    return 0


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """What --set, --data, --tokenizer and --output say, as overrides of the recipe."""
    overrides = list(arguments.set)
    if arguments.data:
        overrides.append(f"data.manifests={json.dumps(arguments.data)}")
    if arguments.tokenizer:
        overrides.append(f"model.tokenizer={json.dumps(arguments.tokenizer)}")
    if arguments.output:
        overrides.append(f"output.directory={json.dumps(arguments.output)}")
    return overrides


def _for_ranks(arguments: argparse.Namespace) -> list[str]:
    """The command line of one rank."""
    words = ["train", arguments.recipe]
    for override in overrides_of(arguments):
        words += ["--set", override]
    return words + ["--restart"] * arguments.restart + ["--json"] * arguments.json


def _dry_run(recipe: TrainRecipe, ranks: int, *, as_json: bool) -> int:
    """Print the recipe and what the run would be; write nothing."""
    from training.prepare import check_pipeline, prepare  # noqa: PLC0415
    from training.run_plan import make_plan  # noqa: PLC0415

    check_pipeline(recipe, ranks)
    plan = make_plan(recipe, prepare(recipe), ranks)
    settings = recipe.model_dump(mode="json")
    if as_json:
        print(json.dumps({"recipe": settings, "plan": plan.to_json()}, ensure_ascii=False))
    else:
        print(json.dumps(settings, indent=1, ensure_ascii=False))
        print(plan.table())
    return 0


def _report(summary: dict[str, Any]) -> str:
    """The end of a run for a person."""
    lines = [f"{summary['status']}: step {summary['step']:,} of {summary['steps']:,}"]
    evaluation = summary.get("evaluation") or {}
    rows = [("all", evaluation["total"])] if evaluation else []
    rows += sorted(evaluation.get("domains", {}).items())
    for name, losses in rows:
        terms = "  ".join(
            f"{term} {one['loss']:.3f} ({one['accuracy']:.1%} right)"
            for term, one in losses["terms"].items()
        )
        if losses["examples"]:
            lines.append(f"held out, {name:<20}{losses['examples']:>7,} examples  {terms}")
    if summary["skipped_steps"]:
        lines.append(f"warning: {summary['skipped_steps']:,} steps were skipped, see the metrics")
    if summary["model"]:
        lines.append(f"model: {summary['model']}")
    elif summary["status"] == "stopped":
        lines.append(f"{'saved; ' * bool(summary['step'])}run the same command again to go on")
    return "\n".join(lines)
