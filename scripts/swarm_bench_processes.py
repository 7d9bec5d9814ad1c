"""The bench's end of the peers that train (`swarm_bench_trainer`): start, read, measure, kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench_peers import RunFailed
from scripts.swarm_bench_peers import end_group, environment, group_of, last_line
from scripts.swarm_bench_trainer import EVENTS

_LEAVE_S = 40.0
"""One that is in the midst of a search leaves after it."""


class TrainerProcess:
    """One peer. All its processes are in one group, whose number is its process id."""

    def __init__(self, folder: Path, name: str, words: Sequence[str]) -> None:
        self.name, self._folder = name, folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log = self._folder / "output"
        (self._folder / EVENTS).unlink(missing_ok=True)
        self.events: list[dict[str, Any]] = []
        self._read = 0
        self.began_at = time.time()
        program = [sys.executable, "-m", "scripts.swarm_bench_trainer"]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*program, "--folder", str(self._folder), *words], stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, env=environment(), start_new_session=True,
            )  # fmt: skip
        self.group = self._process.pid

    @property
    def running(self) -> bool:
        """Whether its main process is there."""
        return self._process.poll() is None

    @property
    def said(self) -> str:
        """Its last line of output."""
        return last_line(self._log)

    def look(self) -> list[dict[str, Any]]:
        """Its events that are new; a line that is not whole yet is left for the next time."""
        with contextlib.suppress(OSError):
            text = (self._folder / EVENTS).read_bytes()[self._read :]
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            fresh = [json.loads(line) for line in whole.splitlines()]
            self.events += fresh
            return fresh
        return []

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        return [event for event in self.events if event["kind"] == kind]

    def wait_for(self, kind: str, limit_s: float) -> dict[str, Any]:
        """Its first event of `kind`. Raises RunFailed."""
        deadline = time.monotonic() + limit_s
        while True:
            self.look()
            if found := self.of_kind(kind):
                return found[0]
            if not self.running:
                raise RunFailed(f"{self.name} ended: {self.said}")
            if time.monotonic() > deadline:
                raise RunFailed(f"{self.name}: no '{kind}' in {limit_s:g} s: {self.said}")
            time.sleep(0.1)

    def memory_bytes(self) -> int:
        """Of all its processes: pages that are in no file, those shared by several once."""
        return sum(anonymous_bytes(pid) for pid in group_of(self.group))

    def kill(self, *, whole: bool) -> None:
        """SIGKILL to all its processes, or to the main one alone."""
        if whole:
            end_group(self.group)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.group, signal.SIGKILL)
        self._process.wait()

    def ask_to_leave(self) -> None:
        """SIGTERM."""
        if self.running:
            self._process.terminate()

    def close(self) -> list[int]:
        """Wait until it has left; the processes that it left behind, which are then killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        left = group_of(self.group)
        end_group(self.group)
        self._process.wait()
        self.look()
        return left


def anonymous_bytes(pid: int) -> int:
    """What one process holds in memory without the pages of files, which change their share with
    every other process that maps them; 0 for one that has gone."""
    with contextlib.suppress(OSError):
        return anonymous_of(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return 0


def anonymous_of(table: str) -> int:
    """`Pss_Anon` and `Pss_Shmem` of a table as /proc/PID/smaps_rollup has it."""
    kilobytes = 0
    for line in table.splitlines():
        name, _, rest = line.partition(":")
        if name in ("Pss_Anon", "Pss_Shmem"):
            kilobytes += int(rest.split()[0])
    return kilobytes * 1024
