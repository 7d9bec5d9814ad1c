"""The folder of a run: whose it is, whether the run is finished, and how it is emptied.

DIR/checkpoints/    training.checkpoint
DIR/metrics.jsonl   training.metrics
DIR/tensorboard/    training.metrics
DIR/model/          training.export
DIR/manifest.json   training.run_manifest; written last: with it the run is finished
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from models import files
from models.errors import UserError
from training import checkpoint, identity, run_manifest
from training.folders import local
from training.metrics import METRICS_FILE, TENSORBOARD_FOLDER
from training.run_manifest import MANIFEST_FILE, RunManifest

MODEL_FOLDER = "model"


def finished(directory: str, current: dict[str, Any]) -> RunManifest | None:
    """The manifest that stands in `directory` when the run of identity `current` is finished.

    Raises UserError when the folder belongs to something else: another run, a mined crawl, a
    model that no run made.
    """
    folder = local(directory)
    if not (folder / MANIFEST_FILE).exists():
        if (folder / MODEL_FOLDER).exists() and not (folder / checkpoint.FOLDER).exists():
            raise UserError(
                f"output '{directory}' holds a '{MODEL_FOLDER}' that no run of `gristmill train` "
                "made: give another folder with --output"
            )
        return None
    manifest = _own_manifest(folder)
    identity.check(_identity(manifest), current, directory)
    return manifest


def clear(directory: str) -> None:
    """Remove what a run has written to `directory`, and nothing else; rank 0 alone calls it.

    Raises UserError when the folder is that of something else.
    """
    folder = local(directory)
    if (folder / MANIFEST_FILE).exists():
        _own_manifest(folder)
    elif not (folder / checkpoint.FOLDER).exists() and (folder / MODEL_FOLDER).exists():
        return
    files.remove(folder / MANIFEST_FILE)
    checkpoint.clear(folder)
    files.remove(folder / METRICS_FILE)
    for name in (TENSORBOARD_FOLDER, MODEL_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def _own_manifest(folder: Path) -> RunManifest:
    try:
        return run_manifest.read(folder)
    except UserError as error:
        raise UserError(f"{error}; give another folder with --output") from None


def _identity(manifest: RunManifest) -> dict[str, Any]:
    """What `training.identity` gave to the run of `manifest`."""
    settings = dict(manifest.recipe)
    del settings["name"]
    return {
        "recipe_digest": manifest.recipe_digest,
        "recipe": settings,
        "tokenizer_sha256": manifest.tokenizer.sha256,
        "sources": [source.model_dump() for source in manifest.sources],
        "domains": manifest.domains,
        "init_sha256": manifest.init,
    }
