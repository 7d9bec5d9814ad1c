"""Whole runs on a tiny crawl: the same curve however the work is cut, stopped or spoilt."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from models.errors import Fault, UserError
from pipelines import lock
from tests.training import step_examples
from tests.training.tiny_runs import Place, make_place, recipe, without_times
from training import evaluations, loop, placing
from training.evaluate.held_out import held_out_losses
from training.metrics import Clock
from training.objectives import Objective
from training.optimisers import build_optimiser
from training.recipe import Run
from training.strategy import Parallel, Placement

ALONE = Placement(0, 1, torch.device("cpu"), "single")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("crawl"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share the processor with each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def run(place: Place, folder: Path, *fields: str, restart: bool = False) -> dict[str, Any]:
    return loop.train(recipe(place, folder, *fields), quiet=True, restart=restart)


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


@pytest.fixture(scope="module")
def finished(place: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, run(place, folder, "model.dropout=0.1")


def test_run_says_what_it_did(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    assert summary["status"] == "finished"
    assert (summary["step"], summary["examples"], summary["skipped_steps"]) == (8, 40, 0)
    train = lines(folder, "train")
    assert [line["step"] for line in train] == [3, 6, 8]
    assert [line["examples"] for line in train] == [15, 30, 40]
    assert train[-1]["tokens"] == summary["tokens"] > 0
    # 8 steps, 2 of them warm-up: at the third line step 8 is taken at 1/6 of the rate.
    assert train[-1]["learning_rate"] == pytest.approx(1e-2 / 6)
    assert [line["step"] for line in lines(folder, "evaluation")] == [5, 8]
    assert set(summary["evaluation"]["domains"]) == {"bn", "hi"}
    assert set(train[0]["domains"]) == {"bn", "hi"}
    assert train[-1]["loss"] < train[0]["loss"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints", "manifest.json", "metrics.jsonl", "model",
    ]  # fmt: skip


def test_same_recipe_same_curve(
    place: Place, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = finished
    run(place, tmp_path / "run", "model.dropout=0.1")
    assert without_times(tmp_path / "run") == without_times(folder)
    for name in ("manifest.json", "model/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()


def test_stopped_and_resumed_is_uninterrupted(
    place: Place,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = finished
    taken = 0
    count = Clock.step

    def stop_in_step_4(self: Clock, *arguments: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        count(self, *arguments)

    monkeypatch.setattr(Clock, "step", stop_in_step_4)
    summary = run(place, tmp_path / "run", "model.dropout=0.1")
    assert (summary["status"], summary["step"]) == ("stopped", 4)
    assert summary["model"] is None
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "loss": 9}\n{"kind": "tr')  # died later
    assert run(place, tmp_path / "run", "model.dropout=0.1")["status"] == "finished"
    assert without_times(tmp_path / "run") == without_times(folder)
    for name in ("manifest.json", "model/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()


def _same(folder: Path, other: Path) -> bool:
    return without_times(folder) == without_times(other) and all(
        (folder / name).read_bytes() == (other / name).read_bytes()
        for name in ("manifest.json", "model/model.safetensors")
    )


def _signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("evaluation", [1, 2])
def test_signal_cuts_an_evaluation_off(
    place: Place,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
) -> None:
    """In the middle of the run, and after its last step; the next call evaluates."""
    calls = 0

    def interrupted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == evaluation:
            _signal()
        return held_out_losses(*arguments, **more)

    monkeypatch.setattr(evaluations, "held_out_losses", interrupted)
    summary = run(place, tmp_path / "run", "model.dropout=0.1")
    step = {1: 5, 2: 8}[evaluation]
    assert (summary["status"], summary["step"], summary["model"]) == ("stopped", step, None)
    assert summary["evaluation"] == {}
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{step:08d}\n"
    assert len(lines(tmp_path / "run", "evaluation")) == evaluation - 1
    summary = run(place, tmp_path / "run", "model.dropout=0.1")
    assert summary["status"] == "finished"
    assert set(summary["evaluation"]["domains"]) == {"bn", "hi"}
    assert _same(tmp_path / "run", finished[0])


def test_signal_before_the_first_step(
    place: Place,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*arguments: Any) -> Any:
        _signal()
        return build_optimiser(*arguments)

    monkeypatch.setattr(loop, "build_optimiser", interrupted)
    summary = run(place, tmp_path / "run", "model.dropout=0.1")
    assert (summary["status"], summary["step"], summary["examples"]) == ("stopped", 0, 0)
    monkeypatch.undo()
    assert run(place, tmp_path / "run", "model.dropout=0.1")["status"] == "finished"
    assert _same(tmp_path / "run", finished[0])


def test_another_recipe_is_told_before_anything_of_its_run_is_taken(
    place: Place,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipeline's saved cut, for one: it is of another network here."""
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()

    def put(*_: Any, **__: Any) -> Any:
        raise AssertionError("the checkpoint of another run is taken")

    monkeypatch.setattr(placing, "put", put)
    with pytest.raises(UserError, match=r"holds another run: model\.dropout = '0\.0' is '0\.1'"):
        run(place, tmp_path / "run", "model.family=decoder")


