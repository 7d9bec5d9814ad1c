"""`gristmill mix`: mistakes in one line, the plan, shipped recipes, a mix from the front door."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import mix_command
from scripts.arguments import parse
from scripts.cli import VERBS, main
from tests.training.corpora import Page, make_corpus, random_pages
from tests.training.mix_runs import MixInputs, make_inputs
from training.flops import flops_per_token
from training.held_out import is_held_out
from training.mix import results
from training.mix.recipe import load_recipe, shipped_recipes
from training.networks import network_config
from training.prepare import prepare

pytestmark = pytest.mark.usefixtures("one_process")
RECIPES = ["doremi", "doremi-docs", "mixing-law"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> MixInputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_shipped_recipes() -> None:
    assert shipped_recipes() == RECIPES
    for name in RECIPES:
        assert load_recipe(name).name == name
    doremi, law = load_recipe("doremi"), load_recipe("mixing-law")
    assert (doremi.doremi.step_size, doremi.doremi.smoothing) == (1.0, 1e-3)  # the paper's
    assert (law.mix.method, law.regress.runs, law.regress.size) == ("regress", 64, "tiny")
    assert law.schedule == doremi.schedule


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipe_runs(
    name: str, inputs: MixInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "the mix"
    words = ["mix", name, "--data", inputs.manifest, "--tokenizer", str(inputs.tokenizer),
             "--output", str(output)]  # fmt: skip
    for field in ("model.size=tiny", "schedule.steps=2", "schedule.warmup_steps=1", "mix.seeds=[7]",
                  "batch.samples=8", "batch.microbatch=8", "examples.sequence_length=32",
                  "data.held_out=0.1", "data.languages=[]", "evaluation.examples=2",
                  "regress.runs=10", "regress.steps=2", "regress.bootstrap=2",
                  "regress.regressor=linear", "run.device=cpu"):  # fmt: skip
        words += ["--set", field]
    assert main(words) == 0
    shown = capsys.readouterr().out
    *_, weights, following = shown.splitlines()
    assert weights == f"weights: {output}/weights.json"
    # The command that is shown next is one that works.
    command = shlex.split(following.removeprefix("next: gristmill "))
    command = [*command, "--dry-run", "--json"]
    assert main(command) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    manifest = results.read(output)
    assert {one["name"]: one["share"] for one in plan["domains"]} == pytest.approx(manifest.weights)

    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out == (output / "manifest.json").read_text() + "\n"
    assert captured.err.startswith("already finished: ")
    (output / "notes.txt").write_text("")
    assert main([*words, "--set", "schedule.steps=3"]) == 2
    assert "holds another mix: schedule.steps = '3' is '2' there" in capsys.readouterr().err
    assert main([*words, "--set", "schedule.steps=3", "--restart"]) == 0
    assert results.read(output).recipe["schedule"]["steps"] == 3
    assert (output / "notes.txt").exists()


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown recipe": (["mix", "doremy"], ["'doremy'", "'doremi'"]),
    "a training recipe": (["mix", "demo"], ["no recipe 'demo'", "'mixing-law'"]),
    "no data": (["mix", "doremi"], ["--data"]),
    "no tokenizer": (["mix", "doremi", "--data", "nowhere"], ["no tokenizer"]),
    "no output": (["mix", "doremi", "--data", "{crawl}", "--tokenizer", "{tok}"], ["--output"]),
    "output is a file": (["{recipe}", "--output", "file"], ["'file'", "--output"]),
    "small batch": (
        ["{recipe}", "--set", "batch.samples=3"],
        ["batch of '3' examples for 2 domains", "batch.samples=4 or more"],
    ),
    "one domain": (["{recipe}", "--set", 'data.languages=["bn"]'], ["one domain, 'bn'"]),
    "nothing held out": (["{recipe}", "--set", "data.held_out=0"], ["data.held_out = '0'"]),
    "no domain held out": (
        ["{recipe}", "--set", "data.held_out=1e-9"], ["no domain has a held-out page ('bn', 'hi')"],
    ),
    "unknown reference": (
        ["{recipe}", "--set", "doremi.reference_run=nowhere"], ["reference 'nowhere'"],
    ),
    "reference of other domains": (
        ["{recipe}", "--set", "doremi.reference={bn=1}"], ["no weight for 'hi'"],
    ),
    "jobs and processes": (
        ["{recipe}", "--jobs", "2", "--processes", "2"], ["--jobs 2", "--processes 2"],
    ),
    "no table": (
        ["{recipe}", "--method", "regress", "--set", "regress.table=none.csv"], ["'none.csv'"],
    ),
    "unknown target": (
        ["{recipe}", "--method", "regress", "--set", "regress.target=xx"], ["'xx'", "bn, hi"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_gets_one_line_and_writes_nothing(
    name: str,
    inputs: MixInputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    words, expected = MISTAKES[name]
    if words[0] == "{recipe}":
        words = [*inputs.words(Path("mix")), *words[1:]]
    where = {"{crawl}": inputs.manifest, "{tok}": str(inputs.tokenizer)}
    assert main([where.get(word, word) for word in words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    for part in expected:
        assert part in output.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_processes_inside_torchrun_are_refused(
    inputs: MixInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*inputs.words(tmp_path / "mix"), "--processes", "2"]) == 2
    assert main([*inputs.words(tmp_path / "mix"), "--jobs", "2"]) == 2


def test_dry_run_shows_the_plan_and_writes_nothing(
    inputs: MixInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*inputs.words(tmp_path / "mix", "mix.specialists=1", "doremi.max_rounds=2",
                           "mix.main_steps=600"), "--dry-run"]  # fmt: skip
    assert main([*words, "--json"]) == 0
    output = capsys.readouterr()
    value = json.loads(output.out)
    assert value["recipe"]["mix"]["seeds"] == [0, 1]
    plan = value["plan"]
    assert [(one["label"], one["runs"], one["steps"]) for one in plan["runs"]] == [
        ("reference-1", 2, 6), ("proxy-1", 2, 6), ("reference-2", 2, 6), ("proxy-2", 2, 6),
        ("doremi", 2, 600), ("proportional", 2, 600), ("uniform", 2, 600), ("specialist-0", 1, 600),
        ("specialist-1", 1, 600),
    ]  # fmt: skip
    step = 8 * 32
    assert plan["tokens"] == step * (8 * 6 + 8 * 600)
    recipe = inputs.load(tmp_path / "mix").train_recipe(
        weights="proportional", seed=0, directory=str(tmp_path / "mix")
    )
    each = flops_per_token(network_config(recipe, prepare(recipe).vocab_size), 32, 1.0)
    # A proxy also computes the reference, and passes two microbatches forward twice.
    assert plan["flops"] == pytest.approx(step * each * (4 * 6 + 4 * 6 * (1 + 2 / 3) + 8 * 600))
    assert plan["expected_absent_domains"] == pytest.approx(2 * 0.5**8)
    bn, hi = plan["domains"]["bn"], plan["domains"]["hi"]
    assert bn["share"] + hi["share"] == pytest.approx(1)
    assert plan["epochs"]["uniform"]["bn"] == pytest.approx(300 * step / bn["tokens_once"])
    assert plan["epochs"]["proxy"]["hi"] == pytest.approx(3 * step / hi["tokens_once"])
    assert plan["epochs"]["one domain alone"]["hi"] == pytest.approx(600 * step / hi["tokens_once"])
    worst = max(plan["epochs"]["uniform"], key=plan["epochs"]["uniform"].get)
    assert worst == "hi" and plan["epochs"]["uniform"]["hi"] > 4
    assert any(text.startswith("mixture 'uniform' reads domain 'hi' ") for text in plan["warnings"])
    assert main(words) == 0
    output = capsys.readouterr()
    assert "domains absent from a proxy's step, on average: 0.0078" in output.out
    assert output.err.count("warning: mixture '") == len(plan["warnings"])
    assert main([*words, "--set", "mix.main_steps=6"]) == 0
    assert "the runs of 'proportional'" in capsys.readouterr().out
    assert main([*words, "--method", "regress", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert [(one["label"], one["runs"]) for one in plan["runs"]][:2] == [
        ("small", 64), ("regress", 2),
    ]  # fmt: skip
    assert plan["expected_absent_domains"] is None
    assert not (tmp_path / "mix").exists()


def test_a_domain_without_held_out_pages_is_warned_of(
    inputs: MixInputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"https://x.example/{number}" for number in range(9)]
    urls = [url for url in urls if not is_held_out(url, 0.1)][:2]
    texts = [page.text for page in random_pages(2, seed=9)]
    few = [Page(text, url=url) for text, url in zip(texts, urls, strict=True)]
    pages = {"bn": random_pages(60, seed=1), "hi": random_pages(60, seed=2), "sw": few}
    crawl = make_corpus(tmp_path / "crawl", pages)
    words = [*replace(inputs, manifest=crawl).words(tmp_path / "mix"), "--dry-run", "--json"]
    assert main(words) == 0
    warnings = json.loads(capsys.readouterr().out)["plan"]["warnings"]
    assert "no held-out page in 'sw': no loss of it is compared; raise data.held_out" in warnings


def test_ranks_get_the_whole_command() -> None:
    words = ["mix", "doremi", "--data", "a b", "c", "--tokenizer", "t", "--output", "o", "--set",
             "mix.specialists=1", "--method", "regress", "--processes", "2", "--restart",
             "--json"]  # fmt: skip
    again = parse(VERBS, mix_command._for_ranks(parse(VERBS, words)))
    assert mix_command._overrides(again) == [
        "mix.specialists=1", 'data.manifests=["a b", "c"]', 'model.tokenizer="t"',
        'output.directory="o"', 'mix.method="regress"',
    ]  # fmt: skip
    assert again.restart and again.json and not again.processes
