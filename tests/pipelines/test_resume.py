"""Whose an output folder is: stopping, going on, beginning anew, and one run at a time."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from models.files import TEMPORARY_SUFFIX
from tests.pipelines.fault_runs import (
    LIMIT_S,
    REPOSITORY,
    Runs,
    before_file,
    contents,
    count,
    members,
)


def test_ctrl_c_stops_the_command_as_a_user_starts_it(
    data_dir: Path, shards: list[Path], tmp_path: Path
) -> None:
    words = [word for path in shards for word in ("--input", str(path))]
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.cli", "mine", "default", *words, "--output", str(tmp_path),
         "--workers", "2"],
        env=os.environ | {"GRISTMILL_DATA": str(data_dir)}, cwd=REPOSITORY,
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + LIMIT_S
    while not count(tmp_path, ".staging/keys/*"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends: to all of them
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert stderr.strip() == "gristmill: stopped; run the same command again to go on"
    while members(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_workers_leave_with_their_parent(runs: Runs, shards: list[Path], tmp_path: Path) -> None:
    running = runs.start(shards, tmp_path, "--workers", "2")
    running.wait_until(lambda: len(running.workers()) == 2)
    running.kill()
    assert running.end().code == -signal.SIGKILL  # and nothing is left behind


def test_restart_throws_staging_and_results_away(
    runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    runs.finish(shards, tmp_path, "--set", "pages.min_chars=1000")
    assert contents(tmp_path) != whole
    (tmp_path / "notes.txt").write_text("the user's own")
    runs.finish(shards, tmp_path, "--restart")
    assert contents(tmp_path) == whole | {"notes.txt": b"the user's own"}
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(TEMPORARY_SUFFIX)]


def stopped_in_pass_1(runs: Runs, shards: list[Path], output: Path, *words: str) -> None:
    running = runs.start(shards, output, *words, pause=before_file("/timings/hash/"))
    running.paused()
    running.kill()
    running.end()


def test_no_staging_folder_is_left_when_its_place_changes(
    runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    """With --restart and without; what else stands in those places stays."""
    one, other, output = tmp_path / "one", tmp_path / "other", tmp_path / "output"
    one.mkdir()
    (one / "precious").write_text("mine")
    places = [["--set", f"run.staging={place}"] for place in (one, other)]
    stopped_in_pass_1(runs, shards, output, *places[0])
    assert len(list(one.glob("gristmill-*"))) == 1
    runs.finish(shards, output, "--restart", *places[1])
    assert contents(output) == whole
    stopped_in_pass_1(runs, shards, tmp_path / "output2", *places[1])
    runs.finish(shards, tmp_path / "output2")
    assert contents(tmp_path / "output2") == whole
    assert [path.name for path in (*one.iterdir(), *other.iterdir())] == ["precious"]


def test_one_run_at_a_time(
    runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    lock = tmp_path / ".staging" / "run.lock"
    lock.parent.mkdir()
    held = os.open(lock, os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    ended = runs.run(shards, tmp_path)
    assert ended.code == 2
    assert "another run is at work" in ended.stderr
    lock.unlink()  # the lock of a file that is gone guards nothing
    runs.finish(shards, tmp_path)
    os.close(held)
    assert contents(tmp_path) == whole
