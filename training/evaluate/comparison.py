"""Checkpoints against each other, against random weights, and against a constant answer.

For each model the learning rate and the number of epochs are chosen on the validation examples,
with the same search for all. Only then are the test labels opened, once, for one prediction of
each seed. A finished run is a file in the results folder: it is not run again.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models import files
from models.errors import UserError
from training.evaluate import scores
from training.evaluate.checkpoint_folder import (
    CheckpointFolder,
    load_tokenizer,
    pad_id_of,
    task_network,
)
from training.evaluate.fine_tuning import Run, fine_tune, score
from training.evaluate.tables import task_table
from training.evaluate.task_batches import EncodedTask, encode_task
from training.evaluate.task_recipe import TaskRecipe
from training.evaluate.tasks import Task, summary

_NOT_SHAPE = {"_name_or_path", "architectures", "dtype", "transformers_version", "torch_dtype"}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """A row of the table: a checkpoint, or random weights in its shape."""

    name: str
    folder: CheckpointFolder
    random: bool
    digests: dict[str, str]
    shape: str
    """Digest of the network's configuration and the tokenizer: what random weights share."""


@dataclass(frozen=True)
class Found:
    """What the search gave: validation score by learning rate, and a run for each seed."""

    contender: Contender
    search: dict[float, float]
    learning_rate: float
    runs: tuple[Run, ...]


