"""A peer's processes: a clean leave, and none left behind whoever is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.swarm.supervisor import alive

# A trainer with two processes below it that ignore everything but SIGKILL, as hivemind's do: a
# child, and the child's child, which outlive their parents.
TRAINER = """
import os, signal, subprocess, sys, time
mode, folder = sys.argv[1:]
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
below = subprocess.Popen([sys.executable, "-S", "-c", '''
import signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
deeper = subprocess.Popen([sys.executable, "-S", "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "signal.signal(signal.SIGHUP, signal.SIG_IGN); time.sleep(300)"])
print(deeper.pid, flush=True)
time.sleep(300)
'''], stdout=subprocess.PIPE)
below.stdout.readline()
runs = folder + "/runs"
with open(runs, "a") as file:
    file.write("x")
count = os.path.getsize(runs)
with open(folder + "/pid.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(folder + "/pid.new", folder + "/pid")
if mode == "again":
    sys.exit(75 if count < 3 else 0)
if mode.startswith("codes"):  # one a try
    sys.exit(int(mode.split("-")[count]))
if mode.startswith("exit"):
    sys.exit(int(mode[4:]))
if mode == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
while not stop or mode == "deaf":
    time.sleep(0.02)
open(folder + "/left", "w").close()
"""
SUPERVISOR = """
import sys
from training.swarm.supervisor import supervise
script, mode, folder, grace, worked = sys.argv[1:]
sys.exit(supervise([sys.executable, "-S", script, mode, folder], grace_s=float(grace), pause_s=0.1,
                   worked_s=float(worked), say=lambda text: print(text, flush=True)))
"""


class Supervised:
    """A supervisor at work, and the group below it."""

    def __init__(self, folder: Path, mode: str, grace_s: float, worked_s: float = 600) -> None:
        script = folder / "trainer.py"
        script.write_text(TRAINER)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(script), mode, str(folder), str(grace_s),
             str(worked_s)],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """The trainer's group, once it has processes below it."""
        until = time.monotonic() + 60
        while not (self.folder / "pid").exists():
            assert time.monotonic() < until, "the trainer did not start"
            time.sleep(0.02)
        return int((self.folder / "pid").read_text())

    def end(self, timeout_s: float = 60) -> tuple[int, str]:
        """Exit code and what was said."""
        text, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, text


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def gone(group: int, within_s: float = 20) -> bool:
    """Whether no process of the group is left, soon."""
    until = time.monotonic() + within_s
    while alive(group) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(group)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_leave(number: signal.Signals, folder: Path) -> None:
    running = Supervised(folder, "serve", 30)
    group = running.group
    assert len(alive(group)) == 3
    running.process.send_signal(number)
    code, _ = running.end()
    assert alive(group) == []  # already when the supervisor has ended
    assert code == 0
    assert (folder / "left").exists()


def test_a_closed_terminal_ends_the_group(folder: Path) -> None:
    running = Supervised(folder, "serve", 30)
    group = running.group
    running.process.send_signal(signal.SIGHUP)
    code, _ = running.end()
    assert (code, alive(group)) == (0, [])
    assert (folder / "left").exists()  # it is asked to leave as by SIGTERM


def test_who_does_not_leave_is_ended(folder: Path) -> None:
    running = Supervised(folder, "deaf", 1.0)
    group = running.group
    began = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    code, said = running.end()
    assert (code, said) == (128 + signal.SIGTERM, "not left after 1 s: ended\n")
    assert time.monotonic() - began >= 1.0
    assert alive(group) == []


def test_a_second_ctrl_c_ends_at_once(folder: Path) -> None:
    running = Supervised(folder, "deaf", 300)
    group = running.group
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert alive(group)
    running.process.send_signal(signal.SIGINT)
    code, _ = running.end()
    assert code == 128 + signal.SIGINT
    assert alive(group) == []


def test_a_killed_supervisor_leaves_nothing(folder: Path) -> None:
    running = Supervised(folder, "serve", 30)
    group = running.group
    assert len(alive(group)) == 3
    running.process.kill()
    assert running.process.wait() == -signal.SIGKILL
    assert gone(group)


def test_a_killed_trainer_leaves_nothing(folder: Path) -> None:
    running = Supervised(folder, "serve", 30)
    group = running.group
    os.kill(group, signal.SIGKILL)
    code, _ = running.end()
    assert code == 128 + signal.SIGKILL
    assert alive(group) == []


@pytest.mark.parametrize(("mode", "expected"), [("exit0", 0), ("exit2", 2), ("crash", 139)])
def test_exit_codes(mode: str, expected: int, folder: Path) -> None:
    running = Supervised(folder, mode, 30)
    group = running.group
    code, _ = running.end()
    assert code == expected
    assert alive(group) == []


def test_who_asks_for_it_is_started_anew(folder: Path) -> None:
    running = Supervised(folder, "again", 30)
    code, said = running.end()
    assert (code, said) == (0, "joining anew in 0 s\n" * 2)
    assert (folder / "runs").read_text() == "xxx"


@pytest.mark.parametrize(
    ("mode", "worked_s", "expected", "tries"),
    [
        ("codes-75-2-1-0", 600, 0, 4),  # what keeps out who had got in will pass
        ("codes-75-2-0", 0, 2, 2),  # it had got in again: a new failure
        ("codes-2-0", 600, 2, 1),  # it never got in
        ("codes-75-139-0", 600, 139, 2),  # a crash is told
    ],
)
def test_what_keeps_out_a_peer_that_is_started_anew(
    mode: str, worked_s: float, expected: int, tries: int, folder: Path
) -> None:
    code, said = Supervised(folder, mode, 30, worked_s).end()
    assert (code, len((folder / "runs").read_text())) == (expected, tries)
    assert said.count("joining anew") == tries - 1
