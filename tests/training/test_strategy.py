"""Every strategy on two ranks computes what one process computes: losses, gradients, norms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.training.step_examples import curve, free_ports, rank_process

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


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    place = tmp_path_factory.mktemp("ranks") / "results.pt"
    mp.spawn(rank_process, args=(free_ports(len(CASES)), CASES, str(place)), nprocs=2)
    results: list[Any] = torch.load(place, weights_only=True)
    return results


@pytest.mark.timeout(300)
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


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_one_rank_of_any_strategy(strategy: str) -> None:
    case = {"family": "decoder", "examples": 3, "microbatch": 2, "steps": 2}
    losses, gradients, norms = curve(case | {"strategy": strategy})
    alone_losses, alone_gradients, alone_norms = curve(case | {"strategy": "single"})
    assert losses == pytest.approx(alone_losses, abs=1e-6)
    assert norms == pytest.approx(alone_norms, rel=1e-5)
    for name, expected in alone_gradients[0].items():
        torch.testing.assert_close(gradients[0][name], expected, rtol=0, atol=1e-6, msg=name)
