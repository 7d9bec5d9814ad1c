"""What the trace of a chain says of its units, against sizes known by hand and real tensors."""

from __future__ import annotations

import itertools
import resource
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.training.step_examples import objective
from training.networks import build_network
from training.objectives import Objective
from training.parallel.chain import Chain, module_chain, objective_chain
from training.parallel.profile import profile_chain, profile_recipe, worst_batch
from training.recipe import Pipeline, TrainRecipe, load_recipe

ROWS, WIDTH, HIDDEN = 8, 16, 64


def recipe(name: str, *fields: str) -> TrainRecipe:
    return load_recipe(name, ["run.compile=false", "run.precision=fp32", *fields])


def _stack(blocks: int) -> nn.Sequential:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))

    return nn.Sequential(*(block() for _ in range(blocks)))


def test_bytes_and_flops_by_hand() -> None:
    profile = profile_chain(module_chain(_stack(1)), {"input": torch.zeros(ROWS, WIDTH)})
    (unit,) = profile.units
    weights = 2 * WIDTH * HIDDEN
    assert unit.parameters == weights + HIDDEN + WIDTH
    assert unit.matrices == (WIDTH * HIDDEN, HIDDEN * WIDTH)
    assert unit.output_bytes == 4 * ROWS * WIDTH
    # ReLU's result serves its own backward pass and the second layer's; and the output is there.
    assert unit.kept_bytes == 4 * ROWS * (HIDDEN + WIDTH)
    # The first layer's result, which ReLU makes another of.
    assert unit.forward_bytes == 4 * ROWS * 2 * HIDDEN
    assert unit.gradient_bytes == 4 * unit.parameters
    assert unit.forward_s == 2 * ROWS * weights  # a FLOP is a second
    # Of the weights of both layers, and of the input of the second.
    assert unit.backward_s == 2 * ROWS * (weights + WIDTH * HIDDEN)
    assert profile.source == "operations"
    assert profile.batch_bytes == 4 * ROWS * WIDTH


def test_equal_units_are_traced_once_and_told_all() -> None:
    few, many = (
        profile_chain(module_chain(_stack(blocks)), {"input": torch.zeros(ROWS, WIDTH)}).units
        for blocks in (3, 30)
    )
    assert [unit.name for unit in many] == [str(number) for number in range(30)]
    assert len({unit.kept_bytes for unit in many}) <= 2
    for one, other in (
        (few[0], many[0]),
        (few[1], many[1]),
        (few[1], many[20]),
        (few[2], many[29]),
    ):
        assert (one.kept_bytes, one.backward_bytes, one.gradient_bytes, one.forward_s) == (
            other.kept_bytes, other.backward_bytes, other.gradient_bytes, other.forward_s
        )  # fmt: skip


def test_blocks_that_differ_in_nothing_but_a_setting_are_not_equal() -> None:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(share)) for share in (0.0, 0.0, 0.5, 0.5)]
    units = profile_chain(module_chain(nn.Sequential(*parts)), {"input": torch.zeros(4, 8)}).units
    assert units[2].kept_bytes > units[1].kept_bytes  # dropout keeps its mask


def test_equal_blocks_of_different_inputs_are_not_equal() -> None:
    """Convolutions of one repr that halve the image: each does less than the one before."""
    network = nn.Sequential(*(nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(5)))
    batch = {"input": torch.zeros(2, 4, 64, 64)}
    profile = profile_chain(module_chain(network), batch, device=torch.device("cpu"))
    assert [unit.output_bytes for unit in profile.units] == [32768, 8192, 2048, 512, 128]
    counted = profile_chain(module_chain(network), batch).units
    assert [one.forward_s / two.forward_s for one, two in itertools.pairwise(counted)] == [4.0] * 4
    assert len({unit.seconds for unit in profile.units}) == 5  # each timed by itself


def test_blocks_that_are_recomputed_are_not_like_those_that_are_not() -> None:
    network = _stack(6)
    for block in list(network)[3:]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    units = profile_chain(module_chain(network), {"input": torch.zeros(ROWS, WIDTH)}).units
    plain, again = units[1], units[4]
    # The second layer's product is not needed again.
    assert again.backward_s == plain.backward_s + plain.forward_s - 2 * ROWS * HIDDEN * WIDTH
    assert plain.kept_bytes > again.kept_bytes


