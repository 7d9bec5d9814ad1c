"""What `test_memory` runs on two ranks: steps of pipelines, and the most that each holds."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.training.parallel.measured_steps import STEPS, VOCAB, full_batch
from training.networks import build_network, checkpoint_blocks
from training.objectives import Objective
from training.optimisers import build_optimiser
from training.parallel.chain import objective_chain, unpacked
from training.parallel.live import LiveBytes
from training.parallel.pipeline import Pipeline
from training.parallel.schedules import SCHEDULES
from training.parallel.units import Cut, Pipe
from training.recipe import TrainRecipe, load_recipe

RANKS, MICROBATCHES = 2, 4


@dataclass(frozen=True)
class Case:
    """One pipeline."""

    name: str
    schedule: str
    bounds: tuple[int, ...]
    fields: tuple[str, ...] = ()

    def recipe(self) -> TrainRecipe:
        """Without dropout, so that its numbers are those of all seeds."""
        return load_recipe(
            self.name,
            ["batch.microbatch=2", "examples.sequence_length=64", "run.compile=false",
             "run.precision=fp32", "optimiser.name=adamw", *self.fields],
        )  # fmt: skip

    def cut_and_pipe(self) -> tuple[Cut, Pipe]:
        """As `parallel.memory` wants them."""
        stages = len(self.bounds) - 1
        return Cut(self.bounds), Pipe(RANKS, MICROBATCHES, self.schedule, stages // RANKS)


CASES = (
    Case("decoder-small", "1f1b", (0, 3, 6)),
    Case("decoder-small", "gpipe", (0, 5, 6), ("run.activation_checkpointing=true",)),
    Case("decoder-small", "interleaved-1f1b", (0, 2, 3, 4, 6)),
    Case("albert-small", "1f1b", (0, 4, 6), ("run.precision=bf16",)),
)


def run(rank: int, port: int, folder: str) -> None:
    """Every case on this rank; the peaks go to `folder`/`rank`.pt."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        found = [_peak(case) for case in CASES]
    finally:
        dist.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.pt")


def _peak(case: Case) -> int:
    """Bytes: the weights, and the most that two steps need beside them."""
    recipe = case.recipe()
    cut, pipe = case.cut_and_pipe()
    network = build_network(recipe, VOCAB)
    if recipe.run.activation_checkpointing:
        checkpoint_blocks(network)
    pipeline = Pipeline(
        objective_chain(Objective(network)), cut, schedule=SCHEDULES[case.schedule],
        stages_per_rank=pipe.stages_per_rank, microbatches=MICROBATCHES, mesh=None,
        device=torch.device("cpu"), bf16=recipe.run.precision == "bf16",
    )  # fmt: skip
    del network
    weights = list(pipeline.module.parameters())
    with LiveBytes() as live:
        live.know([*weights, *pipeline.module.buffers()])
        optimiser = build_optimiser(recipe.optimiser, pipeline.module)
        batches = [full_batch(recipe) for _ in range(MICROBATCHES)]
        for step in range(STEPS):
            pipeline.step(batches, lambda output, _: unpacked(output).sums.sum(), seed=0, step=step)
            pipeline.scale_gradients(0.5)
            optimiser.step()
            optimiser.zero_grad()
    return sum(one.nbytes for one in weights) + max(live.peaks.values())
