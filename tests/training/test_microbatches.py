"""Microbatches of a step: dealt alike to any number of ranks, adding up to one big batch."""

from __future__ import annotations

import pytest
import torch

from tests.training import step_examples
from training import microbatches
from training.batches import blank
from training.metrics import Window
from training.pipelined import Pipelined
from training.recipe import Run
from training.strategy import Parallel, Placement

ALONE = Placement(0, 1, torch.device("cpu"), "single")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share the processor with each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_microbatches_add_up_to_one_big_batch(family: str) -> None:
    examples = step_examples.examples(family, 0, 7)
    found = []
    for microbatch in (7, 1, 2, 3):
        parallel = Parallel(step_examples.objective(family), ALONE, Run())
        passed = step_examples.gradients(
            parallel, family, examples, of=7, microbatch=microbatch, step=0
        )
        gradient = step_examples.whole(parallel.objective, gradient=True)
        found.append((passed.window.means()["loss"], gradient, passed.tokens))
    big_loss, big_gradient, tokens = found[0]
    assert tokens == sum(len(example.arrays["input_ids"]) for example in examples)
    for loss, gradient, count in found[1:]:
        assert count == tokens
        assert loss == pytest.approx(big_loss, abs=1e-6)
        for name, expected in big_gradient.items():
            torch.testing.assert_close(gradient[name], expected, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_blank_batch_has_no_gradient(family: str) -> None:
    parallel = Parallel(step_examples.objective(family), ALONE, Run())
    passed = step_examples.gradients(parallel, family, [], of=1, microbatch=1, step=0)
    assert passed.tokens == 0
    assert not passed.window.sums.any()
    assert parallel.gradient_norm() == 0
    step_examples.whole(parallel.objective, gradient=True)  # each parameter has one


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deal_is_the_same_for_all_ranks(ranks: int) -> None:
    examples = step_examples.examples("decoder", 22, 22)
    number = microbatches.count(22, 3, ranks)
    assert number == 8
    dealt: dict[int, list[int]] = {}
    for rank in range(ranks):
        own = [example for example in examples if example.index % ranks == rank]
        for place, part in enumerate(microbatches.deal(own, number, rank, ranks)):
            dealt[rank + place * ranks] = [example.index for example in part]
    assert dealt == {g: [i for i in range(22, 44) if i % 8 == g] for g in range(8)}


def test_dropout_seeds_differ() -> None:
    seeds = {
        microbatches.dropout_seed(*key) for key in [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1)]
    }
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_names_of_parameters_stay(family: str, activation_checkpointing: bool) -> None:
    plain = [name for name, _ in step_examples.objective(family).network.named_parameters()]
    run = Run(activation_checkpointing=activation_checkpointing, compile=True)
    parallel = Parallel(step_examples.objective(family), ALONE, run)
    assert [name for name, _ in parallel.objective.network.named_parameters()] == plain


def test_a_pipeline_weighs_no_examples() -> None:
    """Its first ranks do not have the losses that the weights come from."""
    pipelined = Pipelined.__new__(Pipelined)
    with pytest.raises(ValueError, match="a pipeline cannot weigh examples"):
        microbatches.gradients(
            pipelined, [[]], [blank("decoder", 8)], Window(("next_token",), ("bn",), ALONE.device),
            seed=0, step=0, weigh=lambda batch, losses: losses.sums,
        )  # fmt: skip
