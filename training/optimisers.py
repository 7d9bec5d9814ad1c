"""Optimisers: AdamW from torch, LAMB of our own, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.errors import Fault
from training.recipe import Optimiser


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and vectors (biases, scales of norms), which do not.

    With LAMB the vectors are not adapted by layer either, as in the authors' code.
    """
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {
            "params": [parameter for parameter in parameters if parameter.ndim >= 2],
            "weight_decay": weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]


def build_optimiser(recipe: Optimiser, network: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimiser for the parameters of `network`, plain or sharded by FSDP2."""
    groups = parameter_groups(network, recipe.weight_decay)
    if recipe.name == "adamw":
        return torch.optim.AdamW(
            _by_kind(groups),
            lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.epsilon, fused=True,
        )  # fmt: skip
    groups[1]["layer_adaptation"] = False
    return Lamb(
        groups,
        lr=recipe.learning_rate,
        betas=recipe.betas,
        eps=recipe.epsilon,
        max_trust_weight_norm=recipe.max_trust_weight_norm,
    )


def _by_kind(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of parameters of one kind each, plain or sharded.

    Fused steps take a group as one and refuse both kinds in it; in a sharded pipeline what stages
    of one rank share is plain (`training.parallel.replicas`).
    """
    found = []
    for group in groups:
        sharded = [one for one in group["params"] if isinstance(one, DTensor)]
        plain = [one for one in group["params"] if not isinstance(one, DTensor)]
        parts = [part for part in (plain, sharded) if part] or [[]]
        found += [{**group, "params": part} for part in parts]
    return found


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's step, scaled to each weight's own norm.

    With r = m̂ / (√v̂ + eps) and u = r + weight_decay · w a weight moves by
    lr · φ(‖w‖) / ‖u‖ · u, where φ(‖w‖) = min(‖w‖, max_trust_weight_norm); by lr · u where one of
    the norms is 0 or the group has `layer_adaptation` False. Norms are of the whole tensor, also
    where FSDP2 has sharded it. `bias_correction` False takes m and v as they are, as the
    authors' code does.

    `step` holds the update of one group at once, so that its norms share one all-reduce. It
    raises Fault for a sparse gradient.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_trust_weight_norm: float = 1e4,
        bias_correction: bool = True,
        layer_adaptation: bool = True,
    ) -> None:
        super().__init__(
            parameters,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "max_trust_weight_norm": max_trust_weight_norm,
                "bias_correction": bias_correction,
                "layer_adaptation": layer_adaptation,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = [self._update(parameter, group) for parameter in moved]
            if group["layer_adaptation"] and moved:
                ratios = trust_ratios(moved, updates, group["max_trust_weight_norm"])
                for update, ratio in zip(updates, ratios, strict=True):
                    _local(update).mul_(ratio)
            for parameter, update in zip(moved, updates, strict=True):
                parameter.add_(update, alpha=-group["lr"])
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """u of the class's formula; moves the moments on."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise Fault("LAMB takes no sparse gradients: build the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            # A tensor, as in torch's optimisers: checkpoints keep it like the moments.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["bias_correction"]:
            steps = float(state["step"])
            first = first / (1 - beta1**steps)
            second = second / (1 - beta2**steps)
        update: Tensor = first / (second.sqrt() + group["eps"])
        if group["weight_decay"]:
            update.add_(parameter, alpha=group["weight_decay"])
        return update


def trust_ratios(
    weights: Sequence[Tensor], updates: Sequence[Tensor], max_weight_norm: float
) -> Tensor:
    """min(‖w‖, max_weight_norm) / ‖u‖ of each pair, 1 where a norm is 0; float32 (weights,)."""
    norms = tensor_norms([*weights, *updates])
    weight, update = norms[: len(weights)], norms[len(weights) :]
    ratios = weight.clamp(max=max_weight_norm) / update
    return torch.where((weight > 0) & (update > 0), ratios, torch.ones_like(ratios))


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of each whole tensor: float32 (tensors,), the same on every rank.

    Tensors of one layout (device mesh, placements) share one all-reduce for each sharded
    dimension of the mesh.
    """
    squares = torch.stack(
        [torch.linalg.vector_norm(_local(one), dtype=torch.float32).square() for one in tensors]
    )
    layouts: dict[tuple[Any, Any], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            layouts.setdefault((tensor.device_mesh, tensor.placements), []).append(index)
    for (mesh, placements), indices in layouts.items():
        part = squares[indices]
        for dimension, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(part, group=mesh.get_group(dimension))
        squares[indices] = part
    return squares.sqrt()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
