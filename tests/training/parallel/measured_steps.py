"""Peaks of real steps, as torch's MemTracker sees them: what `parallel.memory` has to foretell."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from training import objectives
from training.batches import Batch
from training.networks import build_network
from training.objectives import Objective
from training.optimisers import build_optimiser
from training.parallel.profile import worst_batch
from training.recipe import TrainRecipe
from training.strategy import Parallel, Placement

VOCAB = 2000
STEPS = 2


def peak_bytes(
    recipe: TrainRecipe,
    microbatches: int,
    *,
    strategy: str = "single",
    ranks: int = 1,
    fake: bool = False,
) -> int:
    """Peak of two steps of one rank.

    fake: without memory and work, for decoders with AdamW. More than one rank: the process group
    must be there.
    """
    place = Placement(0, ranks, torch.device("cpu"), strategy)
    tracker = MemTracker()
    with contextlib.ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode())
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(objectives, "document_mask", _mask)
            # It is on its device already, and fake parameters cannot be moved.
            patch.setattr(Objective, "to", lambda self, _: self)
        stack.enter_context(tracker)
        network = build_network(recipe, VOCAB)
        parallel = Parallel(Objective(network), place, recipe.run)
        optimiser = build_optimiser(recipe.optimiser, network)
        tracker.track_external(parallel.objective)
        batches = [full_batch(recipe) for _ in range(microbatches)]
        for _ in range(STEPS):
            for number, batch in enumerate(batches):
                # It counts passes of a module, and wants to be told of each new one.
                tracker.reset_mod_stats()
                with parallel.microbatch(last=number == microbatches - 1):
                    (parallel(batch).sums * 0.1).sum().backward()
            parallel.scale_gradients(0.5)
            optimiser.step()
            optimiser.zero_grad()
    return int(tracker.get_tracker_snapshot("peak")[place.device]["Total"])


def full_batch(recipe: TrainRecipe) -> Batch:
    """The worst batch, of ordinary tokens, with padding."""
    batch = worst_batch(recipe, recipe.batch.microbatch)
    for name in ("input_ids", "labels"):
        batch[name] = torch.where(batch[name] >= 0, 7, batch[name])
    if "attention_mask" in batch:
        batch["attention_mask"][:, -1] = 0
    return batch


def _mask(positions: Tensor) -> Tensor:
    """`document_mask` without the question whether one is needed."""
    documents = (positions == 0).cumsum(dim=1)
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


@contextlib.contextmanager
def lone_group() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # DDP's reducer must be gone before it
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A process group whose other ranks are not there: nothing is sent, sizes are the real ones."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
