"""A run's objective as a pipeline: what the loop asks of `training.strategy.Parallel`, where each
rank holds some of the layers.

The ranks of a pipeline read the same examples; only hidden states travel between them, and the
losses go from where the last layers are to the first rank, which reports them. All microbatches
get one shape (`batches.filled`): blank examples and padding, which change neither losses nor
gradients. What the rank holds is called as in the whole network, so a checkpoint knows nothing of
stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from training import batches, checkpoint_tensors
from training.batches import Batch
from training.objectives import Losses, Objective
from training.parallel import device_memory, layout
from training.parallel.chain import objective_chain, unpacked
from training.parallel.pipeline import Pipeline
from training.parallel.schedules import SCHEDULES, rank_of
from training.parallel.units import Cut
from training.recipe import TrainRecipe
from training.strategy import Placement, prepare_blocks
from training.together import on_first


class PipelinedObjective(nn.Module):
    """This rank's layers as `network`, and the losses of all layers when it is called.

    Every rank of the pipeline calls it with the same batch, under `torch.no_grad`; the losses are
    zeros but on its first rank.
    """

    def __init__(
        self,
        owner: Pipelined,
        network: PreTrainedModel,
        terms: tuple[str, ...],
        names: frozenset[str],
    ) -> None:
        super().__init__()
        held: Any = owner.pipeline.module.get_submodule("network")
        held.config = network.config  # what a checkpoint says of it
        held.transformers_class = type(network).__name__
        self.network = held
        self.terms = terms
        self.parameter_names = owner.pipeline.parameter_names
        self.whole_names = names
        self._owner = [owner]  # in a list: it is no part of this module

    def forward(self, batch: Mapping[str, Tensor]) -> Losses:
        """Losses of a batch of any number of examples."""
        return self._owner[0].losses(dict(batch))


class Pipelined:
    """A network in stages on the ranks of the run, with what the loop needs of it.

    Takes `objective` apart: only this rank's layers stay in memory, on its device. saved: what
    `saved` gave to the checkpoint that the run goes on from: its cut is taken again where the
    pipeline is the same. Raises UserError.
    """

    def __init__(
        self,
        objective: Objective,
        place: Placement,
        recipe: TrainRecipe,
        *,
        microbatches: int,
        rows: int,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        run = recipe.run
        self.place, self.run = place, run
        self.family, self.length = recipe.model.family, recipe.examples.sequence_length
        self.positions = not recipe.examples.cross_document_attention
        self.microbatches, self.rows = microbatches, rows
        settings = run.pipeline
        schedule = SCHEDULES[settings.schedule]
        objective.train()
        prepare_blocks(objective, run)
        terms, network = objective.terms, objective.network
        chain = objective_chain(objective)
        layout.pipe_of(recipe, place.copies, microbatches)  # refuses what cannot be
        names = frozenset(checkpoint_tensors.plain_tensors(objective))
        self.layout = layout.key(
            recipe, place.copies, microbatches, rows=rows, copies=place.data_ranks
        )
        self.table = ""
        """The cut for a person, where it was chosen anew."""
        if saved and saved["layout"] == self.layout:
            self.cut = Cut(tuple(saved["bounds"]))
        else:
            usable = device_memory.usable_bytes(place, recipe)
            self.cut, self.table = on_first(
                lambda: layout.choose(
                    chain, recipe, place, microbatches, rows, usable_bytes=usable
                ),
                "cannot cut the network into stages",
            )
        mesh = init_device_mesh(
            place.device.type,
            (place.copies, place.data_ranks),
            mesh_dim_names=("pipe", "data"),
        )
        self.gradient_factor = 1.0
        self.pipeline = Pipeline(
            chain,
            self.cut,
            schedule=schedule,
            stages_per_rank=layout.stages_per_rank(settings),
            microbatches=microbatches,
            mesh=mesh,
            device=place.device,
            bf16=run.precision == "bf16",
            shard=settings.shard,
        )
        self._pipe, self._pipe_rank = mesh.get_group("pipe"), mesh.get_local_rank("pipe")
        self._last_rank = rank_of(schedule, self.cut.stages - 1, place.copies)
        self.objective = PipelinedObjective(self, network, terms, names)

    def passes(
        self, found: Sequence[Batch], by_label: Tensor, *, seed: int, step: int
    ) -> list[Losses]:
        """Leave the gradient of a step in the parameters; the losses of each microbatch.

        found: this pipeline's microbatches. by_label: (terms, 1), the weights of the losses.
        """
        outputs = self.pipeline.step(
            [self._filled(batch, self.rows) for batch in found],
            lambda output, _: (unpacked(output).sums * by_label).sum(),
            seed=seed,
            step=step,
        )
        all_losses = self._reported(outputs)
        return [
            unpacked(all_losses[number][: len(batch["domains"])])
            for number, batch in enumerate(found)
        ]

    def losses(self, batch: Batch) -> Losses:
        """Losses of a batch of any size, without a gradient: in as many passes as it needs."""
        examples, at_once = len(batch["domains"]), self.evaluated_at_once
        passed = []
        for start in range(0, examples, at_once):
            part = {name: tensor[start : start + at_once] for name, tensor in batch.items()}
            full = self._filled(part, at_once)
            outputs = self.pipeline.forward(
                [
                    {name: tensor[first : first + self.rows] for name, tensor in full.items()}
                    for first in range(0, at_once, self.rows)
                ]
            )
            passed.append(self._reported(outputs).flatten(0, 1)[: len(part["domains"])])
        return unpacked(torch.cat(passed))

    @property
    def evaluated_at_once(self) -> int:
        """Examples that fill the pipeline once."""
        return self.rows * self.microbatches

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps so that a run that goes on rounds as one that was not stopped."""
        return {"pipeline": {"layout": self.layout, "bounds": list(self.cut.bounds)}}

    def _filled(self, batch: Batch, examples: int) -> Batch:
        """`batch` in the shape of all batches of the run."""
        return batches.filled(batch, self.family, examples, self.length, positions=self.positions)

    def _reported(self, outputs: Sequence[Tensor] | None) -> Tensor:
        """Packed losses of all microbatches, (microbatches, rows, 3 x terms), on the pipeline's
        first rank; zeros on the others."""
        shape = (self.microbatches, self.rows, 3 * len(self.objective.terms))
        found = torch.zeros(shape, device=self.place.device)
        if outputs is not None:
            found = torch.stack([output.detach() for output in outputs])
        if self._last_rank != 0:
            torch.distributed.broadcast(found, group=self._pipe, group_src=self._last_rank)
        return found if self._pipe_rank == 0 else torch.zeros_like(found)

    def gradient_norm(self) -> float:
        """L2 norm of the gradients of all parameters, over all ranks; the same on every rank."""
        return self.pipeline.gradient_norm()

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        self.pipeline.scale_gradients(factor)

    def reshard(self) -> None:
        """Nothing to give up: stages that FSDP2 shards stay whole between the microbatches."""
