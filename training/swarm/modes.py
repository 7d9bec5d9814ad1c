"""What an epoch is made of: gradients of one big batch, or the way of many local steps (DiLoCo).

`Batch` serves the modes sync and delayed, which differ in when a round runs, not in what it
averages; `LocalSteps` is DiLoCo. Both give tensors to average, and turn the average into one step
that is the same at every peer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from models.errors import Fault, UserError
from training.checkpoint_tensors import plain_tensors
from training.objectives import Losses
from training.swarm import portable
from training.swarm.epochs import Brought
from training.swarm.gradients import Gathered, Gradients
from training.swarm.settings import Collaboration
from training.swarm.types import State
from training.swarm.whereabouts import View

_NETWORK, _OPTIMISER, _OUTER = "network.", "optimiser.", "outer."

Rate = Callable[[int], float]
"""The learning rate of step number 0, 1, ...: of the swarm's, under DiLoCo of a peer's."""


class Mode(Protocol):
    """What a peer gathers in an epoch, and the step that comes of it."""

    needed: float
    """Samples that a round must have."""
    terms: int

    @property
    def gathered(self) -> Gathered:
        """What counts in this epoch so far."""
        ...

    @property
    def full(self) -> bool:
        """Whether the peer has done its part and only waits for others."""
        ...

    def add(self, losses: Losses, epoch: int) -> bool:
        """Gather one microbatch; False where it is not finite and so not counted."""
        ...

    def ready(self, seen: View, now: float) -> bool:
        """Whether the epoch ends, by what peers have reported."""
        ...

    def outgoing(self, sealed: Gathered) -> list[Tensor]:
        """What is sent: copies on the CPU, whose mean weighted by samples makes the step."""
        ...

    def own_norm(self, sealed: Gathered) -> float:
        """Norm of the step's direction by these samples alone."""
        ...

    def direction(self, means: Sequence[Tensor], members: Sequence[Brought]) -> list[Tensor]:
        """What the step is made of, from the weighted mean over `members`; on the CPU."""
        ...

    def move(self, direction: Sequence[Tensor], norm: float, epoch: int) -> None:
        """Take the step."""
        ...

    def clear(self) -> None:
        """Forget what is gathered; with it goes what it has done to the weights."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors that every peer of the epoch has alike, by name."""
        ...

    def load(self, state: State) -> None:
        """Take them from `state`. Raises Fault where they are of another network."""
        ...


