"""Where a run computes and how its state is divided among the ranks.

`placed` finds the device and starts the process group that torchrun (or `gristmill train
--processes N`) prepared; `Parallel` puts the objective on it. The strategies differ in memory and
traffic, never in the curve of the loss:

    single  one device
    ddp     every rank holds everything; gradients are averaged once a step
    zero1   FSDP2: optimiser state in shards; weights and gradients whole during a step
    zero2   FSDP2: gradients in shards too: reduce-scattered after each microbatch
    zero3   FSDP2: weights in shards too: gathered block by block
    pipeline  each rank holds some of the layers (`training.pipelined`, not `Parallel`)

But for dropout: a pipeline draws its masks by layer (`training.parallel.stage.unit_seed`), the
others by microbatch, so that with dropout its curve is one of other masks, as of another seed.

DDP and FSDP2 average gradients over ranks, but the loss is a sum over the global batch: the
loss of each microbatch is multiplied by `gradient_factor`, the number of ranks.
Left out on purpose: `find_unused_parameters`, because every rank runs every parameter in every
microbatch (a rank without examples runs an empty one).
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from models.errors import UserError
from training.host_memory import keep_freed_memory
from training.networks import checkpoint_blocks
from training.objectives import Losses, Objective
from training.prepare import pipeline_ranks, strategy_of
from training.recipe import Run
from training.together import distributed

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank may wait so long for another: the slowest one may be reading a remote shard."""
_LAST_WORK_S = 0.05
"""So long gloo's threads have to drop what the last collective held."""
_BLOCKS = {"LlamaDecoderLayer", "AlbertLayerGroup"}
_SHARDED_BLOCKS = {"LlamaDecoderLayer"}
"""ALBERT's one layer runs many times in a pass: on its own it would be gathered each time."""


