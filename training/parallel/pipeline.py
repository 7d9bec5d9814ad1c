"""A chain on the ranks of one or more pipelines: training steps and evaluation.

The schedules are torch's; around them stands what they leave to the caller, much of which goes
wrong without a word: shared parameters (`parallel.tied`), data-parallel ranks
(`parallel.replicas`), losses that are sums, random choices that know neither cut nor ranks, and
the mistakes that `parallel.guards` refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from models.errors import UserError
from training.batches import Batch
from training.parallel import guards, replicas, schedules, tied
from training.parallel.chain import Chain
from training.parallel.relay import Relay
from training.parallel.schedules import Schedule, rank_of
from training.parallel.stage import Stage, put, unit_seed
from training.parallel.units import Cut

Weigh = Callable[[Tensor, Batch], Tensor]
"""What a microbatch adds to the loss of the step, one number: a sum over its labels, divided by
counts of the whole global batch where there is a division, never a mean of the microbatch. Takes
what the chain's last unit gives, and the batch."""


@dataclass(frozen=True)
class _Ranks:
    """Where this process stands among pipelines side by side."""

    pipelines: tuple[tuple[int, ...], ...]
    """The ranks of the world in each, first stage first."""
    pipe: dist.ProcessGroup
    data: dist.ProcessGroup | None
    """The ranks that hold the same stages; None: there is one pipeline."""
    data_mesh: DeviceMesh | None
    pipeline: int
    """Number of this process's pipeline."""
    rank: int
    """In it."""

    @property
    def ranks(self) -> int:
        """Of one pipeline."""
        return len(self.pipelines[0])

    @staticmethod
    def of(mesh: DeviceMesh | None) -> _Ranks:
        """mesh: dimensions "data" and "pipe" in any order; None: all ranks are one pipeline."""
        if mesh is None:
            everyone = tuple(range(dist.get_world_size()))
            return _Ranks((everyone,), _world(), None, None, 0, dist.get_rank())
        rows = mesh.mesh if mesh.mesh_dim_names == ("data", "pipe") else mesh.mesh.t()
        data = mesh["data"] if len(rows) > 1 else None
        return _Ranks(
            tuple(tuple(row) for row in rows.tolist()),
            mesh.get_group("pipe"),
            None if data is None else data.get_group(),
            data,
            mesh.get_local_rank("data"),
            mesh.get_local_rank("pipe"),
        )


