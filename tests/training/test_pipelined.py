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
from pipelines.sealed import write_sealed
from tests.training import forked, pipelined_ranks
from tests.training.step_examples import free_ports, rank_process
from tests.training.tiny_runs import Place, make_place, overrides, without_times
from training import checkpoint, loop
from training.mix.recipe import load_recipe as load_mix_recipe
from training.prepare import check_pipeline, pipeline_ranks, strategy_of
from training.recipe import Pipeline, Run, load_recipe

PIPELINE = "run.strategy=pipeline"
COUNTED = "run.pipeline.costs=operations"
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
            "checkpoint.keep=2", *[COUNTED] * (PIPELINE in fields), *fields]  # fmt: skip


def _on(
    ranks: int,
    runs: list[list[str]],
    folder: Path,
    spoilt: dict[int, tuple[int, ...]] | None = None,
) -> list[Any]:
    """The summaries of runs on some ranks, one after the other.

    spoilt: by the number of a run, passes of the second rank with an infinite loss.
    """
    place = folder / "results.pt"
    cases = [
        {"train": run, "spoilt": (spoilt or {}).get(number, ())} for number, run in enumerate(runs)
    ]
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
    runs["spoilt"] = _sets(crawl, folder / "spoilt", PIPELINE, *DECODER)
    spoilt = {list(runs).index("spoilt"): (10,)}  # four passes a step: the third one's of step 3
    return dict(zip(runs, _on(2, list(runs.values()), folder, spoilt), strict=True))


