"""What `training.loop` asks of a way to learn: what a step lowers, and what that has to remember.

A plain run lowers the mean loss of the labels (`Plain`). DoReMi's proxy (`training.proxy`) lowers
a loss whose weights move from step to step. The loop owns all else: data, steps, checkpoints, log.
Every rank calls every method, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from models import files
from training import microbatches
from training.batches import Batch
from training.examples import Example
from training.metrics import Window
from training.microbatches import Passed
from training.pipelined import Pipelined
from training.prepare import Prepared
from training.recipe import TrainRecipe
from training.strategy import Parallel, Placement
from training.together import on_first
from training.trace import ALPHA_FILE


class Learning(Protocol):
    """One way to learn, for one run."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Folders that it reads, which no --restart may take away."""
        ...

    def prepared(self, recipe: TrainRecipe, prepared: Prepared) -> Prepared:
        """The run's inputs, checked, with what this learning adds to the run's identity."""
        ...

    def begin(self, place: Placement, done: int, state: dict[str, Any]) -> None:
        """Open what the steps need, to go on after `done` steps from the `state` saved then."""
        ...

    def gradients(
        self,
        parallel: Parallel | Pipelined,
        dealt: Sequence[Sequence[Example]],
        batches: Sequence[Batch],
        window: Window,
        *,
        seed: int,
        step: int,
    ) -> Passed:
        """Leave the gradient of a step in the parameters: as `microbatches.gradients`."""
        ...

    def settle(self, step: int, *, taken: bool) -> None:
        """Hear whether step `step`, counted from 1, was taken or skipped."""
        ...

    def line(self) -> dict[str, Any]:
        """What a line of metrics.jsonl says of the last step beside the loss."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, JSON; files that it belongs to are on the disk by then."""
        ...

    def finish(self) -> dict[str, float] | None:
        """Write what stays; the weights of the domains that were found, for the manifest."""
        ...

    def close(self) -> None:
        """Close files; also after an error, and before `begin`."""
        ...


class Plain:
    """The mean loss over the labels, and nothing to remember."""

    inputs: tuple[str, ...] = ()

    def prepared(self, recipe: TrainRecipe, prepared: Prepared) -> Prepared:
        """As they are."""
        self._trace = Path(recipe.output.directory) / ALPHA_FILE
        return prepared

    def begin(self, place: Placement, done: int, state: dict[str, Any]) -> None:
        """Nothing to open; the trace of a proxy that died here before its first checkpoint goes."""
        if not done:
            on_first(lambda: files.remove(self._trace), "cannot begin the run")

    def gradients(
        self,
        parallel: Parallel | Pipelined,
        dealt: Sequence[Sequence[Example]],
        batches: Sequence[Batch],
        window: Window,
        *,
        seed: int,
        step: int,
    ) -> Passed:
        """Of the mean loss."""
        return microbatches.gradients(parallel, dealt, batches, window, seed=seed, step=step)

    def settle(self, step: int, *, taken: bool) -> None:
        """Nothing moves with the steps."""

    def line(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def finish(self) -> dict[str, float] | None:
        """No weights were found."""
        return None

    def close(self) -> None:
        """Nothing to close."""
