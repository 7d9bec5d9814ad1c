"""Runs with strategy 'pipeline' are the runs of one process, and go on as any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.errors import UserError
from tests.training import forked
from tests.training.step_examples import free_ports, rank_process
from tests.training.tiny_runs import Place, make_place, overrides, without_times
from training import loop
from training.mix.recipe import load_recipe as load_mix_recipe
from training.prepare import pipeline_ranks, strategy_of
from training.recipe import Pipeline, Run, load_recipe

PIPELINE = "run.strategy=pipeline"
DECODER = ("model.family=decoder", "optimiser.name=adamw")
RUNS = {
    "albert": (),
    "albert-zbv": ("run.pipeline.schedule=zbv",),
    "decoder": DECODER,
    "decoder-zbv": (*DECODER, "run.pipeline.schedule=zbv"),
    "decoder-interleaved": (*DECODER, "run.pipeline.schedule=interleaved-1f1b"),
    "decoder-recomputed": (*DECODER, "run.activation_checkpointing=true",
                           "run.pipeline.schedule=gpipe", "run.pipeline.cut=uniform"),
}  # fmt: skip
"""Whole runs of two stages or more, with an evaluation and a checkpoint in the middle.

The tiny networks have four units: embedding, two layers, head.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelined")


@pytest.fixture(scope="module")
def crawl(folder: Path) -> Place:
    return make_place(folder)


def _sets(crawl: Place, output: Path, *fields: str) -> list[str]:
    # 7 examples in microbatches of 2: four, of which one is filled up with a blank example.
    return [*overrides(crawl, output), "batch.samples=7", "checkpoint.every=4", "run.log_every=1",
            "run.pipeline.costs=operations", *fields]  # fmt: skip


def _on(ranks: int, runs: list[list[str]], folder: Path) -> list[Any]:
    """The summaries of runs on some ranks, one after the other."""
    place = folder / "results.pt"
    cases = [{"train": run} for run in runs]
    forked.start_ranks(rank_process, (free_ports(len(cases)), cases, str(place), ranks), ranks)
    results: list[Any] = torch.load(place, weights_only=True)
    return results


@pytest.fixture(scope="module")
def alone(folder: Path, crawl: Place) -> dict[str, Path]:
    """The same runs in this process, by family."""
    found = {"albert": folder / "albert-alone", "decoder": folder / "decoder-alone"}
    loop.train(load_recipe("demo", _sets(crawl, found["albert"])), quiet=True)
    loop.train(load_recipe("demo", _sets(crawl, found["decoder"], *DECODER)), quiet=True)
    return found


@pytest.fixture(scope="module")
def pipelined(folder: Path, crawl: Place, alone: dict[str, Path]) -> dict[str, Any]:
    """Whole runs; and two that go on, of which another number of stages did the first half."""
    for name, source in alone.items():
        _rewind(source, folder / f"{name}-then-pipeline")
    runs = {name: _sets(crawl, folder / name, PIPELINE, *fields) for name, fields in RUNS.items()}
    for name, fields in (("albert", ()), ("decoder", DECODER)):
        runs[f"{name}-then-pipeline"] = _sets(
            crawl, folder / f"{name}-then-pipeline", PIPELINE, *fields
        )
    return dict(zip(runs, _on(2, list(runs.values()), folder), strict=True))


