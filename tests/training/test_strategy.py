"""Every strategy on two ranks computes what one process computes: losses, gradients, norms."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import training.strategy
from models.errors import UserError
from tests.training import forked
from tests.training.step_examples import curve, free_ports, rank_process
from tests.training.tiny_runs import Place, make_place, overrides, without_times
from training import loop
from training.objectives import Objective
from training.prepare import strategy_of
from training.recipe import Run, load_recipe
from training.strategy import placed

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
FAMILIES = ("albert", "decoder")


def _cases() -> list[dict[str, Any]]:
    """Two ranks; 7 examples in microbatches of 2: 4 microbatches, of which one has one example."""
    cases = []
    for family, strategy in itertools.product(FAMILIES, STRATEGIES):
        case = {"family": family, "strategy": strategy, "examples": 7, "microbatch": 2, "steps": 3}
        cases.append(case)
    for family in FAMILIES:
        with_dropout = {"family": family, "examples": 7, "microbatch": 2, "steps": 3,
                        "dropout": 0.1}  # fmt: skip
        cases += [with_dropout | {"strategy": "ddp"}]
        recompute = with_dropout | {"run": {"activation_checkpointing": True}}
        cases += [recompute | {"strategy": "zero3"}, recompute | {"strategy": "ddp"}]
        # One example: the second rank has none.
        cases += [
            {"family": family, "strategy": strategy, "examples": 1, "microbatch": 2, "steps": 2}
            for strategy in ("ddp", "zero2")
        ]
    return cases


CASES = _cases()
RUNS = {
    "ddp": ("run.strategy=ddp", "model.dropout=0.1"),
    "zero1": ("run.strategy=zero1", "model.family=decoder", "optimiser.name=adamw"),
    "zero2": ("run.strategy=zero2", "model.dropout=0.1"),
    "zero3": ("run.strategy=zero3", "model.family=decoder", "optimiser.name=adamw",
              "run.activation_checkpointing=true", "run.precision=bf16"),
}  # fmt: skip
"""Whole runs, with an evaluation and a checkpoint in the middle."""
SPOILT = ("ddp", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def crawl(folder: Path) -> Place:
    return make_place(folder)


def _sets(crawl: Place, output: Path, *fields: str) -> list[str]:
    # 8 examples in microbatches of 2: two ranks share the 4 microbatches of one process.
    return [*overrides(crawl, output), "batch.samples=8", "checkpoint.every=4", "run.log_every=1",
            *fields]  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(folder: Path, crawl: Place) -> list[Any]:
    place = folder / "results.pt"
    runs = [{"train": _sets(crawl, folder / name, *RUNS[name])} for name in RUNS]
    one_rank_spoilt = [
        {"train": _sets(crawl, folder / f"spoilt-{name}", f"run.strategy={name}"), "spoilt": (4, 5)}
        for name in SPOILT
    ]
    cases = [*CASES, *runs, *one_rank_spoilt]
    forked.start_ranks(rank_process, (free_ports(len(cases)), cases, str(place)), 2)
    results: list[Any] = torch.load(place, weights_only=True)
    return results


@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_ranks_are_one_process(two_ranks: list[Any], number: int) -> None:
    case = CASES[number]
    losses, gradients, norms = two_ranks[number]
    alone_losses, alone_gradients, alone_norms = curve(case | {"strategy": "single", "run": {}})
    assert losses == pytest.approx(alone_losses, abs=1e-5)
    assert norms == pytest.approx(alone_norms, rel=1e-4)
    for found, expected in zip(gradients[:1], alone_gradients[:1], strict=True):
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", RUNS)
def test_run_of_two_ranks_is_the_run_of_one(
    two_ranks: list[Any], folder: Path, crawl: Place, name: str
) -> None:
    summary = two_ranks[len(CASES) + list(RUNS).index(name)]
    assert (summary["status"], summary["ranks"], summary["strategy"]) == ("finished", 2, name)
    alone = folder / f"{name}-alone"
    fields = [field for field in RUNS[name] if not field.startswith("run.strategy")]
    loop.train(load_recipe("demo", _sets(crawl, alone, *fields)), quiet=True)
    # FSDP2 rounds weights to bf16, autocast rounds also between them; and a processor that
    # multiplies bf16 itself (AMX: 0.023 after 7 steps) rounds in other places than one that widens.
    within = 0.05 if "run.precision=bf16" in fields else 1e-5
    found, expected = without_times(folder / name), without_times(alone)
    assert [(line["kind"], line["step"]) for line in found] == [
        *[("train", step) for step in range(1, 6)], ("evaluation", 5),
        *[("train", step) for step in range(6, 9)], ("evaluation", 8),
    ]  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        if one["kind"] == "train":
            assert one["loss"] == pytest.approx(other["loss"], abs=within)
            assert one["tokens"] == other["tokens"]
        else:
            terms, other_terms = one["total"]["terms"], other["total"]["terms"]
            for term in other_terms:
                assert terms[term]["labels"] == other_terms[term]["labels"]
                assert terms[term]["loss"] == pytest.approx(other_terms[term]["loss"], abs=within)
    weights = load_file(folder / name / "model" / "model.safetensors")
    for key, tensor in load_file(alone / "model" / "model.safetensors").items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=max(within, 1e-4), msg=key)


@pytest.mark.parametrize("name", SPOILT)
def test_infinite_loss_on_one_rank_skips_the_step_on_all(
    two_ranks: list[Any], folder: Path, name: str
) -> None:
    summary = two_ranks[len(CASES) + len(RUNS) + SPOILT.index(name)]
    assert (summary["status"], summary["step"], summary["skipped_steps"]) == ("finished", 8, 1)
    (line,) = [one for one in without_times(folder / f"spoilt-{name}") if one["kind"] == "skipped"]
    # Two passes a step: those of the third step. Example i is in microbatch i % 4.
    assert (line["step"], line["examples"], line["non_finite_losses"]) == (3, [16, 23], [17, 19])


@pytest.mark.parametrize(
    ("asked", "ranks", "strategy"),
    [("auto", 1, "single"), ("auto", 2, "ddp"), ("single", 1, "single"), ("zero3", 1, "zero3")],
)
def test_strategy(asked: Any, ranks: int, strategy: str) -> None:
    assert strategy_of(Run(strategy=asked), ranks) == strategy


def test_single_on_two_is_refused() -> None:
    with pytest.raises(UserError, match="'single' on 2 processes"):
        strategy_of(Run(strategy="single"), 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(UserError, match=r"run\.device=cpu"), placed(Run(device="cuda")):
        pass


def test_placed_inside_placed_uses_its_process_group() -> None:
    """As the runs of a mix do; on two ranks: `test_proxy`."""
    run = Run(strategy="ddp", device="cpu")
    with placed(run) as outer:
        group = torch.distributed.group.WORLD
        for _ in range(2):
            with placed(run) as inner:
                assert inner == outer
                assert torch.distributed.group.WORLD is group
            assert torch.distributed.is_initialized()
        with pytest.raises(UserError, match="boom"), placed(run):
            raise UserError("boom")
        assert torch.distributed.group.WORLD is group
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_one_rank_of_any_strategy(strategy: str) -> None:
    case = {"family": "decoder", "examples": 3, "microbatch": 2, "steps": 2}
    losses, gradients, norms = curve(case | {"strategy": strategy})
    alone_losses, alone_gradients, alone_norms = curve(case | {"strategy": "single"})
    assert losses == pytest.approx(alone_losses, abs=1e-6)
    assert norms == pytest.approx(alone_norms, rel=1e-5)
    for name, expected in alone_gradients[0].items():
        torch.testing.assert_close(gradients[0][name], expected, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_shards_never_have_the_whole_network_on_the_device(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 moves it there block by block, the rest of the network last."""
    moved: list[str] = []
    shard = fully_shard

    def note(module: nn.Module, **more: Any) -> Any:
        moved.append(type(module).__name__)
        return shard(module, **more)

    def whole(*_: Any, **__: Any) -> Any:
        raise AssertionError("the whole network is moved at once")

    monkeypatch.setattr(training.strategy, "fully_shard", note)
    monkeypatch.setattr(Objective, "to", whole)
    curve({"family": "decoder", "strategy": strategy, "examples": 1, "microbatch": 1, "steps": 1})
    assert moved == ["LlamaDecoderLayer", "LlamaDecoderLayer", "Objective"]


def test_what_a_run_holds_ends_before_its_process_group(
    crawl: Place, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP dropped last would tear the group down, and may hang at it (`let_go`)."""
    left: list[object] = []
    end = torch.distributed.destroy_process_group

    def destroy() -> None:
        left.extend(one for one in gc.get_objects() if type(one) is DistributedDataParallel)
        end()

    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy)
    recipe = load_recipe("demo", _sets(crawl, folder / "ends", "run.strategy=ddp"))
    assert loop.train(recipe, quiet=True)["status"] == "finished"
    assert left == []
