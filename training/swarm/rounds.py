"""What `training.swarm.optimiser` runs its rounds with: a clock and a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from training.swarm.types import RoundResult


@dataclass(frozen=True)
class Averaged:
    """What a round left: its tensors, how it went, and what this peer had told the others."""

    tensors: list[Tensor]
    result: RoundResult | None
    gathered: Mapping[str, Any]
    refused: str = ""
    """Why the transport sent nothing."""


class Clock(Protocol):
    """Time, so that tests have their own."""

    def time(self) -> float:
        """Seconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Job(Protocol):
    """A round that runs beside something else."""

    def done(self) -> bool:
        """Whether `result` is there."""
        ...

    def result(self) -> Averaged:
        """What the round gave; waits for it."""
        ...


def in_a_thread(work: Callable[[], Averaged]) -> Job:
    """Run `work` in a thread that does not keep the process alive."""
    future: Future[Averaged] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed over to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="swarm round", daemon=True).start()
    return future


def rss_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
