"""What is said of steps that are not taken, because their gradients are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.errors import Fault

_NAMED_EXAMPLES = 16
"""So many of the examples with infinite losses are named."""


def line(step: int, first: int, last: int, indexes: list[int], in_a_row: int) -> dict[str, Any]:
    """The line of metrics.jsonl, without its times: step `step` had the examples `first` to `last`,
    of which `indexes` have losses that are not finite."""
    return {
        "kind": "skipped",
        "step": step,
        "examples": [first, last],
        "non_finite_losses": indexes[:_NAMED_EXAMPLES],
        "in_a_row": in_a_row,
    }


def text(line: dict[str, Any]) -> str:
    """`line` for a person."""
    first, last = line["examples"]
    return (
        f"step {line['step']:,} skipped: gradients are not finite (examples {first:,} to {last:,}; "
        f"losses not finite: {', '.join(map(str, line['non_finite_losses'])) or 'none'})"
    )


def too_many(most: int, step: int, checkpoints: Path) -> Fault:
    """The error that ends a run after `most` such steps in a row."""
    return Fault(
        f"the gradients of {most} steps in a row, up to step {step:,}, were not finite "
        f"(run.max_skipped_steps = '{most}'): the weights are as before them; go on from "
        f"one of '{checkpoints}' with another --output and a lower "
        "optimiser.learning_rate (gristmill export CHECKPOINT --output MODEL, then "
        "--set model.init=MODEL)"
    )
