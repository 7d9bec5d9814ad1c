"""`gristmill evaluate`: held-out losses, or fine-tuning on a labelled task."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from models import files
from models.errors import UserError
from training.evaluate.checkpoint_place import find_places
from training.evaluate.task_recipe import TaskRecipe, load_task_recipe, shipped_tasks
from training.evaluate.tasks import load_task

HELD_OUT = "held-out"


def evaluate(arguments: argparse.Namespace) -> int:
    """Run the task on the checkpoints and print its table, or JSON. Raises UserError."""
    find_places(arguments.checkpoints)
    if arguments.task == HELD_OUT:
        if arguments.no_random_baseline:
            raise UserError("--no-random-baseline is for tasks: held-out trains no model")
        result, table = _held_out(arguments)
    else:
        recipe = _task_recipe(arguments)
        result, table = _task(recipe, arguments)
    print(json.dumps(result, ensure_ascii=False) if arguments.json else table)
    return 0


def _task(recipe: TaskRecipe, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    # torch and transformers take seconds to load: mistakes in the recipe and the data are told
    # before.
    task = load_task(recipe)
    if arguments.output is not None:
        _check_output(arguments.output, recipe.name)
    from training.evaluate.checkpoint_folder import find_checkpoints  # noqa: PLC0415
    from training.evaluate.comparison import compare  # noqa: PLC0415
    from training.evaluate.tables import task_table  # noqa: PLC0415

    result = compare(
        recipe,
        task,
        find_checkpoints(arguments.checkpoints),
        random_baseline=not arguments.no_random_baseline,
        output=arguments.output,
        progress=_progress(),
    )
    return result, task_table(result)


def _held_out(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from training.evaluate.checkpoint_folder import find_checkpoints  # noqa: PLC0415
    from training.evaluate.stand_alone import evaluate_held_out  # noqa: PLC0415
    from training.evaluate.tables import held_out_comparison, held_out_table  # noqa: PLC0415

    if arguments.output is not None:
        _check_output(arguments.output, HELD_OUT)
    progress = _progress()
    found = [
        evaluate_held_out(folder, arguments.data or [], arguments.set, progress)
        for folder in find_checkpoints(arguments.checkpoints)
    ]
    result = {"task": HELD_OUT, "checkpoints": [one.to_json() for one in found]}
    tables = [held_out_table(one.folder.name, one.losses) for one in found]
    if len(found) > 1:
        names, losses = [one.folder.name for one in found], [one.losses for one in found]
        digests = {one.folder.digests()["tokenizer.json"] for one in found}
        tables.append(held_out_comparison(names, losses, same_tokens=len(digests) == 1))
    table = "\n\n".join(tables)
    if arguments.output is not None:
        files.write_atomic(files.join(arguments.output, "table.txt"), table + "\n")
        text = json.dumps(result, indent=1, ensure_ascii=False)
        files.write_atomic(files.join(arguments.output, "result.json"), text + "\n")
    return result, table


def _task_recipe(arguments: argparse.Namespace) -> TaskRecipe:
    name = arguments.task
    if not name.endswith(".toml") and name not in shipped_tasks():
        raise UserError(
            f"no task '{name}': the last word is '{HELD_OUT}', "
            f"{', '.join(map(repr, shipped_tasks()))} or the path of a .toml file"
        )
    overrides = list(arguments.set)
    if arguments.data:
        if len(arguments.data) > 1:
            raise UserError(
                f"--data {' '.join(arguments.data)}: a task has one folder; its file names are "
                "data.train, data.validation and data.test"
            )
        overrides.append(f"data.directory={json.dumps(arguments.data[0])}")
    return load_task_recipe(name, overrides)


def _check_output(directory: str, task: str) -> None:
    """Raises UserError for a folder of another task, and for one that cannot be written."""
    place = files.join(directory, "result.json")
    try:
        if files.is_local(directory):
            files.local_path(directory).mkdir(parents=True, exist_ok=True)
        if not files.exists(place):
            return
    except OSError as error:
        raise UserError(
            f"--output '{directory}' cannot be written ({error.strerror or error}): give another "
            "folder"
        ) from error
    try:
        before = json.loads(files.read_bytes(place)).get("task")
    except (ValueError, AttributeError):
        before = None
    if before != task:
        raise UserError(
            f"--output '{directory}' holds a result of '{before}', not of '{task}': give another "
            "folder"
        )


def _progress() -> Callable[[str], None]:
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {text}", file=sys.stderr, flush=True)

    return say
