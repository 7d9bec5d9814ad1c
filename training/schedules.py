"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from training.recipe import Schedule


def learning_rate_factor(schedule: Schedule, step: int) -> float:
    """What the learning rate is multiplied by in step `step`, counted from 0.

    The warm-up is a line that would be 0 one step before the first and reaches 1 at
    `warmup_steps`, so that no step is spent at 0. From there the decay goes from 1 towards
    `final_ratio`, which stands at `steps`: one after the last step.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    done = min(1.0, (step - schedule.warmup_steps) / (schedule.steps - schedule.warmup_steps))
    final = schedule.final_ratio
    match schedule.decay:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - final) * done
        case "cosine":
            return final + (1.0 - final) * (1.0 + math.cos(math.pi * done)) / 2
        case "exponential":
            return float(final**done)
