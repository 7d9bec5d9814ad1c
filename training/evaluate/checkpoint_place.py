"""Where checkpoints to evaluate lie. Needs neither torch nor transformers: a wrong path is told
before those are loaded, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.errors import UserError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class CheckpointPlace:
    """The folder of an exported model; `run` is the folder of the run that made it.

    `name` is the folder's (the run's, where there is one), or the whole path where two have it.
    """

    name: str
    model: Path
    run: Path | None


def find_places(paths: Sequence[str]) -> list[CheckpointPlace]:
    """The models at `paths`: exported folders, or run folders (their model/).

    Raises UserError for a folder that is none, has no safetensors, or is given twice.
    """
    found = [_find(Path(path)) for path in paths]
    resolved = [place.model.resolve() for place in found]
    for number, model in enumerate(resolved):
        if model in resolved[:number]:
            raise UserError(f"checkpoint '{paths[number]}' is given twice: name each one once")
    names = [place.name for place in found]
    return [
        place if names.count(place.name) == 1 else CheckpointPlace(path, place.model, place.run)
        for path, place in zip(paths, found, strict=True)
    ]


def _find(path: Path) -> CheckpointPlace:
    if (path / "config.json").is_file():
        model = path
        run = path.parent if path.name == "model" and _is_run(path.parent) else None
    elif (path / "model" / "config.json").is_file():
        model, run = path / "model", path
    else:
        what = "is no folder" if not path.is_dir() else "holds neither config.json nor model/"
        raise UserError(
            f"checkpoint '{path}' {what}: give an exported model or the folder of a finished run"
        )
    if not any((model / name).is_file() for name in _WEIGHTS):
        raise UserError(
            f"checkpoint '{model}' holds no {_WEIGHTS[0]}: only safetensors are opened; "
            "export the run again"
        )
    return CheckpointPlace((run or model).resolve().name, model, run)


def _is_run(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()
