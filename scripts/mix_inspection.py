"""`gristmill inspect` on the folder of a mix: the comparison of mixtures, its check, its page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from models import files
from pipelines.report import size
from training.mix import results
from training.mix.law import TABLE_FILE
from training.mix.report import write_report
from training.mix.results import WEIGHTS_FILE, MixManifest
from training.mix.stages import RUNS_FOLDER
from training.mix.table import table
from training.run_manifest import MANIFEST_FILE

_MIX_FILE = "mix.json"  # of training.mix.folder, which loads torch


def is_mix(target: str) -> bool:
    """Whether `target` is the folder or the manifest of a mix, or of an unfinished one."""
    if not files.is_local(target):
        return False
    return _is_finished(target) or (_folder(target) / _MIX_FILE).is_file()


def inspect_mix(target: str, *, verify: bool, as_json: bool, html: str | None) -> int:
    """Print what a mix has found, or write its page; gives the exit code: 1 when `verify` found
    something wrong. Raises UserError."""
    folder = _folder(target)
    if not _is_finished(target) and html is None and not verify:
        _unfinished(folder, as_json=as_json)
        return 0
    manifest = results.read(folder)
    if html is not None:
        print(f"{html}: {size(write_report(manifest, folder, html))}")
        return 0
    wrong = list(verify_mix(manifest, folder)) if verify else []
    if as_json:
        shown = manifest.model_dump(mode="json")
        print(json.dumps(shown | ({"faults": wrong} if verify else {}), ensure_ascii=False))
    else:
        print(table(manifest))
        if verify:
            runs = len(manifest.runs) + len(manifest.specialists)
            print()
            print("\n".join(wrong) or f"verified: {WEIGHTS_FILE} and {runs:,} runs as listed")
    return 1 if wrong else 0


def verify_mix(manifest: MixManifest, folder: Path) -> Iterator[str]:
    """What is wrong with a mix: weights.json, the table of small runs or a run that is missing
    or another; one line each."""
    path = folder / WEIGHTS_FILE
    try:
        if path.read_bytes() != results.weights_text(manifest).encode():
            yield f"'{WEIGHTS_FILE}' differs from the manifest"
    except OSError as error:
        yield f"'{WEIGHTS_FILE}' cannot be read ({error.strerror})"
    listed = {
        f"{run.run}/{MANIFEST_FILE}": run.manifest_sha256
        for run in (*manifest.runs, *manifest.specialists)
    }
    law = manifest.law
    own = law is not None and manifest.recipe["regress"]["table"] is None
    if law is not None and own and law.table_sha256 is not None:
        listed[TABLE_FILE] = law.table_sha256
    for name, digest in listed.items():
        try:
            if files.sha256_file(folder / name) != digest:
                yield f"'{name}' differs from the manifest"
        except OSError as error:
            yield f"'{name}' cannot be read ({error.strerror})"


def _unfinished(folder: Path, *, as_json: bool) -> None:
    runs = sorted((folder / RUNS_FOLDER).glob("*/seed-*"))
    done = sum((run / MANIFEST_FILE).is_file() for run in runs)
    if as_json:
        print(json.dumps({"finished": False, "runs_finished": done, "runs_begun": len(runs)}))
    else:
        print(
            f"unfinished mix; {done:,} runs finished, {len(runs) - done:,} begun; "
            "the same command goes on from there"
        )


def _folder(target: str) -> Path:
    path = files.local_path(target)
    return path.parent if path.name == MANIFEST_FILE else path


def _is_finished(target: str) -> bool:
    """Whether a manifest of a mix stands there."""
    return results.is_manifest(_folder(target) / MANIFEST_FILE)