def test_weights_are_on_the_device_only_while_they_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `side` needs goes there first; then each distinct unit, there and back."""
    chain = objective_chain(objective("decoder"))
    moved: list[tuple[nn.Module, torch.device]] = []
    monkeypatch.setattr(nn.Module, "to", lambda self, where: moved.append((self, where)) or self)
    batch = worst_batch(_tiny("decoder"), 2)
    profile_chain(chain, batch, device=torch.device("cpu"))
    rotary = chain.common[0][1]
    embedding, first, *_, head = (unit.modules for unit in chain.units)
    assert [module for module, _ in moved] == [
        *[rotary] * 2,
        *[embedding[0][1]] * 2,
        *[first[0][1]] * 2,
        *[module for _ in range(2) for _, module in head],
    ]
    assert {where.type for _, where in moved} == {"cpu"}


def _weights(chain: Chain) -> list[nn.Parameter]:
    return [one for unit in chain.units for _, module in unit.modules
            for one in module.parameters()]  # fmt: skip


@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_a_network_is_left_as_it_was(family: str) -> None:
    found = objective(family)
    before = {name: (id(one), one.clone()) for name, one in found.named_parameters()}
    state = torch.get_rng_state()
    profile_chain(objective_chain(found), worst_batch(_tiny(family), 2))
    after = dict(found.named_parameters())
    assert {name: id(one) for name, one in after.items()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(after[name], was) for name, (_, was) in before.items())
    assert all(one.grad is None for one in after.values())
    assert torch.equal(torch.get_rng_state(), state)


def _tiny(family: str) -> TrainRecipe:
    name = {"albert": "albert-small", "decoder": "decoder-small"}[family]
    return recipe(name, "model.size=tiny", "examples.sequence_length=16")


@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_shared_weights(family: str) -> None:
    found = objective(family)
    profile = profile_chain(objective_chain(found), worst_batch(_tiny(family), 2))
    assert profile.parameters(0, len(profile.units)) == sum(p.numel() for p in found.parameters())
    embedding, head = profile.units[0], profile.units[-1]
    assert len(set(embedding.shared) & set(head.shared)) == 1
    blocks = profile.units[1:-1]
    shared = {sum(unit.shared.values()) for unit in blocks}
    assert shared == {blocks[0].parameters if family == "albert" else 0}
    assert [unit.sharded_alone for unit in blocks] == [family == "decoder"] * len(blocks)


def test_a_recipe_is_profiled_as_its_network_is() -> None:
    """Weights without memory and real ones give the same numbers."""
    for family in ("albert", "decoder"):
        wanted = _tiny(family)
        real = objective_chain(Objective(build_network(wanted, 90)).train())
        assert profile_chain(real, worst_batch(wanted, 2)) == profile_recipe(
            wanted, 90, microbatch=2
        )
        low = wanted.model_copy(update={"run": wanted.run.model_copy(
            update={"strategy": "pipeline", "precision": "bf16",
                    "pipeline": Pipeline(shard=True)})})  # fmt: skip
        found = profile_chain(real, worst_batch(wanted, 2), bf16=True, low=True)
        assert found == profile_recipe(low, 90, microbatch=2, copies=2)
        assert found.low_weights
        assert not profile_recipe(low, 90, microbatch=2, copies=1).low_weights
        assert all(one.dtype == torch.float32 for one in _weights(real))  # put back


def test_settings_of_the_run_change_what_is_kept() -> None:
    def kept(*fields: str) -> int:
        found = recipe("decoder-small", "examples.sequence_length=64", *fields)
        unit = profile_recipe(found, 500, microbatch=2).units[2]
        copied = 2 * sum(unit.matrices) if fields == ("run.precision=bf16",) else 0
        assert unit.copied_bytes == copied
        return unit.kept_bytes - unit.copied_bytes

    plain = kept()
    # Beside its input a recomputed block keeps nothing, but its output, the next one's input.
    assert kept("run.activation_checkpointing=true") == 4 * 2 * 64 * 256
    half = kept("run.precision=bf16")
    assert plain / 2 < half < plain
    # Under FSDP2 weights are bf16 already, and the residual stream is of half the size.
    assert kept("run.precision=bf16", "run.strategy=zero2") < half
    # No mask, which each layer keeps in float32.
    assert plain - kept("examples.cross_document_attention=true") == 4 * 2 * 64 * 64


def test_recomputation_is_a_second_forward_pass() -> None:
    plain, again = (
        profile_recipe(
            recipe(
                "decoder-small",
                f"run.activation_checkpointing={flag}",
                "examples.sequence_length=64",
            ),
            500,
            microbatch=1,
        ).units[2]
        for flag in ("false", "true")
    )
    # But for its last product, whose result the backward pass does not need.
    last = 2 * 64 * 704 * 256
    assert again.backward_s == plain.backward_s + plain.forward_s - last


def test_measured_seconds() -> None:
    wanted = _tiny("decoder")
    chain = objective_chain(Objective(build_network(wanted, 50_000)).train())
    profile = profile_chain(chain, worst_batch(wanted, 4), device=torch.device("cpu"))
    assert profile.source == "measured"
    assert all(0 < unit.forward_s < 1 and 0 < unit.backward_s < 1 for unit in profile.units)
    assert len({unit.seconds for unit in profile.units[1:-1]}) == 1
    # 50,000 logits a token are the most of this network's work.
    assert profile.units[-1].seconds > 2 * profile.units[1].seconds
    counted = profile_recipe(wanted, 50_000, microbatch=4)
    assert [unit.kept_bytes for unit in profile.units] == [u.kept_bytes for u in counted.units]


def test_large_networks_take_neither_memory_nor_time() -> None:
    wanted = recipe("decoder-280m", "model.size=70b", "examples.sequence_length=8192",
                    "run.activation_checkpointing=true", "run.precision=bf16")  # fmt: skip
    before, begin_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    profile = profile_recipe(wanted, 128_256, microbatch=1)
    assert time.process_time() - begin_s < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB
    assert profile.parameters(0, len(profile.units)) == 70_553_706_496
    assert len(profile.units) == 82
