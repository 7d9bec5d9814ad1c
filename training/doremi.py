"""DoReMi's weights of the domains, by group DRO (Xie et al. 2023, Algorithm 1, step 2).

A proxy learns from batches that are uniform over the domains, whatever the mixture of its
reference was. At step t, with alpha_0 = u = 1/k for each of k domains:

    lambda_t[i]  mean over the tokens of domain i in the global batch of
                 max(loss of the proxy at theta_(t-1) - loss of the reference, 0)
    alpha_t      (1 - c) x normalised(alpha_(t-1) x exp(eta x lambda_t)) + c x u
    theta_t      one optimiser step on the sum over domains of
                 alpha_t[i] x (mean loss of the tokens of domain i in the global batch)

The result is the mean of alpha_1 ... alpha_T. The loss is clipped token by token in lambda and not
at all in the optimiser's step. One update a step, from all its microbatches, the same on every
rank. Where the public code (github.com/sangmichaelxie/doremi) does otherwise, the paper is
followed: a domain that is not in the batch has lambda 0, alpha_0 is not in the mean, the domains'
means are added up by alpha and not by their tokens.

A step whose excess or gradients are not finite is skipped: the network, alpha and the mean stay as
they were. How a training run is made a proxy's: `training.proxy`. No torch here but in annotations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from models.errors import UserError
from training import run_manifest
from training.mix.recipe import Excess
from training.trace import Trace, read_trace, read_weights

if TYPE_CHECKING:
    from torch import Tensor

    from training.recipe import TrainRecipe

__all__ = [
    "DomainWeights",
    "ProxySettings",
    "Trace",
    "domain_excess",
    "mean_excess",
    "read_trace",
    "read_weights",
    "train_proxy",
]


@dataclass(frozen=True)
class ProxySettings:
    """What makes a proxy of a training run. Raises UserError for values that mean nothing.

    reference: folder of a finished run. excess: 'excess', or the paper's ablations 'hardest' (the
    proxy's loss) and 'easiest' (the reference's, the lower the more). step_size: eta. smoothing: c.
    """

    reference: str
    excess: Excess = "excess"
    step_size: float = 1.0
    smoothing: float = 1e-3

    def __post_init__(self) -> None:
        if self.excess not in get_args(Excess):
            raise UserError(
                f"doremi.excess = '{self.excess}': choose {', '.join(get_args(Excess))}"
            )
        if not (self.step_size > 0 and math.isfinite(self.step_size)):
            raise UserError(f"doremi.step_size = '{self.step_size}': give a number above 0")
        if not 0 < self.smoothing < 1:
            raise UserError(f"doremi.smoothing = '{self.smoothing}': give a number between 0 and 1")


class DomainWeights:
    """alpha_t of `domains` domains, and the mean of alpha_1 ... alpha_t."""

    def __init__(self, domains: int, *, step_size: float = 1.0, smoothing: float = 1e-3) -> None:
        self._step_size, self._smoothing = step_size, smoothing
        self.alpha = np.full(domains, 1 / domains)
        """Weights after `steps` updates: float64 (domains,), sum 1, none below c / domains."""
        self.steps = 0
        self._sum = np.zeros(domains)

    def update(self, excess: np.ndarray) -> np.ndarray:
        """alpha_t from lambda_t: float64 (domains,), finite. In log space, so none is too large."""
        if not np.isfinite(excess).all():
            raise ValueError(f"an excess is not finite: {excess.tolist()}")
        logits = np.log(self.alpha) + self._step_size * excess
        grown = np.exp(logits - logits.max())
        smoothing = self._smoothing
        self.alpha = (1 - smoothing) * grown / grown.sum() + smoothing / len(grown)
        self._sum = self._sum + self.alpha
        self.steps += 1
        return self.alpha

    @property
    def mean(self) -> np.ndarray:
        """Of alpha_1 ... alpha_t: float64 (domains,); uniform before the first update."""
        mean: np.ndarray = self._sum / self.steps if self.steps else self.alpha
        return mean

    def state(self) -> dict[str, Any]:
        """Everything, as JSON holds it exactly."""
        return {"alpha": self.alpha.tolist(), "sum": self._sum.tolist(), "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        self.alpha, self._sum = np.array(state["alpha"]), np.array(state["sum"])
        self.steps = int(state["steps"])


def domain_excess(
    proxy: Tensor,
    reference: Tensor,
    labelled: Tensor,
    domains: Tensor,
    *,
    k: int,
    excess: Excess,
) -> tuple[Tensor, Tensor]:
    """Excess summed over the labelled tokens of each domain, and how many they are: float64 (k,).

    proxy, reference: losses of the tokens (examples, positions), without gradient; labelled: bool
    of the same shape; domains: (examples,). 'excess' is clipped at 0 token by token; 'hardest' does
    not look at `reference`, nor 'easiest' at `proxy`.
    """
    if excess == "excess":
        found = (proxy.double() - reference.double()).clamp(min=0)
    else:
        found = proxy.double() if excess == "hardest" else -reference.double()
    values = found.masked_fill(~labelled, 0).sum(dim=1)
    tokens = labelled.sum(dim=1).double()
    return (
        values.new_zeros(k).index_add(0, domains, values),
        tokens.new_zeros(k).index_add(0, domains, tokens),
    )


def mean_excess(sums: np.ndarray, tokens: np.ndarray, excess: Excess) -> np.ndarray:
    """lambda_t of a global batch, from `domain_excess` summed over all of it.

    A domain that is not in the batch is as good as the reference: 0. The ablations' losses have
    no such point, so there it gets the mean of the domains that are, and keeps its place.
    """
    there = tokens > 0
    found: np.ndarray = np.divide(sums, tokens, out=np.zeros_like(sums), where=there)
    if excess != "excess" and there.any():
        found[~there] = found[there].mean()
    return found


def train_proxy(
    recipe: TrainRecipe, settings: ProxySettings, *, restart: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Train the recipe's model as DoReMi's proxy, or go on with it: see `training.loop.train`.

    The batches are uniform over the domains, whatever `recipe.data.weights` says. Gives the summary
    of the run and `weights`: the mean alpha by domain, None for a run that was stopped. Its folder
    also gets alpha.jsonl and weights.json (`training.trace`). Raises UserError, Fault.
    """
    from training.loop import train  # noqa: PLC0415 - torch
    from training.proxy import Proxy, uniform  # noqa: PLC0415

    learning = Proxy(settings)
    summary = train(uniform(recipe), restart=restart, quiet=quiet, learning=learning)
    if summary["status"] == "stopped":
        return {**summary, "weights": None}
    entry = run_manifest.read(recipe.output.directory).proxy
    assert entry is not None
    return {**summary, "weights": entry.weights}
