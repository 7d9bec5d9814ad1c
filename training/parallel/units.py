"""What the units of a chain cost, as plain numbers: all that a partition and a plan are made of.

A chain is a network cut as fine as it can be: each unit takes the hidden states of the one before
it. The numbers are for one microbatch on one device; where they come from: `parallel.profile`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class UnitCost:
    """One unit and one microbatch."""

    name: str
    forward_s: float
    backward_s: float
    """Of weights and of inputs together; with the recomputation, where there is one."""
    parameters: int
    """Elements, those that other units hold too among them."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Parameters that other units use too (tied weights): their elements, by name."""
    output_bytes: int = 0
    """Hidden states that it hands to the next unit; as many gradients come back."""
    kept_bytes: int = 0
    """What its forward pass keeps until its backward pass, its input not counted twice."""
    forward_bytes: int = 0
    """Most that its forward pass holds at once, `kept_bytes` among it."""
    backward_bytes: int = 0
    """Most that its backward pass holds at once beside the gradients of weights that others have
    left, `kept_bytes` among it."""
    copied_bytes: int = 0
    """Of `kept_bytes`: casts of weights."""
    cached_bytes: int = 0
    """Casts of weights that autocast holds until the forward pass of all units is over, beside
    `kept_bytes`. Counted in the first unit that casts a weight."""
    gradient_bytes: int = 0
    """Gradients that its backward pass leaves in a step's first microbatch, among them those that
    wait for what other units will add to a shared weight's."""
    first_backward_bytes: int = 0
    """As `backward_bytes` in a step's first microbatch, `gradient_bytes` among it."""
    matrices: tuple[int, ...] = ()
    """Elements of each parameter of its own with more than one dimension."""
    sharded_alone: bool = False
    """Whether FSDP2 gathers its weights by themselves."""

    @property
    def seconds(self) -> float:
        """Forward and backward pass."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Profile:
    """A chain in numbers."""

    units: tuple[UnitCost, ...]
    microbatch: int
    """Examples."""
    source: str
    """Where the seconds come from: 'measured' on a device, 'operations' counted (a FLOP is a
    second), 'given'."""
    batch_bytes: int = 0
    """A microbatch's own tensors; a device holds those of all microbatches of a step."""
    side_bytes: int = 0
    """What the units read beside the hidden states (mask, rotary positions): kept from a
    microbatch's forward to its backward pass, once a stage."""
    bf16: bool = False
    """Whether the units compute under autocast."""
    low_weights: bool = False
    """Whether the weights that they compute with are bf16, as FSDP2 gathers them."""

    def parameters(self, first: int, end: int) -> int:
        """Elements in the units first .. end - 1, shared ones once."""
        units = self.units[first:end]
        shared = {name: size for unit in units for name, size in unit.shared.items()}
        own = sum(unit.parameters - sum(unit.shared.values()) for unit in units)
        return own + sum(shared.values())


def held_parameters(stages: Iterable[Sequence[UnitCost]]) -> tuple[int, int]:
    """Elements that a rank with these stages holds, each once; and of them those that more than
    one of the stages uses."""
    users: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    own = 0
    for units in stages:
        shared = {name: size for unit in units for name, size in unit.shared.items()}
        own += sum(unit.parameters - sum(unit.shared.values()) for unit in units)
        sizes.update(shared)
        users.update(shared.keys())
    several = sum(sizes[name] for name, count in users.items() if count > 1)
    return own + sum(sizes.values()), several


@dataclass(frozen=True)
class Pipe:
    """How a pipeline runs: what a cut is judged by."""

    ranks: int
    microbatches: int
    schedule: str = "1f1b"
    """A name of `parallel.schedules.SCHEDULES`."""
    stages_per_rank: int = 1
    bandwidth_bytes_s: float | None = None
    """Between neighbouring ranks, one way; None: transfers take no time."""
    latency_s: float = 0.0
    """Of one transfer."""
    memory_bytes: int | None = None
    """Cap of each rank; None: none."""
    bytes_per_parameter: float = 16.0
    """Weights, gradients and optimiser state: 16 for float32 and two moments."""
    shards: int = 1
    """Data ranks among which FSDP2 divides the state of a stage; 1: each holds all of it."""
    optimiser: Literal["adamw", "lamb"] = "adamw"
    """LAMB's updates take memory of their own."""
    whole_backward: bool = False
    """Whether a backward pass that a schedule splits is done whole in its first part (recomputed
    blocks, and weights that a stage uses twice)."""

    @property
    def stages(self) -> int:
        """Over all ranks."""
        return self.ranks * self.stages_per_rank


@dataclass(frozen=True)
class Cut:
    """Which units a stage holds: stage s has the units bounds[s] .. bounds[s + 1] - 1."""

    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.bounds) - 1

    def of(self, stage: int) -> range:
        """Numbers of the units of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])
