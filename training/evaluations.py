"""Held-out losses in a run: when they are due, and how a signal cuts them off."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from training import placing
from training.evaluate.held_out import held_out_losses, total
from training.evaluate.unigrams import Unigrams, training_unigrams
from training.metrics import Clock, MetricsLog
from training.pipelined import Pipelined
from training.prepare import Prepared
from training.recipe import TrainRecipe
from training.stopping import StopRequest
from training.strategy import Parallel, Placement


class _Stopped(Exception):
    """A signal came while held-out losses were computed."""


class Evaluations:
    """The evaluations of one run; every rank calls the methods together."""

    def __init__(
        self,
        recipe: TrainRecipe,
        prepared: Prepared,
        place: Placement,
        parallel: Parallel | Pipelined,
        stop: StopRequest,
    ) -> None:
        self.recipe, self.prepared, self.place = recipe, prepared, place
        self.parallel, self.stop = parallel, stop

    @cached_property
    def _unigrams(self) -> Unigrams:
        """The baseline of the held-out losses, counted before the first of them."""
        prepared = self.prepared
        return training_unigrams(prepared.corpus, prepared.tokenizer, data=self.recipe.data)

    def due(self, done: int) -> bool:
        """Whether held-out losses are computed after `done` steps."""
        every = self.recipe.evaluation.every
        if self.recipe.data.held_out == 0:
            return False
        return done == self.recipe.schedule.steps or (every is not None and done % every == 0)

    def losses(
        self, done: int, log: MetricsLog | None, clock: Clock
    ) -> tuple[dict[str, Any], bool]:
        """Held-out losses of each domain, as JSON can hold them; whether a signal cut them off."""
        ask = self.parallel.objective.register_forward_pre_hook(self._leave_on_signal, prepend=True)
        try:
            return self._held_out_losses(done, log, clock), False
        except _Stopped:
            return {}, True
        finally:
            ask.remove()
            self.parallel.reshard()

    def _leave_on_signal(self, *_: object) -> None:
        """Before each pass of an evaluation; all ranks make as many passes."""
        if self.stop.agreed():
            raise _Stopped

    def _held_out_losses(self, done: int, log: MetricsLog | None, clock: Clock) -> dict[str, Any]:
        recipe, place = self.recipe, self.place
        begin_s = time.monotonic()
        found = held_out_losses(
            self.parallel.objective, self.prepared.corpus, self.prepared.builder,
            data=recipe.data, limit=recipe.evaluation.examples,
            microbatch=placing.evaluated_at_once(self.parallel, recipe), device=place.device,
            rank=place.data_rank, ranks=place.data_ranks, precision=recipe.run.precision,
            tokenizer=self.prepared.tokenizer, unigrams=self._unigrams,
        )  # fmt: skip
        losses = {
            "total": total(found.values()).to_json(),
            "domains": {name: loss.to_json() for name, loss in found.items()},
        }
        if log is not None:
            seconds = {"seconds": round(time.monotonic() - begin_s, 3), **clock.figures()}
            log.write({"kind": "evaluation", "step": done, **losses, "times": seconds})
        return losses
