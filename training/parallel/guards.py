"""What would train wrongly without a word, or die in the middle of a step, said before it does.

Not here because nothing can be said wrongly: losses are taken as sums (`Pipeline.step`), never as
means, for a mean over a microbatch weighs labels by how full their microbatch is; gradients are
never divided by the number of microbatches (`scale_grads`), which divides shared ones twice.
The numbers that a schedule takes: `parallel.schedules.check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from models.errors import UserError
from training.batches import Batch
from training.parallel.chain import Chain
from training.parallel.schedules import SCHEDULES, Schedule, rank_of
from training.parallel.units import Cut

_WHOLE = ", ".join(f"'{one.name}'" for one in SCHEDULES.values() if not one.splits_backward)

_UNSPLITTABLE = ("through the graph a second time", "refers to a single memory location")


def no_data_parallel_wrappers(chain: Chain) -> None:
    """UserError where a module is in DDP or FSDP2 already.

    DDP's gradients are wrong when the backward pass is split, FSDP2's when it gives up weights
    between the forward and the backward pass, which it does unless told.
    """
    for name, module in _modules(chain):
        if isinstance(module, DistributedDataParallel):
            raise UserError(
                f"'{name}' is in DistributedDataParallel, whose gradients in a pipeline can be "
                "wrong: give the plain module; data ranks of the mesh add up its gradients"
            )
        if isinstance(module, FSDPModule):
            raise UserError(
                f"'{name}' is in FSDP2, which in a pipeline loses gradients when it gives up "
                "weights between the passes: give the plain module and shard=True, which keeps them"
            )


def no_compiled_parts(chain: Chain, schedule: Schedule) -> None:
    """UserError where the backward pass of a compiled module would have to be split."""
    if not schedule.splits_backward:
        return
    for name, module in _modules(chain):
        forward = getattr(module, "forward", None)
        # activation checkpointing wraps a compiled forward in a partial
        inner = getattr(forward, "args", (None,))[0] if hasattr(forward, "args") else None
        if isinstance(module, torch._dynamo.OptimizedModule) or any(
            hasattr(one, "_torchdynamo_orig_callable") for one in (forward, inner)
        ):
            raise UserError(
                f"'{name}' is compiled, but schedule '{schedule.name}' splits the backward pass, "
                f"which torch.compile makes one piece: set run.compile=false or take {_WHOLE}"
            )


def no_hidden_aliases(chain: Chain, cut: Cut, schedule: Schedule, ranks: int) -> None:
    """UserError where units on different ranks share memory that is no shared parameter.

    Each rank has a copy of its own, and nothing keeps the copies alike: buffers, tensors kept as
    attributes, two parameters with one memory.
    """
    place = {unit: stage for stage in range(cut.stages) for unit in cut.of(stage)}
    names = chain.parameter_names()
    holders: dict[int, tuple[int, str, str]] = {}
    for number, unit in enumerate(chain.units):
        rank = rank_of(schedule, place[number], ranks)
        for name, tensor in _tensors(unit.modules):
            memory = StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-untyped-call]
            what = names.get(id(tensor), "") if isinstance(tensor, nn.Parameter) else ""
            first, where, same = holders.setdefault(memory, (rank, name, what))
            if first != rank and not (what and what == same):
                raise UserError(
                    f"'{name}' on rank {rank} of the pipeline shares its memory with '{where}' on "
                    f"rank {first}: only a parameter (the same object) can be shared; share that, "
                    "copy the tensor, or keep both units on one rank"
                )


def explain_split(error: RuntimeError, schedule: Schedule) -> None:
    """UserError in place of the error of a backward pass that torch cannot split.

    Seen where a weight is used again after itself: `Stage.splittable` knows of modules called
    twice, not weights that a module's own code uses twice. The gradients are never wrong for it.
    """
    if not schedule.splits_backward:
        return
    found: BaseException | None = error
    while found is not None:
        if any(words in str(found) for words in _UNSPLITTABLE):
            raise UserError(
                f"schedule '{schedule.name}' splits the backward pass, which torch cannot do for "
                "this network, where a module uses a weight more than once or spreads one number "
                f"over all its gradients: take {_WHOLE}"
            ) from error
        found = found.__cause__


def one_shape(batches: Sequence[Batch]) -> None:
    """UserError where microbatches differ in shape: the ranks wait for tensors of one shape."""
    first = _shapes(batches[0])
    for number, batch in enumerate(batches):
        shapes = _shapes(batch)
        if shapes.keys() != first.keys():
            raise UserError(
                f"microbatch {number} has the tensors '{', '.join(shapes)}', microbatch 0 "
                f"'{', '.join(first)}': all microbatches of a pipeline step have the same ones"
            )
        for name, shape in shapes.items():
            if first[name] != shape:
                raise UserError(
                    f"microbatch {number} has '{name}' of shape '{list(shape)}', microbatch 0 of "
                    f"'{list(first[name])}': all microbatches of a pipeline step have one shape; "
                    "pad them to one length and one number of examples"
                )


def _shapes(batch: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def _modules(chain: Chain) -> Iterator[tuple[str, nn.Module]]:
    for unit in chain.units:
        for path, root in unit.modules:
            for name, module in root.named_modules():
                yield f"{path}.{name}" if name else path, module


def _tensors(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and tensors kept as attributes, each with its name."""
    for path, root in modules:
        for above, module in root.named_modules():
            kept = {**module._parameters, **module._buffers, **vars(module)}
            for name, tensor in kept.items():
                if isinstance(tensor, Tensor):
                    yield ".".join(part for part in (path, above, name) if part), tensor
