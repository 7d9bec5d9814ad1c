"""Peers that learn in a `memory_swarm.World`: a tiny regression, or a tiny language model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.training import step_examples
from tests.training.swarm.memory_swarm import MemoryTransport, World, bits
from training.batches import collate
from training.objectives import Losses
from training.optimisers import Lamb
from training.swarm.epochs import Stage
from training.swarm.optimiser import Applied, CollaborativeOptimiser
from training.swarm.settings import Collaboration
from training.swarm.types import PeerInfo, Role

CLIP = 0.5


def rate(step: int) -> float:
    """A learning rate that changes with each step."""
    return 0.02 / (1 + 0.1 * step)


class Regression(nn.Module):
    """Losses of samples that a number each stands for; one term or two, uneven labels."""

    def __init__(self, terms: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        self.terms = terms

    @property
    def network(self) -> nn.Module:
        """As an `Objective` has it."""
        return self

    def forward(self, samples: Sequence[int]) -> Losses:
        draws = [np.random.default_rng(sample) for sample in samples]
        inputs = torch.tensor(np.stack([draw.normal(size=4) for draw in draws]).astype(np.float32))
        targets = torch.tensor(np.stack([draw.normal(size=2) for draw in draws]).astype(np.float32))
        labels = torch.tensor([[float(draw.integers(1, 4)) for draw in draws]
                               for _ in range(self.terms)], dtype=torch.float64)  # fmt: skip
        errors = (self.second(torch.tanh(self.first(inputs))) - targets).square()
        sums = torch.stack([errors[:, term] * labels[term].float() for term in range(self.terms)])
        return Losses(sums, labels, torch.zeros_like(labels))


class Language(nn.Module):
    """The objective of a tiny ALBERT or decoder; a sample is the index of an example."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family, self.objective = family, step_examples.objective(family)
        self.terms = len(self.objective.terms)

    @property
    def network(self) -> nn.Module:
        """The plain network."""
        return self.objective.network

    def forward(self, samples: Sequence[int]) -> Losses:
        examples = [step_examples.examples(self.family, one, 1)[0] for one in samples]
        losses: Losses = self.objective(collate(examples))
        return losses


class ToyPeer:
    """One peer: `run` until the swarm has taken `steps`.

    spoilt: microbatches, counted from 0, whose first loss is not finite. scaled: factor of the
    gradients of all microbatches from `scaled_from` on.
    """

    def __init__(
        self,
        world: World,
        name: str,
        settings: Collaboration,
        *,
        role: Role = "node",
        steps: int = 4,
        microbatch: int = 2,
        compute_s: float = 1.0,
        learner: Any = None,
        optimiser: Callable[[Any], torch.optim.Optimizer] | None = None,
        spoilt: Sequence[int] = (),
        scaled: float = 1.0,
        scaled_from: int = 0,
        linger_s: float = 100.0,
        tell: Callable[[Stage, int, str], None] | None = None,
    ) -> None:
        self.world, self.name, self.steps = world, name, steps
        self.microbatch, self.compute_s = microbatch, compute_s
        self.spoilt, self.scaled, self.scaled_from = set(spoilt), scaled, scaled_from
        self.linger_s = linger_s
        self.learner = learner or Regression()
        self.optimiser = (optimiser or lamb)(self.learner.network.parameters())
        self.transport = MemoryTransport(world, PeerInfo(name, f"peer {name}", role, "cpu"))
        self.lines: list[tuple[Stage, int, str]] = []
        self.gathered: list[tuple[int, int, tuple[int, ...]]] = []
        """Of each microbatch that counted: its epoch, the steps taken before, its samples."""
        self.applied: list[Applied] = []
        self.hashes: dict[int, str] = {}
        self._tell = tell
        self.collaborative = CollaborativeOptimiser(
            self.learner.network, self.optimiser, transport=self.transport,
            peer=self.transport.peer, settings=settings, terms=self.learner.terms,
            rate=rate, max_gradient_norm=CLIP, clock=world,
            submit=lambda work: world.start(name, work), tell=self._hear,
        )  # fmt: skip

    def _hear(self, stage: Stage, epoch: int, text: str) -> None:
        self.lines.append((stage, epoch, text))
        if self._tell is not None:
            self._tell(stage, epoch, text)

    def run(self) -> None:
        own = self.collaborative
        own.start()
        first = int.from_bytes(self.name.encode(), "big") * 1_000_000
        numbers = itertools.count()
        while own.epoch < self.steps:
            if own.wants_samples:
                self.world.pause(self.compute_s)
                number = next(numbers)
                samples = tuple(first + number * self.microbatch + one
                                for one in range(self.microbatch))  # fmt: skip
                losses = self.learner(samples)
                if number in self.spoilt:
                    factors = torch.ones_like(losses.sums)
                    factors[:, 0] = torch.nan
                    losses = losses._replace(sums=losses.sums * factors)
                if number >= self.scaled_from:
                    losses = losses._replace(sums=losses.sums * self.scaled)
                if own.backward(losses):
                    self.gathered.append((own.gathering, own.epoch, samples))
            applied = own.step()
            if applied is not None:
                self.applied.append(applied)
            self.hashes[own.epoch] = own.state_hash
        # The others may still have to download what came of the last step.
        until = self.world.now + self.linger_s
        while self.world.now < until:
            own.linger()
            self.world.sleep(1.0)
        assert own.epoch == self.steps  # whatever was gathered beside the last round
        self.hashes[own.epoch] = own.state_hash

    def state(self) -> bytes:
        return bits(self.collaborative.state())


def lamb(parameters: Any) -> torch.optim.Optimizer:
    """The optimiser of the swarm's steps."""
    return Lamb(parameters, lr=1.0, weight_decay=0.1)


def batches(peers: Sequence[ToyPeer]) -> dict[int, list[int]]:
    """Samples that the peers gathered, by epoch."""
    found: dict[int, list[int]] = {}
    for peer in peers:
        for epoch, _, samples in peer.gathered:
            found.setdefault(epoch, []).extend(samples)
    return found


def alone(
    learner: Any,
    batches: Mapping[int, Sequence[int]],
    expected: Sequence[float] = (),
    after: Callable[[int], None] = lambda epoch: None,
) -> list[Tensor]:
    """Weights of one process after a step with each of `batches`, torch's own clipping and LAMB."""
    parameters = list(learner.network.parameters())
    optimiser = lamb(parameters)
    for epoch in sorted(batches):
        losses = learner(batches[epoch])
        counts: Any = losses.counts.sum(dim=1).float()
        if expected:
            counts = torch.tensor(expected) * len(batches[epoch])
        (losses.sums.sum(dim=1) / counts).sum().backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in optimiser.param_groups:
            group["lr"] = rate(epoch)
        optimiser.step()
        optimiser.zero_grad()
        after(epoch)
    return [parameter.detach() for parameter in parameters]
