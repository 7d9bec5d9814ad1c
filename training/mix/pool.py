"""Several runs of a mix at once: worker processes that stay, so that each imports torch once.

A worker is `python -m training.mix.worker`: a line of JSON with a run comes in, a line with its
summary or its error goes out. It is a session of its own (a signal reaches it through the pool
alone) and never outlives this process (Linux). The pool does not start a run by itself, and a
worker that is idle costs nothing but its memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from models.errors import Fault, GristmillError, UserError
from training.doremi import train_proxy
from training.loop import train
from training.mix.stages import MixRun

_PR_SET_PDEATHSIG = 1
_STOPPED = {"status": "stopped"}


@dataclass(frozen=True)
class Outcome:
    """What became of a run. summary: of `training.loop.train`, or the error that ended it."""

    run: MixRun
    seconds: float
    summary: dict[str, Any] | None = None
    error: GristmillError | None = None


class Executor(Protocol):
    """Where runs are computed."""

    @property
    def free(self) -> int:
        """So many runs can be started now."""

    @property
    def busy(self) -> bool:
        """Whether a run has been started whose outcome has not been given."""

    def start(self, run: MixRun) -> None:
        """Begin with a run."""

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Outcomes of the runs that have ended, after `timeout_s` at the latest."""

    def stop(self) -> None:
        """Ask what is running to save and leave; its outcomes come all the same."""

    def close(self) -> None:
        """Leave nothing behind."""


def compute(run: MixRun, *, quiet: bool) -> dict[str, Any]:
    """Train a run, or go on with it: its summary. Raises UserError, Fault."""
    if run.proxy is None:
        return train(run.recipe, quiet=quiet)
    return train_proxy(run.recipe, run.proxy, quiet=quiet)


class InProcess:
    """One run after the other, here; with a process group on all ranks together."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._ended: list[Outcome] = []

    @property
    def free(self) -> int:
        """See `Executor`."""
        return 1 - len(self._ended)

    @property
    def busy(self) -> bool:
        """See `Executor`."""
        return bool(self._ended)

    def start(self, run: MixRun) -> None:
        """See `Executor`; comes back when the run has ended."""
        begin_s = time.monotonic()
        summary, error = None, None
        try:
            summary = compute(run, quiet=self._quiet)
        except GristmillError as caught:
            error = caught
        self._ended.append(Outcome(run, time.monotonic() - begin_s, summary, error))

    def wait(self, timeout_s: float) -> list[Outcome]:
        """See `Executor`."""
        ended, self._ended = self._ended, []
        return ended

    def stop(self) -> None:
        """See `Executor`: `train` hears the signals itself."""

    def close(self) -> None:
        """See `Executor`."""


class Pool:
    """Runs in `jobs` processes, which begin when there is work for them."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._stopping = False

    @property
    def free(self) -> int:
        """See `Executor`."""
        return self._jobs - sum(worker.run is not None for worker in self._workers)

    @property
    def busy(self) -> bool:
        """See `Executor`."""
        return self.free < self._jobs

    def start(self, run: MixRun) -> None:
        """See `Executor`."""
        worker = next((one for one in self._workers if one.run is None), None)
        if worker is None:
            worker = _Worker(self._jobs)
            self._workers.append(worker)
            self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        worker.begin(run)

    def wait(self, timeout_s: float) -> list[Outcome]:
        """See `Executor`."""
        ended = []
        for key, _ in self._selector.select(timeout_s):
            worker: _Worker = key.data
            answer = worker.answers.readline()
            if worker.run is not None:
                ended.append(worker.outcome(answer, stopped=self._stopping))
            if not answer:
                self._selector.unregister(worker.answers)
                self._workers.remove(worker)
                worker.end()
        return ended

    def stop(self) -> None:
        """See `Executor`."""
        self._stopping = True
        for worker in self._workers:
            if worker.run is not None:
                worker.ask_to_stop()

    def close(self) -> None:
        """See `Executor`."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._selector.close()


class _Worker:
    """One process."""

    def __init__(self, jobs: int) -> None:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        parent = os.getpid()

        def end_with_parent() -> None:
            if library is not None:
                library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)

        threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.mix.worker"],
            env={"OMP_NUM_THREADS": str(threads)} | dict(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - no thread runs yet
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._tasks, self.answers = self._process.stdin, self._process.stdout
        self.run: MixRun | None = None
        self._begin_s = 0.0

    def begin(self, run: MixRun) -> None:
        """Hand it a run."""
        self.run, self._begin_s = run, time.monotonic()
        # A worker that has died tells by the end of its answers.
        with contextlib.suppress(BrokenPipeError):
            self._tasks.write(to_line(run))
            self._tasks.flush()

    def outcome(self, answer: bytes, *, stopped: bool) -> Outcome:
        """What became of its run, by its answer, which is empty when it has died."""
        run, seconds = self.run, time.monotonic() - self._begin_s
        assert run is not None
        self.run = None
        if not answer.endswith(b"\n"):
            code = self._process.wait()
            if stopped and code == -signal.SIGTERM:  # before it could hear of it; nothing is lost
                return Outcome(run, seconds, _STOPPED)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            return Outcome(run, seconds, error=Fault(f"its process {how}"))
        found = json.loads(answer)
        if "summary" in found:
            return Outcome(run, seconds, found["summary"])
        kind = UserError if found["by_user"] else Fault
        return Outcome(run, seconds, error=kind(found["error"]))

    def ask_to_stop(self) -> None:
        """As `training.stopping` hears it."""
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End it, and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._tasks.close()
        self.answers.close()


def to_line(run: MixRun) -> bytes:
    """A run as the worker reads it."""
    tree = {
        "label": run.label,
        "seed": run.seed,
        "recipe": run.recipe.model_dump(mode="json"),
        "weights": dict(run.weights),
        "proxy": None if run.proxy is None else asdict(run.proxy),
    }
    return json.dumps(tree).encode() + b"\n"