def _rewind(source: Path, target: Path) -> None:
    """A copy of a run as it was after its fourth step."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model", "manifest.json"))
    shutil.rmtree(target / "checkpoints" / "step-00000008")
    assert (target / "checkpoints" / "step-00000004").is_dir(), "it would begin anew"
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
    """The same bytes as the run that was not stopped; and sharded ranks take a checkpoint too.

    The cut is the saved one, though another one would be chosen anew.
    """
    resumed, sharded = folder / "decoder-resumed", folder / "decoder-then-zero2"
    other = folder / "decoder-other-cut"
    for target in (resumed, sharded, other):
        _rewind(folder / "decoder", target)
    bounds = _bounds(folder / "decoder", 8)
    assert _bounds(folder / "decoder", 4) == bounds
    saved = [0, 1 if bounds[1] != 1 else 2, 4]
    _set_bounds(other, 4, saved)
    _on(
        2,
        [
            _sets(crawl, resumed, PIPELINE, *DECODER),
            _sets(crawl, sharded, "run.strategy=zero2", *DECODER),
            _sets(crawl, other, PIPELINE, *DECODER),
        ],
        folder,
    )
    assert _bounds(resumed, 8) == bounds
    assert _bounds(other, 8) == saved
    _assert_same_run(other, folder / "decoder")
    for name in ("model/model.safetensors", "manifest.json"):
        assert (resumed / name).read_bytes() == (folder / "decoder" / name).read_bytes()
    assert without_times(resumed) == without_times(folder / "decoder")
    _assert_same_run(sharded, folder / "decoder")


def _state_of(run: Path, step: int) -> tuple[Path, dict[str, Any]]:
    path = run / "checkpoints" / f"step-{step:08d}"
    return path / checkpoint.STATE_FILE, checkpoint.read_state(path)


def _bounds(run: Path, step: int) -> list[int]:
    """The cut that a checkpoint holds."""
    found: list[int] = _state_of(run, step)[1]["state"]["pipeline"]["bounds"]
    return found


def _set_bounds(run: Path, step: int, bounds: list[int]) -> None:
    file, value = _state_of(run, step)
    value["state"]["pipeline"]["bounds"] = bounds
    write_sealed(file, value)


def test_an_infinite_loss_in_one_microbatch_skips_the_step(
    pipelined: dict[str, Any], folder: Path
) -> None:
    """Only the last stage sees the loss; all ranks skip, and the first one names the example."""
    summary = pipelined["spoilt"]
    assert (summary["status"], summary["step"], summary["skipped_steps"]) == ("finished", 8, 1)
    (line,) = [one for one in without_times(folder / "spoilt") if one["kind"] == "skipped"]
    # Step 3 has the examples 14 to 20; its third microbatch those with i % 4 == 2.
    assert (line["step"], line["examples"], line["non_finite_losses"]) == (3, [14, 20], [14])


def test_buffers_of_a_stage_are_saved_and_loaded(tmp_path: Path) -> None:
    """A checkpoint of two stages that hold a persistent buffer each, read by both ways."""
    (port,) = free_ports(1)
    forked.start_ranks(pipelined_ranks.save_and_load, (port, str(tmp_path)), 2)


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
        "decoder-shards-zbv": (*DECODER, two, "run.pipeline.shard=true",
                               "run.pipeline.schedule=zbv"),
        "albert-shards": (two, "run.pipeline.shard=true", "run.pipeline.schedule=gpipe"),
        "decoder-from-two": (*DECODER,),
    }  # fmt: skip
    _rewind(folder / "decoder", folder / "four-decoder-from-two")
    sets = [
        _sets(crawl, folder / f"four-{name}", PIPELINE, *fields) for name, fields in runs.items()
    ]
    for summary in _on(4, sets, folder):
        assert (summary["status"], summary["ranks"]) == ("finished", 4)
    for name in runs:
        _assert_same_run(folder / f"four-{name}", alone[name.partition("-")[0]])


@pytest.mark.slow
def test_microbatches_without_examples(crawl: Place, folder: Path) -> None:
    """5 examples in 6 microbatches of two pipelines: one has an empty one."""
    fields = (*DECODER, "batch.samples=5", "batch.microbatch=1")
    loop.train(load_recipe("demo", _sets(crawl, folder / "five-alone", *fields)), quiet=True)
    target = folder / "five-copies"
    (summary,) = _on(4, [_sets(crawl, target, PIPELINE, *fields, "run.pipeline.ranks=2")], folder)
    assert (summary["status"], summary["ranks"]) == ("finished", 4)
    _assert_same_run(target, folder / "five-alone")


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


def test_shards_of_one_pipeline_are_refused() -> None:
    run = Run(strategy="pipeline", pipeline=Pipeline(shard=True))
    with pytest.raises(UserError, match=r"one pipeline of 6 .*pipeline\.ranks to 2 or 3$"):
        strategy_of(run, 6)
    with pytest.raises(UserError, match=r"shard=false, or more processes$"):
        strategy_of(run, 2)
    shared = Run(strategy="pipeline", pipeline=Pipeline(shard=True, ranks=2))
    assert strategy_of(shared, 4) == "pipeline"


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2"])
def test_settings_of_a_pipeline_without_one_are_refused(strategy: Any) -> None:
    run = Run(strategy=strategy, pipeline=Pipeline(schedule="zbv"))
    with pytest.raises(UserError, match=rf"schedule = 'zbv' with run\.strategy = '{strategy}'"):
        strategy_of(run, 1)
    assert strategy_of(run.model_copy(update={"pipeline": Pipeline()}), 1) == strategy
    assert strategy_of(run.model_copy(update={"strategy": "auto"}), 2) == "ddp"


@pytest.mark.parametrize(
    ("fields", "ranks", "told"),
    [
        # 8 examples in pieces of 4 are 2 microbatches; of 2, 4; of 1, 8.
        (("batch.microbatch=4",), 4, r"with '2' microbatches.*: set batch\.microbatch=2, not 4$"),
        (
            ("batch.microbatch=4", "run.pipeline.schedule=dualpipe-v"), 4,
            r"with '2' microbatches.*: set batch\.microbatch=1, not 4$",
        ),
        (
            ("batch.samples=21", "batch.microbatch=3", "run.pipeline.schedule=interleaved-1f1b"), 3,
            r"'7' microbatches: it goes in equal rounds.*: set batch\.microbatch=1, not 3$",
        ),
        # No microbatch is small enough.
        (("batch.samples=2", "batch.microbatch=2"), 4, r"takes any number$"),
        (
            ("run.pipeline.stages_per_rank=3", "run.pipeline.schedule=zbv"), 2,
            r"^run\.pipeline: .*'3' stages on each rank: valid is 2$",
        ),
    ],
)  # fmt: skip
def test_what_no_pipeline_can_be_is_told_without_a_network(
    crawl: Place, folder: Path, fields: tuple[str, ...], ranks: int, told: str
) -> None:
    sets = [*overrides(crawl, folder / "nothing"), "batch.samples=8", PIPELINE, *fields]
    with pytest.raises(UserError, match=told) as caught:
        check_pipeline(load_recipe("demo", sets), ranks)
    assert "\n" not in str(caught.value)


def test_a_pipeline_that_can_be_passes(crawl: Place, folder: Path) -> None:
    sets = [*overrides(crawl, folder / "nothing"), "batch.samples=8", PIPELINE]
    check_pipeline(load_recipe("demo", sets), 4)
    check_pipeline(load_recipe("demo", sets[:-1]), 4)


def test_a_mix_takes_no_pipeline() -> None:
    with pytest.raises(UserError, match=r"run\.strategy = 'pipeline'"):
        load_mix_recipe("doremi", [PIPELINE])
