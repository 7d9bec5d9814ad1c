"""A run on Google Cloud Dataflow: its options, what its workers need, and the job itself.

The service is the lock: of all live jobs in a project and region one may have a given name, and
the name comes from the output folder. The job's id stands beside the claim, so that the same
command, from any machine, waits for the job that is at work instead of starting another one.
docs/dataflow.md has the commands.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from models import files
from models.errors import Fault, UserError
from pipelines.estimate import unsampled_memory
from pipelines.plan import Plan

_JOB_FILE = "job.json"
_NEEDED = {
    "project": "the project that pays",
    "region": "such as us-central1, where the input and output buckets are",
    "temp_location": "a gs:// folder for Beam's own files",
    "sdk_container_image": "the image with Gristmill in it, built from the Dockerfile",
}
_NO_USE = {
    "no_wait_until_finish": "Ctrl+C after the submission leaves the job at work",
    "template_location": "a plan is made for each run, so a template has nothing to start",
    "dry_run": "'gristmill mine --dry-run' shows the plan",
    "update": "a batch job cannot be updated",
    "streaming": "mining is a batch job",
}
_RAM_MARGIN = 2
"""On top of the estimate, which no run with files larger than 11 MB has checked."""


def with_defaults(words: Sequence[str], options: Any) -> list[str]:
    """Beam options `words` (parsed: `options`) with what a mining job on Dataflow always needs.

    One thread a process: the work is Python and memory counts by thread. Workers take the SDK
    and Gristmill from the image. Nothing of this machine's environment is uploaded.

    Raises UserError for what is missing and for what makes no sense here.
    """
    given = options.get_all_options()
    for name, reason in _NO_USE.items():
        if given.get(name):
            raise UserError(f"'--{name}' is of no use on Dataflow: {reason}")
    for name, meaning in _NEEDED.items():
        if not given.get(name):
            raise UserError(
                f"DataflowRunner needs --{name}= behind --: {meaning} (docs/dataflow.md)"
            )
    if not given["temp_location"].startswith("gs://"):  # Beam would create a bucket instead
        raise UserError(f"--temp_location={given['temp_location']} is no gs:// folder: give one")
    more = ["--experiments=disable_logging_submission_environment"]
    if not given["save_main_session"]:
        more.append("--no_save_main_session")
    if given["number_of_worker_harness_threads"] is None:
        more.append("--number_of_worker_harness_threads=1")
    if given["sdk_location"] == "default":
        more.append("--sdk_location=container")
    return [*words, *more]


@contextlib.contextmanager
def executed(pipeline: Any, plan: Plan) -> Iterator[None]:
    """Run what the block builds, on any runner, and wait for it."""
    if _is_dataflow(pipeline):
        prepare(pipeline, plan)
        yield
        _run_job(pipeline, plan)
    else:
        with pipeline:
            yield


def rejoined(pipeline: Any, plan: Plan, *, restart: bool) -> bool:
    """Wait for the job of an earlier command, if one is still at work; whether there was one.

    Raises UserError with `restart`, which cannot be done meanwhile, and Fault when the job fails.
    """
    if not _is_dataflow(pipeline):
        return False
    _name_job(pipeline, plan)
    job = _unfinished_job(pipeline, plan)
    if job is None:
        return False
    if restart:
        options = _cloud_options(pipeline)
        raise UserError(
            f"job '{job.job_id()}' is at work in output '{plan.recipe.output.directory}': wait for "
            "it (the same command without --restart), or stop it: "
            f"{_cancel_command(options, job.job_id())}"
        )
    _wait(pipeline, job)
    return True


def prepare(pipeline: Any, plan: Plan) -> None:
    """Set the options that come from the plan: the job's name and the memory of its workers."""
    _name_job(pipeline, plan)
    _hint_ram(pipeline, plan)


def _is_dataflow(pipeline: Any) -> bool:
    return type(pipeline.runner).__name__ == "DataflowRunner"


def _name_job(pipeline: Any, plan: Plan) -> None:
    """Give the job its name, which comes from the output folder, unless the user gave one."""
    options = _cloud_options(pipeline)
    if not options.job_name:
        place = plan.recipe.output.directory.rstrip("/")
        options.job_name = f"gristmill-{files.xxh3_bytes(place.encode())[:16]}"


def least_ram_bytes(plan: Plan, processes: int) -> int:
    """RAM that a worker with so many processes should have: the estimate's, with a margin.

    KenLM models are mapped, once for all processes; each has the other models for itself.
    """
    own, shared = unsampled_memory(plan)
    own = _RAM_MARGIN * own + files.size_bytes(plan.language_id.path)
    return processes * own + shared


