"""One mining run around the graph: claim the output folder, run Beam, check, tidy up."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from models import files
from models.errors import Fault, UserError
from pipelines import timings
from pipelines.manifest import MANIFEST_FILE, Manifest, read_manifest
from pipelines.plan import Plan, make_plan
from pipelines.publish import DROPS_FILE, FAULTS_FILE
from pipelines.recipe import MineRecipe
from pipelines.regroup import PAGES
from pipelines.timings import TIMINGS_FILE

_CLAIM_FILE = "run.json"
_LOCK_FILE = "run.lock"
_PROGRESS_S = 2.0


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
    if not restart:
        done = _check_free(plan)
        if done is not None:
            return done
    # Imported here, behind a handler of ours: Beam's import logs warnings of no concern.
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    from pipelines.mine import build  # noqa: PLC0415

    pipeline = _pipeline(recipe.run.workers, beam_options)
    with _claimed(plan, restart=restart):
        timings.clear(plan)
        files.remove_tree(files.join(plan.staging, FAULTS_FILE))
        plan_path = plan.write()
        with _progress(plan), pipeline:
            build(pipeline, plan_path)
        _raise_faults(plan)
        manifest = read_manifest(recipe.output.directory)
        _sweep(plan)
    if not recipe.run.keep_staging:
        files.remove_tree(plan.staging)
    return manifest


def _check_free(plan: Plan) -> Manifest | None:
    """The manifest, when this very work stands finished in the output folder.

    Raises UserError when something else stands there.
    """
    directory = plan.recipe.output.directory
    advice = "choose another output folder, or add --restart to throw that away"
    if files.exists(files.join(directory, MANIFEST_FILE)):
        manifest = read_manifest(directory)
        inputs = [(entry.name, entry.bytes) for entry in manifest.inputs]
        same = manifest.recipe_digest == plan.digest() and inputs == [
            (file.name, file.bytes) for file in plan.inputs
        ]
        if not same:
            raise UserError(f"output '{directory}' holds the result of another run: {advice}")
        complete = all(
            files.exists(files.join(directory, output.path)) for output in manifest.outputs
        )
        return manifest if complete else None
    claim = files.join(plan.staging, _CLAIM_FILE)
    if files.exists(claim):
        if files.read_bytes(claim).decode() != _claim(plan):
            raise UserError(f"output '{directory}' belongs to an unfinished other run: {advice}")
    elif _parts(plan):
        raise UserError(f"output '{directory}' holds Parquet files without a manifest: {advice}")
    return None


def _claim(plan: Plan) -> str:
    """What makes two runs the same work: recipe, models, and the names and sizes of the inputs."""
    inputs = [[file.name, file.bytes] for file in plan.inputs]
    return json.dumps({"recipe_digest": plan.digest(), "inputs": inputs})


def _parts(plan: Plan) -> list[str]:
    system, root = files.filesystem(plan.recipe.output.directory)
    return list(system.glob(f"{root}/{PAGES}/language=*/bucket=*/part-*.parquet"))


@contextlib.contextmanager
def _claimed(plan: Plan, *, restart: bool) -> Iterator[None]:
    """Take the output folder for this run; one run at a time where the file system can lock."""
    directory = plan.recipe.output.directory
    with contextlib.ExitStack() as stack:
        try:
            if files.is_local(plan.staging):
                folder = files.local_path(plan.staging)
                folder.mkdir(parents=True, exist_ok=True)
                files.local_path(directory).mkdir(parents=True, exist_ok=True)
                _lock(stack, directory, str(folder / _LOCK_FILE))
            _sweep(plan)
            if restart:
                _throw_away(plan)
            files.write_atomic(files.join(plan.staging, _CLAIM_FILE), _claim(plan))
        except OSError as error:
            raise UserError(
                f"output '{directory}' cannot be written ({error.strerror or error}): "
                "give a folder that you may write to with --output"
            ) from None
        yield


def _sweep(plan: Plan) -> None:
    files.sweep(plan.staging)
    files.sweep(files.join(plan.recipe.output.directory, PAGES))


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
    for name in (MANIFEST_FILE, TIMINGS_FILE, DROPS_FILE):  # the manifest first
        if files.exists(files.join(directory, name)):
            system.rm(files.filesystem(files.join(directory, name))[1])
    for path in _parts(plan):
        system.rm(path)
    for name in ("keys", "pages", "parts"):
        files.remove_tree(files.join(plan.staging, name))


def _pipeline(workers: int, beam_options: Sequence[str]) -> Any:
    import apache_beam as beam  # noqa: PLC0415
    from apache_beam.options.pipeline_options import PipelineOptions  # noqa: PLC0415
    from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner  # noqa: PLC0415
    from apache_beam.transforms.environments import SubprocessSDKEnvironment  # noqa: PLC0415

    logging.getLogger("apache_beam").setLevel(logging.ERROR)
    if any(option.startswith("--runner") for option in beam_options):
        return beam.Pipeline(options=PipelineOptions(list(beam_options)))
    # By name: the default DirectRunner first tries to download another runner.
    environment = None
    if workers > 1:
        # Ctrl+C is for this process: the workers leave with it (pipelines/worker.py).
        python = shlex.quote(sys.executable)
        command = f"trap '' INT; exec {python} -m pipelines.worker {os.getpid()}"
        environment = SubprocessSDKEnvironment.from_command_string(command)
    options = PipelineOptions([*beam_options, f"--direct_num_workers={workers}"])
    unknown = set(options.get_all_options(retain_unknown_options=True)) - set(
        options.get_all_options()
    )
    if unknown:
        raise UserError(
            f"'--{min(unknown)}' is no option of Beam's local runner: leave it out, or name "
            "another runner with --runner"
        )
    return beam.Pipeline(runner=FnApiRunner(default_environment=environment), options=options)


def _raise_faults(plan: Plan) -> None:
    path = files.join(plan.staging, FAULTS_FILE)
    if files.exists(path):
        faults: list[str] = json.loads(files.read_bytes(path))
        more = f" (and {len(faults) - 1} more in '{path}')" if len(faults) > 1 else ""
        raise Fault(f"{faults[0]}{more}; repair it and run the same command again to go on")


@contextlib.contextmanager
def _progress(plan: Plan) -> Iterator[None]:
    """Say on stderr, every few seconds, how far each pass is. Local staging only."""
    if not files.is_local(plan.staging):
        yield
        return
    stop = threading.Event()
    groups = len({file.group for file in plan.inputs})
    totals = {
        "hash": len(plan.inputs),
        "judge": groups * plan.ranges,
        "clean": len(plan.inputs),
        "regroup": 0,
    }
    thread = threading.Thread(target=_report, args=(plan, totals, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _report(plan: Plan, totals: dict[str, int], stop: threading.Event) -> None:
    begin = time.monotonic()
    live = sys.stderr.isatty() and "CI" not in os.environ
    last = ""
    while not stop.wait(_PROGRESS_S):
        done = timings.pieces_done(plan)
        parts = [
            f"{name} {done.get(name, 0)}" + (f"/{total}" if total else "")
            for name, total in totals.items()
        ]
        line = "  ".join(parts)
        if live:
            print(f"\r{line}  {time.monotonic() - begin:.0f} s", end="", file=sys.stderr)
        elif line != last:
            print(f"{line}  {time.monotonic() - begin:.0f} s", file=sys.stderr)
        last = line
    if live and last:
        print(file=sys.stderr)
