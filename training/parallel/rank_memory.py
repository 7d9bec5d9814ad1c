"""The most memory that each rank of a pipeline holds during a step, by use.

`parallel.memory` for pipelines: which microbatches a rank holds when, the schedule's own actions
say. torch's `PipelineStage` also holds a buffer for the input and one for the gradient of the
output of every microbatch, for the whole run.

`parallel.stage_memory` judges thousands of cuts by fewer numbers; this is for the one chosen.
"""

from __future__ import annotations

from dataclasses import replace

from training.parallel.memory import (
    FLOAT_BYTES,
    LOW_BYTES,
    Memory,
    Optimiser,
    update_bytes,
    waiting_bytes,
)
from training.parallel.schedules import Action, actions, rank_of, schedule_named
from training.parallel.units import Cut, Pipe, Profile, UnitCost, held_parameters


def pipeline_memory(profile: Profile, cut: Cut, pipe: Pipe) -> tuple[Memory, ...]:
    """The peak of each rank of one pipeline.

    Of the pipe its `shards` and its optimiser count, not `bytes_per_parameter`. With shards whole
    weights and gradients stay from the first to the last microbatch of a step; parameters that
    several stages of one rank use are not divided.
    """
    schedule = schedule_named(pipe.schedule)
    order = actions(schedule, pipe.ranks, pipe.stages_per_rank, pipe.microbatches)
    ranks = [rank_of(schedule, stage, pipe.ranks) for stage in range(cut.stages)]
    return tuple(
        _Rank(profile, cut, pipe, [stage for stage, one in enumerate(ranks) if one == rank]).peak(
            order[rank], pipe.optimiser
        )
        for rank in range(pipe.ranks)
    )


class _Rank:
    """One rank, which holds the stages `own`."""

    def __init__(self, profile: Profile, cut: Cut, pipe: Pipe, own: list[int]) -> None:
        self.profile, self.shards, self.last = profile, pipe.shards, cut.stages - 1
        self.stages = {
            stage: profile.units[cut.bounds[stage] : cut.bounds[stage + 1]] for stage in own
        }
        elements, several = held_parameters(self.stages.values())
        divided = elements - several if pipe.shards > 1 else 0
        self.shard = FLOAT_BYTES * (elements - divided) - (-FLOAT_BYTES * divided // pipe.shards)
        element = LOW_BYTES if profile.low_weights else FLOAT_BYTES
        buffers = 0
        for stage in own:
            if stage > 0:
                buffers += profile.units[cut.bounds[stage] - 1].output_bytes
            if stage < self.last:
                buffers += profile.units[cut.bounds[stage + 1] - 1].output_bytes
        self.state = Memory(
            weights=self.shard,
            copies=element * divided,
            moments=2 * self.shard,
            activations=pipe.microbatches * (profile.batch_bytes + buffers),
        )

    def peak(self, order: tuple[Action, ...], optimiser: Optimiser) -> Memory:
        """The moment with the most."""
        working = update_bytes(
            [unit for units in self.stages.values() for unit in units], self.shards, optimiser
        )
        moments = [
            replace(self.state, gradients=self.shard, copies=0, working=working, peak="optimiser")
        ]
        held = dict.fromkeys(self.stages, 0)
        gone_back: set[int] = set()
        seen: set[object] = set()
        for action in order:
            stage = action.stage
            if action.kind == "F":
                held[stage] += 1
            key = (action.kind, stage, tuple(held.values()), stage in gone_back, len(gone_back))
            if key not in seen:
                seen.add(key)
                moments.append(self._moment(action, held, gone_back))
            if action.kind in ("B", "W"):
                held[stage] -= 1
                gone_back.add(stage)
        return max(moments, key=lambda one: one.total)

    def _moment(self, action: Action, held: dict[int, int], gone_back: set[int]) -> Memory:
        units = self.stages[action.stage]
        others = 0
        for stage, count in held.items():
            kept = sum(unit.kept_bytes for unit in self.stages[stage]) + self.profile.side_bytes
            others += (count - (stage == action.stage)) * kept
        others += self.profile.side_bytes
        gradients = FLOAT_BYTES * held_parameters(self.stages[stage] for stage in gone_back)[0]
        if action.kind == "F":
            most, name = _forward(units)
            name = f"forward of {name}"
        else:
            most, name = self._backward(units, action.stage, first=action.stage not in gone_back)
            name = f"backward of {name}"
        kept = sum(unit.kept_bytes for unit in units)
        here = min(most, kept)
        return replace(
            self.state,
            gradients=gradients,
            activations=self.state.activations + others + here,
            working=most - here,
            peak=name,
        )

    def _backward(self, units: tuple[UnitCost, ...], stage: int, *, first: bool) -> tuple[int, str]:
        """Most bytes of one microbatch's backward pass, and in which unit."""
        kept = sum(unit.kept_bytes for unit in units)
        most, name, gradients = 0, "", 0
        for number in reversed(range(len(units))):
            unit = units[number]
            kept -= unit.kept_bytes
            own = unit.first_backward_bytes if first else unit.backward_bytes
            if number == len(units) - 1 and stage != self.last:
                own -= unit.output_bytes  # comes in a buffer
            found = kept + own + (gradients if first else waiting_bytes(units, number))
            if found > most:
                most, name = found, unit.name
            gradients += unit.gradient_bytes
        return most, name


def _forward(units: tuple[UnitCost, ...]) -> tuple[int, str]:
    """Most bytes of one microbatch's forward pass, and in which unit."""
    most, name, inside = 0, "", 0
    for unit in units:
        if inside + unit.forward_bytes > most:
            most, name = inside + unit.forward_bytes, unit.name
        inside += unit.kept_bytes + unit.cached_bytes
    return most, name
