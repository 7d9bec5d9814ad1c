"""What one way of training costs a device: memory by kind, bytes sent, work.

A way is a strategy with its precision, microbatch and recomputation, and for a pipeline the
numbers of ranks and copies. `parallel.planner` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from models.errors import UserError
from training import microbatches as dealing
from training.parallel import traffic
from training.parallel.ladder import Devices, Stages, size
from training.parallel.memory import Strategy, memory_of
from training.parallel.partition import optimal
from training.parallel.profile import profile_recipe
from training.parallel.rank_memory import pipeline_memory
from training.parallel.timing import step_time
from training.parallel.traffic import Traffic
from training.parallel.units import Pipe, Profile
from training.recipe import TrainRecipe

SHARDED = ("zero1", "zero2", "zero3")
_FLOAT_BYTES, _LOW_BYTES = 4, 2


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

    def profile(self, settings: Settings) -> Profile:
        """The network's units, traced."""
        sharded = settings.strategy in SHARDED and settings.bf16
        strategy = settings.strategy if sharded else "ddp"
        key = (settings.precision, settings.checkpointing, settings.microbatch, sharded)
        if key not in self._profiles:
            run = self.recipe.run.model_copy(
                update={
                    "strategy": strategy,
                    "precision": settings.precision,
                    "activation_checkpointing": settings.checkpointing,
                }
            )
            recipe = self.recipe.model_copy(update={"run": run})
            self._profiles[key] = profile_recipe(
                recipe, self._vocab_size, microbatch=settings.microbatch
            )
        return self._profiles[key]

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

    def pipeline(
        self,
        settings: Settings,
        devices: Devices,
        pipe: Pipe,
        *,
        shard: bool,
        capped: bool = True,
    ) -> Way:
        """Pipelines side by side, with the best cut that fits (capped) or the best of all.

        Stages are on different nodes where there are several, the copies of a stage on one: hidden
        states are less than gradients. Raises UserError where no cut fits.
        """
        replicas = devices.ranks // pipe.ranks
        traced = replace(settings, strategy="zero2") if shard else settings
        profile = self.profile(traced)
        speed = devices.speed(settings.precision)
        timed = _timed(profile, speed)
        between = devices.bandwidth(inside=devices.nodes == 1) if speed else None
        pipe = replace(
            pipe,
            bandwidth_bytes_s=between,
            memory_bytes=devices.usable_bytes if capped else None,
            bytes_per_parameter=_state_bytes(replicas, bf16=settings.bf16, shard=shard),
            whole_backward=settings.checkpointing or self.recipe.model.family == "albert",
        )
        cut = optimal(timed, pipe)
        timing = step_time(timed, cut, pipe)
        sent = traffic.pipeline(
            profile, cut, pipe, replicas=replicas, shard=shard, bf16=settings.bf16
        )
        work = timing.step_s
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
        peaks = pipeline_memory(
            profile,
            cut,
            pipe,
            optimiser=self.recipe.optimiser.name,
            shards=replicas if shard else 1,
        )
        memory = max(peaks, key=lambda one: one.total)
        if capped and memory.total > devices.usable_bytes:
            raise UserError(f"a rank would want {size(memory.total)}")
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


def _state_bytes(replicas: int, *, bf16: bool, shard: bool) -> float:
    """What a rank of a pipeline holds for each parameter of its stages, for the search of a cut.

    shard: weights and moments in parts, beside them whole weights and whole gradients (torch's
    schedules reduce them once, at the end).
    """
    if not shard:
        return 4.0 * _FLOAT_BYTES
    return 4 * _FLOAT_BYTES / replicas + (_LOW_BYTES if bf16 else _FLOAT_BYTES) + _FLOAT_BYTES
