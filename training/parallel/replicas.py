"""Pipelines side by side: each has its own microbatches, and the gradients are added up.

Two ways, both right for all schedules:

    replicas  every data rank holds all of a stage; after the schedule one all-reduce of the
              gradients, in buckets. DistributedDataParallel is not used: its reducer waits for
              hooks of autograd, which a backward pass split in two (zero bubble) calls for a part
              of the weights only, and its gradients are wrong without a word. The traffic does
              not overlap the backward pass; what there is to overlap is the last microbatch's.
    shards    FSDP2 over the data ranks: weights, gradients and optimiser state in shards between
              the steps. torch's schedules gather and reduce them by themselves. The weights stay
              whole from the first forward pass to the last backward pass of a step: given up in
              between (FSDP2's default), schedules that split the backward pass lose gradients.

Parameters that several stages of one rank share cannot be in the shards of both: they stay whole
and are all-reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from training.strategy import sharded_blocks

_BUCKET_BYTES = 32 << 20


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient; one of zeros is made where no pass has left any."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def add_up(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by their sums over the ranks of a group, which all have the same ones."""
    for bucket in _buckets([local(tensor) for tensor in tensors]):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        sizes = [tensor.numel() for tensor in bucket]
        for tensor, part in zip(bucket, torch.split(flat, sizes), strict=True):
            tensor.copy_(part.view_as(tensor))


def start_equal(module: nn.Module, group: dist.ProcessGroup, first: int) -> None:
    """Give every data rank the weights and buffers of the rank `first` of the world."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=first, group=group)


def _buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one type each, together at most `_BUCKET_BYTES` unless a single one is more."""
    for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        held = 0
        for tensor in tensors:
            if tensor.dtype != kind:
                continue
            if bucket and held + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
            bucket.append(tensor)
            held += tensor.nbytes
        if bucket:
            yield bucket


def shard(
    stages: Sequence[nn.Module], mesh: DeviceMesh, *, bf16: bool, whole: set[nn.Parameter]
) -> None:
    """Divide the weights of stages among the ranks of `mesh`, all but those in `whole`."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for stage in stages:
        for part in [*sharded_blocks(stage), stage]:
            fully_shard(
                part, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=whole
            )
        for part in stage.modules():
            if isinstance(part, FSDPModule):
                # The loss is a sum over all ranks: FSDP2 must not divide by their number. Forced
                # to plain sums, because for any factor it takes an operation that only NCCL has.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)


def give_up_whole_weights(stages: Sequence[nn.Module]) -> None:
    """Let FSDP2 keep only shards, after passes without a backward one."""
    for stage in stages:
        for part in stage.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def squared_norm(parameter: nn.Parameter) -> Tensor:
    """Sum of squares of what this rank holds of a gradient, float64 without dimensions."""
    if parameter.grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    norm: Tensor = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float32)
    return norm.double().square()


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 has divided it among the data ranks."""
    return isinstance(cast("Tensor", parameter), DTensor)
