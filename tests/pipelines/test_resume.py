"""A run that is killed goes on where it was, and gives the bytes of an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.files import TEMPORARY_SUFFIX

REPOSITORY = Path(__file__).resolve().parents[2]
MOMENTS = 10
_LIMIT_S = 120


def command(inputs: str, output: Path, workers: int, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "scripts.cli", "mine", "default", "--input", inputs,
        "--output", str(output), "--workers", str(workers),
        "--set", "dedup.ranges=4", "--set", "output.target_bytes=100000", *more,
    ]  # fmt: skip


def environment(data_dir: Path) -> dict[str, str]:
    return os.environ | {"GRISTMILL_DATA": str(data_dir)}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "timings.json"
    }


def finish(words: list[str], data_dir: Path) -> None:
    done = subprocess.run(
        words, env=environment(data_dir), cwd=REPOSITORY, capture_output=True, text=True,
        timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def inputs(data_dir: Path) -> str:
    return f"{data_dir}/wet_docs_small/*.warc.wet.gz"


@pytest.fixture(scope="module")
def whole(
    inputs: str, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    finish(command(inputs, folder, 1), data_dir)
    found = contents(folder)
    assert len(found) > 30
    return found


def files_in(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_killed_then_resumed(
    moment: int, inputs: str, data_dir: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The moment is a number of files written so far, plus a little, so that every pass is hit."""
    rng = random.Random(moment)
    # Some 4 key files, 8 of pages, 2 for each part, and the timings: about 150 in all.
    after_files = rng.randrange(1 + 14 * moment, 15 + 14 * moment)
    workers = 1 + moment % 2
    words = command(inputs, tmp_path, workers)
    process = subprocess.Popen(
        words, env=environment(data_dir), cwd=REPOSITORY, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None and files_in(tmp_path) < after_files:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(rng.random() * 0.05)
    process.kill()  # the parent alone: its workers must notice
    killed = process.wait() == -signal.SIGKILL
    for path in tmp_path.glob("pages/*/*/*.parquet"):
        name = str(path.relative_to(tmp_path))
        assert path.read_bytes() == whole[name], f"{name} is partial after the kill"
    if killed:
        assert (
            not (tmp_path / "manifest.json").exists() or contents(tmp_path).keys() >= whole.keys()
        )
    finish(command(inputs, tmp_path, 3 - workers), data_dir)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_stops_cleanly(
    workers: int, inputs: str, data_dir: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        command(inputs, tmp_path, workers), env=environment(data_dir), cwd=REPOSITORY,
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + _LIMIT_S
    while files_in(tmp_path) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends: to all of them
    _, stderr = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert stderr.rstrip().endswith("gristmill: stopped; run the same command again to go on")
    while members(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    finish(command(inputs, tmp_path, workers), data_dir)
    assert contents(tmp_path) == whole


def test_workers_leave_with_their_parent(inputs: str, data_dir: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(inputs, tmp_path, 2), env=environment(data_dir), cwd=REPOSITORY,
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + _LIMIT_S
    while len(members(process.pid)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    while members(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def members(session: int) -> list[int]:
    """Live processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def test_restart_throws_staging_and_results_away(
    inputs: str, data_dir: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    finish(command(inputs, tmp_path, 1, "--set", "pages.min_chars=1000"), data_dir)
    other = contents(tmp_path)
    assert other != whole
    (tmp_path / "notes.txt").write_text("the user's own")
    finish(command(inputs, tmp_path, 1, "--restart"), data_dir)
    assert contents(tmp_path) == whole | {"notes.txt": b"the user's own"}
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(TEMPORARY_SUFFIX)]