class Pipeline:
    """This rank's stages of a chain, in step with those of the other ranks.

    Takes the modules out of the chain's root as they are: let go of root and chain afterwards, and
    build the optimiser on `module`. Every rank of the mesh must build it at the same time, from
    the same chain.
    """

    def __init__(
        self,
        chain: Chain,
        cut: Cut,
        *,
        schedule: Schedule,
        stages_per_rank: int,
        microbatches: int,
        mesh: DeviceMesh | None,
        device: torch.device,
        bf16: bool = False,
        shard: bool = False,
    ) -> None:
        """microbatches: of a step, on each pipeline. mesh: dimensions "data" and "pipe", or None:
        one pipeline. bf16: autocast, or FSDP2's rounded weights with `shard`, which divides
        weights, gradients and what the optimiser keeps among the data ranks. Raises UserError.
        """
        self._at = at = _Ranks.of(mesh)
        schedules.check(schedule, at.ranks, stages_per_rank, microbatches)
        _check_cut(chain, cut, at.ranks * stages_per_rank)
        guards.no_data_parallel_wrappers(chain)
        guards.no_compiled_parts(chain, schedule)
        guards.no_hidden_aliases(chain, cut, schedule, at.ranks)
        self._schedule, self._microbatches, self._device = schedule, microbatches, device
        self._count = cut.stages
        self._stages = {
            number: Stage(
                chain, cut.of(number), device=device, bf16=bf16, splits=schedule.splits_backward
            )
            for number in range(cut.stages)
            if self._rank_of(number) == at.rank
        }  # fmt: skip
        self.module = nn.Module()
        """This rank's modules by their names in the root; a parameter can have several names."""
        held = [unit for stage in self._stages for unit in cut.of(stage)]
        put(self.module, (named for unit in held for named in chain.units[unit].modules))
        for module in (self.module, *(module for _, module in chain.common)):
            module.to(device)

        # Shared parameters and copies of a stage start equal; only then are they divided.
        stages = tied.stages_of(chain, cut)
        holders = tied.ranks_of(stages, schedule, at.ranks)
        root_names = chain.parameter_names()
        names = {
            name: root_names[id(parameter)]
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        self._tied = tied.Tied(at.pipelines, holders)
        if at.data is not None:
            replicas.start_equal(self.module, at.data, at.pipelines[0][at.rank])
        self._tied.start_equal(self._named_by(names))
        if shard and at.data_mesh is not None:
            several = tied.several_uses(stages, schedule, at.ranks)
            whole = {one for name, one in self._named_by(names).items() if name in several}
            replicas.shard(list(self._stages.values()), at.data_mesh, bf16=bf16, whole=whole)
        self._named = self._named_by(names)
        self.parameter_names = {id(parameter): name for name, parameter in self._named.items()}
        """The first name in the root of each parameter of this rank, by its id."""
        self._order = list(stages)
        self._counted = {name for name, ranks in holders.items() if ranks[0] == at.rank}
        self._relay = Relay(self._stages, cut.stages, self._rank_of, group=at.pipe, device=device)
        self._made: Any = None
        self._shapes: dict[str, tuple[Any, ...]] = {}
        self._weigh: Weigh | None = None
        self._batches: Sequence[Batch] = ()
        self._outputs: list[Tensor | None] = []

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._count - 1 in self._stages

    def step(
        self, batches: Sequence[Batch], weigh: Weigh, *, seed: int, step: int
    ) -> list[Tensor] | None:
        """Leave in the parameters the gradient of the sum of `weigh` over everything.

        Over all microbatches of all data ranks; nothing is divided by anything. batches: this data
        rank's, all of one shape, on the device of every rank of the pipeline; microbatch i is
        number `data rank + i x data ranks` of the step, whose random choices depend on that number
        only. Returns what the chain's last unit gave for each, on the ranks with the last stage.
        The parameters must have no gradients before. With shards the shape must be the same on all
        data ranks, which gather weights together. Raises UserError where the shapes differ, or
        where the schedule splits a backward pass that torch cannot split.
        """
        if len(batches) != self._microbatches:
            raise ValueError(f"{len(batches)} microbatches for {self._microbatches}")
        if any(parameter.grad is not None for parameter in self._named.values()):
            raise ValueError("the gradients of the step before are still there")
        guards.one_shape(batches)
        self.module.train()
        schedule = self._prepared(batches[0])
        number, numbers = self._at.pipeline, len(self._at.pipelines)

        def seeds(microbatch: int, unit: int) -> int:
            return unit_seed(seed, step, number + microbatch * numbers, unit)

        for stage in self._stages.values():
            stage.prepare(batches, seeds)
        self._batches, self._weigh = batches, weigh
        self._outputs = [None] * len(batches)
        # torch cuts what it is given into microbatches: these numbers, one for each.
        which = torch.arange(len(batches))
        first = (which,) if 0 in self._stages else ()
        try:
            schedule.step(*first, target=which, return_outputs=False, number=which)
            outputs = [output for output in self._outputs if output is not None]
        except RuntimeError as error:
            guards.explain_split(error, self._schedule)
            raise
        finally:
            for stage in self._stages.values():
                stage.prepare((), None)
            self._batches, self._weigh, self._outputs = (), None, []

        self._tied.add_gradients(self._named)
        if self._at.data is not None:
            plain = [
                replicas.gradient(parameter)
                for parameter in self._named.values()
                if parameter.requires_grad and not replicas.is_sharded(parameter)
            ]
            replicas.add_up(plain, self._at.data)
        return outputs if self.last else None

    def forward(self, batches: Sequence[Batch]) -> list[Tensor] | None:
        """What the chain's last unit gives for each batch, without dropout and gradients.

        On the ranks with the last stage; elsewhere None. Any number of batches of any shapes, the
        same ones on every rank of a pipeline; with shards also as many on every data rank.
        """
        self.module.eval()
        found = self._relay.run(batches)
        self._give_up_whole_weights()
        return found if self.last else None

    def gradient_norm(self) -> float:
        """L2 norm of the gradients of all parameters: the same on all ranks and for every cut.

        A shared parameter counts once. Sums are made in the order of the root's parameters.
        """
        whole = torch.zeros(len(self._order), dtype=torch.float64, device=self._device)
        parts = torch.zeros_like(whole)
        for number, name in enumerate(self._order):
            if name in self._counted:
                parameter = self._named[name]
                squares = parts if replicas.is_sharded(parameter) else whole
                squares[number] = replicas.squared_norm(parameter)
        if self._at.data is not None:
            dist.all_reduce(parts, group=self._at.data)
        whole += parts
        dist.all_reduce(whole, group=self._at.pipe)
        return float(whole.cpu().sum().sqrt())

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        for parameter in self._named.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _rank_of(self, stage: int) -> int:
        return rank_of(self._schedule, stage, self._at.ranks)

    def _named_by(self, names: dict[str, str]) -> dict[str, nn.Parameter]:
        """This rank's parameters by their first names in the root."""
        return {names[name]: parameter for name, parameter in self.module.named_parameters()}

    def _prepared(self, batch: Batch) -> Any:
        """torch's schedule for batches of this shape; every rank comes here with the same."""
        shapes = {name: (*tensor.shape, tensor.dtype) for name, tensor in batch.items()}
        if self._made is None or shapes != self._shapes:
            self._made, self._shapes = None, shapes
            self._made = self._make(batch)
        return self._made

    def _make(self, batch: Batch) -> Any:
        """A schedule with stages that know the shapes of what they send and receive.

        A forward pass of one microbatch finds the shapes; torch would ask for more.
        """
        between: dict[int, Tensor] = {}

        def note(stage: int, hidden: Tensor) -> None:
            between[stage] = torch.empty_like(hidden, device="meta", requires_grad=True)

        self.module.eval()
        self._relay.run([batch], seen=note)
        self._give_up_whole_weights()
        self.module.train()
        number = torch.empty(1, dtype=torch.int64, device="meta")
        stages = [
            pipelining.PipelineStage(
                stage, at, self._count, self._device, group=self._at.pipe,
                input_args=between.get(at, number), output_args=between.get(at + 1, number),
                # With a builder torch leaves nothing for later: the backward pass stays whole.
                dw_builder=None if stage.splittable else _nothing_left,
            )
            for at, stage in sorted(self._stages.items())
        ]  # fmt: skip
        kind = getattr(pipelining, self._schedule.torch_name)
        return kind(
            stages[0] if self._schedule.stages_per_rank == (1, 1) else stages,
            self._microbatches,
            loss_fn=self._loss,
            # Sums stay sums; and what two stages of a rank share would be divided twice.
            scale_grads=False,
        )

    def _loss(self, output: Tensor, number: Tensor) -> Tensor:
        assert self._weigh is not None
        which = int(number)
        self._outputs[which] = output.detach()
        return self._weigh(output, self._batches[which])

    def _give_up_whole_weights(self) -> None:
        replicas.give_up_whole_weights(list(self._stages.values()))


def _world() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def _nothing_left() -> Callable[..., None]:
    return lambda: None


def _check_cut(chain: Chain, cut: Cut, stages: int) -> None:
    """UserError where a cut is none of this chain into so many stages with something in each."""
    bounds, units = cut.bounds, len(chain.units)
    rising = all(before < after for before, after in itertools.pairwise(bounds))
    if len(bounds) != stages + 1 or bounds[0] != 0 or bounds[-1] != units or not rising:
        raise UserError(
            f"the cut '{list(bounds)}' is none of {units} units into {stages} stages: give "
            f"{stages + 1} rising numbers from 0 to {units}"
        )
