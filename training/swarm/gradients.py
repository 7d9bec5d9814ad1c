"""Gradients that a peer has gathered, as sums, so that those of all peers add up to one big batch.

The loss is the sum over terms of (sum of the losses of all labels / labels of all peers). How many
labels the others have is known only after the round. With one term that is no matter: the mean is
divided by it afterwards. ALBERT's two terms need two gradients, kept and sent apart, to be exact.
With `labels_per_sample` they are one: each term is divided by its labels in an average batch
instead of in this one, which for a batch of 4,096 is the same within some tenths of a per cent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.errors import UserError
from training.objectives import Losses
from training.swarm import portable
from training.swarm.epochs import Brought


@dataclass
class Gathered:
    """Sums over samples, of gradients (term by term, parameter by parameter), labels and losses."""

    sums: list[Tensor] = field(default_factory=list)
    samples: int = 0
    labels: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add(self, other: Gathered) -> None:
        """Count what `other` has gathered, too."""
        if not other.samples:
            return
        if not self.samples:
            self.sums = [part.clone() for part in other.sums]
            self.labels, self.losses = list(other.labels), list(other.losses)
        else:
            for mine, more in zip(self.sums, other.sums, strict=True):
                mine.add_(more)
            self.labels = [a + b for a, b in zip(self.labels, other.labels, strict=True)]
            self.losses = [a + b for a, b in zip(self.losses, other.losses, strict=True)]
        self.samples += other.samples

    @property
    def loss(self) -> float | None:
        """Mean loss, the sum over the terms; None before the first sample."""
        if not self.samples:
            return None
        pairs = zip(self.losses, self.labels, strict=True)
        return sum(loss / labels for loss, labels in pairs if labels)


class Gradients:
    """How gradients of `parameters` are gathered, sent and put together."""

    def __init__(
        self, parameters: Sequence[Tensor], terms: int, labels_per_sample: Sequence[float] = ()
    ) -> None:
        if labels_per_sample and (terms == 1 or len(labels_per_sample) != terms):
            raise UserError(
                f"labels_per_sample = '{list(labels_per_sample)}' has {len(labels_per_sample)} "
                f"numbers, this network's loss {terms} term{'s' if terms > 1 else ''}: "
                + ("leave it out" if terms == 1 else f"give {terms} or none")
            )
        self.parameters = list(parameters)
        self.terms = terms
        self._by_term = tuple(labels_per_sample)
        self._kept = 1 if self._by_term else terms

    def of(self, losses: Losses) -> Gathered | None:
        """The gradients of one microbatch; None where a loss or a gradient is not finite."""
        if not bool(losses.sums.isfinite().all()):
            return None
        sums = losses.sums.sum(dim=1)
        if self._by_term:
            sums = (sums / sums.new_tensor(self._by_term)).sum()[None]
        found: list[Tensor] = []
        for number in range(self._kept):
            parts = torch.autograd.grad(
                sums[number], self.parameters, retain_graph=number < self._kept - 1,
                allow_unused=True,
            )  # fmt: skip
            found += [
                torch.zeros_like(parameter, dtype=torch.float32) if part is None else part.float()
                for part, parameter in zip(parts, self.parameters, strict=True)
            ]
        if not bool(torch.stack([part.isfinite().all() for part in found]).all()):
            return None
        return Gathered(
            found, losses.sums.shape[1], losses.counts.sum(dim=1).tolist(),
            losses.sums.detach().double().sum(dim=1).tolist(),
        )  # fmt: skip

    def means(self, gathered: Gathered) -> list[Tensor]:
        """What is sent: sums / samples, copies in float32 on the CPU; zeros without a sample."""
        if not gathered.samples:
            return [
                torch.zeros(parameter.shape)
                for _ in range(self._kept)
                for parameter in self.parameters
            ]
        return [(part / gathered.samples).cpu() for part in gathered.sums]

    def whole(self, means: Sequence[Tensor], members: Sequence[Brought]) -> list[Tensor]:
        """The gradient of the loss of all members' samples, from the weighted mean of `means`.

        In operations whose results are the same on every machine (`training.swarm.portable`).
        """
        if self._by_term:
            return list(means)
        weight = math.fsum(member.weight for member in members)
        factors = []
        for term in range(self._kept):
            labels = math.fsum(
                member.labels[term] * (member.weight / member.samples)
                for member in members
                if member.samples
            )
            factors.append(weight / labels if labels else 0.0)
        number = len(self.parameters)
        found = []
        for place in range(number):
            whole = means[place] * factors[0]
            for term in range(1, self._kept):
                whole = whole + means[term * number + place] * factors[term]
            found.append(whole)
        return found

    def own_norm(self, gathered: Gathered) -> float:
        """Norm of the gradient of these samples alone."""
        told = Brought("", float(gathered.samples), 0, gathered.samples, "", "node", 0, 0,
                       tuple(gathered.labels))  # fmt: skip
        return portable.norm(self.whole(self.means(gathered), [told]))
