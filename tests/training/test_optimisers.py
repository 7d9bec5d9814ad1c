"""LAMB by hand and against double precision; which parameters decay."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from models.errors import Fault
from training.optimisers import Lamb, build_optimiser, parameter_groups
from training.recipe import Optimiser


def parameter(values: list[Any], gradient: list[Any]) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values))
    made.grad = torch.tensor(gradient)
    return made


def test_lamb_first_step_by_hand() -> None:
    """‖w‖ = 5; m̂ = g and v̂ = g², so r = g / (|g| + 0.1) = (0.75, 0.8).

    u = r + 0.01 w = (0.78, 0.84), ‖u‖ = √1.314 = 1.1462984, trust = 5 / ‖u‖ = 4.3618647,
    w - 0.1 · trust · u = (3 - 0.3402254, 4 - 0.3663966).
    """
    weight = parameter([[3.0, 4.0]], [[0.3, 0.4]])
    Lamb([weight], lr=0.1, eps=0.1, weight_decay=0.01).step()
    assert weight.tolist() == [pytest.approx([2.6597746, 3.6336034], abs=1e-6)]


def test_lamb_second_step_by_hand() -> None:
    """Gradients 1 then -1, betas (0.5, 0.75), no decay, eps 1, one weight of 2, lr 0.1.

    Step 1: m = 0.5, v = 0.25; m̂ = 1, v̂ = 1; r = 1/2, trust 2 / 0.5 = 4: w = 2 - 0.1·2 = 1.8.
    Step 2: m = -0.25, v = 0.4375; m̂ = -0.25/0.75 = -1/3, v̂ = 0.4375/0.4375 = 1; r = -1/6,
    trust 1.8 · 6: w = 1.8 + 0.1 · 1.8 = 1.98.
    """
    weight = parameter([[2.0]], [[1.0]])
    optimiser = Lamb([weight], lr=0.1, betas=(0.5, 0.75), eps=1.0, weight_decay=0.0)
    optimiser.step()
    assert weight.item() == pytest.approx(1.8, abs=1e-6)
    weight.grad = torch.tensor([[-1.0]])
    optimiser.step()
    assert weight.item() == pytest.approx(1.98, abs=1e-6)


def test_lamb_without_bias_correction_by_hand() -> None:
    """m = 0.5·2 = 1, v = 0.25·4 = 1: r = 1 / (1 + 1) = 0.5; trust 3 / 0.5: w = 3 - 0.1 · 3."""
    weight = parameter([[3.0]], [[2.0]])
    options: dict[str, Any] = {"betas": (0.5, 0.75), "eps": 1.0, "weight_decay": 0.0}
    Lamb([weight], lr=0.1, bias_correction=False, **options).step()
    assert weight.item() == pytest.approx(2.7, abs=1e-6)
    # The size of r is lost in one weight's trust ratio: seen without it, r is 0.5, not 2/3.
    weight = parameter([[3.0]], [[2.0]])
    Lamb([weight], lr=0.1, bias_correction=False, layer_adaptation=False, **options).step()
    assert weight.item() == pytest.approx(2.95, abs=1e-6)


def test_lamb_caps_the_norm_of_a_large_weight() -> None:
    """‖w‖ = 50 counts as 10, ‖u‖ = √2: each w falls by 0.1 · 10 / √2."""
    weight = parameter([[30.0, 40.0]], [[1.0, 1.0]])
    Lamb([weight], lr=0.1, eps=1e-12, weight_decay=0.0, max_trust_weight_norm=10.0).step()
    fall = 1 / math.sqrt(2)
    assert weight.tolist() == [pytest.approx([30 - fall, 40 - fall], abs=1e-5)]


def test_lamb_trusts_a_zero_weight_and_leaves_a_zero_update() -> None:
    zero = parameter([[0.0, 0.0]], [[1.0, -1.0]])
    still = parameter([[3.0, 4.0]], [[0.0, 0.0]])
    Lamb([zero, still], lr=0.1, eps=1e-12, weight_decay=0.0).step()
    assert zero.tolist() == [pytest.approx([-0.1, 0.1])]
    assert still.tolist() == [[3.0, 4.0]]


def naive_lamb(
    weights: list[np.ndarray],
    gradients: list[list[np.ndarray]],
    *,
    decay: list[float],
    adapt: list[bool],
    correct: bool,
    cap: float,
) -> list[np.ndarray]:
    """Algorithm 2 of the paper in float64, one tensor after the other."""
    lr, beta1, beta2, eps = 0.02, 0.9, 0.99, 1e-6
    moved = [weight.astype(np.float64) for weight in weights]
    for index, weight in enumerate(moved):
        m, v = np.zeros_like(weight), np.zeros_like(weight)
        for step, at_step in enumerate(gradients, start=1):
            g = at_step[index].astype(np.float64)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            m_hat = m / (1 - beta1**step) if correct else m
            v_hat = v / (1 - beta2**step) if correct else v
            u = m_hat / (np.sqrt(v_hat) + eps) + decay[index] * weight
            phi, size = min(math.sqrt((weight**2).sum()), cap), math.sqrt((u**2).sum())
            ratio = phi / size if adapt[index] and phi > 0 and size > 0 else 1.0
            weight[...] -= lr * ratio * u
    return moved


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("cap", [1e4, 1.5])
def test_lamb_against_double_precision(correct: bool, cap: float) -> None:
    rng = np.random.default_rng(3)
    shapes = [(6, 5), (3, 4, 2), (7,)]
    weights = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    gradients = [
        [(rng.normal(size=shape) * 10.0 ** rng.integers(-4, 2)).astype(np.float32)
         for shape in shapes]
        for _ in range(8)
    ]  # fmt: skip
    network = nn.ParameterList([torch.from_numpy(weight.copy()) for weight in weights])
    groups = parameter_groups(network, 0.1)
    groups[1]["layer_adaptation"] = False
    optimiser = Lamb(
        groups, lr=0.02, betas=(0.9, 0.99), eps=1e-6, max_trust_weight_norm=cap,
        bias_correction=correct,
    )  # fmt: skip
    for at_step in gradients:
        for weight, gradient in zip(network, at_step, strict=True):
            weight.grad = torch.from_numpy(gradient)
        optimiser.step()
    expected = naive_lamb(
        weights, gradients, decay=[0.1, 0.1, 0.0], adapt=[True, True, False], correct=correct,
        cap=cap,
    )  # fmt: skip
    for weight, exact in zip(network, expected, strict=True):
        np.testing.assert_allclose(weight.detach().numpy(), exact, rtol=1e-5, atol=1e-6)


def steps(optimiser: torch.optim.Optimizer, weights: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimiser.step()


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_a_restored_state_goes_on_bit_by_bit(name: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    recipe = Optimiser(name=name, learning_rate=0.05)
    optimiser = build_optimiser(recipe, network)
    steps(optimiser, list(network.parameters()), range(3))
    other = copy.deepcopy(network)
    resumed = build_optimiser(recipe, other)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    steps(optimiser, list(network.parameters()), range(3, 6))
    steps(resumed, list(other.parameters()), range(3, 6))
    for left, right in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_lamb_closure_and_missing_gradient() -> None:
    weight, idle = parameter([[1.0]], [[0.0]]), nn.Parameter(torch.ones(1, 1))
    optimiser = Lamb([weight, idle], lr=0.5, eps=1e-12, weight_decay=0.0)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (weight * 3).sum()
        loss.backward()
        return loss

    assert optimiser.step(closure).item() == 3.0
    assert weight.item() == pytest.approx(0.5)
    assert idle.item() == 1.0


def test_lamb_refuses_sparse_gradients() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(Fault, match="sparse"):
        Lamb(embedding.parameters(), lr=0.1).step()


def test_biases_and_norms_neither_decay_nor_adapt() -> None:
    network = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    recipe = Optimiser(name="lamb", weight_decay=0.3, max_trust_weight_norm=7.0)
    matrices, vectors = build_optimiser(recipe, network).param_groups
    assert [tuple(one.shape) for one in matrices["params"]] == [(5, 4), (3, 4)]
    assert [tuple(one.shape) for one in vectors["params"]] == [(3,), (3,), (3,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert (matrices["layer_adaptation"], vectors["layer_adaptation"]) == (True, False)
    assert matrices["max_trust_weight_norm"] == 7.0


def test_adamw_step_by_hand() -> None:
    """r = 0.3 / (0.3 + 0.1) = 0.75: w = 3 (1 - 0.1 · 0.01) - 0.1 · 0.75; vectors do not decay."""
    network = nn.ParameterList([torch.tensor([[3.0]]), torch.tensor([3.0])])
    for weight in network:
        weight.grad = torch.full_like(weight, 0.3)
    recipe = Optimiser(name="adamw", learning_rate=0.1, epsilon=0.1, weight_decay=0.01)
    build_optimiser(recipe, network).step()
    assert network[0].item() == pytest.approx(2.922, abs=1e-6)
    assert network[1].item() == pytest.approx(2.925, abs=1e-6)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_plain_and_sharded_parameters_in_one_network(group: None, name: str) -> None:
    """As in a pipeline in shards, where stages of one rank share a weight."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    mixed = copy.deepcopy(alone)
    whole = {mixed[0].weight, mixed[2].bias}
    fully_shard(mixed, mesh=init_device_mesh("cpu", (1,)), ignored_params=whole)
    assert {isinstance(one, DTensor) for one in mixed.parameters()} == {False, True}
    settings = Optimiser.model_validate({"name": name, "learning_rate": 0.05, "epsilon": 1e-6})
    optimisers = [build_optimiser(settings, one) for one in (alone, mixed)]
    for step in range(3):
        rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        for network, optimiser in zip((alone, mixed), optimisers, strict=True):
            network(rows).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
    for one, other in zip(alone.parameters(), mixed.parameters(), strict=True):
        found = other.full_tensor() if isinstance(other, DTensor) else other
        torch.testing.assert_close(found, one, rtol=0, atol=1e-6)
    decays = {group["weight_decay"] for group in optimisers[1].param_groups}
    assert decays == {0.0, settings.weight_decay}
