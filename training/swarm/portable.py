"""Steps of AdamW and LAMB with the same bits on every machine: AVX2 or AVX-512, CPU or CUDA.

Peers compare hashes of their weights, so the same gradient must give the same weights everywhere.
torch's own steps do not: fused multiply-add and the order of a sum differ between processors. Here
only additions, multiplications, divisions and roots of whole tensors are used, each rounded once
as IEEE 754 says; sums go by halves in an order of their own. Numbers of the step (learning rate,
bias correction) are rounded to 12 digits, so that a math library's last bit does not count.

The formulas are those of `torch.optim.AdamW` and `training.optimisers.Lamb`, and so are the names
in the optimiser's state. A scalar never divides a tensor: CUDA multiplies by its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Any

import torch
from torch import Tensor

from models.errors import Fault
from training.optimisers import Lamb


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Sum of the squares of all values: float64 (), added up by halves."""
    values = tensor.detach().reshape(-1).double()
    values = values * values
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values[: len(values) - half] += values[half:]
        values = values[:half]
    return values.sum()  # of one value or none


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """Euclidean norm of each tensor."""
    if not tensors:
        return []
    squares: list[float] = torch.stack([sum_of_squares(one) for one in tensors]).tolist()
    return [math.sqrt(one) for one in squares]


def norm(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all values together."""
    return math.sqrt(math.fsum(one * one for one in norms(tensors)))


def rounded(value: float) -> float:
    """`value` to 12 digits."""
    return float(f"{value:.12g}")


@torch.no_grad()
def step(optimiser: torch.optim.Optimizer) -> None:
    """The step that `optimiser.step()` takes. Raises Fault for an optimiser not known here."""
    if isinstance(optimiser, Lamb):
        update = _lamb
    elif isinstance(optimiser, torch.optim.AdamW):
        update = _adamw
    else:
        raise Fault(f"a swarm takes steps of AdamW and LAMB, not of {type(optimiser).__name__}")
    for group in optimiser.param_groups:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        update(optimiser, group, moved)


def _adamw(
    optimiser: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[Tensor]
) -> None:
    if group["amsgrad"] or group["maximize"]:
        raise Fault("a swarm takes plain steps of AdamW: no amsgrad, no maximize")
    rate = rounded(group["lr"])
    for parameter in parameters:
        direction = _direction(optimiser, group, parameter, bias_correction=True)
        parameter.mul_(rounded(1 - rate * group["weight_decay"]))
        parameter.sub_(direction * rate)


def _lamb(
    optimiser: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[Tensor]
) -> None:
    rate, decay = rounded(group["lr"]), group["weight_decay"]
    updates = []
    for parameter in parameters:
        direction = _direction(
            optimiser, group, parameter, bias_correction=group["bias_correction"]
        )
        updates.append(direction + parameter * decay if decay else direction)
    ratios = [1.0] * len(updates)
    if group["layer_adaptation"]:
        pairs = zip(norms(parameters), norms(updates), strict=True)
        longest = group["max_trust_weight_norm"]
        ratios = [min(weight, longest) / update if weight and update else 1.0
                  for weight, update in pairs]  # fmt: skip
    for parameter, update, ratio in zip(parameters, updates, ratios, strict=True):
        parameter.sub_(update * (ratio * rate))


def _direction(
    optimiser: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: Tensor,
    *,
    bias_correction: bool,
) -> Tensor:
    """m / (root of v + eps), with bias corrections; moves the moments on."""
    gradient = parameter.grad
    assert gradient is not None
    state = optimiser.state[parameter]
    if not state:
        on_device = bool(group.get("fused") or group.get("capturable"))
        device = parameter.device if on_device else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.mul_(beta1).add_(gradient * rounded(1 - beta1))
    second.mul_(beta2).add_(gradient * gradient * rounded(1 - beta2))
    steps = int(state["step"])
    one, two = (
        (_correction(beta1, steps), _correction(beta2, steps)) if bias_correction else (1.0, 1.0)
    )
    # In float64 a root that is off by its last bit still rounds to the same float32.
    root = (second.double() * two).sqrt().float()
    update: Tensor = first * one / (root + group["eps"])
    return update


def _correction(beta: float, steps: int) -> float:
    """1 / (1 - beta^steps), without the power of a math library."""
    with localcontext() as context:
        context.prec = 40
        return float(1 / (1 - Decimal(beta) ** steps))