@dataclass(frozen=True)
class Placement:
    """This process among the processes of the run."""

    rank: int
    ranks: int
    device: torch.device
    strategy: str
    copies: int = 1
    """Ranks that read the same examples: those of one pipeline."""

    @property
    def data_ranks(self) -> int:
        """Parts that the examples are dealt to."""
        return self.ranks // self.copies

    @property
    def data_rank(self) -> int:
        """The part of this rank. Ranks of one stage stand side by side, so that they are on one
        machine where the stages are not."""
        return self.rank % self.data_ranks

    @property
    def first(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.rank == 0

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` over all ranks, on the CPU; every rank must call it."""
        values = values.detach().cpu().clone()
        if self.ranks > 1:
            torch.distributed.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """`value` of each rank, in order, on every rank; every rank must call it."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.ranks > 1:
            torch.distributed.barrier()


@contextlib.contextmanager
def placed(run: Run) -> Iterator[Placement]:
    """The place of this process, with its process group while the block runs.

    Reads torchrun's WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE. A process group that is there
    already, as inside another `placed` block, is used and left: several runs, one after the other,
    share it. Raises UserError.
    """
    inside = distributed()
    ranks = torch.distributed.get_world_size() if inside else int(os.environ.get("WORLD_SIZE", "1"))
    rank = torch.distributed.get_rank() if inside else int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    strategy = strategy_of(run, ranks)
    copies = pipeline_ranks(run, ranks) if strategy == "pipeline" else 1
    device = _device(run, local_rank, local_ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if run.precision == "bf16":
            # What autocast leaves in fp32 may use TF32; an fp32 run stays exact.
            torch.set_float32_matmul_precision("high")
    else:
        keep_freed_memory()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    if strategy == "single" or inside:
        yield Placement(rank, ranks, device, strategy, copies)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = HashStore() if ranks == 1 else _store()
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=_COLLECTIVE_TIMEOUT
    )
    try:
        yield Placement(rank, ranks, device, strategy, copies)
    finally:
        let_go()
        torch.distributed.destroy_process_group()


def let_go() -> None:
    """Let what uses the process group end before it.

    A group is torn down by whoever drops it last, and who does that waits for gloo's threads with
    Python's lock in hand. A thread that has just ended a collective may still want that lock, to
    drop what the collective held: then the process hangs for ever (seen with DDP). So objects of
    the run go first, and the threads get a moment of the lock.
    """
    gc.collect()
    time.sleep(_LAST_WORK_S)


def _store() -> PrefixStore:
    """Where the ranks find each other.

    After a restart torchrun (torch 2.13) hands out the same store, in which the addresses of the
    ranks that died still stand: one that reads them before the new ones are there waits for a dead
    process, and the restart fails or hangs. So each start has a part of the store of its own.
    """
    store, _, _ = next(rendezvous("env://", timeout=_COLLECTIVE_TIMEOUT))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"start {start}", store)


def _device(run: Run, local_rank: int, local_ranks: int) -> torch.device:
    if run.device == "cpu" or (run.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if found == 0:
        raise UserError("run.device = 'cuda', but torch sees no CUDA device: set run.device=cpu")
    if local_ranks > found:
        raise UserError(
            f"{local_ranks} processes on this machine, but only {found} CUDA devices: "
            f"give --processes {found}"
        )
    if run.precision == "bf16" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(local_rank)
        raise UserError(f"run.precision = 'bf16', which '{name}' cannot compute: set fp32")
    return torch.device("cuda", local_rank)


class Parallel:
    """The objective on its devices; `objective` itself keeps its names of parameters.

    Changes `objective` in place (blocks are wrapped, compiled, sharded), so build the optimiser
    afterwards, on `objective.network`.
    """

    def __init__(self, objective: Objective, place: Placement, run: Run) -> None:
        self.objective = objective
        objective.train()
        self.place = place
        self.bf16 = run.precision == "bf16"
        self.gradient_factor = float(place.ranks)
        shards = sharded_blocks(objective)
        prepare_blocks(objective, run)
        self._forward: nn.Module = self.objective
        if place.strategy not in ("single", "ddp"):
            self._shard(shards)
            return
        objective.to(place.device)
        if place.strategy == "ddp":
            self._forward = DistributedDataParallel(
                self.objective, forward_sync_buffers=False, gradient_as_bucket_view=True
            )

    def _shard(self, blocks: list[nn.Module]) -> None:
        """Divide the weights, which come from the machine's memory: FSDP2 moves one block at a time
        to the device, with its buffers, and keeps this rank's part. So a device never holds the
        whole network."""
        mesh = init_device_mesh(self.place.device.type, (self.place.ranks,))
        low = torch.bfloat16 if self.bf16 else None
        policy = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        whole = self.place.strategy != "zero3"
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not whole)
        # The root's own weights are the first and the last that a pass needs.
        fully_shard(self.objective, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    def __call__(self, batch: dict[str, torch.Tensor]) -> Losses:
        """Losses of one microbatch, in the precision of the run."""
        with self.precision():
            losses: Losses = self._forward(batch)
        return losses

    def precision(self) -> torch.autocast:
        """Context in which the network runs: bf16 autocast or nothing."""
        return torch.autocast(self.place.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Context of the forward and backward pass of one microbatch of a step.

        Gradients of the ranks are combined after the last one; under zero2 and zero3 after each.
        """
        forward = self._forward
        if isinstance(forward, DistributedDataParallel):
            with contextlib.nullcontext() if last else forward.no_sync():
                yield
            return
        if isinstance(forward, FSDPModule):
            forward.set_is_last_backward(last)
            forward.set_requires_gradient_sync(last or self.place.strategy != "zero1")
            forward.set_reshard_after_backward(last or self.place.strategy == "zero3")
        yield

    def gradient_norm(self) -> float:
        """L2 norm of the gradients of all parameters, over all ranks; the same on every rank."""
        gradients = [
            parameter.grad
            for parameter in self.objective.parameters()
            if parameter.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        for parameter in self.objective.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: nothing."""
        return {}

    def reshard(self) -> None:
        """Give up weights that a pass without a backward one has left whole."""
        for part in self.objective.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def prepare_blocks(objective: Objective, run: Run) -> None:
    """Compile the transformer blocks, and recompute their insides, where the recipe says so."""
    if run.compile:
        # Block by block: one compilation serves all of them. `forward` and not the module, so
        # that names of parameters stay and what recomputes or gathers a block is outside:
        # torch.compile gives up, without a word, a module with a checkpoint inside.
        for block in objective.modules():
            if type(block).__name__ in _BLOCKS:
                block.forward = torch.compile(block.forward)
    if run.activation_checkpointing:
        checkpoint_blocks(objective.network)


def sharded_blocks(network: nn.Module) -> list[nn.Module]:
    """The parts of `network` that FSDP2 gathers one by one; what remains it gathers as one."""
    return [part for part in network.modules() if type(part).__name__ in _SHARDED_BLOCKS]
