"""Pipelines on two and four ranks compute what one process computes, with every schedule."""

from __future__ import annotations

import json
import socket
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.training import forked
from tests.training.parallel import pipeline_ranks
from tests.training.parallel.pipeline_ranks import Case
from training.parallel.chain import module_chain
from training.parallel.pipeline import Pipeline
from training.parallel.schedules import SCHEDULES
from training.parallel.stage import Stage

NETWORKS = ("tied", "untied", "albert")
TIED = {"tied": "embed_tokens.weight", "albert": "word_embeddings.weight", "untied": "nothing"}
SPLIT = [one.name for one in SCHEDULES.values() if one.splits_backward]


def _case(name: str, ranks: int, **fields: Any) -> Case:
    """A case with much the same number of units in each stage."""
    fewest = SCHEDULES[name].stages_per_rank[0]
    stages_per_rank = 2 if name == "interleaved-zero-bubble" else fewest
    stages = ranks * stages_per_rank
    units = fields.get("units", max(stages, 5))
    cut = [round(units * stage / stages) for stage in range(stages + 1)]
    return {
        "network": "tied", "schedule": name, "units": units, "stages_per_rank": stages_per_rank,
        "microbatches": 2 * ranks, "cut": cut,
    } | fields  # fmt: skip


REFUSED: dict[str, tuple[Case, str]] = {
    "cut": (
        _case("1f1b", 2, cut=[0, 2]),
        "the cut '[0, 2]' is none of 5 units into 2 stages: give 3 rising numbers from 0 to 5",
    ),
    "microbatches": (_case("1f1b", 2, microbatches=1), "'1' microbatches: it needs 2 or more"),
}
TWO: dict[str, Case] = {
    **{
        f"{name} {network}": _case(name, 2, network=network)
        for name in SCHEDULES
        for network in NETWORKS
    },
    **{
        f"{name} recompute {network}": _case(name, 2, network=network, recompute=True, dropout=0.2)
        for name in ("1f1b", *SPLIT)
        for network in ("tied", "albert")
    },
    **{
        f"{name} bf16 {network}": _case(name, 2, network=network, bf16=True)
        for name in ("1f1b", "zbv")
        for network in ("tied", "albert")
    },
    **{
        f"{name} sequential": _case(name, 2, network="sequential")
        for name in ("1f1b", "interleaved-1f1b", *SPLIT)
    },
    "a weight used twice": _case("1f1b", 2, network="twice"),
    **{f"{name} shared": _case(name, 2, network="shared") for name in ("1f1b", *SPLIT)},
    **{f"{name} dropout": _case(name, 2, dropout=0.2) for name in ("gpipe", "looped-bfs", *SPLIT)},
    "1f1b dropout albert": _case("1f1b", 2, network="albert", dropout=0.2),
    "one microbatch": _case("gpipe", 2, microbatches=1),
    "uneven": _case("1f1b", 2, microbatches=3, cut=[0, 4, 5]),
    "one stage, zero bubble": _case("interleaved-zero-bubble", 2, stages_per_rank=1, cut=[0, 3, 5]),
    "three stages": _case("interleaved-1f1b", 2, stages_per_rank=3, units=6, cut=[*range(7)]),
    "few for zbv": _case("zbv", 2, microbatches=1),
    **{name: case | {"refused": True} for name, (case, _) in REFUSED.items()},
}
FOUR: dict[str, Case] = {
    **{
        f"{name} {network}": _case(name, 4, network=network)
        for name in SCHEDULES
        for network in NETWORKS
    },
    **{
        f"{name} {network} x 2{' in shards' if shard else ''}": _case(
            name, 2, network=network, pipelines=2, shard=shard
        )
        for name in SCHEDULES
        for network in NETWORKS
        for shard in (False, True)
    },
    **{
        f"{name} recompute x 2{' in shards' if shard else ''}": _case(
            name, 2, pipelines=2, shard=shard, recompute=True, dropout=0.2
        )
        for name in ("1f1b", "zbv")
        for shard in (False, True)
    },
    "albert's block everywhere x 2 in shards": _case(
        "looped-bfs", 2, network="albert", units=6, pipelines=2, shard=True
    ),
    **{
        f"{name} bf16 x 2 in shards": _case(name, 2, pipelines=2, shard=True, bf16=True)
        for name in ("1f1b", "zbv")
    },
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return _run(2, list(TWO.values()), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return _run(4, list(FOUR.values()), tmp_path_factory.mktemp("four"))


def _run(ranks: int, cases: list[Case], folder: Path) -> list[list[dict[str, Any]]]:
    """By case: what each rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked.start_ranks(pipeline_ranks.run, (ranks, port, cases, str(folder)), ranks)
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    return [list(by_rank) for by_rank in zip(*found, strict=True)]


@lru_cache(maxsize=64)
def _alone(text: str) -> dict[str, Any]:
    return pipeline_ranks.alone(json.loads(text))


def _check(case: Case, found: list[dict[str, Any]]) -> None:
    """Gradients, losses and norms of all ranks against those of one process."""
    apart = ("schedule", "stages_per_rank", "cut", "shard", "bf16")
    expected = _alone(json.dumps({key: value for key, value in case.items() if key not in apart}))
    within = 4e-2 if case.get("bf16") else 1e-5
    seen, passed = set(), set()
    # Some gradients are zero but for rounding (those of the keys' biases).
    least = expected["norm"] * 1e-2
    for rank in found:
        for name, gradient in rank["gradients"].items():
            _assert_near(gradient, expected["gradients"][name], within, name, least)
            seen.add(name)
        assert rank["norm"] == pytest.approx(expected["norm"], rel=within)
        assert rank["norm"] == found[0]["norm"], "the ranks would decide differently"
        assert rank["half"] == pytest.approx(rank["norm"] / 2, rel=1e-6)
        if rank["outputs"] is None:
            assert rank["evaluated"] is None
            continue
        *evaluated, short = rank["evaluated"]
        for number, output, after in zip(rank["numbers"], rank["outputs"], evaluated, strict=True):
            _assert_near(output, expected["outputs"][number], within, "loss")
            _assert_near(after, expected["evaluated"][number], within, "evaluation")
            passed.add(number)
        _assert_near(short, expected["short"][rank["numbers"][0]], within, "two examples")
    assert seen == expected["gradients"].keys()
    # A forward pass each, and one more where a block is recomputed: not one for every few weights.
    if case["network"] in ("tied", "untied"):
        passes = (
            (case["units"] - 2) * len(expected["outputs"]) * (2 if case.get("recompute") else 1)
        )
        assert sum(rank["calls"] for rank in found) == passes
    sharded = set().union(*(rank["sharded"] for rank in found))
    assert sharded == ((seen - _whole(case, seen)) if case.get("shard") else set())
    assert passed == set(range(len(expected["outputs"])))


def _whole(case: Case, names: set[str]) -> set[str]:
    """What shards leave whole: what several stages of a rank share.

    With 5 units in 4 stages ALBERT's block is in the two in the middle, with 6 it is in all.
    """
    in_v = SCHEDULES[case["schedule"]].placement == "v"
    ends = {name for name in names if in_v and name.endswith(TIED[case["network"]])}
    if case["network"] == "albert" and case["stages_per_rank"] > 1 and (in_v or case["units"] > 5):
        return ends | {name for name in names if "albert_layer_groups" in name}
    return ends


def _assert_near(
    left: torch.Tensor, right: torch.Tensor, within: float, what: str, least: float = 0.0
) -> None:
    assert left.shape == right.shape, what
    difference = float((left - right).norm()) / max(float(right.norm()), least)
    assert difference <= within, f"{what}: {difference:.1e}"


@pytest.mark.parametrize("name", [name for name in TWO if name not in REFUSED])
def test_two_ranks_are_one_process(two: list[list[dict[str, Any]]], name: str) -> None:
    _check(TWO[name], two[list(TWO).index(name)])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_told_on_every_rank(two: list[list[dict[str, Any]]], name: str) -> None:
    found = two[list(TWO).index(name)]
    assert len(found) == 2
    for rank in found:
        assert REFUSED[name][1] in rank["refused"]


@pytest.mark.parametrize("name", ["zbv", "interleaved-zero-bubble"])
def test_a_weight_that_a_module_uses_twice_is_told_or_right(name: str, tmp_path: Path) -> None:
    """Never seen before the step: all ranks end, with the reason in one line."""
    with pytest.raises(ProcessRaisedException, match=f"schedule '{name}' splits the backward pass"):
        _run(2, [_case(name, 2, network="twice")], tmp_path)


def test_a_step_that_fails_leaves_no_batches_behind() -> None:
    class Failing:
        def step(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("boom")

    stage = Stage(
        module_chain(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), (0, 1),
        device=torch.device("cpu"), bf16=False, splits=False,
    )  # fmt: skip
    pipeline = Pipeline.__new__(Pipeline)
    vars(pipeline).update(
        _microbatches=1, _named={}, module=stage, _stages={0: stage}, _schedule=SCHEDULES["1f1b"],
        _at=SimpleNamespace(pipeline=0, pipelines=((0, 1),)), _prepared=lambda _: Failing(),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="boom"):
        pipeline.step(
            [{"input": torch.zeros(1, 2)}], lambda output, _: output.sum(), seed=0, step=0
        )
    left: Any = (stage._batches, stage._seeds, pipeline._batches, pipeline._weigh)
    assert left == ((), None, (), None)
    assert pipeline._outputs == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_are_one_process(four: list[list[dict[str, Any]]], name: str) -> None:
    _check(FOUR[name], four[list(FOUR).index(name)])
