"""`gristmill swarm ...` as processes, for tests of whole runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.cli import main
from tests.conftest import REPOSITORY

RECIPE = """
name = "tiny-swarm"
data = {lanes = 4, held_out = 0.1}
examples = {sequence_length = 32}
model = {family = "albert", size = "tiny"}
batch = {samples = 400, microbatch = 4}
optimiser = {name = "lamb", learning_rate = 5e-3, epsilon = 1e-6}
schedule = {steps = 24, warmup_steps = 2}
checkpoint = {every = 4}
swarm = {codec = "none", matchmaking_s = 1.0, sender_s = 5}
peer = {host = "127.0.0.1"}
coordinator = {port = 0, page_port = 0, poll_s = 0.5, gone_s = 10}
[collaboration]
labels_per_sample = [4.0, 1.0]
min_peers = 2
announce_s = 0.3
look_s = 0.2
round_timeout_s = 20
"""


class Commands:
    """`gristmill swarm ...`, each as a process of its own with its output in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[str]]()

    def start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.err").open("a") as said:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "scripts.cli", "swarm", *words],
                cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=said, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def wait_for(self, what: Callable[[], bool], name: str) -> None:
        until = time.monotonic() + 180
        while not what():
            assert self.running[name].poll() is None, self.said(name)
            assert time.monotonic() < until, self.said(name)
            time.sleep(0.1)

    def end(self, name: str) -> tuple[int, dict[str, Any]]:
        text, _ = self.running[name].communicate(timeout=240)
        code = self.running.pop(name).returncode
        assert code == 0, self.said(name)
        return code, json.loads(text)

    def kill(self, name: str) -> None:
        """End a command and all that it started, at once."""
        process = self.running.pop(name)
        for group in self.groups(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait()

    def groups(self, parent: int) -> set[int]:
        """The process groups of a supervisor and of what it has started."""
        found = {parent}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                words = path.read_text().rpartition(")")[2].split()
                if int(words[1]) == parent:
                    found.add(int(words[2]))
        return found

    def told(self, name: str, pattern: str) -> str:
        """What the first group of `pattern` is in the last line that has it."""
        found = re.findall(pattern, self.said(name))
        assert found, self.said(name)
        return str(found[-1])

    def processes(self) -> list[str]:
        """Command lines of all processes that name the test's folder, or stand below one."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes()
                line = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if (
                b"GRISTMILL_SWARM_INSIDE" in environment
                and line
                and (str(self.folder) in line or f"PWD={self.folder}".encode() in environment)
            ):
                found.append(line)
        return found


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def credential(run: Path, user: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """Let `user` in; the file of the credential."""
    capsys.readouterr()
    assert main(["swarm", "allow", "add", user, "--run", str(run)]) == 0
    return secret(run.parent / f"{user}.key", capsys.readouterr().out)


def secret(path: Path, text: str) -> Path:
    """A file that only its owner reads."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path
