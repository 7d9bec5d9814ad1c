"""Killed at any moment of any pass, a run goes on and gives the bytes of an uninterrupted one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.pipelines.fault_runs import Running, Runs, contents, count

# A pass is reached when so many of its files are finished: pattern and how many there will be.
PASSES = {
    "hash": (".staging/keys/*", 4),
    "judge": (".staging/timings/judge/*/*.json", 4),
    "clean": (".staging/pages/*", 12),
    "regroup": (".staging/parts/*", 8),
    "publish": ("*.parquet", 1),
}
SEEDS = range(8)
_BOUND_S = 60.0
_STOPPED = "gristmill: stopped; run the same command again to go on"


def reach(running: Running, output: Path, name: str, seed: int) -> bool:
    """Wait for a seeded moment of a pass; False when the run was faster."""
    rng = random.Random(f"{name} {seed}")
    pattern, files = PASSES[name]
    wanted = rng.randrange(1, files + 1)
    if name == "hash" and seed == 1:
        wanted = 0  # before the first file: workers are starting, or Beam plans
    reached = running.wait_until(lambda: count(output, pattern) >= wanted)
    time.sleep(rng.random() * 0.03)
    return reached


def nothing_partial(output: Path, whole: dict[str, bytes]) -> None:
    """What stands under a final name has its final bytes."""
    for path in (*output.glob("pages/*/*/[!.]*"), *output.glob("[!.]*.*")):
        name = str(path.relative_to(output))
        if name != "timings.json":
            assert path.read_bytes() == whole[name], f"{name} is partial"


def moments(chosen: dict[str, int]) -> list[object]:
    """One seed of each chosen pass; the others are slow."""
    return [
        pytest.param(name, seed, marks=[] if chosen.get(name) == seed else [pytest.mark.slow])
        for name in PASSES
        for seed in SEEDS
    ]


@pytest.mark.parametrize(("name", "seed"), moments(dict.fromkeys(PASSES, 0)))
def test_the_run_is_killed(
    name: str, seed: int, runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    running = runs.start(shards, tmp_path)
    reach(running, tmp_path, name, seed)
    running.kill()
    ended = running.end()
    assert ended.code in (-signal.SIGKILL, 0)
    nothing_partial(tmp_path, whole)
    runs.finish(shards, tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize(("name", "seed"), moments({"hash": 1, "clean": 0, "regroup": 0}))
def test_one_worker_is_killed(
    name: str, seed: int, runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The run ends at once and with one line; Beam alone waits, or prints pages."""
    running = runs.start(shards, tmp_path, "--workers", "2")
    running.wait_until(lambda: len(running.workers()) == 2)
    reach(running, tmp_path, name, seed)
    workers = running.workers()
    if workers:
        os.kill(random.Random(seed).choice(workers), signal.SIGKILL)
    ended = running.end(_BOUND_S)  # and nothing of it is left behind
    nothing_partial(tmp_path, whole)
    if ended.code != 0:  # not all was over
        assert ended.code == 1
        assert ended.lines() == [
            "gristmill: fault: a worker process was killed by signal 9 (SIGKILL), as happens when "
            "memory runs out: run the same command again to go on"
        ]
    else:
        assert name == "publish"
    runs.finish(shards, tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize(
    ("number", "workers", "name"),
    [
        (signal.SIGINT, 1, "clean"),
        (signal.SIGTERM, 2, "hash"),
        pytest.param(signal.SIGTERM, 1, "regroup", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, "clean", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, "regroup", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_of_it(
    number: signal.Signals, workers: int, name: str,
    runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path,
) -> None:  # fmt: skip
    """Ctrl+C, and what a scheduler or a spot machine sends, to the whole process group."""
    running = runs.start(shards, tmp_path, "--workers", str(workers))
    assert reach(running, tmp_path, name, 0)
    running.kill_group(number)
    ended = running.end(_BOUND_S)
    assert (ended.code, ended.lines()) == (128 + number, [_STOPPED])
    nothing_partial(tmp_path, whole)
    runs.finish(shards, tmp_path)
    assert contents(tmp_path) == whole


def test_a_run_that_was_killed_in_its_clean_up_is_tidied(
    runs: Runs, shards: list[Path], kept: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The manifest stands, and so do the staging files: the next run has only those to remove."""
    output = tmp_path / "output"
    shutil.copytree(kept, output)
    claim = output / ".staging" / "run.json"
    claim.write_text(claim.read_text().replace(str(kept), str(output)))
    ended = runs.finish(shards, output)
    assert "already finished" in ended.stderr
    assert contents(output) == whole
    assert not (output / ".staging").exists()
