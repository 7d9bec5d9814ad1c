"""Which Beam runner a run uses, with what options, and what that means for the graph.

Without `--runner` it is Beam's local FnApiRunner, in this process or in N worker processes. Any
other runner gets its options as they stand. What differs between runners is decided here and
in `pipelines/places.py`: how keys are exchanged, how many elements the graph begins with. The
commands are in docs/flink.md and docs/dataflow.md.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from models.errors import UserError
from pipelines import dataflow
from pipelines.plan import Plan

LOCAL_RUNNER = "FnApiRunner"
PORTABLE_RUNNERS = {"PortableRunner", "FlinkRunner", "SparkRunner"}
"""They hand options on that Beam for Python does not know."""
_EXTRAS = {"dask": "dask", "dataflow": "dataflow"}
_DASK_RUNNER = "apache_beam.runners.dask.dask_runner.DaskRunner"
_DASK_PARTITIONS = 16


def make_pipeline(workers: int, beam_options: Sequence[str]) -> Any:
    """An empty Beam pipeline; without `--runner`, on the local runner with `workers` processes.

    Raises UserError for a runner that is not there and for options that nothing reads.
    """
    import apache_beam as beam  # noqa: PLC0415
    from apache_beam.options.pipeline_options import StandardOptions  # noqa: PLC0415

    logging.getLogger("apache_beam").setLevel(logging.ERROR)
    name = _options(beam_options).view_as(StandardOptions).runner
    if name in (None, LOCAL_RUNNER):
        return _local_pipeline(workers, beam_options)
    if workers > 1:
        print(
            f"note: run.workers = {workers} is for the local runner, {name} has its own options",
            file=sys.stderr,
        )
    runner = _runner(name)
    if type(runner).__name__ == "DaskRunner" and not any(
        option.startswith(("--dask_npartitions", "--dask_partition_size"))
        for option in beam_options
    ):
        beam_options = [*beam_options, f"--dask_npartitions={_DASK_PARTITIONS}"]
    if type(runner).__name__ == "DataflowRunner":
        beam_options = dataflow.with_defaults(beam_options, _options(beam_options))
    options = _options(beam_options)
    if type(runner).__name__ not in PORTABLE_RUNNERS:
        _refuse_unknown(options, name)
    try:
        return beam.Pipeline(runner=runner, options=options)
    except (ValueError, ImportError) as error:
        raise UserError(f"Beam refuses its options: {error}") from None


def _local_pipeline(workers: int, beam_options: Sequence[str]) -> Any:
    import apache_beam as beam  # noqa: PLC0415
    from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner  # noqa: PLC0415
    from apache_beam.transforms.environments import SubprocessSDKEnvironment  # noqa: PLC0415

    if any(option.startswith("--direct_num_workers") for option in beam_options):
        raise UserError("'--direct_num_workers' is set by --workers: use that")
    environment = None
    if workers > 1:
        # Ctrl+C and SIGTERM are for this process: the workers leave with it (pipelines/worker.py).
        python = shlex.quote(sys.executable)
        command = f"trap '' INT TERM; exec {python} -m pipelines.worker {os.getpid()}"
        environment = SubprocessSDKEnvironment.from_command_string(command)
    options = _options([*beam_options, f"--direct_num_workers={workers}"])
    _refuse_unknown(options, "local runner")
    # By name: the default DirectRunner first tries to download another runner.
    return beam.Pipeline(runner=FnApiRunner(default_environment=environment), options=options)


def _options(words: Sequence[str]) -> Any:
    """Parsed options; argparse's complaint, with its page of usage, becomes one line."""
    from apache_beam.options.pipeline_options import PipelineOptions  # noqa: PLC0415

    if words and not words[0].startswith("-"):
        raise UserError(f"'{words[0]}' behind -- is no option: write --name=value")
    options = PipelineOptions(list(words))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            options.get_all_options()
        except (SystemExit, ValueError) as error:
            lines = said.getvalue().strip().splitlines() or [str(error)]
            complaint = lines[-1].rsplit("error: ", 1)[-1]
            raise UserError(f"Beam refuses '{' '.join(words)}': {complaint}") from None
    return options


def _refuse_unknown(options: Any, runner: str) -> None:
    unknown = set(options.get_all_options(retain_unknown_options=True)) - set(
        options.get_all_options()
    )
    if unknown:
        raise UserError(
            f"'--{min(unknown)}' is no option of Beam's {runner}: leave it out, or name "
            "another runner with --runner"
        )


def _runner(name: str) -> Any:
    from apache_beam.options.pipeline_options import StandardOptions  # noqa: PLC0415
    from apache_beam.runners.runner import create_runner  # noqa: PLC0415

    short = name.lower().removesuffix("runner")
    try:
        if short == "dask":
            # Its workers print the traceback of what they also hand back, which we explain.
            os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")
            import dask.distributed  # noqa: F401, PLC0415  # Beam asks for it only in the run

            return create_runner(_DASK_RUNNER)  # Beam knows no short name for it
        return create_runner(name)
    except ImportError as error:
        if short in _EXTRAS:
            raise UserError(
                f"--runner={name} needs what is not installed ({error}): "
                f"pip install 'gristmill[{_EXTRAS[short]}]'"
            ) from None
        raise UserError(f"--runner={name} cannot be loaded: {error}") from None
    except (ValueError, AttributeError):
        known = ", ".join(sorted({*StandardOptions.KNOWN_RUNNER_NAMES, LOCAL_RUNNER, "DaskRunner"}))
        raise UserError(f"unknown runner '{name}': valid are {known}") from None


def runner_name(pipeline: Any) -> str:
    """The class of the runner: FnApiRunner, PortableRunner, DaskRunner, DataflowRunner, ..."""
    return type(pipeline.runner).__name__


def exchange_of(pipeline: Any, plan: Plan) -> Literal["files", "shuffle"]:
    """How keys get to the judges: `run.exchange`, or what suits this runner.

    Through files on the local runner, which holds all that it shuffles in memory. Through the
    shuffle elsewhere: on a cluster each of K judges would open the key file of every input.
    """
    if plan.recipe.run.exchange != "auto":
        return plan.recipe.run.exchange
    return "files" if runner_name(pipeline) == LOCAL_RUNNER else "shuffle"


def slices_of(pipeline: Any) -> int:
    """How many elements the graph begins with.

    Dask keeps the partitions of the first collection to the end, and regroups nothing at a
    Reshuffle: with one element one process would do all the work.
    """
    if runner_name(pipeline) != "DaskRunner":
        return 1
    from apache_beam.runners.dask.dask_runner import DaskOptions  # noqa: PLC0415

    return int(pipeline.options.view_as(DaskOptions).npartitions or _DASK_PARTITIONS)


def check_graph(pipeline: Any) -> None:
    """Refuse a constructed pipeline of which the runner would lose data. Raises UserError."""
    if runner_name(pipeline) == "DaskRunner":
        from pipelines.dask_checks import refuse_what_dask_loses  # noqa: PLC0415

        refuse_what_dask_loses(pipeline)


@contextlib.contextmanager
def tidied(pipeline: Any) -> Iterator[None]:
    """Run the block, then close what the runner leaves open: Dask's client and local cluster."""
    try:
        yield
    finally:
        client = getattr(getattr(pipeline, "result", None), "client", None)
        if runner_name(pipeline) == "DaskRunner" and client is not None:
            cluster = client.cluster
            client.close()
            if cluster is not None:
                cluster.close()
