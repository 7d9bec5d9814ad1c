"""A training run as DoReMi's proxy: what `training.doremi` computes, as a way to learn.

One optimiser step makes one update of alpha, from the whole global batch, before its gradient is
known. With one microbatch a rank, the forward pass whose losses give the update is the one that is
gone back through. With more, all microbatches first pass without gradient (a third of the step's
work again), then forward and back under the new alpha; dropout draws the same in both.

Each rank holds the reference whole, whatever the strategy; it runs in the precision of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.errors import UserError
from training import microbatches, trace
from training.batches import Batch
from training.doremi import DomainWeights, ProxySettings, domain_excess, mean_excess
from training.examples import IGNORED, Example
from training.metrics import Window
from training.microbatches import Passed
from training.objectives import Losses
from training.pipelined import Pipelined
from training.prepare import Prepared
from training.recipe import TrainRecipe
from training.reference import checked_reference, load_reference
from training.run_folder import MODEL_FOLDER
from training.strategy import Parallel, Placement
from training.together import on_all, on_first

_DIGITS = 6


def uniform(recipe: TrainRecipe) -> TrainRecipe:
    """`recipe` with the mixture that a proxy reads."""
    data = recipe.data.model_copy(update={"weights": "uniform"})
    return recipe.model_copy(update={"data": data})


class Proxy:
    """`training.learning.Learning` of one proxy run."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self.inputs = (str(Path(settings.reference) / MODEL_FOLDER),)
        self._domains: tuple[str, ...] = ()
        self._directory = Path()
        self._vocab_size = 0
        self._log: trace.TraceLog | None = None
        self._excess: np.ndarray | None = None
        self._tokens = np.zeros(0)

    def prepared(self, recipe: TrainRecipe, prepared: Prepared) -> Prepared:
        """With the reference and the constants of DoReMi in the identity. Raises UserError."""
        family, names = recipe.model.family, prepared.corpus.names
        if family != "decoder":
            raise UserError(
                f"model.family = '{family}': a proxy compares next-token losses, set 'decoder'"
            )
        if recipe.run.strategy == "pipeline":
            raise UserError(
                "run.strategy = 'pipeline': a proxy needs the whole network on each rank: choose "
                "auto, ddp, zero1, zero2 or zero3"
            )
        if len(names) < 2:
            raise UserError(
                f"data.by = '{', '.join(recipe.data.by)}' gives one domain, '{names[0]}': there is "
                "nothing to weigh; divide the pages by more: language, bucket, host, source"
            )
        digest = checked_reference(self._settings.reference, recipe, prepared)
        settings = asdict(self._settings)
        del settings["reference"]
        proxy = {"method": "doremi", **settings, "reference_sha256": digest}
        self._domains, self._vocab_size = names, prepared.vocab_size
        self._directory = Path(recipe.output.directory)
        return replace(prepared, identity={**prepared.identity, "proxy": proxy})

    def begin(self, place: Placement, done: int, state: dict[str, Any]) -> None:
        """Load the reference, take alpha up, open the trace."""
        self._place = place
        self._weights = DomainWeights(
            len(self._domains),
            step_size=self._settings.step_size,
            smoothing=self._settings.smoothing,
        )
        if state:
            self._weights.restore(state)

        def load() -> None:
            self._reference = load_reference(
                self._settings.reference, self._vocab_size, place.device
            )
            if place.first:
                self._log = trace.TraceLog(self._directory, self._domains, step=done)

        on_all(load, "cannot begin the proxy")

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
        """Move alpha by the losses of the step, and leave the gradient of its loss under alpha."""
        assert isinstance(parallel, Parallel)  # `prepared` refuses a pipeline
        self._before = self._weights.state()
        factors = torch.zeros(0)
        if len(batches) > 1:
            with torch.no_grad():
                found = [
                    self._example_excess(
                        parallel,
                        batch,
                        microbatches.forward(parallel, batch, number, seed=seed, step=step),
                    )
                    for number, batch in enumerate(batches)
                ]
            factors = self._update(torch.stack(found).sum(dim=0))

        def weigh(batch: Batch, losses: Losses) -> torch.Tensor:
            nonlocal factors
            if len(batches) == 1:
                factors = self._update(self._example_excess(parallel, batch, losses))
            return factors[batch["domains"]]

        return microbatches.gradients(
            parallel, dealt, batches, window, seed=seed, step=step, weigh=weigh
        )

    def settle(self, step: int, *, taken: bool) -> None:
        """Keep the new alpha, or go back to the one before a step that was skipped."""
        if not taken:
            self._weights.restore(self._before)
            self._excess = None
        if self._log is not None:
            self._log.write(step, self._weights.alpha, self._excess, self._tokens)

    def line(self) -> dict[str, Any]:
        """alpha and lambda of the last step, where it was taken."""
        found = {"alpha": self._by_domain(self._weights.alpha)}
        if self._excess is not None:
            found["excess"] = self._by_domain(self._excess)
        return {"proxy": found}

    def state(self) -> dict[str, Any]:
        """alpha and its sum, exactly; the trace is on the disk."""
        if self._log is not None:
            self._log.sync()
        return self._weights.state()

    def finish(self) -> dict[str, float]:
        """Write weights.json; the mean alpha by domain."""
        mean = self._weights.mean
        on_first(
            lambda: trace.write_weights(self._directory, self._domains, mean),
            f"cannot finish '{self._directory}'",
        )
        return dict(zip(self._domains, mean.tolist(), strict=True))

    def close(self) -> None:
        """Close the trace."""
        if self._log is not None:
            self._log.close()

    def _example_excess(self, parallel: Parallel, batch: Batch, losses: Losses) -> torch.Tensor:
        """Sums of the excess and labelled tokens of each domain in a microbatch: (2, domains)."""
        assert losses.tokens is not None  # a decoder's
        with torch.no_grad(), parallel.precision():
            reference = self._reference.token_losses(batch)
        found = domain_excess(
            losses.tokens, reference, batch["labels"] != IGNORED, batch["domains"],
            k=len(self._domains), excess=self._settings.excess,
        )  # fmt: skip
        return torch.stack(found)

    def _update(self, own: torch.Tensor) -> torch.Tensor:
        """Weights of an example's loss by its domain, alpha_t / tokens: float32 (domains,).

        own: of this rank's examples, as `_example_excess` gives it. Where the excess is not finite
        nor are the weights, and so the step is skipped, as for gradients that are not.
        """
        sums, self._tokens = self._place.total(own).numpy()
        self._excess = mean_excess(sums, self._tokens, self._settings.excess)
        if np.isfinite(self._excess).all():
            factors = self._weights.update(self._excess) / np.maximum(self._tokens, 1)
        else:
            factors = np.full(len(self._domains), np.nan)
        return torch.from_numpy(factors).to(self._place.device, torch.float32)

    def _by_domain(self, values: np.ndarray) -> dict[str, float]:
        return {
            name: round(value, _DIGITS)
            for name, value in zip(self._domains, values.tolist(), strict=True)
        }
