"""Steps with the same bits everywhere: torch's formulas, NumPy's bits, a digest that is known."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.errors import Fault
from training.optimisers import Lamb
from training.swarm import portable

ROOT = Path(__file__).parents[3]


def parameters() -> list[nn.Parameter]:
    draw = np.random.default_rng(0)
    return [nn.Parameter(torch.tensor(draw.normal(size=shape).astype(np.float32)))
            for shape in [(7, 5), (5,), (3, 2, 2), (1,)]]  # fmt: skip


def gradients(step: int) -> list[torch.Tensor]:
    draw = np.random.default_rng(100 + step)
    return [torch.tensor((draw.normal(size=one.shape) * 10.0 ** draw.integers(-6, 3))
                         .astype(np.float32)) for one in parameters()]  # fmt: skip


def stepped(build: Any, move: Any, steps: int = 5) -> list[torch.Tensor]:
    own = parameters()
    optimiser = build(own)
    for step in range(steps):
        for parameter, gradient in zip(own, gradients(step), strict=True):
            parameter.grad = gradient
        for group in optimiser.param_groups:
            group["lr"] = 0.01 / (step + 1)
        move(optimiser)
    states = [optimiser.state[one] for one in own]
    return [one.detach() for one in own] + [
        state[key] for state in states for key in ("step", "exp_avg", "exp_avg_sq")
    ]


CASES: dict[str, Any] = {
    "adamw": lambda own: torch.optim.AdamW(own, lr=1.0, weight_decay=0.1),
    "adamw fused": lambda own: torch.optim.AdamW(own, lr=1.0, weight_decay=0.1, fused=True),
    "lamb": lambda own: Lamb(own, lr=1.0, weight_decay=0.1),
    "lamb groups": lambda own: Lamb(
        [{"params": own[:2]}, {"params": own[2:], "layer_adaptation": False, "weight_decay": 0.0}],
        lr=1.0, bias_correction=False, max_trust_weight_norm=1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_step_is_that_of_the_optimiser(name: str) -> None:
    expected = stepped(CASES[name], lambda optimiser: optimiser.step())
    found = stepped(CASES[name], portable.step)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-8)


def test_saved_state_goes_on_in_the_optimiser_itself() -> None:
    """The state has the names, types and devices that torch expects."""
    own = parameters()
    optimiser = torch.optim.AdamW(own, lr=0.01)
    for parameter, gradient in zip(own, gradients(0), strict=True):
        parameter.grad = gradient
    portable.step(optimiser)
    there = torch.optim.AdamW(own, lr=0.01)
    there.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    there.step()
    assert all(float(there.state[one]["step"]) == 2 for one in own)


def test_bits_are_those_of_ieee_arithmetic_in_numpy() -> None:
    """AdamW in NumPy, one operation after the other in float32, gives each bit."""
    beta1, beta2, eps, decay = 0.9, 0.999, 1e-8, 0.1
    f = np.float32
    own = [one.detach().numpy().copy() for one in parameters()]
    first, second = ([np.zeros_like(one) for one in own] for _ in range(2))
    for step in range(5):
        rate = float(f"{0.01 / (step + 1):.12g}")
        for place, gradient in enumerate(one.numpy() for one in gradients(step)):
            first[place] = first[place] * f(beta1) + gradient * f(1 - beta1)
            second[place] = second[place] * f(beta2) + gradient * gradient * f(1 - beta2)
            scale = 1 / (1 - math.prod([beta2] * (step + 1)))
            root = np.sqrt(second[place].astype(np.float64) * scale).astype(f)
            direction = first[place] * f(1 / (1 - math.prod([beta1] * (step + 1))))
            direction = direction / (root + f(eps))
            own[place] = own[place] * f(1 - rate * decay) - direction * f(rate)
    found = stepped(CASES["adamw"], portable.step)[: len(own)]
    for one, expected in zip(found, own, strict=True):
        np.testing.assert_array_equal(one.numpy(), expected)


def digests() -> dict[str, str]:
    """Of weights and moments after five steps."""
    return {
        name: hashlib.sha256(
            b"".join(one.numpy().tobytes() for one in stepped(CASES[name], portable.step))
        ).hexdigest()
        for name in ("adamw", "lamb")
    }


KNOWN = {
    "adamw": "b7e469cfb0477a11eb8e1cc1b24af83ab403f7039cd36d582bade3133972d0cf",
    "lamb": "d7f0d7dee884b9625a54d1ce135230ee1c29949161bc7dd028c8e19dfe1bcdfd",
}
"""On each machine. torch's own steps give others with AVX2 than without."""


def test_digests_are_known() -> None:
    assert digests() == KNOWN


def test_a_processor_without_vector_instructions_gives_the_same_bits() -> None:
    script = (
        "import torch; from tests.training.swarm import test_portable as t; "
        "assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'; "
        "assert t.digests() == t.KNOWN, t.digests()"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_sum_of_squares(size: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    expected = math.fsum(float(one) ** 2 for one in values)
    assert float(portable.sum_of_squares(torch.tensor(values))) == pytest.approx(
        expected, rel=1e-13
    )


def test_norm_leaves_the_tensors_alone() -> None:
    tensors = [torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])]
    assert portable.norm(tensors) == 5.0
    assert portable.norms(tensors) == [3.0, 4.0]
    assert portable.norm([]) == 0.0
    assert tensors[0].tolist() == [[3.0, 0.0]]
    assert math.isnan(portable.norm([torch.tensor([1.0, math.nan])]))


def test_other_optimisers_are_refused() -> None:
    own = parameters()
    with pytest.raises(Fault, match="AdamW and LAMB, not of SGD"):
        portable.step(torch.optim.SGD(own, lr=0.1))
    with pytest.raises(Fault, match="no amsgrad"):
        portable.step(torch.optim.AdamW(own, amsgrad=True))
