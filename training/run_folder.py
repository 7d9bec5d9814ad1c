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
from training import checkpoint, identity, json_lines, model_card, model_files, run_manifest
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
_METRICS_START = b'{"kind": "'


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
        _refuse_foreign(folder, current)
        return None
    manifest = _own_manifest(folder)
    identity.check(_identity(manifest), current, directory)
    return manifest


def clear(
    directory: str, inputs: Sequence[str] = (), *, current: dict[str, Any] | None = None
) -> None:
    """Remove what a run has written to `directory`, and nothing else; rank 0 alone calls it.

    inputs: what the new run reads. current: its identity, if there is one. Raises UserError, and
    removes nothing, when an input would go too, or when the folder holds files under the names of
    a run that no run made.
    """
    folder = local(directory)
    traced = (WEIGHTS_FILE, ALPHA_FILE) if is_trace(folder / ALPHA_FILE) else ()
    for place in inputs:
        for name in (*_OWN_NAMES, *traced):
            if files.is_local(place) and _is_in(files.local_path(place), folder / name):
                raise UserError(
                    f"--restart would throw away '{place}', which the run needs: give another "
                    "folder with --output"
                )
    check_own(folder, current)
    files.remove(folder / MANIFEST_FILE)
    checkpoint.clear(folder)
    for name in (*traced, METRICS_FILE):
        files.remove(folder / name)
    for name in (TENSORBOARD_FOLDER, MODEL_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def check_own(directory: str | os.PathLike[str], current: dict[str, Any] | None = None) -> None:
    """Raises UserError when files stand under our names in `directory` that no run made.

    current: identity of the run that begins there, if there is one.
    """
    folder = local(directory)
    if (folder / MANIFEST_FILE).exists():
        _own_manifest(folder)
    _refuse_foreign(folder, current or {})


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


def _refuse_foreign(folder: Path, current: dict[str, Any]) -> None:
    found = _foreign(folder, proxy="proxy" in current)
    if found is not None:
        raise UserError(
            f"output '{folder}' holds '{found}', which no run of `gristmill train` made: give "
            "another folder with --output"
        )


def _foreign(folder: Path, *, proxy: bool) -> str | None:
    """A file or folder that stands where a run writes, and is none of a run; None: there is none.

    So neither a run nor `--restart` ever takes away what somebody else has put there. Weights
    without a trace are somebody's: in the way of a proxy alone, all others leave them.
    """
    for name, own in _OWN_NAMES.items():
        place = folder / name
        if place.exists() and not place.is_dir():
            return name
        for path in sorted(place.glob("*")):
            if not re.fullmatch(own, path.name):
                return f"{name}/{path.name}"
    metrics, alpha = folder / METRICS_FILE, folder / ALPHA_FILE
    if metrics.exists() and not json_lines.begins(metrics, _METRICS_START):
        return METRICS_FILE
    if alpha.exists() and not is_trace(alpha):
        return ALPHA_FILE
    if proxy and (folder / WEIGHTS_FILE).exists() and not alpha.exists():
        return WEIGHTS_FILE
    return None


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
