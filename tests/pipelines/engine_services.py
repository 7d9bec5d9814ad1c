"""What engines other than the local runner need: started on free ports, ended with the test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_START_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def service(module: str, port: int, *arguments: str, log: Path) -> Iterator[None]:
    """`python -m module arguments` in a process group of its own, once it listens on `port`."""
    # The worker pool starts its workers with the `python` of the PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PATH": path},
        )  # fmt: skip
    try:
        _wait_for(process, port, log)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"no service on port {port}:\n{log.read_text()}")


@contextlib.contextmanager
def portable_services(folder: Path) -> Iterator[list[str]]:
    """A job service and an external worker pool; gives the Beam options that name them."""
    jobs, pool = free_port(), free_port()
    server = "apache_beam.runners.portability.local_job_service_main"
    workers = "apache_beam.runners.worker.worker_pool_main"
    with (
        service(server, jobs, "--port", str(jobs), log=folder / "jobs.log"),
        service(workers, pool, f"--service_port={pool}", log=folder / "pool.log"),
    ):
        yield [
            "--runner=PortableRunner",
            f"--job_endpoint=localhost:{jobs}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{pool}",
        ]


@contextlib.contextmanager
def dask_cluster() -> Iterator[Any]:
    """A cluster of two worker processes on this machine."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        yield cluster
