"""A peer that learns a tiny ALBERT in a thread, so that its test can look, hold it and kill it.

What a microbatch holds is a function of (peer, epoch, number), so that a test can compute
afterwards what any set of peers must have come to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.training import step_examples
from training.batches import collate
from training.examples import Example
from training.objectives import Losses, Objective
from training.optimisers import Lamb
from training.swarm.optimiser import Applied, CollaborativeOptimiser
from training.swarm.settings import Collaboration
from training.swarm.types import PeerInfo, Role, Transport

MICROBATCH = 2
CLIP = 0.5
HELD_OUT = 32
SAMPLES = "samples"
"""A place to hold a peer beside the stages: it has announced samples of this epoch."""


def rate(step: int) -> float:
    """A learning rate that changes with each step."""
    return 0.01 / (1 + 0.02 * step)


def learner() -> Objective:
    """The same tiny network at every peer: 45,628 parameters, two terms of the loss."""
    return step_examples.objective("albert")


def optimiser(network: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of the swarm's steps (under DiLoCo of each peer's)."""
    return Lamb(network.parameters(), lr=1.0, weight_decay=0.01)


def microbatch(index: int, epoch: int, number: int) -> list[Example]:
    """Microbatch `number` of peer `index` in `epoch`; no example is in two."""
    first = ((epoch * 16 + index) * 1000 + number) * MICROBATCH
    return step_examples.examples("albert", first, MICROBATCH)


@dataclass
class Told:
    """What a peer tells of itself, all of it from its start on."""

    epoch: int = 0
    stage: str = ""
    is_held: bool = False
    error: str = ""
    hashes: dict[int, str] = field(default_factory=dict)
    """By epoch: what it had last in each."""
    applied: list[Applied] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    """By epoch: the loss of HELD_OUT examples with the weights that it began with."""
    lines: list[tuple[str, int, str]] = field(default_factory=list)
    losses: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    """By (epoch, number of the microbatch): sum and labels of each term."""


class Learning:
    """One peer; `index` is its own number in the run."""

    def __init__(
        self,
        transport: Transport,
        *,
        index: int,
        role: Role,
        settings: Mapping[str, Any],
        steps: int,
        pause_s: float,
        hold: str = "",
    ) -> None:
        self._transport, self._index = transport, index
        self._steps, self._pause_s = steps, pause_s
        self._told = Told()
        self._hold = hold
        self._free, self._ended = threading.Event(), threading.Event()
        self._objective = learner()
        self._own = CollaborativeOptimiser(
            self._objective.network, optimiser(self._objective.network), transport=transport,
            peer=PeerInfo(transport.peer_id, f"peer {index}", role, "cpu"),
            settings=Collaboration(**settings), terms=len(self._objective.terms), rate=rate,
            max_gradient_norm=CLIP, tell=self._hear,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def told(self) -> Told:
        """All of it."""
        return self._told

    def hold(self, place: str) -> None:
        """Stop at the next `place`, a stage or SAMPLES."""
        self._free.clear()
        self._hold = place

    def release(self) -> None:
        """Go on."""
        self._hold, self._told.is_held = "", False
        self._free.set()

    def end(self) -> Told:
        """Stop after this turn; the network of peers is as before."""
        self._ended.set()
        self.release()
        self._thread.join(60.0)
        return self._told

    def _wait_at(self, place: str) -> None:
        if place == self._hold:
            self._told.is_held = True
            self._free.wait()

    def _hear(self, stage: Any, epoch: int, text: str) -> None:
        self._told.stage = str(stage)
        self._told.lines.append((str(stage), epoch, text))
        self._wait_at(str(stage))

    def _run(self) -> None:
        try:
            self._own.start()
            while not self._ended.is_set():
                self._note()
                # At the end it stays, for whoever has not got there.
                if self._own.wants_samples and self._own.gathering < self._steps:
                    self._compute()
                else:
                    time.sleep(0.05)
                applied = self._own.step()
                if applied is not None:
                    self._told.applied.append(applied)
                if self._gathered():
                    if self._hold == SAMPLES:
                        self._own._announce(now=True)
                    self._wait_at(SAMPLES)
        except BaseException as error:
            self._told.error = repr(error)
            raise

    def _note(self) -> None:
        self._told.epoch = self._own.epoch
        known = self._told.hashes.get(self._own.epoch)
        self._told.hashes[self._own.epoch] = self._own.state_hash
        # DiLoCo's weights are a peer's own between two rounds.
        if self._own.state_hash != known and not self._gathered():
            self._told.held_out[self._own.epoch] = held_out(self._objective)

    def _gathered(self) -> int:
        return self._own._mode.gathered.samples

    def _compute(self) -> None:
        time.sleep(self._pause_s)
        epoch, number = self._own.gathering, self._gathered() // MICROBATCH
        losses: Losses = self._objective(collate(microbatch(self._index, epoch, number)))
        if self._own.backward(losses):
            self._told.losses[epoch, number] = terms_of(losses)


def held_out(objective: Objective) -> float:
    """The loss of examples that nobody learns from."""
    with torch.no_grad():
        examples = step_examples.examples("albert", 10**8, HELD_OUT)
        return loss_of([terms_of(objective(collate(examples)))])


def terms_of(losses: Losses) -> list[tuple[float, float]]:
    """Sum of the losses and labels, of each term."""
    sums = losses.sums.detach().double().sum(dim=1).tolist()
    return list(zip(sums, losses.counts.double().sum(dim=1).tolist(), strict=True))


def loss_of(parts: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The loss of all these microbatches together."""
    return sum(
        sum(loss for loss, _ in term) / sum(labels for _, labels in term)
        for term in zip(*parts, strict=True)
    )