def _rewind(source: Path, target: Path) -> None:
    """A copy of a run as it was after its fourth step."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model", "manifest.json"))
    shutil.rmtree(target / "checkpoints" / "step-00000008")
    (target / "checkpoints" / "latest").write_text("step-00000004\n")


def _assert_same_run(found: Path, expected: Path) -> None:
    lines, others = without_times(found), without_times(expected)
    assert [(line["kind"], line["step"]) for line in lines] == [
        *[("train", step) for step in range(1, 6)], ("evaluation", 5),
        *[("train", step) for step in range(6, 9)], ("evaluation", 8),
    ]  # fmt: skip
    for one, other in zip(lines, others, strict=True):
        if one["kind"] == "train":
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)
            assert (one["tokens"], one["examples"]) == (other["tokens"], other["examples"])
        else:
            for name, domain in other["domains"].items():
                assert one["domains"][name]["examples"] == domain["examples"]
                for term, losses in domain["terms"].items():
                    here = one["domains"][name]["terms"][term]
                    assert here["labels"] == losses["labels"]
                    assert here["loss"] == pytest.approx(losses["loss"], abs=1e-5)
    weights = load_file(found / "model" / "model.safetensors")
    there = load_file(expected / "model" / "model.safetensors")
    assert weights.keys() == there.keys()
    for key, tensor in there.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-4, msg=key)
    for name in ("config.json", "tokenizer.json"):
        assert (found / "model" / name).read_bytes() == (expected / "model" / name).read_bytes()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_stages_is_the_run_of_one_process(
    pipelined: dict[str, Any], alone: dict[str, Path], folder: Path, name: str
) -> None:
    summary = pipelined[name]
    assert (summary["status"], summary["ranks"], summary["strategy"]) == ("finished", 2, "pipeline")
    _assert_same_run(folder / name, alone[name.partition("-")[0]])
    pages = json.loads((folder / name / "manifest.json").read_bytes())["counts"]
    alone_manifest = alone[name.partition("-")[0]] / "manifest.json"
    assert pages == json.loads(alone_manifest.read_bytes())["counts"]


@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_stages_go_on_from_one_process(
    pipelined: dict[str, Any], alone: dict[str, Path], folder: Path, family: str
) -> None:
    assert pipelined[f"{family}-then-pipeline"]["status"] == "finished"
    _assert_same_run(folder / f"{family}-then-pipeline", alone[family])


@pytest.mark.parametrize("name", ["albert", "decoder", "decoder-zbv"])
def test_one_process_goes_on_from_stages(
    pipelined: dict[str, Any], alone: dict[str, Path], crawl: Place, folder: Path, name: str
) -> None:
    family = name.partition("-")[0]
    target = folder / f"{name}-then-one"
    _rewind(folder / name, target)
    fields = DECODER if family == "decoder" else ()
    loop.train(load_recipe("demo", _sets(crawl, target, *fields)), quiet=True)
    _assert_same_run(target, alone[family])


def test_stages_go_on_as_they_were(pipelined: dict[str, Any], crawl: Place, folder: Path) -> None:
    """The same bytes as the run that was not stopped; and sharded ranks take a checkpoint too."""
    resumed, sharded = folder / "decoder-resumed", folder / "decoder-then-zero2"
    _rewind(folder / "decoder", resumed)
    _rewind(folder / "decoder", sharded)
    _on(
        2,
        [
            _sets(crawl, resumed, PIPELINE, *DECODER),
            _sets(crawl, sharded, "run.strategy=zero2", *DECODER),
        ],
        folder,
    )
    for name in ("model/model.safetensors", "manifest.json"):
        assert (resumed / name).read_bytes() == (folder / "decoder" / name).read_bytes()
    assert without_times(resumed) == without_times(folder / "decoder")
    _assert_same_run(sharded, folder / "decoder")


@pytest.mark.slow
def test_four_ranks(
    pipelined: dict[str, Any], alone: dict[str, Path], crawl: Place, folder: Path
) -> None:
    """Four stages; two pipelines of two, plain and sharded; and four that go on from two.

    Four microbatches of one process are two for each of two pipelines.
    """
    two = "run.pipeline.ranks=2"
    runs = {
        "decoder": (*DECODER,),
        "albert": (),
        "decoder-copies": (*DECODER, two),
        "albert-copies": (two,),
        "decoder-shards": (*DECODER, two, "run.pipeline.shard=true"),
        "albert-shards": (two, "run.pipeline.shard=true", "run.pipeline.schedule=gpipe"),
        "decoder-from-two": (*DECODER,),
    }
    _rewind(folder / "decoder", folder / "four-decoder-from-two")
    sets = [
        _sets(crawl, folder / f"four-{name}", PIPELINE, *fields) for name, fields in runs.items()
    ]
    for summary in _on(4, sets, folder):
        assert (summary["status"], summary["ranks"]) == ("finished", 4)
    for name in runs:
        _assert_same_run(folder / f"four-{name}", alone[name.partition("-")[0]])


@pytest.mark.parametrize(
    ("ranks", "asked", "found"), [(2, None, 2), (4, 2, 2), (8, 4, 4), (6, None, 6)]
)
def test_ranks_of_a_pipeline(ranks: int, asked: int | None, found: int) -> None:
    run = Run(strategy="pipeline", pipeline=Pipeline(ranks=asked))
    assert strategy_of(run, ranks) == "pipeline"
    assert pipeline_ranks(run, ranks) == found


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"'4' does not divide the 6 processes: choose 2, 3, 6"):
        strategy_of(Run(strategy="pipeline", pipeline=Pipeline(ranks=4)), 6)
    with pytest.raises(UserError, match="on 1 process: start more with --processes"):
        strategy_of(Run(strategy="pipeline"), 1)


def test_a_mix_takes_no_pipeline() -> None:
    with pytest.raises(UserError, match=r"run\.strategy = 'pipeline'"):
        load_mix_recipe("doremi", [PIPELINE])
