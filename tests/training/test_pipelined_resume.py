"""Pipelines that are killed and stopped go on to the same bytes; torchrun restarts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.training.train_runs import Inputs, Runs, make_inputs, metrics, result, runs_of
from training import checkpoint

SETTINGS = ("run.strategy=pipeline", "run.pipeline.costs=operations")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def runs(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_of(tmp_path_factory.mktemp("logs"), inputs) as found:
        yield found


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in two stages that nothing happened to."""
    output = tmp_path_factory.mktemp("whole")
    _finish(runs, output)
    return output


def _finish(runs: Runs, output: Path) -> None:
    for rank in runs.start_ranks(2, output, *SETTINGS):
        assert rank.end() == 0, rank.said()


def _same(output: Path, whole: Path) -> None:
    assert metrics(output) == metrics(whole)
    assert result(output) == result(whole)


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_in_any_stage(runs: Runs, whole: Path, tmp_path: Path, killed: int) -> None:
    output = tmp_path / "run"
    ranks = runs.start_ranks(2, output, *SETTINGS)
    ranks[0].wait_for_step(5)
    ranks[killed].send(signal.SIGKILL)
    assert ranks[killed].end() == -signal.SIGKILL
    # The other one hears of it by the connection that is gone, and does not wait for ever.
    assert ranks[1 - killed].end() not in (0, -signal.SIGKILL)
    found = checkpoint.latest(output)
    assert found is not None
    assert checkpoint.read_state(found)["state"]["step"] >= 4  # every 2 steps
    _finish(runs, output)
    _same(output, whole)


def test_stopped_by_a_signal_to_the_launcher(runs: Runs, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run = runs.start(output, "--processes=2", *SETTINGS)
    run.wait_for_step(3)
    run.send(signal.SIGTERM)
    assert run.end() == 0, run.said()
    assert "saved after step" in run.said()
    _finish(runs, output)
    _same(output, whole)


@pytest.mark.slow
def test_torchrun_restarts_what_died(inputs: Inputs, whole: Path, tmp_path: Path) -> None:
    """One rank is killed; torchrun starts all of them again, and they go on by themselves."""
    output = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1",
               "--nproc-per-node", "2", "-m", "scripts.cli",
               *inputs.words(output, *SETTINGS)]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 300
        while not any(line["step"] >= 5 for line in metrics(output)):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        os.kill(_children(process.pid)[-1], signal.SIGKILL)
        _, said = process.communicate(timeout=300)
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0, said
    assert "going on after step" in said
    _same(output, whole)


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
