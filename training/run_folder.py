"""The folder of a run: whose it is, who is at work, whether it is finished, how it is emptied.

DIR/checkpoints/    training.checkpoint
DIR/metrics.jsonl   training.metrics
DIR/tensorboard/    training.metrics
DIR/model/          training.export
DIR/alpha.jsonl     training.trace; of a proxy alone
DIR/weights.json    training.trace; of a proxy alone
DIR/manifest.json   training.run_manifest; written last: with it the run is finished
DIR/run.lock        while a run is at work
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from models import files
from models.errors import Fault, UserError
from models.tokenizer import CONFIG_FILE as TOKENIZER_CONFIG_FILE
from models.tokenizer import TOKENIZER_FILE
from pipelines import lock
from training import checkpoint, identity, model_card, model_files, run_manifest
from training.folders import PARTIAL_SUFFIX, local
from training.metrics import METRICS_FILE, TENSORBOARD_FOLDER
from training.run_manifest import MANIFEST_FILE, RunManifest
from training.together import on_first, rank
from training.trace import ALPHA_FILE, WEIGHTS_FILE, is_trace

LOCK_FILE = "run.lock"
MODEL_FOLDER = "model"
_OWN_NAMES = {
    checkpoint.FOLDER: rf"step-\d{{8,}}|{checkpoint.LATEST_FILE}|"
    rf"\..*({re.escape(PARTIAL_SUFFIX)}|{re.escape(files.TEMPORARY_SUFFIX)})",
    MODEL_FOLDER: "|".join(
        map(
            re.escape,
            (
                model_files.CONFIG_FILE,
                model_files.WEIGHTS_FILE,
                TOKENIZER_FILE,
                TOKENIZER_CONFIG_FILE,
                model_card.FILE,
            ),
        )
    ),
    TENSORBOARD_FOLDER: r"events\.out\.tfevents\..*",
}
"""What a run writes into each of its folders."""


@contextlib.contextmanager
def held(directory: str) -> Iterator[None]:
    """Keep other runs out of `directory` while the block runs; all ranks call it.

    Raises UserError when one is at work there, or when the folder cannot be written. A crash lets
    go; where the file system has no locks nobody is kept out.
    """
    folder = local(directory)
    # Of rank 0: the others have no use for its number.
    descriptor = on_first(lambda: _taken(folder), f"cannot lock '{directory}'")
    try:
        yield
    finally:
        if rank() == 0:
            with contextlib.suppress(OSError):
                files.remove(folder / LOCK_FILE)
            os.close(descriptor)


def finished(directory: str, current: dict[str, Any]) -> RunManifest | None:
    """The manifest that stands in `directory` when the run of identity `current` is finished.

    Raises UserError when the folder belongs to something else: another run, a mined crawl, files
    under our names that no run made.
    """
    folder = local(directory)
    if not (folder / MANIFEST_FILE).exists():
        _refuse_foreign(folder)
        # Weights that stand alone are somebody's; a plain run leaves them, and so does --restart.
        if "proxy" in current and (folder / WEIGHTS_FILE).exists() and not _has_trace(folder):
            _refuse(folder, WEIGHTS_FILE)
        return None
    manifest = _own_manifest(folder)
    identity.check(_identity(manifest), current, directory)
    return manifest


def clear(directory: str, inputs: Sequence[str] = ()) -> None:
    """Remove what a run has written to `directory`, and nothing else; rank 0 alone calls it.

    inputs: what the new run reads. Raises UserError, and removes nothing, when one of them would
    go too, or when the folder holds files under our names that no run made.
    """
    folder = local(directory)
    for place in inputs:
        for name in _OWN_NAMES:
            if files.is_local(place) and _is_in(files.local_path(place), folder / name):
                raise UserError(
                    f"--restart would throw away '{place}', which the run needs: give another "
                    "folder with --output"
                )
    check_own(folder)
    files.remove(folder / MANIFEST_FILE)
    checkpoint.clear(folder)
    if _has_trace(folder):
        files.remove(folder / WEIGHTS_FILE)
        files.remove(folder / ALPHA_FILE)
    files.remove(folder / METRICS_FILE)
    for name in (TENSORBOARD_FOLDER, MODEL_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def check_own(directory: str | os.PathLike[str]) -> None:
    """Raises UserError when files stand under our names in `directory` that no run made."""
    folder = local(directory)
    if (folder / MANIFEST_FILE).exists():
        _own_manifest(folder)
    _refuse_foreign(folder)


def _is_in(place: Path, folder: Path) -> bool:
    return place.resolve().is_relative_to(folder.resolve())


def _taken(folder: Path) -> int:
    """The descriptor of the lock, which this process has now."""
    try:
        descriptor = lock.take(folder / LOCK_FILE)
    except OSError as error:
        what = f"output '{folder}' cannot be written: {error.strerror}: '{error.filename}'"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Fault(f"{what}: make room and run the same command again") from None
        raise UserError(f"{what}: give another folder with --output") from None
    if descriptor is None:
        raise UserError(
            f"another run is at work in output '{folder}': wait for it, or give another folder "
            "with --output"
        )
    return descriptor


def _refuse_foreign(folder: Path) -> None:
    found = _foreign(folder)
    if found is not None:
        _refuse(folder, found)


def _refuse(folder: Path, found: str) -> None:
    raise UserError(
        f"output '{folder}' holds '{found}', which no run of `gristmill train` made: give "
        "another folder with --output"
    )


def _has_trace(folder: Path) -> bool:
    return is_trace(folder / ALPHA_FILE)


def _foreign(folder: Path) -> str | None:
    """A file or folder that stands where a run writes, and is none of a run; None: there is none.

    So neither a run nor `--restart` ever takes away what somebody else has put there.
    """
    for name, own in _OWN_NAMES.items():
        place = folder / name
        if place.exists() and not place.is_dir():
            return name
        for path in sorted(place.glob("*")):
            if not re.fullmatch(own, path.name):
                return f"{name}/{path.name}"
    place = folder / METRICS_FILE
    if place.is_dir():
        return METRICS_FILE
    if place.exists():
        with place.open("rb") as file:
            first = file.readline()
        if first.endswith(b"\n") and not _is_metrics(first):
            return METRICS_FILE
    if (folder / ALPHA_FILE).exists() and not _has_trace(folder):
        return ALPHA_FILE
    return None


def _is_metrics(line: bytes) -> bool:
    try:
        return {"kind", "step"} <= set(json.loads(line))
    except (ValueError, TypeError):
        return False


def _own_manifest(folder: Path) -> RunManifest:
    try:
        return run_manifest.read(folder)
    except UserError as error:
        raise UserError(f"{error}; give another folder with --output") from None


def _identity(manifest: RunManifest) -> dict[str, Any]:
    """What `training.identity` gave to the run of `manifest`."""
    settings = dict(manifest.recipe)
    del settings["name"]
    proxy = None if manifest.proxy is None else manifest.proxy.model_dump(exclude={"weights"})
    return {
        "recipe_digest": manifest.recipe_digest,
        "recipe": settings,
        "tokenizer_sha256": manifest.tokenizer.sha256,
        "sources": [source.model_dump() for source in manifest.sources],
        "domains": manifest.domains,
        "init_sha256": manifest.init,
        **({} if proxy is None else {"proxy": proxy}),
    }
