"""Runs that are killed, stopped and moved to other devices go on as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.training.train_runs import (
    Inputs,
    Moment,
    Run,
    Runs,
    make_inputs,
    metrics,
    result,
    runs_of,
)
from training import checkpoint


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def runs(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_of(tmp_path_factory.mktemp("logs"), inputs) as found:
        yield found


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""
    output = tmp_path_factory.mktemp("whole")
    runs.finish(output)
    return output


def newest(output: Path) -> str:
    found = checkpoint.latest(output)
    return "" if found is None else found.name


def killed(run: Run) -> None:
    assert run.end() == -signal.SIGKILL, run.said()


def test_killed_at_every_kind_of_moment(runs: Runs, whole: Path, tmp_path: Path) -> None:
    """One run, killed again and again: each time the last whole checkpoint is there."""
    output = tmp_path / "run"
    for moment, left in [
        (Moment("open", r"00000002.*/shard-"), ""),
        (Moment("os.rename", r"00000002.*/state\.json$"), ""),
        (Moment("os.rename", r"/step-00000002$"), ""),
        (Moment("os.rename", r"checkpoints/latest$"), "step-00000002"),
        (Moment("open", r"00000004.*/shard-"), "step-00000002"),
        (Moment("os.rename", r"checkpoints/latest$"), "step-00000004"),
        (Moment("os.rename", r"/\.step-00000002\.old"), "step-00000006"),
        (Moment("os.rename", r"checkpoints/latest$"), "step-00000006"),  # as the pointer says
        (Moment("os.rmdir", r"\.step-00000002\.old"), "step-00000008"),
    ]:
        killed(runs.start(output, kill_at=moment))
        assert newest(output) == left, moment
    # At any step.
    step = random.Random(os.urandom(1)).choice((9, 11))
    run = runs.start(output)
    run.wait_for_step(step)
    run.send(signal.SIGKILL)
    killed(run)
    assert int(newest(output)[-2:]) >= step - 1
    # While it finishes.
    for moment in (
        Moment("open", r"model\.gristmill-partial/tokenizer"),
        Moment("os.rename", r"/model$"),
        Moment("os.rename", r"/manifest\.json$"),
    ):
        killed(runs.start(output, kill_at=moment))
        assert newest(output) == "step-00000012"
    runs.finish(output)
    assert metrics(output) == metrics(whole)
    assert result(output) == result(whole)
    assert [path.name for path in output.rglob("*gristmill-*")] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal_nothing_is_lost(
    number: int, runs: Runs, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = runs.start(output, "checkpoint.every=100")
    run.wait_for_step(3)
    run.send(number)
    assert run.end() == 0, run.said()
    (saved,) = re.findall(r"saved after step (\d+)", run.said())
    assert newest(output) == f"step-{int(saved):08d}"
    last = max(line["step"] for line in metrics(output))
    assert int(saved) == last  # the step that was under way, and no other
    # Only how the work is done may change in between.
    runs.finish(output, "checkpoint.every=3", "checkpoint.keep=1")
    assert metrics(output) == metrics(whole)
    assert result(output) == result(whole)


def test_another_recipe_does_not_go_on(runs: Runs, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    killed(runs.start(output, kill_at=Moment("open", r"00000004.*/shard-")))
    run = runs.start(output, "schedule.steps=20")
    assert run.end() == 2
    (said,) = run.said().splitlines()
    assert said.startswith(f"gristmill: '{output}' holds another run: "
                           "schedule.steps = '20' is '12' there: ")  # fmt: skip
    assert "model.init" in said
    assert newest(output) == "step-00000002"
    runs.finish(output, "--restart")
    assert result(output) == result(whole)


def close(output: Path, whole: Path) -> None:
    """The same curve, up to the rounding of sums over ranks."""
    found, expected = metrics(output), metrics(whole)
    assert [(line["kind"], line["step"]) for line in found] == [
        (line["kind"], line["step"]) for line in expected
    ]
    for line, right in zip(found, expected, strict=True):
        if line["kind"] == "train":
            assert line["loss"] == pytest.approx(right["loss"], abs=1e-5)
            assert (line["examples"], line["tokens"]) == (right["examples"], right["tokens"])
        else:
            for domain, losses in line["domains"].items():
                for name, term in losses["terms"].items():
                    right_term = right["domains"][domain]["terms"][name]
                    assert term["loss"] == pytest.approx(right_term["loss"], abs=1e-5)


def test_goes_on_under_other_strategies_and_ranks(runs: Runs, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    for step, strategy in ((2, "ddp"), (4, "zero3"), (6, "single"), (8, "zero2")):
        ranks = runs.start_ranks(
            1 if strategy == "single" else 2, output, f"run.strategy={strategy}"
        )
        ranks[0].wait_for_step(step)
        ranks[-1].send(signal.SIGTERM)  # the others hear of it
        for rank in ranks:
            assert rank.end() == 0, rank.said()
        state = checkpoint.read_state(output / "checkpoints" / newest(output))
        assert state["step"] == max(line["step"] for line in metrics(output))
    runs.finish(output)
    close(output, whole)


def test_two_processes_stopped_by_a_signal_to_their_launcher(
    runs: Runs, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = runs.start(output, "--processes=2", "run.strategy=zero1")
    run.wait_for_step(2)
    run.send(signal.SIGTERM)
    assert run.end() == 0, run.said()
    assert "saved after step" in run.said()
    assert newest(output) != ""
    runs.finish(output)
    close(output, whole)


@pytest.mark.slow
def test_killed_at_every_write(runs: Runs, whole: Path, tmp_path: Path) -> None:
    """Every file that is opened for writing, renamed or removed in a run."""
    settings = ("checkpoint.every=4", "checkpoint.keep=1")
    place, number = r"/run/", 0
    while True:
        number += 1
        output = tmp_path / f"{number}" / "run"
        run = runs.start(output, *settings, kill_at=Moment("", place, number))
        if run.end() == 0:
            break
        killed(run)
        runs.finish(output, *settings)
        assert metrics(output) == metrics(whole), number
        assert result(output) == result(whole), number
    assert number > 30


@pytest.mark.slow
def test_torchrun(runs: Runs, inputs: Inputs, whole: Path, tmp_path: Path) -> None:
    """SIGTERM to torchrun: the ranks save and leave, torchrun itself ends with 1."""
    output = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", "-m", "scripts.cli", *inputs.words(output)]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 300
        while not any(line["step"] >= 2 for line in metrics(output)):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=300)
    finally:
        process.terminate()  # killed, torchrun would leave its ranks behind
        process.wait(60)
    assert process.returncode == 1
    (saved,) = re.findall(r"saved after step (\d+)", said)
    assert newest(output) == f"step-{int(saved):08d}"
    runs.finish(output)
    close(output, whole)