def _hint_ram(pipeline: Any, plan: Plan) -> None:
    """Ask for that much RAM, once for all steps, unless the user gave a hint.

    One hint, not one a step: each environment that differs is another container on a worker.
    """
    from apache_beam.options.pipeline_options import (  # noqa: PLC0415
        StandardOptions,
        WorkerOptions,
    )

    options = pipeline.options.view_as(StandardOptions)
    if not options.resource_hints:
        machine = pipeline.options.view_as(WorkerOptions).machine_type or ""
        ending = re.search(r"-(\d+)$", machine)  # n2-standard-4 has 4 vCPUs, a process for each
        processes = int(ending[1]) if ending and "custom" not in machine else 1
        options.resource_hints = [f"min_ram={least_ram_bytes(plan, processes)}B"]


def _run_job(pipeline: Any, plan: Plan) -> None:
    """Submit the pipeline, note its job beside the claim, and wait until it is done.

    Raises UserError when a job is at work for this output already, Fault when the job fails.
    """
    from apache_beam.runners.dataflow.internal.apiclient import (  # noqa: PLC0415
        DataflowJobAlreadyExistsError,
    )

    options = _cloud_options(pipeline)
    try:
        result = pipeline.run()
    except DataflowJobAlreadyExistsError as error:
        # Beam's own words advise another job name: that would be a second run for this output.
        found = re.search(r"with id: ([\w:.-]+?)\.?(?:\s|$)", str(error))
        job_id = found[1] if found else "JOB_ID"
        raise UserError(
            f"another run is at work for this output, as job '{options.job_name}' ({job_id}): wait "
            f"for it, or stop it: {_cancel_command(options, job_id)}"
        ) from None
    about = {"project": options.project, "region": options.region, "job_id": result.job_id()}
    files.write_atomic(_record(plan), json.dumps(about))
    print(
        f"Dataflow job '{options.job_name}' ({result.job_id()}) is submitted: "
        f"{_console(options, result)}\n"
        "Ctrl+C leaves it at work, and the same command waits for it again; to stop it: "
        f"{_cancel_command(options, result.job_id())}",
        file=sys.stderr,
    )
    _wait(pipeline, result)


def _unfinished_job(pipeline: Any, plan: Plan) -> Any:
    """The job of an earlier command for this output that is still at work; None without one.

    Raises UserError when it belongs to another project or region.
    """
    record = _record(plan)
    if not files.exists(record):
        return None
    from apache_beam.runners.dataflow.dataflow_runner import (  # noqa: PLC0415
        DataflowPipelineResult,
    )
    from apache_beam.runners.dataflow.internal import apiclient  # noqa: PLC0415
    from google.api_core.exceptions import NotFound  # noqa: PLC0415

    about = json.loads(files.read_bytes(record))
    options = _cloud_options(pipeline)
    for key in ("project", "region"):
        if about[key] != getattr(options, key):
            raise UserError(
                f"--{key}={getattr(options, key)}: job '{about['job_id']}' for this output was "
                f"started with --{key}={about[key]}: use that, or remove '{record}'"
            )
    pipeline.runner.dataflow_client = apiclient.DataflowApplicationClient(pipeline.options)
    try:
        job = pipeline.runner.dataflow_client.get_job(about["job_id"])
    except NotFound:  # the service forgets old jobs
        return None
    result = DataflowPipelineResult(job, pipeline.runner, pipeline.options)
    return None if result.is_in_terminal_state() else result


def _wait(pipeline: Any, result: Any) -> None:
    """Wait until a job is done, saying on stderr how it stands. Raises Fault when it fails."""
    from apache_beam.runners.dataflow.dataflow_runner import DataflowRunner  # noqa: PLC0415

    options = _cloud_options(pipeline)
    name = f"Dataflow job '{options.job_name}' ({result.job_id()})"

    def say(state: str) -> None:
        print(f"{name}: {state.removeprefix('JOB_STATE_').lower()}", file=sys.stderr)

    # Not wait_until_finish: that looks every 5 s whether its own thread is still waiting.
    DataflowRunner.poll_for_job_completion(pipeline.runner, result, None, say)
    if result.state != "DONE":
        lines = str(getattr(pipeline.runner, "last_error_msg", None) or "").strip().splitlines()
        reason = f": {lines[-1].strip()[:300]}" if lines else ""
        raise Fault(
            f"{name} ended as {result.state}{reason}; its log: {_console(options, result)}; "
            "repair it and run the same command again to go on"
        )


def _record(plan: Plan) -> str:
    return files.join(plan.recipe.output.directory, ".staging", _JOB_FILE)


def _console(options: Any, result: Any) -> str:
    return (
        f"https://console.cloud.google.com/dataflow/jobs/{options.region}/{result.job_id()}"
        f"?project={options.project}"
    )


def _cancel_command(options: Any, job_id: str) -> str:
    return (
        f"gcloud dataflow jobs cancel {job_id} --project={options.project} "
        f"--region={options.region}"
    )


def _cloud_options(pipeline: Any) -> Any:
    from apache_beam.options.pipeline_options import GoogleCloudOptions  # noqa: PLC0415

    return pipeline.options.view_as(GoogleCloudOptions)