class Batch:
    """One step by the gradient of all peers' samples."""

    full = False

    def __init__(
        self,
        network: nn.Module,
        optimiser: torch.optim.Optimizer,
        *,
        settings: Collaboration,
        terms: int,
        rate: Rate,
        max_gradient_norm: float | None,
    ) -> None:
        self.needed, self.terms = float(settings.target_batch), terms
        self._named = _learned(network)
        self._whole = plain_tensors(network)
        self._optimiser, self._rate, self._longest = optimiser, rate, max_gradient_norm
        self._gradients = Gradients(list(self._named.values()), terms, settings.labels_per_sample)
        self.gathered = Gathered()

    def add(self, losses: Losses, epoch: int) -> bool:
        """Add the gradients of one microbatch."""
        found = self._gradients.of(losses)
        if found is not None:
            self.gathered.add(found)
        return found is not None

    def ready(self, seen: View, now: float) -> bool:
        """When the samples reported are enough, or a peer has gone on to the next epoch already."""
        return seen.samples >= self.needed or seen.closed

    def take(self) -> Gathered:
        """Take the sums out, for a round beside the next epoch; new ones begin at zero."""
        sealed, self.gathered = self.gathered, Gathered()
        return sealed

    def give_back(self, sealed: Gathered) -> None:
        """Count `sealed` again, after rounds that failed, with what has come since."""
        sealed.add(self.gathered)
        self.gathered = sealed

    def outgoing(self, sealed: Gathered) -> list[Tensor]:
        """Mean gradients of the samples."""
        return self._gradients.means(sealed)

    def own_norm(self, sealed: Gathered) -> float:
        """Of the gradient of these samples' loss."""
        return self._gradients.own_norm(sealed)

    def direction(self, means: Sequence[Tensor], members: Sequence[Brought]) -> list[Tensor]:
        """The gradient of the loss of all samples."""
        return self._gradients.whole(means, members)

    def move(self, direction: Sequence[Tensor], norm: float, epoch: int) -> None:
        """Clip the gradient and take the optimiser's step of this epoch."""
        clip = 1.0
        if self._longest is not None and norm > self._longest:
            clip = self._longest / norm
        for parameter, gradient in zip(self._named.values(), direction, strict=True):
            scaled = gradient * clip if clip < 1 else gradient
            parameter.grad = scaled.to(parameter.device, parameter.dtype)
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate(epoch)
        portable.step(self._optimiser)
        self._optimiser.zero_grad()

    def clear(self) -> None:
        """Start at zero."""
        self.gathered = Gathered()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments, by the names of `training.checkpoint_tensors`."""
        found = {_NETWORK + name: tensor.detach() for name, tensor in self._whole.items()}
        names = {id(tensor): name for name, tensor in self._named.items()}
        for parameter, state in self._optimiser.state.items():
            for key, value in state.items():
                found[f"{_OPTIMISER}{names[id(parameter)]}.{key}"] = value
        return found

    def load(self, state: State) -> None:
        """Weights and moments; what is gathered belongs to other weights and goes."""
        moments: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.tensors.items():
            owner, _, key = name.removeprefix(_OPTIMISER).rpartition(".")
            if name.startswith(_OPTIMISER) and owner in self._named:
                moments.setdefault(owner, {})[key] = tensor
            elif not name.startswith(_NETWORK):
                raise _other_network(name)
        _fill(self._whole, state.tensors, _NETWORK)
        self._optimiser.state.clear()
        for owner, values in moments.items():
            parameter = self._named[owner]
            for key, value in values.items():
                if value.ndim and value.shape != parameter.shape:
                    raise _other_network(f"{_OPTIMISER}{owner}.{key}")
                # Counts of steps lie where torch's optimisers make them.
                device = parameter.device if value.ndim or self._fused(parameter) else "cpu"
                self._optimiser.state[parameter][key] = value.to(device, copy=True)
        self.clear()

    def _fused(self, parameter: Tensor) -> bool:
        return any(
            bool(group.get("fused") or group.get("capturable"))
            for group in self._optimiser.param_groups
            if any(one is parameter for one in group["params"])
        )


@dataclass
class _Done:
    """Local steps of this epoch, and what went into them."""

    steps: int
    gathered: Gathered


class LocalSteps:
    """DiLoCo: each peer takes local steps; then all move along the mean of the ways back.

    A peer that is slower than the others comes with the steps it has when they have waited long
    enough, and weighs as much as the samples in them. The moments of the inner optimiser are the
    peer's own and not part of the state: those of a joiner, or of a run that goes on from a
    checkpoint, begin at zero.
    """

    def __init__(
        self,
        network: nn.Module,
        optimiser: torch.optim.Optimizer,
        *,
        settings: Collaboration,
        terms: int,
        rate: Rate,
        max_gradient_norm: float | None,
    ) -> None:
        assert settings.diloco.local_batch is not None  # the settings' own check
        self._settings = settings.diloco
        self._batch = settings.diloco.local_batch
        self.needed = float(self._batch * self._settings.local_steps)
        self.terms = terms
        self._named = _learned(network)
        self._whole = plain_tensors(network)
        self._optimiser, self._rate, self._longest = optimiser, rate, max_gradient_norm
        # A peer's own batch is whole: one gradient, whatever the terms.
        self._gradients = Gradients(list(self._named.values()), terms)
        self._batch_so_far = Gathered()
        self._anchor = [one.detach().clone() for one in self._named.values()]
        self._momentum = [torch.zeros_like(one) for one in self._anchor]
        self._done = _Done(0, Gathered())
        self._waiting_since: float | None = None

    @property
    def gathered(self) -> Gathered:
        """Of the local steps; a batch that is not full yet does not count."""
        return self._done.gathered

    @property
    def full(self) -> bool:
        """Whether all local steps are done."""
        return self._done.steps >= self._settings.local_steps

    def add(self, losses: Losses, epoch: int) -> bool:
        """Add one microbatch, and take a local step when its batch is full."""
        if self.full:
            return True
        found = self._gradients.of(losses)
        if found is None:
            return False
        self._batch_so_far.add(found)
        if self._batch_so_far.samples >= self._batch:
            self._local_step(epoch)
        return True

    def _local_step(self, epoch: int) -> None:
        batch, self._batch_so_far = self._batch_so_far, Gathered()
        own = Brought("", float(batch.samples), 0, batch.samples, "", "node", 0, 0,
                      tuple(batch.labels))  # fmt: skip
        means = [part / batch.samples for part in batch.sums]
        gradients = self._gradients.whole(means, [own])
        norm = float(torch.nn.utils.get_total_norm(gradients))
        clip = 1.0
        if self._longest is not None and norm > self._longest:
            clip = self._longest / norm
        for parameter, gradient in zip(self._named.values(), gradients, strict=True):
            parameter.grad = (gradient * clip).to(parameter.dtype)
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate(epoch * self._settings.local_steps + self._done.steps)
        self._optimiser.step()
        self._optimiser.zero_grad()
        self._done.steps += 1
        batch.sums = []  # its gradients have been used; samples and losses are told
        self._done.gathered.add(batch)

    def ready(self, seen: View, now: float) -> bool:
        """When all peers have done their steps, or half of them have waited long enough."""
        here = seen.here
        done = sum(one.samples >= self.needed for one in here)
        if not here or 2 * done < len(here):
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        return done == len(here) or now - self._waiting_since >= self._settings.patience_s

    def outgoing(self, sealed: Gathered) -> list[Tensor]:
        """The way from the weights here to those that the epoch began with; none without a step."""
        if not sealed.samples:
            return [torch.zeros(one.shape) for one in self._anchor]
        return [
            (anchor - one.detach()).float().cpu()
            for anchor, one in zip(self._anchor, self._named.values(), strict=True)
        ]

    def own_norm(self, sealed: Gathered) -> float:
        """Length of the way."""
        return portable.norm(self.outgoing(sealed))

    def direction(self, means: Sequence[Tensor], members: Sequence[Brought]) -> list[Tensor]:
        """The mean way, as it is."""
        return list(means)

    @torch.no_grad()
    def move(self, direction: Sequence[Tensor], norm: float, epoch: int) -> None:
        """Nesterov's step from where the epoch began, as `torch.optim.SGD` takes it."""
        rate = portable.rounded(self._settings.outer_learning_rate)
        rounds = zip(direction, self._anchor, self._momentum, strict=True)
        for way, anchor, momentum in rounds:
            here = way.to(anchor.device, anchor.dtype)
            momentum.mul_(self._settings.outer_momentum).add_(here)
            anchor.sub_((momentum * self._settings.outer_momentum + here) * rate)

    @torch.no_grad()
    def clear(self) -> None:
        """Back to where the epoch began."""
        for parameter, anchor in zip(self._named.values(), self._anchor, strict=True):
            parameter.copy_(anchor)
        self._forget()

    def _forget(self) -> None:
        self._batch_so_far = Gathered()
        self._done = _Done(0, Gathered())
        self._waiting_since = None

    def tensors(self) -> dict[str, Tensor]:
        """Weights where the epoch began, and the outer momentum."""
        found = {_NETWORK + name: tensor.detach() for name, tensor in self._whole.items()}
        names = list(self._named)
        found |= {_NETWORK + name: one for name, one in zip(names, self._anchor, strict=True)}
        return found | {_OUTER + name: one for name, one in zip(names, self._momentum, strict=True)}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Weights and outer momentum; the inner optimiser keeps its own moments."""
        momentum = dict(zip(self._named, self._momentum, strict=True))
        for name in state.tensors:
            if not name.startswith((_NETWORK, _OUTER)):
                raise _other_network(name)
        _fill(momentum, state.tensors, _OUTER)
        _fill(self._whole, state.tensors, _NETWORK)
        for anchor, parameter in zip(self._anchor, self._named.values(), strict=True):
            anchor.copy_(parameter)
        self._forget()


def build(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    *,
    settings: Collaboration,
    terms: int,
    rate: Rate,
    max_gradient_norm: float | None,
) -> Mode:
    """The mode that the settings name. Raises UserError."""
    kind = LocalSteps if settings.mode == "diloco" else Batch
    if settings.mode == "diloco" and settings.labels_per_sample:
        raise UserError(
            f"labels_per_sample = '{list(settings.labels_per_sample)}' means nothing in mode = "
            "'diloco', whose batches are whole: leave it out"
        )
    return kind(
        network, optimiser, settings=settings, terms=terms, rate=rate,
        max_gradient_norm=max_gradient_norm,
    )  # fmt: skip


def _learned(network: nn.Module) -> dict[str, Tensor]:
    """The parameters that learn, each once, by name."""
    return {name: one for name, one in network.named_parameters() if one.requires_grad}


@torch.no_grad()
def _fill(own: Mapping[str, Tensor], found: Mapping[str, Any], prefix: str) -> None:
    """Copy the tensors under `prefix` into `own`, after a look at all of them."""
    names = {name.removeprefix(prefix) for name in found if name.startswith(prefix)}
    for name in sorted(names ^ own.keys()):
        raise _other_network(prefix + name)
    for name, tensor in own.items():
        if found[prefix + name].shape != tensor.shape:
            raise _other_network(prefix + name)
    for name, tensor in own.items():
        tensor.copy_(found[prefix + name])


def _other_network(name: str) -> Fault:
    return Fault(
        f"the swarm's state is of another network: '{name}' is not as here; use the run file of "
        "the swarm, and the same version of Gristmill"
    )
