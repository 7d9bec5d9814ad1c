"""What one way of training costs a device: memory by kind, bytes sent, work.

A way is a strategy with its precision, microbatch and recomputation, and for a pipeline the
numbers of ranks and copies. `parallel.planner` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from training import microbatches as dealing
from training.parallel import layout, traffic
from training.parallel.ladder import Devices, Stages
from training.parallel.memory import Strategy, memory_of
from training.parallel.profile import low_weights, profile_recipe
from training.parallel.timing import step_time
from training.parallel.traffic import Traffic
from training.parallel.units import Pipe, Profile
from training.recipe import TrainRecipe

SHARDED = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Settings:
    """What a rung decides of the recipe."""

    strategy: str
    precision: str
    checkpointing: bool
    microbatch: int

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16."""
        return self.precision == "bf16"


@dataclass(frozen=True)
class Way:
    """A way of training, in numbers."""

    settings: Settings
    microbatches: int
    """Of a device in a step."""
    memory: Mapping[str, int]
    """Of the fullest device, by kind."""
    sent: Traffic
    work: float
    """Seconds of a step, or where no speed is known FLOPs of a device: for comparisons."""
    waits: bool = False
    """Whether transfers take time that its own work does not hide."""
    stages: Stages | None = None

    @property
    def total_bytes(self) -> int:
        """Memory of all kinds."""
        return sum(self.memory.values())


class Ways:
    """Finds what ways of training one recipe cost; profiles are made once."""

    def __init__(self, recipe: TrainRecipe, vocab_size: int) -> None:
        self.recipe = recipe
        self.examples = recipe.batch.examples(recipe.examples.sequence_length)
        self._vocab_size = vocab_size
        self._profiles: dict[object, Profile] = {}

    def passes(self, microbatch: int, replicas: int) -> int:
        """Microbatches of a device in a step."""
        return dealing.count(self.examples, microbatch, replicas) // replicas

    def profile(self, settings: Settings, *, copies: int = 1, shard: bool = False) -> Profile:
        """The network's units, traced. copies: pipelines side by side, with or without shards."""
        recipe = self._recipe(settings, shard=shard)
        low = low_weights(recipe, copies)
        key = (settings.precision, settings.checkpointing, settings.microbatch, low)
        if key not in self._profiles:
            self._profiles[key] = profile_recipe(
                recipe, self._vocab_size, microbatch=settings.microbatch, copies=copies
            )
        return self._profiles[key]

    def _recipe(
        self, settings: Settings, *, shard: bool = False, ranks: int | None = None
    ) -> TrainRecipe:
        """The recipe with settings of a rung. ranks: of one pipeline."""
        asked = self.recipe.run.pipeline
        run = self.recipe.run.model_copy(
            update={
                "strategy": settings.strategy,
                "precision": settings.precision,
                "activation_checkpointing": settings.checkpointing,
                "pipeline": asked.model_copy(update={"ranks": ranks, "shard": shard}),
            }
        )
        return self.recipe.model_copy(update={"run": run})

    def in_parallel(self, settings: Settings, devices: Devices) -> Way:
        """single, ddp, zero1, zero2, zero3 on all devices."""
        ranks, passes = devices.ranks, self.passes(settings.microbatch, devices.ranks)
        profile = self.profile(settings)
        memory = memory_of(
            profile,
            strategy=cast(Strategy, settings.strategy),
            ranks=ranks,
            optimiser=self.recipe.optimiser.name,
            microbatches=passes,
        )
        sent = traffic.data_parallel(
            settings.strategy,
            profile.parameters(0, len(profile.units)),
            sum(unit.parameters for unit in profile.units if unit.sharded_alone),
            ranks=ranks,
            microbatches=passes,
            bf16=settings.bf16,
        )
        speed = devices.speed(settings.precision)
        timed = _timed(profile, speed)
        forward_s = sum(unit.forward_s for unit in timed.units)
        backward_s = sum(unit.backward_s for unit in timed.units)
        work = passes * (forward_s + backward_s)
        waiting = 0.0
        bandwidth = devices.bandwidth(inside=devices.nodes == 1)
        if speed and bandwidth:
            waiting = traffic.exposed_s(
                sent,
                settings.strategy,
                bandwidth,
                passes=passes,
                forward_s=forward_s,
                backward_s=backward_s,
            )
        return Way(settings, passes, memory.to_json(), sent, work + waiting, waits=waiting > 0)

    def pipe(
        self, settings: Settings, devices: Devices, ranks: int, *, shard: bool, capped: bool = True
    ) -> Pipe:
        """A pipeline of `ranks` devices, copies of it on the others. UserError where the schedule
        takes no such numbers."""
        replicas = devices.ranks // ranks
        speed = devices.speed(settings.precision)
        return layout.pipe_for(
            self._recipe(settings, shard=shard, ranks=ranks),
            ranks,
            self.passes(settings.microbatch, replicas),
            copies=replicas,
            usable_bytes=devices.usable_bytes if capped else None,
            bandwidth_bytes_s=devices.bandwidth(inside=devices.nodes == 1) if speed else None,
        )

    def pipeline(
        self, settings: Settings, devices: Devices, ranks: int, *, shard: bool, capped: bool = True
    ) -> Way:
        """Pipelines side by side, with the cut that a run makes if it fits (capped), or the one
        whose fullest rank holds the least.

        Stages are on different nodes where there are several, the copies of a stage on one: hidden
        states are less than gradients. Raises UserError where no cut fits.
        """
        replicas = devices.ranks // ranks
        pipe = self.pipe(settings, devices, ranks, shard=shard, capped=capped)
        profile = self.profile(settings, copies=replicas, shard=shard)
        speed = devices.speed(settings.precision)
        timed = _timed(profile, speed)
        find = layout.fitting if capped else layout.smallest
        cut, memory = find(timed, self._recipe(settings, shard=shard, ranks=ranks), pipe)
        timing = step_time(timed, cut, pipe)
        sent = traffic.pipeline(
            profile, cut, pipe, replicas=replicas, shard=shard, bf16=settings.bf16
        )
        work = timing.step_s  # the gradients of tied parameters are in it
        inside = devices.bandwidth(inside=devices.per_node % replicas == 0)
        if speed and inside:
            work += (sent.gradients + sent.weights) / inside
        stages = Stages(
            ranks=pipe.ranks,
            replicas=replicas,
            schedule=pipe.schedule,
            stages_per_rank=pipe.stages_per_rank,
            shard=shard,
            bounds=cut.bounds,
            bubble=timing.bubble,
        )
        return Way(settings, pipe.microbatches, memory.to_json(), sent, work, stages=stages)


def _timed(profile: Profile, speed: float | None) -> Profile:
    """With seconds in place of FLOPs, where the speed is known."""
    if speed is None:
        return profile
    units = tuple(
        replace(unit, forward_s=unit.forward_s / speed, backward_s=unit.backward_s / speed)
        for unit in profile.units
    )
    return replace(profile, units=units)
