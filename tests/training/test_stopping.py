"""Signals: the first one asks, all ranks hear of it, a second Ctrl+C ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.training.checkpointed import on_ranks
from training import launch, rank_output
from training.stopping import StopRequest


def test_a_signal_sets_a_flag() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest() as stop:
        assert not stop.requested
        assert not stop.agreed()
        assert stop.name == ""
        for _ in range(3):  # torchrun and schedulers repeat it
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.agreed()
        assert stop.name == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)  # the first Ctrl+C, after a SIGTERM
        assert stop.name == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)  # the same press, passed on twice
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_blocks_inside_one_another_share_a_request() -> None:
    with StopRequest() as outer:
        with StopRequest() as inner:
            assert not inner.requested
        assert not outer.requested
        with StopRequest() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (inner.name, outer.name) == ("SIGTERM", "")
        assert outer.name == "SIGTERM"
        with StopRequest() as inner:
            assert inner.requested


def test_a_second_ctrl_c_ends_the_process() -> None:
    """Also while the first request is at work in code that never looks at the flag."""
    code = (
        "import time\nfrom training.stopping import StopRequest\n"
        "with StopRequest():\n print('ready', flush=True)\n while True: time.sleep(0.05)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=REPOSITORY, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.8)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "\ngristmill: stopped at once; the last checkpoint stands\n"


def ask_rank(asked: int, rank: int, ranks: int) -> tuple[bool, bool, bool]:
    """Signal one rank; what this one knows before, alone, and with the others."""
    with StopRequest() as stop:
        before = stop.agreed()
        if rank == asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return before, stop.requested, stop.agreed()


def test_all_ranks_agree() -> None:
    assert on_ranks(2, [0, 1], ask_rank) == [(False, True, True), (False, False, True)]


RANK = """
import os, signal, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
assert os.environ["LOCAL_RANK"] == str(rank) and os.environ["MASTER_ADDR"] == "127.0.0.1"
def write(name, text=""):
    with open(os.path.join(folder, name + str(rank)), "w") as file:
        file.write(text)
def forever():
    write("ready", str(os.getpid()))
    while True:
        time.sleep(0.02)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts a launcher of two ranks that run `RANK` and a test's own lines."""
    started: list[subprocess.Popen[str]] = []

    def begin(lines: str) -> subprocess.Popen[str]:
        code = (
            "import subprocess, sys\nfrom training import launch\nreal = subprocess.Popen\n"
            "def popen(command, **more):\n"
            "    return real([sys.executable, '-c', sys.argv[1], *command[4:]], **more)\n"
            "launch.subprocess.Popen = popen\n"
            "sys.exit(launch.launch([sys.argv[2]], 2))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, RANK + lines, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "3"},
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def wait_for(reached: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline_s, "the moment never came"
        time.sleep(0.02)


def ranks_of(folder: Path) -> list[int]:
    """Process ids, once both ranks are at work."""
    wait_for(lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)))
    wait_for(lambda: all((folder / f"ready{rank}").read_text() for rank in (0, 1)))
    return [int((folder / f"ready{rank}").read_text()) for rank in (0, 1)]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


CLEAN = """
def stop(number, frame):
    write("signal", str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("figures of rank", rank)
forever()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_the_end_is_clean(
    number: int, start: Any, tmp_path: Path
) -> None:
    launcher = start(CLEAN)
    ranks_of(tmp_path)
    launcher.send_signal(number)
    shown, said = launcher.communicate(timeout=60)
    assert (launcher.returncode, said) == (0, "")
    assert [(tmp_path / f"signal{rank}").read_text() for rank in (0, 1)] == [str(number)] * 2
    assert shown == "figures of rank 0\n"


def test_a_users_mistake_is_one_line(start: Any) -> None:
    launcher = start("print('gristmill: no such thing', file=sys.stderr)\nsys.exit(2)")
    shown, said = launcher.communicate(timeout=60)
    assert (launcher.returncode, shown, said) == (2, "", "gristmill: no such thing\n")


def test_the_rank_that_failed_first_is_heard(start: Any, tmp_path: Path) -> None:
    """Rank 0 fails for rank 1's failure, with a page of traceback that nobody needs."""
    launcher = start(
        "if rank == 1:\n"
        "    print('gristmill: fault: the disk is full', file=sys.stderr)\n"
        "    sys.exit(1)\n"
        "print('loss 3.1', file=sys.stderr)\n"
        "raise RuntimeError('connection closed by peer')"
    )
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert said == "loss 3.1\ngristmill: rank 1: fault: the disk is full\n"


def test_a_rank_that_is_killed_ends_all(start: Any, tmp_path: Path) -> None:
    launcher = start("forever()")
    first, second = ranks_of(tmp_path)
    os.kill(second, signal.SIGKILL)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 137
    assert said == "gristmill: fault: rank 1 was ended by SIGKILL\n"
    assert not alive(first)


def test_our_own_fault_is_shown_whole(start: Any) -> None:
    launcher = start("if rank == 0: raise RuntimeError('oh')\nforever()")
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("RuntimeError: oh\n")


def test_no_rank_outlives_its_launcher(start: Any, tmp_path: Path) -> None:
    launcher = start("forever()")
    ranks = ranks_of(tmp_path)
    launcher.kill()
    wait_for(lambda: not any(map(alive, ranks)))


def test_a_rank_stopped_before_its_first_step(start: Any, tmp_path: Path) -> None:
    """Nothing handles the signal yet: the exit code tells of it, and no traceback."""
    launcher = start("forever()")
    ranks_of(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert (launcher.returncode, said) == (143, "")


def test_torchrun_has_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(launch.UserError, match="--processes '2' inside torchrun"):
        launch.launch(["train"], 2)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_tracebacks_are_held_back_wherever_the_stream_is_cut(
    size: int, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = b""

    def write(_: int, data: bytes) -> int:
        nonlocal passed
        passed += data
        return len(data)

    monkeypatch.setattr(rank_output.os, "write", write)
    head = b"\rstep 1\rstep 2\nTrace of a word\n not at the start: Traceback (most recent\n"
    page = f"{prefix}Traceback (most recent call last):\n  File x\nError: y\n".encode()
    output = rank_output.RankOutput(0, shown=True)
    for begin in range(0, len(head + page), size):
        output.take((head + page)[begin : begin + size])
    assert passed == head
    assert output.held == page
