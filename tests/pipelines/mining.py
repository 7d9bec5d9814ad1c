"""Runs of the whole mining pipeline for tests, and what must hold after each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipelines.manifest import Manifest
from pipelines.recipe import load_recipe
from pipelines.run import mine
from scripts.inspection import verify_manifest

NO_LANGUAGE_FILTER = "language.threshold=0"


def run(inputs: list[Path] | Path, output: Path, *overrides: str, recipe: str = "default",
        beam: tuple[str, ...] = ()) -> Manifest:  # fmt: skip
    paths = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    settings = [f"input.paths={json.dumps(paths)}", f"output.directory={output}", *overrides]
    manifest = mine(load_recipe(recipe, settings), beam)
    assert verify_manifest(manifest, str(output)) == []
    return manifest


def rows_of(manifest: Manifest, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for output in manifest.outputs:
        rows += pq.ParquetFile(folder / output.path, pre_buffer=False).read().to_pylist()
    return rows


def same_files(one: Path, other: Path) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "timings.json"
        }

    ours, theirs = contents(one), contents(other)
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []
