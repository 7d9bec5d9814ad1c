"""Whole runs of `gristmill mine` as processes of their own, cheap enough to break many of them.

Most of a small run is Beam's import and the tables of characters (5 s). So one process prepares
them once and forks for each run; what runs then is the command line as a user starts it, in a
session of its own. Worker processes are started by the command as always.

A run can be made to stop (SIGSTOP) before a certain system call, in whichever of its processes
that happens: then a test breaks something, at a moment that is the same in each run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
_POLL_S = 0.01

_PAUSE = """
import json, os, re, signal, sys
def pause_at(event, pattern, number):
    def hook(name, arguments):
        nonlocal number
        if name == event and number and re.search(pattern, str(arguments[name == "os.rename"])):
            number -= 1
            if not number:
                os.kill(os.getpid(), signal.SIGSTOP)
    sys.addaudithook(hook)
if "PAUSE_AT" in os.environ:
    pause_at(*json.loads(os.environ["PAUSE_AT"]))
"""
_FORKER = """
import json, os, signal, socket, struct, sys
import apache_beam, fasttext, pyarrow.parquet
import pipelines.mine, pipelines.run, pipelines.report, scripts.cli
from pipelines.paragraphs import paragraph_hashes
paragraph_hashes(["tables, built once: \u00e9 e\u0301 \u09ac\u09be"], "unicode")
channel = socket.socket(fileno=int(sys.argv[1]))
pause = sys.argv[2]
signal.signal(signal.SIGINT, signal.SIG_IGN)
channel.send(b"ready")
while True:
    message, files, _, _ = socket.recv_fds(channel, 1 << 20, 2)
    if not message:
        break
    request = json.loads(message)
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
        channel.send(struct.pack("<q", child))
        _, status = os.waitpid(child, 0)
        channel.send(struct.pack("<q", os.waitstatus_to_exitcode(status)))
        continue
    os.setsid()
    channel.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    sys.argv = ["gristmill", *request["words"]]
    os.environ.update(request["environment"])
    exec(pause)
    code = 1
    try:
        code = scripts.cli.main()
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        import traceback
        traceback.print_exc()
    # As the interpreter does at its end: other threads are waited for.
    import threading
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


@dataclass(frozen=True)
class Ended:
    """How a run ended. code: the exit code, negative for a signal."""

    code: int
    stdout: str
    stderr: str
    wall_s: float

    def lines(self) -> list[str]:
        """What stands on stderr, without empty lines."""
        return [line for line in self.stderr.splitlines() if line.strip()]


class Moment(NamedTuple):
    """Just before the `number`-th call of `event` in a process, of those whose path matches.

    event: an audit event of Python, os.rename (the path is the new name) or os.remove.
    """

    event: str
    pattern: str
    number: int = 1


def before_file(pattern: str, number: int = 1) -> Moment:
    """Before the `number`-th file that matches gets its final name."""
    return Moment("os.rename", pattern, number)


class Running:
    """One run under way."""

    def __init__(self, process: int, channel: socket.socket, folder: Path, number: int) -> None:
        self.process = process
        self._channel = channel
        self._files = [folder / f"{number}.stdout", folder / f"{number}.stderr"]
        self._begin_s = time.monotonic()
        self._code: int | None = None

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """The exit code, or None while the run goes on."""
        if self._code is None and select.select([self._channel], [], [], timeout_s)[0]:
            (self._code,) = struct.unpack("<q", self._channel.recv(8))
        return self._code

    def wait_until(self, reached: Callable[[], Any]) -> None:
        """Wait for `reached`, which must come before the run ends."""
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            assert self.poll(_POLL_S) is None, "the run ended before"
            assert time.monotonic() < deadline, "the moment never came"

    def paused(self) -> int:
        """Wait for the moment of `Runs.start`; gives the process that stopped there."""
        found: list[int] = []

        def reached() -> bool:
            found[:] = members(self.process, state="T")
            return bool(found)

        self.wait_until(reached)
        return found[0]

    def go_on(self) -> None:
        """Let what has paused run."""
        self.kill_group(signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)

    def kill_group(self, number: int) -> None:
        """What a terminal or a scheduler sends: a signal to all processes of the run."""
        os.killpg(self.process, number)

    def workers(self) -> list[int]:
        """Worker processes that have begun to import."""
        found = []
        for process in members(self.process):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes()
                if b"pipelines.worker" in words and not words.startswith(b"/bin/sh"):
                    found.append(process)
        return found

    def end(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait for the end. Fails when that takes longer, or when a process is left behind."""
        code = self.poll(limit_s)
        if code is None:
            left = members(self.process)
            for process in left:
                os.kill(process, signal.SIGKILL)
            self.poll(LIMIT_S)
            raise AssertionError(f"still running after {limit_s} s: {len(left)} processes")
        wall_s = time.monotonic() - self._begin_s
        deadline = time.monotonic() + 10
        while members(self.process):
            assert time.monotonic() < deadline, "processes are left behind"
            time.sleep(0.02)
        stdout, stderr = (path.read_text(errors="replace") for path in self._files)
        return Ended(code, stdout, stderr, wall_s)


class Runs:
    """Starts runs, one at a time. `settings` stand in every command."""

    def __init__(self, folder: Path, data_dir: Path, settings: list[str]) -> None:
        self._folder = folder
        self._settings = settings
        self._environment = {"GRISTMILL_DATA": str(data_dir)}
        (folder / "sitecustomize.py").write_text(_PAUSE)  # workers are interpreters of their own
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        self._forker = subprocess.Popen(
            [sys.executable, "-c", _FORKER, str(theirs.fileno()), _PAUSE],
            cwd=REPOSITORY,
            env=os.environ | self._environment, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        assert ours.recv(16) == b"ready"
        self._number = 0

    def start(self, inputs: Sequence[Path | str], output: Path, *more: str,
              pause: Moment | None = None, terminal: int | None = None,
              **environment: str) -> Running:  # fmt: skip
        """Start `gristmill mine`. terminal: a descriptor that is its stderr."""
        if pause is not None:
            environment |= {"PAUSE_AT": json.dumps(pause), "PYTHONPATH": str(self._folder)}
        words = ["mine", "default", "--output", str(output), *self._settings, *more]
        for place in inputs:
            words += ["--input", str(place)]
        self._number += 1
        with contextlib.ExitStack() as stack:
            descriptors = []
            for suffix in ("stdout", "stderr"):
                file = stack.enter_context((self._folder / f"{self._number}.{suffix}").open("wb"))
                descriptors.append(file.fileno())
            if terminal is not None:
                descriptors[1] = terminal
            request: dict[str, Any] = {"words": words, "environment": environment}
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
        (process,) = struct.unpack("<q", self._channel.recv(8))
        return Running(process, self._channel, self._folder, self._number)

    def run(self, inputs: Sequence[Path | str], output: Path, *more: str) -> Ended:
        """Run to the end."""
        return self.start(inputs, output, *more).end()

    def finish(self, inputs: Sequence[Path | str], output: Path, *more: str) -> Ended:
        """Run to the end, which must be a good one."""
        ended = self.run(inputs, output, *more)
        assert ended.code == 0, ended.stderr
        return ended

    def close(self) -> None:
        self._channel.close()
        self._forker.wait(LIMIT_S)


@contextlib.contextmanager
def runs_of(folder: Path, data_dir: Path, settings: list[str]) -> Iterator[Runs]:
    """`Runs` that end with the block."""
    runs = Runs(folder, data_dir, settings)
    try:
        yield runs
    finally:
        runs.close()


def members(session: int, *, state: str = "") -> list[int]:
    """Live processes of a session; all, or those in one `state` (T: stopped)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z" and state in ("", fields[0]):
            found.append(int(folder.name))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of an output folder but for the timings, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "timings.json"
    }


def count(folder: Path, pattern: str) -> int:
    """Files below `folder` that match; temporary ones do not count."""
    with contextlib.suppress(OSError):
        return sum(not path.name.startswith(".") for path in folder.glob(pattern))
    return 0


def flip(path: Path, at: int) -> None:
    """Change the byte at offset `at` (negative: from the end)."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x5A
    path.write_bytes(data)
