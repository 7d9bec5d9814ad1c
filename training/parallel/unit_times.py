"""How long the units of a chain take on a device, measured one by one."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from training.batches import Batch
from training.parallel.chain import Chain, Unit

_WARMUPS, _TIMES = 2, 5


def seconds(
    chain: Chain,
    keys: Sequence[object],
    batch: Batch,
    *,
    bf16: bool,
    device: torch.device,
) -> list[tuple[float, float]]:
    """Of the forward and the backward pass of each unit; those of equal keys are timed once.

    Weights that are elsewhere are on the device only while their unit is timed. They get no
    gradients.
    """
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    found: dict[object, tuple[tuple[float, float], Tensor]] = {}
    times = []
    common = [module for _, module in chain.common]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with _on(device, common), torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            side = chain.side(dict(inputs))
        hidden = inputs[chain.input]
        for unit, key in zip(chain.units, keys, strict=True):
            if key not in found:
                with _on(device, [module for _, module in unit.modules]):
                    found[key] = _unit_seconds(unit, hidden, side, bf16, device)
            took, hidden = found[key]
            times.append(took)
    return times


def _unit_seconds(
    unit: Unit, hidden: Tensor, side: dict[str, Any], bf16: bool, device: torch.device
) -> tuple[tuple[float, float], Tensor]:
    """Median seconds forward and backward, and what the unit gave."""
    wanted: list[Tensor] = [
        one for _, module in unit.modules for one in module.parameters() if one.requires_grad
    ]
    if hidden.is_floating_point():
        hidden = hidden.detach().requires_grad_()
        wanted = [hidden, *wanted]
    forward_s, backward_s = [], []
    for _ in range(_WARMUPS + _TIMES):
        begin_s = _now(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            output = unit.run(hidden, side)
        middle_s = _now(device)
        if wanted:
            torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
        forward_s.append(middle_s - begin_s)
        backward_s.append(_now(device) - middle_s)
    medians = statistics.median(forward_s[_WARMUPS:]), statistics.median(backward_s[_WARMUPS:])
    return medians, output.detach()


@contextlib.contextmanager
def _on(device: torch.device, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules on a device while the block runs, then where they were."""
    parts = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    homes = {part.device for part in parts} or {device}
    for module in modules:
        module.to(device)
    try:
        yield
    finally:
        for module in modules:
            module.to(next(iter(homes)))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
