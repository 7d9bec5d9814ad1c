"""What one way of training costs a device: memory by kind, bytes sent, work.

A way is a strategy with its precision, microbatch and recomputation, and for a pipeline the
numbers of ranks and copies. `parallel.planner` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from training import microbatches as dealing
from training.parallel import traffic
from training.parallel.ladder import Devices, Stages
from training.parallel.memory import Strategy, memory_of
from training.parallel.partition import optimal
from training.parallel.profile import profile_recipe
from training.parallel.schedules import rank_of, schedule_named
from training.parallel.stage_memory import bytes_of
from training.parallel.timing import step_time
from training.parallel.traffic import Traffic
from training.parallel.units import Cut, Pipe, Profile
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
        state = _state(replicas, settings, shard=shard)
        traced = replace(settings, strategy="zero2") if shard else settings
        profile = self.profile(traced)
        speed = devices.speed(settings.precision)
        timed = _timed(profile, speed)
        between = devices.bandwidth(inside=devices.nodes == 1) if speed else None
        pipe = replace(
            pipe,
            bandwidth_bytes_s=between,
            memory_bytes=devices.usable_bytes if capped else None,
            bytes_per_parameter=sum(state.values()),
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
        memory = _fullest(profile, cut, pipe, state)
        return Way(settings, pipe.microbatches, memory, sent, work, stages=stages)


def _timed(profile: Profile, speed: float | None) -> Profile:
    """With seconds in place of FLOPs, where the speed is known."""
    if speed is None:
        return profile
    units = tuple(
        replace(unit, forward_s=unit.forward_s / speed, backward_s=unit.backward_s / speed)
        for unit in profile.units
    )
    return replace(profile, units=units)


def _state(replicas: int, settings: Settings, *, shard: bool) -> dict[str, float]:
    """Bytes that a rank of a pipeline holds for each parameter of its stages, by kind.

    shard: weights and moments in parts, beside them whole weights and whole gradients (torch's
    schedules reduce them once, at the end). Under autocast the casts of weights belong to
    activations, one for each microbatch in flight.
    """
    if shard:
        part = _FLOAT_BYTES / replicas
        whole = _LOW_BYTES if settings.bf16 else _FLOAT_BYTES
        return {"weights": part, "copies": whole, "gradients": _FLOAT_BYTES + part,
                "moments": 2 * part}  # fmt: skip
    return {"weights": _FLOAT_BYTES, "gradients": _FLOAT_BYTES,
            "moments": 2 * _FLOAT_BYTES}  # fmt: skip


def _fullest(profile: Profile, cut: Cut, pipe: Pipe, state: Mapping[str, float]) -> dict[str, int]:
    """Memory of the fullest rank by kind; `buffers` are those in which torch receives hidden states
    and their gradients, one for each microbatch of a step."""
    peaks = bytes_of(profile, cut, pipe)
    rank = max(range(pipe.ranks), key=lambda one: peaks[one])
    schedule = schedule_named(pipe.schedule)
    own = [one for one in range(cut.stages) if rank_of(schedule, one, pipe.ranks) == rank]
    buffers = sum(
        profile.units[end - 1].output_bytes
        for stage in own
        for end in (cut.bounds[stage], cut.bounds[stage + 1])
        if 0 < end < len(profile.units)
    )
    units = [unit for stage in own for unit in cut.of(stage)]
    shared = {name: count for unit in units for name, count in profile.units[unit].shared.items()}
    alone = sum(
        profile.units[unit].parameters - sum(profile.units[unit].shared.values()) for unit in units
    )
    parameters = alone + sum(shared.values())
    found = {kind: round(each * parameters) for kind, each in state.items()}
    found["buffers"] = pipe.microbatches * buffers
    found["activations"] = peaks[rank] - sum(found.values())
    return found
