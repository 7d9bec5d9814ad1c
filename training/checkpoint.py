"""Checkpoints of a run: DIR/checkpoints/step-00000500/, and `latest`, which names the newest.

Written by torch.distributed.checkpoint (DCP), each rank its own part, under the names of the
plain network (`training.checkpoint_tensors`): a checkpoint does not know how many ranks wrote it
or how they shared the work, so any number of ranks reads it under any strategy. Hyperparameters
and the learning rate are not in it: they follow from the recipe and the step.

Nothing is unpickled. DCP's usual files are pickles (`.metadata`, and each tensor); here it writes
safetensors, whose headers say which part of which tensor they hold. All else stands in
`state.json`, which has its own checksum (`pipelines.sealed`) and the size and XXH3 of every file:
a folder that differs from it by a byte or a file is not used.

A checkpoint is complete when it has its name: it is written under a hidden one, synced, renamed;
then `latest` follows, and only then older ones go. All this needs a file system that all ranks
share. Left out on purpose: object stores, and saving while training goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from models import files
from models.errors import DamagedInput, Fault, UserError
from pipelines.sealed import read_sealed, write_sealed
from training import checkpoint_tensors, folders, model_files
from training.together import on_all, on_first, rank

FORMAT = 1
FOLDER = "checkpoints"
LATEST_FILE = "latest"
STATE_FILE = "state.json"
_KEYS = {"format", "step", "state", "files"}


def save(
    directory: str | os.PathLike[str],
    step: int,
    *,
    objective: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    tokenizer: str | None = None,
) -> Path:
    """Save the state of a run after `step` steps; all ranks call it, all leave it together.

    directory: the run's folder. state: what JSON can hold; rank 0's is taken. keep: how many of
    the newest checkpoints stay, this one among them. tokenizer: folder or tokenizer.json that is
    copied in, so that the checkpoint can be exported anywhere. A sound checkpoint of this step and
    state is left as it is. Raises Fault on all ranks when it fails on one; UserError for a URL.
    """
    folder = folders.local(directory) / FOLDER
    target = folder / f"step-{step:08d}"
    temporary = folders.partial(target)
    what = f"cannot save '{target}'"

    def prepare() -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        folders.sweep(folder)
        if target.exists() and damage(target) is None and _has_state(target, state):
            _point(target, keep)
            return False
        temporary.mkdir()
        return True

    def finish() -> None:
        written = {name: entry for part in parts for name, entry in part.items()}
        for name in written:
            if not (temporary / name).is_file():
                raise Fault(f"'{name}' is not here: all ranks must share one file system")
        model_files.write_config(checkpoint_tensors.plain(objective).network, temporary)
        if tokenizer is not None:
            model_files.write_tokenizer(tokenizer, temporary)
        written |= _digests(temporary, "*.json")
        value = {"format": FORMAT, "step": step, "state": state, "files": written}
        write_sealed(temporary / STATE_FILE, value)
        folders.publish(temporary, target)
        _point(target, keep)

    if on_first(prepare, what):
        on_all(lambda: checkpoint_tensors.write(str(temporary), objective, optimiser), what)
        own = f"shard-{rank() + 1:05d}-*"
        parts = on_all(lambda: _digests(temporary, own), what)
        on_first(finish, what)
    return target


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint to go on from: the one that `latest` names; None when there is none.

    A damaged one is passed over, with a warning on stderr, for the newest sound one. All ranks
    call it. Raises UserError when there are checkpoints and none is sound.
    """
    return on_first(lambda: _latest(folders.local(directory)), f"cannot read '{directory}'")


