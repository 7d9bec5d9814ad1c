"""`gristmill train`: mistakes in one line, the plan, shipped recipes, a run from the front door."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from scripts import train_command
from scripts.cli import main
from tests.training.tiny_runs import Place, make_place, overrides, recipe, without_times
from training import placing, run_plan
from training.prepare import prepare
from training.recipe import load_recipe, shipped_recipes

pytestmark = pytest.mark.usefixtures("one_process")
RECIPES = ["albert-base", "albert-bn", "albert-large", "albert-small", "decoder-120m",
           "decoder-280m", "decoder-small", "demo"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("crawl"))


def command(place: Place, output: Path, *words: str) -> list[str]:
    sets = [word for one in overrides(place, output) for word in ("--set", one)]
    return ["train", "demo", *sets, *words]


def test_shipped_recipes() -> None:
    assert shipped_recipes() == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipe_is_valid(name: str) -> None:
    assert load_recipe(name).name == name


def test_albert_large_has_the_settings_of_sahajbert() -> None:
    found = load_recipe("albert-large")
    assert found.model.size == "large"
    assert found.examples.sequence_length == 512
    assert found.batch.samples == 4096
    assert (found.optimiser.name, found.optimiser.learning_rate) == ("lamb", 1.76e-3)
    assert (found.optimiser.epsilon, found.optimiser.weight_decay) == (1e-6, 0.01)
    assert found.optimiser.max_gradient_norm == 1.0
    assert found.schedule.warmup_steps == 5000
    assert found.schedule.steps == 1_000_000


@pytest.mark.parametrize("name", ["decoder-120m", "decoder-280m"])
def test_decoders_see_about_twenty_tokens_a_parameter(name: str, place: Place) -> None:
    found = load_recipe(name, overrides(place, Path("nowhere"))[:3])
    plan = run_plan.make_plan(found, prepare(found), 1)
    assert 20 < plan.to_json()["tokens"] / int(name.removeprefix("decoder-")[:-1]) / 1e6 < 25


@pytest.mark.parametrize("name", ["albert-small", "decoder-small"])
def test_small_recipe_runs(
    name: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", name, "--data", place.manifest, "--tokenizer", place.tokenizer, "--output",
             str(tmp_path / "run"), "--json"]  # fmt: skip
    for field in ("schedule.steps=2", "schedule.warmup_steps=1", "batch.microbatch=1",
                  "examples.sequence_length=32", "evaluation.examples=1"):  # fmt: skip
        words += ["--set", field]
    words += ["--set", "batch.tokens=64" if name.startswith("decoder") else "batch.samples=2"]
    assert main(words) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["step"], summary["examples"]) == ("finished", 2, 4)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown recipe": (["train", "dem"], ["'dem'", "'demo'"]),
    "no data": (["train", "demo"], ["--data"]),
    "no tokenizer": (
        ["train", "demo", "--data", "nowhere"], ["no tokenizer", "train-tokenizer nowhere"],
    ),
    "no output": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}"], ["--output"],
    ),
    "missing crawl": (
        ["train", "demo", "--data", "nowhere", "--tokenizer", "{tokenizer}", "--output", "run"],
        ["'nowhere/manifest.json'"],
    ),
    "missing tokenizer": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "nowhere", "--output", "run"],
        ["'nowhere'", "train-tokenizer"],
    ),
    "output is a file": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}", "--output", "file"],
        ["'file'", "--output"],
    ),
    "output is a URL": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}", "--output",
         "gs://bucket/run"],
        ["'gs://bucket/run'", "local"],
    ),
    "no such size": (["train", "demo", "--set", "model.size=280m"], ["'280m'", "tiny, small"]),
    "init from nowhere": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}", "--output", "run",
         "--set", "model.init=nowhere"],
        ["model.init = 'nowhere'"],
    ),
    "single on two": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}", "--output", "run",
         "--set", "run.strategy=single", "--processes", "2"],
        ["'single'", "2 processes", "zero3"],
    ),
    "too few microbatches": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}", "--output", "run",
         "--set", "batch.samples=8", "--set", "run.strategy=pipeline", "--processes", "4"],
        ["'1' microbatches: it needs 4 or more", "set batch.microbatch=2, not 64"],
    ),
    "too few microbatches, planned": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}", "--output", "run",
         "--set", "batch.samples=8", "--set", "run.strategy=pipeline", "--processes", "4",
         "--dry-run"],
        ["set batch.microbatch=2, not 64"],
    ),
    "settings of a pipeline without one": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}", "--output", "run",
         "--set", "run.strategy=zero2", "--set", "run.pipeline.schedule=zbv", "--processes", "2"],
        ["run.pipeline.schedule = 'zbv'", "run.strategy=pipeline"],
    ),
    "unknown language": (
        ["train", "demo", "--data", "{crawl}", "--tokenizer", "{tokenizer}", "--output", "run",
         "--set", 'data.languages=["xx"]'],
        ["'xx'", "bn, hi"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_gets_one_line_and_writes_nothing(
    name: str,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    words, expected = MISTAKES[name]
    where = {"{crawl}": place.manifest, "{tokenizer}": place.tokenizer}
    assert main([where.get(word, word) for word in words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    for part in expected:
        assert part in output.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_model_of_another_vocabulary_is_refused(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from models.albert import build_albert

    build_albert("tiny", 77).save_pretrained(tmp_path / "init")
    assert main(command(place, tmp_path / "run", "--set", f"model.init={tmp_path / 'init'}")) == 2
    assert "vocabulary of '77' tokens" in capsys.readouterr().err


def test_processes_inside_torchrun_are_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command(place, tmp_path / "run", "--processes", "2")) == 2


def test_dry_run_shows_the_plan_and_writes_nothing(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(place, tmp_path / "run", "--dry-run", "--json")) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["recipe"]["schedule"]["steps"] == 8
    plan = value["plan"]
    assert plan["examples_per_step"] == 5
    assert plan["microbatches_per_step"] == 3
    assert plan["tokens_per_step"] == 5 * 32
    assert plan["tokens"] == 8 * 5 * 32
    memory = plan["memory_bytes"]
    assert memory["weights"] == 4 * plan["parameters"]
    assert memory["moments"] == 8 * plan["parameters"]
    assert memory["activations"] + memory["working"] > 0
    assert memory.pop("total") == sum(memory.values())
    assert plan["memory_peak"].split(" of ")[0] in ("forward", "backward", "optimiser")
    assert plan["checkpoint_bytes"] == 12 * plan["parameters"]
    bn, hi = plan["domains"]
    assert (bn["name"], hi["name"]) == ("bn", "hi")
    assert bn["share"] + hi["share"] == pytest.approx(1)
    assert bn["share"] == pytest.approx(bn["chars"] / (bn["chars"] + hi["chars"]))
    assert 1 < bn["chars_per_token"] < 12
    assert bn["epochs"] == pytest.approx(
        1280 * bn["share"] * bn["chars_per_token"] / (0.9 * bn["chars"])
    )
    assert main(command(place, tmp_path / "run", "--dry-run", "--processes", "2")) == 0
    text = capsys.readouterr().out
    assert "ranks              2, strategy ddp" in text
    assert f"parameters         {plan['parameters']:,}" in text
    assert not (tmp_path / "run").exists()


def test_dry_run_says_what_auto_would_do(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert main(command(place, tmp_path / "run", "--dry-run", "--json")) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["auto"] is None
    whole = plan["memory_bytes"]["total"]
    monkeypatch.setattr(placing, "memory_here", lambda *_: int(0.99 * whole / 0.95))
    words = command(place, tmp_path / "run", "--dry-run", "--processes", "2", "--json")
    assert main(words) == 0
    tight = json.loads(capsys.readouterr().out)["plan"]
    assert tight["auto"]
    assert tight["memory_bytes"]["total"] <= 0.99 * whole
    monkeypatch.setattr(placing, "memory_here", lambda *_: 1000)
    assert main([word for word in words if word != "--json"]) == 0
    assert "auto               not on this machine: " in capsys.readouterr().out


def test_plan_counts_the_parameters_of_the_network(place: Place, tmp_path: Path) -> None:
    from training.networks import build_network

    for fields in ((), ("model.family=decoder",)):
        found = recipe(place, tmp_path, *fields)
        prepared = prepare(found)
        network = build_network(found, prepared.vocab_size)
        expected = sum(parameter.numel() for parameter in network.parameters())
        assert run_plan.make_plan(found, prepared, 1).parameters == expected


def test_plan_of_the_strategies(place: Place, tmp_path: Path) -> None:
    fields = ("model.family=decoder", "optimiser.name=adamw")
    plans = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3", "pipeline"):
        found = recipe(place, tmp_path, *fields, f"run.strategy={strategy}")
        plans[strategy] = run_plan.make_plan(found, prepare(found), 2)
    parameters = plans["ddp"].parameters
    assert {one.parameters for one in plans.values()} == {parameters}
    state = {name: (one.memory.weights, one.memory.moments) for name, one in plans.items()}
    assert state["ddp"] == (4 * parameters, 8 * parameters)
    for name in ("zero1", "zero2", "zero3"):
        assert state[name] == (2 * parameters, 4 * parameters)
    # The half of the layers, and the embedding in each: as input here, as output there.
    assert 2 * parameters < state["pipeline"][0] < 4 * parameters
    # Two microbatches on each of two ranks; a pipeline's ranks share them all.
    assert (plans["ddp"].microbatches_per_step, plans["pipeline"].microbatches_per_step) == (4, 3)


def test_run_stop_and_go_on_at_the_front_door(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks of one machine: SIGTERM saves and ends with 0, the same command goes on."""
    words = command(place, tmp_path / "run", "--processes", "2", "--set", "schedule.steps=40",
                    "--set", "checkpoint.every=1000")  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        begin_s = time.monotonic()
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() - begin_s < 200
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "stopped: step" in output
    assert "saved; run the same command again to go on" in output
    assert main(command(place, tmp_path / "run", "--set", "schedule.steps=40",
                        "--set", "checkpoint.every=1000")) == 0  # fmt: skip
    assert "finished: step 40 of 40" in capfd.readouterr().out
    assert main(command(place, tmp_path / "alone", "--set", "schedule.steps=40")) == 0
    assert_same(without_times(tmp_path / "run"), without_times(tmp_path / "alone"))
    capfd.readouterr()
    assert main(command(place, tmp_path / "alone", "--set", "schedule.steps=40")) == 0
    assert "already finished: step 40 of 40" in capfd.readouterr().out


def assert_same(left: Any, right: Any) -> None:
    """Equal but for the rounding that another number of ranks brings."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float):
        assert left == pytest.approx(right, abs=1e-4, rel=1e-4)
    else:
        assert left == right


def test_ranks_get_the_whole_command(place: Place, tmp_path: Path) -> None:
    from scripts.arguments import parse
    from scripts.cli import VERBS

    words = ["train", "demo", "--data", "a b", "c", "--tokenizer", "t", "--output", "o", "--set",
             "run.seed=3", "--processes", "2", "--restart", "--json"]  # fmt: skip
    again = parse(VERBS, train_command._for_ranks(parse(VERBS, words)))
    assert train_command.overrides_of(again) == [
        "run.seed=3", 'data.manifests=["a b", "c"]', 'model.tokenizer="t"', 'output.directory="o"',
    ]  # fmt: skip
    assert again.restart and again.json and not again.processes


def test_recipe_without_manifests_cannot_be_prepared() -> None:
    with pytest.raises(UserError, match="--data"):
        prepare(load_recipe("demo"))
