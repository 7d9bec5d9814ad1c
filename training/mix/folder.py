"""The folder of a mix: whose it is, whether it is finished, how it is emptied.

DIR/mix.json        which mix this is; written first: without it nothing here is ours
DIR/runs/LABEL/seed-N/   training.run_folder
DIR/runs.csv        training.mix.law: the small runs
DIR/weights.json    training.mix.results
DIR/manifest.json   training.mix.results; written last: with it the mix is finished
DIR/run.lock        while a mix is at work (training.run_folder.held)
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from models import files
from models.errors import UserError
from training import run_folder
from training.folders import local, sweep
from training.mix import results
from training.mix.law import TABLE_FILE
from training.mix.results import WEIGHTS_FILE, MixManifest
from training.mix.stages import RUNS_FOLDER
from training.run_manifest import MANIFEST_FILE

MIX_FILE = "mix.json"
_OUR_NAMES = (MANIFEST_FILE, WEIGHTS_FILE, TABLE_FILE, RUNS_FOLDER)
_LABEL = re.compile(
    r"proportional|uniform|doremi|regress|(specialist|reference|proxy)-\d+|small-\d{3,}"
)
_SEED = re.compile(r"seed-\d+")
_OTHERWISE = "give another folder with --output"


def claim(directory: str, identity: Mapping[str, Any]) -> MixManifest | None:
    """Take the folder for the mix of this `identity`; its manifest when it is finished.

    identity: what the result depends on, as JSON can hold it. Raises UserError when the folder
    belongs to another mix, or holds files under our names that no mix made; OSError.
    """
    folder = local(directory)
    saved = _saved(folder)
    if saved is None:
        _refuse_foreign(folder, _OUR_NAMES)
        text = json.dumps(identity, indent=1, ensure_ascii=False) + "\n"
        files.write_atomic(folder / MIX_FILE, text)
        return None
    found = _difference(saved, json.loads(json.dumps(identity)))
    if found is not None:
        raise UserError(
            f"'{folder}' holds another mix: {found}: set it back, or {_OTHERWISE}, or throw that "
            "mix away with --restart"
        )
    _check_runs(folder)
    if not (folder / MANIFEST_FILE).exists():
        sweep(folder)
        return None
    manifest = results.read(folder)
    if not (folder / WEIGHTS_FILE).exists():
        results.write_weights(folder, manifest)
    return manifest


def clear(directory: str, inputs: Sequence[str] = ()) -> None:
    """Remove what a mix has written to `directory`, and nothing else.

    inputs: files and folders that the new mix reads. Raises UserError, and removes nothing, when
    one of them would go too, or when the folder holds files under our names that no mix made.
    """
    folder = local(directory)
    names = [folder / name for name in _OUR_NAMES]
    for place in inputs:
        path = files.local_path(place).resolve() if files.is_local(place) else None
        if path is not None and any(path.is_relative_to(name.resolve()) for name in names):
            raise UserError(
                f"--restart would throw away '{place}', which the mix needs: {_OTHERWISE}"
            )
    saved = _saved(folder)
    if saved is None:
        _refuse_foreign(folder, _OUR_NAMES)
        return
    _check_runs(folder)
    if (folder / MANIFEST_FILE).exists() and not results.is_manifest(folder / MANIFEST_FILE):
        _refuse(folder, MANIFEST_FILE)
    runs = list(_runs(folder))
    for run in runs:
        run_folder.check_own(run)
    for name in (MANIFEST_FILE, WEIGHTS_FILE, *([TABLE_FILE] if _writes_table(saved) else [])):
        files.remove(folder / name)
    for run in runs:
        run_folder.clear(str(run))
        _remove_empty(run)
        _remove_empty(run.parent)
    _remove_empty(folder / RUNS_FOLDER)
    files.remove(folder / MIX_FILE)


def _saved(folder: Path) -> dict[str, Any] | None:
    """The identity of the mix whose folder this is; None: there is none yet."""
    tree: Any
    try:
        tree = json.loads((folder / MIX_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        tree = None
    if not isinstance(tree, dict) or "recipe_digest" not in tree:
        _refuse(folder, MIX_FILE)
    found: dict[str, Any] = tree
    return found


def _writes_table(saved: Mapping[str, Any]) -> bool:
    """Whether the mix of this identity has small runs, and so a table of them."""
    method = saved.get("recipe", {}).get("mix", {}).get("method")
    return method == "regress" and saved.get("table_sha256") is None


def _check_runs(folder: Path) -> None:
    """Nothing stands among the runs that is none."""
    root = folder / RUNS_FOLDER
    if root.exists() and not root.is_dir():
        _refuse(folder, RUNS_FOLDER)
    for label in sorted(root.glob("*")):
        if not (_LABEL.fullmatch(label.name) and label.is_dir()):
            _refuse(folder, f"{RUNS_FOLDER}/{label.name}")
        for run in sorted(label.glob("*")):
            if not (_SEED.fullmatch(run.name) and run.is_dir()):
                _refuse(folder, f"{RUNS_FOLDER}/{label.name}/{run.name}")


def _runs(folder: Path) -> Iterator[Path]:
    for label in sorted((folder / RUNS_FOLDER).glob("*")):
        yield from sorted(label.glob("*"))


def _refuse_foreign(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        if (folder / name).exists():
            _refuse(folder, name)


def _refuse(folder: Path, name: str) -> None:
    raise UserError(
        f"output '{folder}' holds '{name}', which no run of `gristmill mix` made: {_OTHERWISE}"
    )


def _remove_empty(folder: Path) -> None:
    """Remove the folder unless somebody has put something there."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _difference(saved: Any, current: Any, name: str = "") -> str | None:
    """The first difference of two trees, as a person reads it; None: there is none."""
    if isinstance(saved, dict) and isinstance(current, dict):
        for key in sorted((saved.keys() | current.keys()) - {"recipe_digest"}):
            path = f"{name}.{key}" if name else key
            found = _difference(saved.get(key), current.get(key), path)
            if found is not None:
                return found
        if saved.get("recipe_digest") != current.get("recipe_digest"):
            return "it was begun by another version of Gristmill"
        return None
    if saved == current:
        return None
    return f"{name.removeprefix('recipe.')} = '{_shown(current)}' is '{_shown(saved)}' there"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