def load(
    path: str | os.PathLike[str],
    *,
    objective: torch.nn.Module,
    optimiser: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Fill the network and the optimiser from the checkpoint `path`; gives the saved state.

    All ranks call it. Digests are not checked again: `latest` and `checked` did. Raises UserError
    when the network has other parameters.
    """
    on_all(
        lambda: checkpoint_tensors.read(str(path), objective, optimiser), f"cannot load '{path}'"
    )
    return dict(read_state(path)["state"])


def whole_network(directory: str | os.PathLike[str], step: int) -> Any:
    """The network of a run's newest checkpoint, that of `step`, on rank 0's CPU; None on the
    others.

    All ranks call it. Raises UserError; Fault where the newest sound one is of another step.
    """
    found = latest(directory)
    there = None if found is None else read_state(found)["step"]
    if found is None or there != step:
        newest = "there is none" if there is None else f"the newest sound one is of step {there}"
        raise Fault(
            f"the checkpoint of step {step} in '{directory}' cannot be used: {newest}: run the "
            "same command again to go on from there"
        )
    whole: list[Any] = [None]

    def build() -> None:
        whole[0] = model_files.network_of(found)
        checkpoint_tensors.read_network(str(found), whole[0])

    on_first(build, f"cannot load '{found}'")
    return whole[0]


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What state.json of a checkpoint holds: `format`, `step`, `state` and `files`.

    Raises OSError, DamagedInput.
    """
    value = read_sealed(Path(path) / STATE_FILE)
    if not isinstance(value, dict) or set(value) != _KEYS or value["format"] != FORMAT:
        raise DamagedInput("other_format", f"'{STATE_FILE}' is not of format {FORMAT}")
    return value


def checked(path: str | os.PathLike[str]) -> Path:
    """The checkpoint `path` when it is sound. Raises UserError that says what is wrong."""
    wrong = damage(Path(path))
    if wrong is not None:
        raise UserError(f"checkpoint '{path}' cannot be used: {wrong}: take another one")
    return Path(path)


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint `path`; None when all its files are as they were saved."""
    try:
        listed = read_state(path)["files"]
        there = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
        there.discard(STATE_FILE)
        for name in sorted(there ^ set(listed)):
            return f"'{name}' is {'no file of it' if name in there else 'missing'}"
        for name, entry in listed.items():
            if (path / name).stat().st_size != entry["bytes"]:
                return f"'{name}' is cut"
            if files.xxh3_file(path / name) != entry["xxh3"]:
                return f"'{name}' differs from its digest"
    except DamagedInput as error:
        return error.detail
    except OSError as error:
        return f"'{error.filename or path}': {error.strerror or error}"
    return None


def clear(directory: str | os.PathLike[str]) -> None:
    """Throw all checkpoints of a run away (`--restart`); rank 0 alone calls it."""
    shutil.rmtree(folders.local(directory) / FOLDER, ignore_errors=True)


def _latest(directory: Path) -> Path | None:
    folder = directory / FOLDER
    names = sorted((path.name for path in folder.glob("step-*")), reverse=True)
    if not names:
        return None
    try:
        first = (folder / LATEST_FILE).read_text().strip()
    except OSError:
        first = names[0]  # killed before the first pointer was written
    if first in names:
        names.remove(first)
    for name in [first, *names]:
        wrong = damage(folder / name)
        if wrong is None:
            return folder / name
        print(f"warning: checkpoint '{folder / name}' is passed over: {wrong}", file=sys.stderr)
    raise UserError(
        f"no checkpoint in '{folder}' can be used: start from the beginning with --restart"
    )


def _has_state(path: Path, state: dict[str, Any]) -> bool:
    return bool(read_state(path)["state"] == json.loads(json.dumps(state)))


def _point(target: Path, keep: int) -> None:
    """Let `latest` name `target`; then remove the checkpoints before it but for keep - 1."""
    files.write_atomic(target.parent / LATEST_FILE, target.name + "\n")
    folders.sync(target.parent)
    older = sorted(path for path in target.parent.glob("step-*") if path.name < target.name)
    for path in older[: max(0, len(older) - (keep - 1))]:
        folders.remove(path)


def _digests(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    return {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "xxh3": files.xxh3_file(path),
        }
        for path in sorted(folder.glob(pattern))
    }