def compare(
    recipe: TaskRecipe,
    task: Task,
    folders: Sequence[CheckpointFolder],
    *,
    random_baseline: bool = True,
    output: str | None = None,
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """Fine-tune every model on `task` (of `recipe`), choose on validation, score on test.

    Returns what `tables.task_table` prints and result.json holds. With `output` (a folder): runs/
    has a file for each (model, learning rate, seed), models/ one for each model and seed with its
    scores, result.json and table.txt stand for the whole. Raises UserError for data or checkpoints
    that cannot be used, and when every learning rate makes a model diverge.
    """
    for line in summary(task):
        progress(line)
    contenders = contenders_of(folders, random_baseline=random_baseline)
    encoded: dict[tuple[str, bool], EncodedTask] = {}
    found = []
    for contender in contenders:
        key = contender.digests["tokenizer.json"], contender.folder.causal
        if key not in encoded:
            encoded[key] = _encode(recipe, task, contender, progress)
        found.append(_search(recipe, contender, encoded[key], output, progress))
    gold = task.test_labels.open()
    models = [_model_result(task, gold, one, output) for one in found]
    result = {
        "task": recipe.name,
        "kind": recipe.kind,
        "main_score": scores.MAIN_SCORE[recipe.kind],
        "recipe": recipe.model_dump(mode="json"),
        "data": task.notes,
        "constant": _constant(task, gold),
        "models": models,
        "differences": _differences(models, scores.MAIN_SCORE[recipe.kind]),
    }
    if output is not None:
        files.write_atomic(files.join(output, "table.txt"), task_table(result) + "\n")
        files.write_atomic(files.join(output, "result.json"), _json(result))
    return result


def contenders_of(folders: Sequence[CheckpointFolder], *, random_baseline: bool) -> list[Contender]:
    """The checkpoints, and random weights once for each shape with each tokenizer."""
    found = []
    for folder in folders:
        digests = folder.digests()
        if "tokenizer.json" not in digests:
            raise UserError(
                f"checkpoint '{folder.path}' holds no tokenizer.json: export the run again, or "
                "copy the tokenizer into it"
            )
        shape = _shape(folder, digests["tokenizer.json"])
        found.append(Contender(folder.name, folder, False, digests, shape))
    if not random_baseline:
        return found
    shapes: dict[str, Contender] = {}
    for one in found:
        digests = {"tokenizer.json": one.digests["tokenizer.json"]}
        shapes.setdefault(
            one.shape, Contender(f"random, as {one.name}", one.folder, True, digests, one.shape)
        )
    return [*found, *shapes.values()]


def _shape(folder: CheckpointFolder, tokenizer: str) -> str:
    settings = folder.config.to_dict()
    shape = {name: value for name, value in settings.items() if name not in _NOT_SHAPE}
    whole = json.dumps([shape, tokenizer], sort_keys=True, default=str)
    return files.xxh3_bytes(whole.encode())


def _encode(
    recipe: TaskRecipe, task: Task, contender: Contender, progress: Progress
) -> EncodedTask:
    length = recipe.fine_tuning.max_length
    longest = getattr(contender.folder.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise UserError(
            f"fine_tuning.max_length = '{length}' is more than the {longest} positions of "
            f"checkpoint '{contender.folder.path}': set it to {longest} or less"
        )
    tokenizer = load_tokenizer(contender.folder)
    folder = contender.folder
    encoded = encode_task(
        task, tokenizer, length, pad_id=pad_id_of(tokenizer, folder), causal=folder.causal
    )
    for part, notes in encoded.notes().items():
        said = [f"{count:,} {what.replace('_', ' ')}" for what, count in notes.items() if count]
        if said:
            progress(f"{contender.name}: {part}, at {length} tokens: {', '.join(said)}")
    return encoded


def _search(
    recipe: TaskRecipe,
    contender: Contender,
    encoded: EncodedTask,
    output: str | None,
    progress: Progress,
) -> Found:
    """Every learning rate with the first seeds; the best of them with all seeds."""
    settings = recipe.fine_tuning
    runs: dict[tuple[float, int], Run] = {}
    search: dict[float, float] = {}

    def run(rate: float, seed: int) -> Run:
        label = f"{contender.name}, learning rate {rate:g}, seed {seed}"
        return _run(
            recipe, contender, encoded, learning_rate=rate, seed=seed, output=output,
            progress=lambda text: progress(f"{label}: {text}"),
        )  # fmt: skip

    first = settings.seeds[: settings.search_seeds]
    for rate in settings.learning_rates:
        for seed in first:
            runs[rate, seed] = run(rate, seed)
        search[rate] = scores.spread([runs[rate, seed].validation_score for seed in first]).mean
    # Equal scores (of hard tasks often 0) are told apart by the loss, as epochs are.
    rate = max(search, key=lambda one: (search[one], -_loss([runs[one, seed] for seed in first])))
    for seed in settings.seeds:
        if (rate, seed) not in runs:
            runs[rate, seed] = run(rate, seed)
    chosen = tuple(runs[rate, seed] for seed in settings.seeds)
    lost = [one.seed for one in chosen if not one.best_epoch]
    if lost:
        raise UserError(
            f"{contender.name}: with learning rate '{rate:g}', the best of those tried, seed "
            f"{lost[0]} went to NaN in its first epoch: give lower fine_tuning.learning_rates"
        )
    return Found(contender, search, rate, chosen)


def _loss(runs: Sequence[Run]) -> float:
    """Mean validation loss of the best epochs; infinite where a run had none."""
    if not all(run.best_epoch for run in runs):
        return math.inf
    return math.fsum(run.epochs[run.best_epoch - 1]["validation_loss"] for run in runs) / len(runs)


def _run(
    recipe: TaskRecipe,
    contender: Contender,
    encoded: EncodedTask,
    *,
    learning_rate: float,
    seed: int,
    output: str | None,
    progress: Progress,
) -> Run:
    """One run, or what its file says about it."""
    settings = recipe.fine_tuning
    identity = _identity(recipe, contender, encoded.task, learning_rate, seed)
    path = None
    if output is not None:
        name = f"lr-{learning_rate:g}-seed-{seed}-{identity[:8]}.json"
        path = files.join(output, "runs", _file_name(contender.name), name)
        if files.exists(path):
            found = json.loads(files.read_bytes(path))
            if found.pop("identity") == identity:
                progress("finished before")
                return Run(**found)
    run = fine_tune(
        lambda: task_network(
            contender.folder,
            recipe.kind,
            encoded.task.labels,
            pad_id=encoded.pad_id,
            head_dropout=settings.head_dropout,
            random=contender.random,
        ),
        encoded,
        settings,
        learning_rate=learning_rate,
        seed=seed,
        progress=progress,
    )
    if path is not None:
        files.write_atomic(path, _json({"identity": identity, **asdict(run)}))
    return run


def _identity(recipe: TaskRecipe, contender: Contender, task: Task, rate: float, seed: int) -> str:
    """XXH3 of everything that a run's result depends on."""
    settings = recipe.model_dump(
        mode="json",
        exclude={
            "name": True,
            "data": {"directory", "train", "validation", "test"},
            "fine_tuning": {"learning_rates", "search_seeds", "seeds", "device"},
        },
    )
    data = {part: notes["sha256"] for part, notes in task.notes["files"].items()}
    weights = contender.shape if contender.random else contender.digests
    whole = [settings, data, weights, rate, seed]
    return files.xxh3_bytes(json.dumps(whole, sort_keys=True).encode())


def _model_result(
    task: Task, gold: Sequence[Sequence[str]], found: Found, output: str | None
) -> dict[str, Any]:
    runs = []
    for run in found.runs:
        scored = score(task, gold, run.test_predictions)
        whole: dict[str, Any] = {
            "seed": run.seed,
            "learning_rate": run.learning_rate,
            "best_epoch": run.best_epoch,
            "validation_score": run.validation_score,
            "seconds": run.seconds,
            "test": scored.values,
        }
        runs.append(whole)
        if output is not None:
            path = files.join(
                output, "models", _file_name(found.contender.name), f"seed-{run.seed}.json"
            )
            detail = {
                "by_label": scored.by_label,
                "labels": scored.labels,
                "confusion": scored.confusion,
                "epochs": run.epochs,
                "test_predictions": run.test_predictions,
            }
            files.write_atomic(path, _json(whole | detail))
    return {
        "name": found.contender.name,
        "checkpoint": str(found.contender.folder.path),
        "random": found.contender.random,
        "digests": found.contender.digests,
        "shape": found.contender.shape,
        "learning_rate": found.learning_rate,
        "validation_by_learning_rate": {f"{rate:g}": value for rate, value in found.search.items()},
        "runs": runs,
        "test": {
            name: asdict(scores.spread([run["test"][name] for run in runs]))
            for name in runs[0]["test"]
        },
    }


def _constant(task: Task, gold: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The scores of the most frequent training label, given as every answer."""
    counts = Counter(label for example in task.train for label in example.labels)
    label = max(task.labels, key=lambda one: counts[one])
    scored = score(task, gold, [[label] * len(labels) for labels in gold])
    return {"name": f"always {label}", "label": label, "test": scored.values}


def _differences(models: Sequence[dict[str, Any]], main: str) -> list[dict[str, Any]]:
    """Each checkpoint less the ones before it and less the random weights of its shape, on the
    main score.

    `std` is the root of the two sample variances' sum: the spread of one such difference.
    """
    found = []
    trained = [model for model in models if not model["random"]]
    for number, model in enumerate(trained):
        same = [other for other in models if other["random"] and model["shape"] == other["shape"]]
        for other in (*trained[:number], *same):
            first, second = model["test"][main], other["test"][main]
            known = first["std"] is not None and second["std"] is not None
            found.append(
                {
                    "name": model["name"],
                    "less": other["name"],
                    "mean": first["mean"] - second["mean"],
                    "std": (first["std"] ** 2 + second["std"] ** 2) ** 0.5 if known else None,
                }
            )
    return found


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
