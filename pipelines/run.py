"""One mining run around the graph: claim the output folder, run Beam, check, tidy up."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator, Sequence

from models import files
from models.errors import Fault, GristmillError, UserError
from pipelines import timings
from pipelines.claim import (
    claimed,
    clean_up,
    clean_up_after_kill,
    index_taken,
    is_claimed,
    is_ours,
    sweep,
)
from pipelines.dataflow import executed, rejoined
from pipelines.engine import (
    check_graph,
    exchange_of,
    make_pipeline,
    slices_of,
    tidied,
)
from pipelines.index import damaged_ranges, index_xxh3
from pipelines.manifest import MANIFEST_FILE, Manifest, damaged_outputs, read_manifest
from pipelines.places import check_places, plan_for_workers
from pipelines.plan import Plan, make_plan
from pipelines.progress import ProgressMode, progress
from pipelines.publish import FAULTS_FILE, parts_in
from pipelines.recipe import MineRecipe
from pipelines.worker_watch import workers_watched

_ERROR_FILE = "error.txt"
_AGAIN = "repair it and run the same command again to go on"


class FailedInputs(Fault):
    """More inputs failed than `input.max_failed_shards` allows. inputs: (name, reason) of each."""

    def __init__(self, message: str, inputs: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.inputs = tuple(inputs)


def mine(
    recipe: MineRecipe,
    beam_options: Sequence[str] = (),
    *,
    restart: bool = False,
    progress_mode: ProgressMode = "auto",
) -> Manifest:
    """Run the whole mining pipeline, or go on with one that was interrupted.

    beam_options: passed to Beam untouched; without `--runner` the local runner is used, with
    `recipe.run.workers` processes. restart: throw away what an earlier run left. progress_mode:
    see `pipelines.progress.progress`.

    Raises UserError before anything is written when the recipe cannot be run, Fault when a pass
    failed or a worker died (the staging files stay, the next run goes on from there), and
    FailedInputs when too many inputs could not be read.
    """
    plan = make_plan(recipe)
    if not restart and is_done(plan):
        clean_up_after_kill(plan)
        print("already finished: nothing to do (--restart does it again)", file=sys.stderr)
        return read_manifest(recipe.output.directory)
    # Imported here, behind a handler of ours: Beam's import logs warnings of no concern.
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    from pipelines.mine import build  # noqa: PLC0415

    pipeline = make_pipeline(recipe.run.workers, beam_options)
    check_places(pipeline, plan)
    with _explained(plan):
        waited = rejoined(pipeline, plan, restart=restart)
    if waited:
        return _end(plan)
    with claimed(plan, restart=restart):
        with _explained(plan):
            timings.clear(plan)
            plan_path = plan_for_workers(pipeline, plan).write()
            with (
                progress(plan, progress_mode),
                workers_watched(),
                tidied(pipeline),
                executed(pipeline, plan),
            ):
                exchange, slices = exchange_of(pipeline, plan), slices_of(pipeline)
                build(pipeline, plan_path, exchange=exchange, slices=slices)
                check_graph(pipeline)
        return _end(plan)


def _end(plan: Plan) -> Manifest:
    """The manifest of the work that has ended; staging files go once nothing needs them."""
    _raise_faults(plan)
    manifest = read_manifest(plan.recipe.output.directory)
    sweep(plan)
    if not any(entry.failed for entry in manifest.inputs):  # else the next run may go on
        clean_up(plan)
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
        for entry, file in zip(manifest.inputs, plan.inputs, strict=True):
            if not entry.failed and file.bytes not in (0, entry.bytes):  # 0: not known
                raise UserError(
                    f"output '{directory}' was made when input '{file.url}' had {entry.bytes:,} "
                    f"bytes, now it has {file.bytes:,}: put the old file back, or {advice}"
                )
        if index_out is not None and index_xxh3(index_out) not in (None, manifest.index_out):
            raise UserError(index_taken(index_out))
        return (
            not any(entry.failed for entry in manifest.inputs)
            and (index_out is None or index_xxh3(index_out) == manifest.index_out)
            and all(
                files.xxh3_file(file.url) == entry.xxh3
                for file, entry in zip(plan.inputs, manifest.inputs, strict=True)
                if files.is_local(file.url)
            )
            and not damaged_outputs(manifest, directory)
            and (index_out is None or not damaged_ranges(index_out))
        )
    if index_out is not None and index_xxh3(index_out) is not None:
        raise UserError(index_taken(index_out))
    if is_claimed(plan):
        if not is_ours(plan):
            raise UserError(f"output '{directory}' belongs to an unfinished other run: {advice}")
    elif parts_in(directory):
        raise UserError(f"output '{directory}' holds Parquet files without a manifest: {advice}")
    return False


def _is_of(manifest: Manifest, plan: Plan) -> bool:
    """Whether a manifest is of this work, whatever its inputs now hold."""
    if manifest.recipe_digest != plan.digest() or len(manifest.inputs) != len(plan.inputs):
        return False
    return all(
        (entry.name, entry.shard) == (file.name, file.shard)
        for entry, file in zip(manifest.inputs, plan.inputs, strict=True)
    )


@contextlib.contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """What Beam or the file system raises, as a Fault of one line.

    The whole of it stands in the staging folder.
    """
    try:
        yield
    except GristmillError:
        raise
    except Exception as error:
        path = files.join(plan.staging, _ERROR_FILE)
        with contextlib.suppress(OSError):
            files.write_atomic(path, "".join(traceback.format_exception(error)))
        if isinstance(error, OSError) and error.strerror and error.filename:
            raise Fault(f"{error.strerror}: '{error.filename}'; {_AGAIN}") from error
        # A worker process sends its exceptions as text.
        ours = re.search(r"^models\.errors\.Fault: (.*?)(?: \[while running|$)", str(error), re.M)
        if ours:
            raise Fault(ours[1]) from error
        lines = str(error).strip().splitlines() or [""]
        raise Fault(
            f"the pipeline failed: {type(error).__name__}: {lines[-1][:300]} (all of it: '{path}')"
        ) from error


def _raise_faults(plan: Plan) -> None:
    path = files.join(plan.staging, FAULTS_FILE)
    if not files.exists(path):
        return
    found = json.loads(files.read_bytes(path))
    faults: list[str] = found["faults"]
    if faults:
        more = f" (and {len(faults) - 1} more in '{path}')" if len(faults) > 1 else ""
        raise Fault(f"{faults[0]}{more}; {_AGAIN}")
    failed = [(name, reason) for name, reason in found["failed"]]
    allowed = plan.recipe.input.max_failed_shards
    raise FailedInputs(
        f"{len(failed):,} of {len(plan.inputs):,} inputs failed, more than "
        f"input.max_failed_shards = '{allowed}' allows: repair them and run the same command again "
        f"to go on, or do without them (--max-failed-shards {len(failed)}); no manifest is written",
        failed,
    )
