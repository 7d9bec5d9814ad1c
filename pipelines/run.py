"""One mining run around the graph: claim the output folder, run Beam, check, tidy up."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

from models import files
from models.errors import Fault, GristmillError, UserError
from pipelines import timings
from pipelines.engine import make_pipeline
from pipelines.index import INDEX_FILE, index_xxh3
from pipelines.manifest import MANIFEST_FILE, Manifest, damaged_outputs, read_manifest
from pipelines.plan import Plan, make_plan
from pipelines.progress import progress
from pipelines.publish import DROPS_FILE, FAULTS_FILE, parts_in
from pipelines.recipe import MineRecipe
from pipelines.timings import TIMINGS_FILE

_CLAIM_FILE = "run.json"
_ERROR_FILE = "error.txt"
_LOCK_FILE = "run.lock"


def mine(
    recipe: MineRecipe, beam_options: Sequence[str] = (), *, restart: bool = False
) -> Manifest:
    """Run the whole mining pipeline, or go on with one that was interrupted.

    beam_options: passed to Beam untouched; without `--runner` the local runner is used, with
    `recipe.run.workers` processes. restart: throw away what an earlier run left.

    Raises UserError before anything is written when the recipe cannot be run, Fault when a pass
    failed (the staging files stay, the next run goes on from there).
    """
    plan = make_plan(recipe)
    if not restart and is_done(plan):
        print("already finished: nothing to do (--restart does it again)", file=sys.stderr)
        return read_manifest(recipe.output.directory)
    # Imported here, behind a handler of ours: Beam's import logs warnings of no concern.
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    from pipelines.mine import build  # noqa: PLC0415

    pipeline = make_pipeline(recipe.run.workers, beam_options)
    with _claimed(plan, restart=restart):
        timings.clear(plan)
        plan_path = plan.write()
        with progress(plan), _explained(plan), pipeline:
            build(pipeline, plan_path)
        _raise_faults(plan)
        manifest = read_manifest(recipe.output.directory)
        _sweep(plan)
        if not any(entry.failed for entry in manifest.inputs):  # else the next run may go on
            if not recipe.run.keep_staging:
                files.remove_tree(plan.staging)
            if not recipe.run.keep_staging or _claim_folder(plan) != plan.staging:
                files.remove_tree(_claim_folder(plan))
    return manifest


def is_done(plan: Plan) -> bool:
    """Whether this very work stands finished and undamaged in the output folder.

    Raises UserError when something else stands there.
    """
    directory = plan.recipe.output.directory
    advice = "choose another output folder, or add --restart to throw that away"
    index_out = plan.recipe.dedup.index_out
    if files.exists(files.join(directory, MANIFEST_FILE)):
        manifest = read_manifest(directory)
        if not _is_of(manifest, plan):
            raise UserError(f"output '{directory}' holds the result of another run: {advice}")
        if index_out is not None and index_xxh3(index_out) not in (None, manifest.index_out):
            raise UserError(_index_taken(index_out))
        return (
            not any(entry.failed for entry in manifest.inputs)
            and (index_out is None or index_xxh3(index_out) == manifest.index_out)
            and all(
                files.xxh3_file(file.url) == entry.xxh3
                for file, entry in zip(plan.inputs, manifest.inputs, strict=True)
                if files.is_local(file.url)
            )
            and not damaged_outputs(manifest, directory)
        )
    if index_out is not None and index_xxh3(index_out) is not None:
        raise UserError(_index_taken(index_out))
    claim = files.join(_claim_folder(plan), _CLAIM_FILE)
    if files.exists(claim):
        if files.read_bytes(claim).decode() != _identity(plan):
            raise UserError(f"output '{directory}' belongs to an unfinished other run: {advice}")
    elif parts_in(directory):
        raise UserError(f"output '{directory}' holds Parquet files without a manifest: {advice}")
    return False


def _index_taken(folder: str) -> str:
    return f"dedup.index_out = '{folder}' holds the index of another run: give a new folder"


def _identity(plan: Plan) -> str:
    """What makes two runs the same work: recipe, models, and the inputs but for their content."""
    inputs = [[file.name, file.bytes, file.shard] for file in plan.inputs]
    return json.dumps({"recipe_digest": plan.digest(), "inputs": inputs})


def _is_of(manifest: Manifest, plan: Plan) -> bool:
    """Whether a manifest is of this work; an input that could not be read may have changed."""
    if manifest.recipe_digest != plan.digest() or len(manifest.inputs) != len(plan.inputs):
        return False
    return all(
        (entry.name, entry.shard) == (file.name, file.shard)
        and (entry.failed or entry.bytes == file.bytes)
        for entry, file in zip(manifest.inputs, plan.inputs, strict=True)
    )


def _claim_folder(plan: Plan) -> str:
    """Lock and claim stand with the output, wherever the staging files are."""
    return files.join(plan.recipe.output.directory, ".staging")


@contextlib.contextmanager
def _claimed(plan: Plan, *, restart: bool) -> Iterator[None]:
    """Take the output folder for this run; one run at a time where the file system can lock."""
    directory = plan.recipe.output.directory
    with contextlib.ExitStack() as stack:
        try:
            folders = [plan.recipe.dedup.index_out, plan.staging, _claim_folder(plan)]
            for folder in folders:
                if folder is not None and files.is_local(folder):
                    files.local_path(folder).mkdir(parents=True, exist_ok=True)
            if files.is_local(directory):
                _lock(stack, directory, str(files.local_path(_claim_folder(plan)) / _LOCK_FILE))
            _sweep(plan)
            if restart:
                _throw_away(plan)
            # A manifest that stands is not true any more once its parts are made again.
            _remove(directory, MANIFEST_FILE)
            _remove(plan.staging, FAULTS_FILE)
            if plan.recipe.dedup.index_out is not None:
                _remove(plan.recipe.dedup.index_out, INDEX_FILE)
            files.write_atomic(files.join(_claim_folder(plan), _CLAIM_FILE), _identity(plan))
        except OSError as error:
            place = error.filename or directory
            raise UserError(
                f"output '{directory}' cannot be written ({error.strerror or error}: '{place}'): "
                "give folders that you may write to (--output, run.staging, dedup.index_out)"
            ) from None
        yield


def _remove(folder: str, name: str) -> None:
    system, path = files.filesystem(files.join(folder, name))
    if system.exists(path):
        system.rm(path)


def _sweep(plan: Plan) -> None:
    for folder in (plan.staging, plan.recipe.output.directory, plan.recipe.dedup.index_out):
        if folder is not None:
            files.sweep(folder)


@contextlib.contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """What Beam raises, as a Fault of one line; the whole of it stands in the staging folder."""
    try:
        yield
    except GristmillError:
        raise
    except Exception as error:
        path = files.join(plan.staging, _ERROR_FILE)
        with contextlib.suppress(OSError):
            files.write_atomic(path, "".join(traceback.format_exception(error)))
        lines = str(error).strip().splitlines() or [""]
        raise Fault(
            f"the pipeline failed: {type(error).__name__}: {lines[-1][:300]} (all of it: '{path}')"
        ) from error


def _lock(stack: contextlib.ExitStack, directory: str, path: str) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"another run is at work in output '{directory}': wait for it, or choose another folder"
        ) from None


def _throw_away(plan: Plan) -> None:
    directory = plan.recipe.output.directory
    system, _ = files.filesystem(directory)
    index_out = plan.recipe.dedup.index_out
    if index_out is not None and index_xxh3(index_out) is not None:
        ours = None
        if files.exists(files.join(directory, MANIFEST_FILE)):
            ours = read_manifest(directory).index_out
        if index_xxh3(index_out) != ours:
            raise UserError(_index_taken(index_out))
    for name in (MANIFEST_FILE, TIMINGS_FILE, DROPS_FILE):  # the manifest first
        _remove(directory, name)
    for path in parts_in(directory):
        system.rm(path)
    for name in ("keys", "pages", "parts"):
        files.remove_tree(files.join(plan.staging, name))


def _raise_faults(plan: Plan) -> None:
    path = files.join(plan.staging, FAULTS_FILE)
    if files.exists(path):
        faults: list[str] = json.loads(files.read_bytes(path))
        more = f" (and {len(faults) - 1} more in '{path}')" if len(faults) > 1 else ""
        raise Fault(f"{faults[0]}{more}; repair it and run the same command again to go on")
