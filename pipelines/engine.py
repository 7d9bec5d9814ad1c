"""Which Beam runner a run uses, and with what options."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from models.errors import UserError


def make_pipeline(workers: int, beam_options: Sequence[str]) -> Any:
    """An empty Beam pipeline; without `--runner`, on the local runner with `workers` processes.

    Raises UserError for options that Beam or the local runner does not take.
    """
    import apache_beam as beam  # noqa: PLC0415
    from apache_beam.options.pipeline_options import PipelineOptions  # noqa: PLC0415
    from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner  # noqa: PLC0415
    from apache_beam.transforms.environments import SubprocessSDKEnvironment  # noqa: PLC0415

    logging.getLogger("apache_beam").setLevel(logging.ERROR)
    if any(option.startswith("--runner") for option in beam_options):
        try:
            return beam.Pipeline(options=PipelineOptions(list(beam_options)))
        except ValueError as error:
            raise UserError(f"Beam refuses its options: {error}") from None
    if any(option.startswith("--direct_num_workers") for option in beam_options):
        raise UserError("'--direct_num_workers' is set by --workers: use that")
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