def test_one_run_at_a_time(place: Place, tmp_path: Path) -> None:
    descriptor = lock.take(tmp_path / "run" / "run.lock")
    assert descriptor is not None
    for restart in (False, True):
        with pytest.raises(UserError, match=r"another run is at work in output .*run'"):
            run(place, tmp_path / "run", restart=restart)
    os.close(descriptor)  # as the end of a process does, whatever ended it
    assert run(place, tmp_path / "run", "schedule.steps=3")["status"] == "finished"
    assert not (tmp_path / "run" / "run.lock").exists()


def test_goes_on_with_smaller_microbatches(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way out of too little memory; the curve stays what it was."""
    fields = ("run.log_every=1", "evaluation.every=4", "checkpoint.every=4")
    run(place, tmp_path / "whole", *fields)
    monkeypatch.setattr(evaluations, "held_out_losses", None)
    with pytest.raises(TypeError):  # died in its evaluation
        run(place, tmp_path / "run", *fields)
    monkeypatch.undo()
    more = ("batch.microbatch=1", "run.activation_checkpointing=true")
    assert run(place, tmp_path / "run", *fields, *more)["status"] == "finished"
    found, expected = without_times(tmp_path / "run"), without_times(tmp_path / "whole")
    assert [(one["kind"], one["step"]) for one in found] == [
        (one["kind"], one["step"]) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        if one["kind"] == "train":
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    recipes = [
        json.loads((tmp_path / name / "manifest.json").read_text())["recipe_digest"]
        for name in ("run", "whole")
    ]
    assert recipes[0] == recipes[1]


def test_finished_run_has_nothing_to_do(
    place: Place, finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, summary = finished
    monkeypatch.setattr(loop, "build_network", None)
    again = run(place, folder, "model.dropout=0.1")
    assert again["status"] == "already finished"
    for name in ("step", "examples", "tokens", "evaluation", "model"):
        assert again[name] == summary[name]


def test_another_recipe_is_refused_and_restart_takes_over(place: Place, tmp_path: Path) -> None:
    short = ("schedule.steps=3", "schedule.warmup_steps=1")
    run(place, tmp_path / "run", *short)
    with pytest.raises(UserError, match=r"model\.dropout = '0\.2' is '0\.0' there.*--restart"):
        run(place, tmp_path / "run", *short, "model.dropout=0.2")
    summary = run(place, tmp_path / "run", *short, "model.dropout=0.2", restart=True)
    assert summary["status"] == "finished"
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [3]


@pytest.mark.parametrize("restart", [False, True])
def test_folder_of_something_else_is_left_alone(
    place: Place, tmp_path: Path, restart: bool
) -> None:
    crawl = Path(place.manifest).parent
    before = Path(place.manifest).read_bytes()
    with pytest.raises(UserError, match=r"no manifest of a run.*--output"):
        run(place, crawl, restart=restart)
    assert Path(place.manifest).read_bytes() == before
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"'model/mine\.txt', which no run"):
        run(place, tmp_path, restart=restart)
    assert (tmp_path / "model" / "mine.txt").read_text() == "mine"


def _spoil(monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[int], bool]) -> None:
    """Let the first example of every microbatch of some steps have an infinite loss."""
    compute = Objective.forward
    calls = 0

    def forward(self: Objective, batch: Any) -> Any:
        nonlocal calls
        losses = compute(self, batch)
        if not self.training:
            return losses
        step, calls = calls // 3, calls + 1  # 5 examples in microbatches of 2: 3 in a step
        if not spoilt(step):
            return losses
        factors = torch.ones_like(losses.sums)
        factors[:, 0] = torch.inf
        return losses._replace(sums=losses.sums * factors)

    monkeypatch.setattr(Objective, "forward", forward)


def test_infinite_step_is_skipped_and_named(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(monkeypatch, lambda step: step in (1, 4))
    summary = run(place, tmp_path / "run", "run.max_skipped_steps=2")
    assert (summary["status"], summary["step"], summary["skipped_steps"]) == ("finished", 8, 2)
    first, second = lines(tmp_path / "run", "skipped")
    # Microbatch g of a step has the examples i with i % 3 == g.
    assert (first["step"], first["examples"], first["in_a_row"]) == (2, [5, 9], 1)
    assert first["non_finite_losses"] == [5, 6, 7]
    assert (second["step"], second["non_finite_losses"], second["in_a_row"]) == (5, [20, 21, 22], 1)
    assert all(line["loss"] < 7 for line in lines(tmp_path / "run", "train"))
    assert lines(tmp_path / "run", "train")[-1]["skipped_steps"] == 2


def test_line_of_skipped_steps_alone_has_no_loss(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(monkeypatch, lambda step: step < 2)
    run(place, tmp_path / "run", "schedule.steps=4", "run.log_every=2")
    first, second = lines(tmp_path / "run", "train")
    assert (first["loss"], first["terms"], first["gradient_norm"]) == (None, {}, None)
    assert second["loss"] > 4


def test_too_many_infinite_steps_end_the_run(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(monkeypatch, lambda step: step >= 5)
    with pytest.raises(Fault, match=r"2 steps in a row, up to step 7, .*learning_rate") as caught:
        run(place, tmp_path / "run", "run.max_skipped_steps=2", "checkpoint.every=2")
    assert "\n" not in str(caught.value)
    assert [line["in_a_row"] for line in lines(tmp_path / "run", "skipped")] == [1, 2]
    # The checkpoint of step 6 has the weights of step 5: the skipped step changed nothing.
    latest = tmp_path / "run" / "checkpoints" / "latest"
    assert latest.read_text().strip() == "step-00000006"
    monkeypatch.undo()
    assert run(place, tmp_path / "run", "run.max_skipped_steps=2", "checkpoint.every=2")[
        "skipped_steps"
    ] == 1  # fmt: skip


def test_skipped_step_leaves_the_weights(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(monkeypatch, lambda step: step >= 2)
    fields = ("checkpoint.every=1", "checkpoint.keep=9", "run.max_skipped_steps=3")
    with pytest.raises(Fault):
        run(place, tmp_path / "run", *fields)
    folders = [tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (1, 2, 3, 4)]
    one, two, *skipped = [load_file(next(folder.glob("shard-*"))) for folder in folders]
    assert not all(torch.equal(one[name], two[name]) for name in two)
    for later in skipped:
        assert later.keys() == two.keys()
        assert all(torch.equal(later[name], two[name]) for name in two)


def test_clipping_bounds_the_gradient() -> None:
    parallel = Parallel(step_examples.objective("decoder"), ALONE, Run())
    examples = step_examples.examples("decoder", 0, 4)
    step_examples.gradients(parallel, "decoder", examples, of=4, microbatch=4, step=0)
    norm = parallel.gradient_norm()
    flat = torch.cat([one.flatten() for one in
                      step_examples.whole(parallel.objective, gradient=True).values()])  # fmt: skip
    assert norm == pytest.approx(float(flat.double().norm()), rel=1e-5)
    parallel.scale_gradients(0.5 / norm)
    assert parallel.gradient_norm() == pytest.approx(0.5, rel=1e-5)


def test_bf16_follows_fp32(place: Place, tmp_path: Path) -> None:
    fields = ("schedule.steps=3", "schedule.warmup_steps=1", "run.log_every=1")
    run(place, tmp_path / "fp32", *fields)
    run(place, tmp_path / "bf16", *fields, "run.precision=bf16")
    exact, rough = (
        [line["loss"] for line in lines(tmp_path / name, "train")] for name in ("fp32", "bf16")
    )
    assert rough != exact
    assert rough == pytest.approx(exact, abs=0.05)


@pytest.mark.slow  # compiles C++
@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_compiled_run_is_the_plain_one(
    place: Place, tmp_path: Path, family: str, activation_checkpointing: bool
) -> None:
    fields = (f"model.family={family}", "schedule.steps=3", "schedule.warmup_steps=1",
              "run.log_every=1", "checkpoint.every=2")  # fmt: skip
    run(place, tmp_path / "plain", *fields)
    torch._dynamo.reset()
    counters.clear()
    more = f"run.activation_checkpointing={str(activation_checkpointing).lower()}"
    run(place, tmp_path / "compiled", *fields, "run.compile=true", more)
    # torch.compile says nothing when it leaves a function as it is.
    assert counters["stats"]["calls_captured"] > 50
    assert not counters["graph_break"]
    plain, compiled = (
        [line["loss"] for line in lines(tmp_path / name, "train")] for name in ("plain", "compiled")
    )
    assert compiled == pytest.approx(plain, abs=1e-4)
