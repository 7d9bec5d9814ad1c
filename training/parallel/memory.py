"""The most memory that a rank holds during a step, by use.

A step has few moments at which its memory can peak: while one unit computes forward (what the
units before it keep is there) or backward (the gradients of those behind it are there), and in the
optimiser. All of them are looked at. `parallel.profile` says what each unit holds.

Not counted: the process itself, what kernels allocate for themselves, the allocator's gaps, the
readers' caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from training.parallel.units import Profile, UnitCost

FLOAT_BYTES, LOW_BYTES = 4, 2
Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3"]
Optimiser = Literal["adamw", "lamb"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of its step."""

    weights: int = 0
    """float32; a shard of them under zero1, zero2 and zero3."""
    copies: int = 0
    """Whole weights that FSDP2 has gathered, casts of weights under autocast."""
    gradients: int = 0
    moments: int = 0
    """The optimiser's state."""
    activations: int = 0
    """Kept for backward passes, and the batches."""
    working: int = 0
    """What is freed soon: what one unit computes with, buffers, updates of weights."""
    peak: str = ""
    """When: 'forward of head', 'backward of layer 3', 'optimiser'."""

    @property
    def total(self) -> int:
        """Of all uses."""
        return sum(self.to_json().values())

    def to_json(self) -> dict[str, int]:
        """By use."""
        return {name: size for name, size in asdict(self).items() if name != "peak"}


def memory_of(
    profile: Profile,
    *,
    strategy: Strategy = "single",
    ranks: int = 1,
    optimiser: Optimiser = "adamw",
    microbatches: int = 2,
) -> Memory:
    """The peak of a rank under a data-parallel strategy; the precision is that of the profile.

    microbatches: that one rank computes in a step. With one alone the gradients come while the
    activations go.
    """
    if strategy in ("single", "ddp"):
        found = list(_whole(profile, first=strategy == "single" and microbatches == 1))
        found.append(_optimiser_step(profile, 1, optimiser))
    else:
        found = list(_sharded(profile, strategy, ranks, microbatches))
        found.append(_optimiser_step(profile, ranks, optimiser))
    most = max(found, key=lambda one: one.total)
    return replace(most, activations=most.activations + microbatches * profile.batch_bytes)


def _whole(profile: Profile, *, first: bool) -> Iterator[Memory]:
    """The moments of a microbatch where a rank holds everything. first: of a step's first, which
    finds no gradients."""
    units = profile.units
    size = FLOAT_BYTES * profile.parameters(0, len(units))
    state = Memory(weights=size, moments=2 * size, gradients=0 if first else size)
    kept = copies = cached = 0
    for unit in units:
        yield replace(
            state,
            copies=copies + cached + unit.copied_bytes,
            activations=profile.side_bytes + kept + unit.kept_bytes - unit.copied_bytes,
            working=unit.forward_bytes - unit.kept_bytes,
            peak=f"forward of {unit.name}",
        )
        kept += unit.kept_bytes - unit.copied_bytes
        copies += unit.copied_bytes
        cached += unit.cached_bytes
    gradients = 0
    for number in reversed(range(len(units))):
        unit = units[number]
        most = unit.first_backward_bytes if first else unit.backward_bytes
        yield replace(
            state,
            copies=copies,
            gradients=gradients if first else size,
            activations=profile.side_bytes + kept,
            working=most - unit.kept_bytes + (0 if first else waiting_bytes(units, number)),
            peak=f"backward of {unit.name}",
        )
        kept -= unit.kept_bytes - unit.copied_bytes
        copies -= unit.copied_bytes
        gradients += unit.gradient_bytes


def waiting_bytes(units: Sequence[UnitCost], number: int) -> int:
    """Bytes of gradients that wait, while unit `number` goes backward, for those that earlier
    units will add to them: autograd hands on the sum."""
    behind = {name: size for unit in units[number + 1 :] for name, size in unit.shared.items()}
    before = {name for unit in units[: number + 1] for name in unit.shared}
    return FLOAT_BYTES * sum(size for name, size in behind.items() if name in before)


def _optimiser_step(profile: Profile, ranks: int, optimiser: Optimiser) -> Memory:
    """Its peak."""
    size = -(-FLOAT_BYTES * profile.parameters(0, len(profile.units)) // ranks)
    working = update_bytes(profile.units, ranks, optimiser)
    return Memory(weights=size, gradients=size, moments=2 * size, working=working, peak="optimiser")


def update_bytes(units: Sequence[UnitCost], ranks: int, optimiser: Optimiser) -> int:
    """What the optimiser needs beside its state, in shards of `ranks`.

    AdamW is fused and needs nothing. LAMB holds the updates of all matrices at once, and four
    tensors like the one whose update it computes.
    """
    before = most = 0
    if optimiser == "lamb":
        shared = {name: size for unit in units for name, size in unit.shared.items()}
        for matrix in [*shared.values(), *(one for unit in units for one in unit.matrices)]:
            most = max(most, before + 4 * matrix)
            before += matrix
    return -(-FLOAT_BYTES * most // ranks)


@dataclass(frozen=True)
class _Part:
    """What one microbatch of a step finds and leaves under FSDP2."""

    strategy: Strategy
    first: bool
    last: bool

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced to shards, group by group, as they come."""
        return self.last or self.strategy != "zero1"

    @property
    def whole_gradients(self) -> bool:
        """Whether it finds gradients of all weights that have not been reduced."""
        return self.strategy == "zero1" and not self.first


def _sharded(
    profile: Profile, strategy: Strategy, ranks: int, microbatches: int
) -> Iterator[Memory]:
    """The moments of a step under FSDP2 but the optimiser's."""
    if profile.bf16 and not profile.low_weights:
        raise ValueError("FSDP2 gathers bf16 weights: profile a recipe with this strategy")
    for number in range(min(microbatches, 3)):  # the first, one between, the last
        first, last = number == 0, number == min(microbatches, 3) - 1
        yield from _Groups(profile, _Part(strategy, first, last), ranks).moments()


class _Groups:
    """The moments of one microbatch where FSDP2 gathers each block alone, the rest as the root."""

    def __init__(self, profile: Profile, part: _Part, ranks: int) -> None:
        self.units, self.part, self.ranks = profile.units, part, ranks
        self.side = profile.side_bytes
        self.low = profile.low_weights
        self.element = LOW_BYTES if self.low else FLOAT_BYTES
        self.parameters = profile.parameters(0, len(self.units))
        self.blocks = [unit.parameters if unit.sharded_alone else 0 for unit in self.units]
        self.root = self.parameters - sum(self.blocks)
        shard = -(-FLOAT_BYTES * self.parameters // ranks)
        self.state = Memory(weights=shard, moments=2 * shard)

    def moments(self) -> Iterator[Memory]:
        """Forward, then backward, then the reduction of the root's gradients."""
        yield from self._forward()
        yield from self._backward()

    def _forward(self) -> Iterator[Memory]:
        part, kept = self.part, 0
        gathers = part.first or part.strategy == "zero3"
        whole = self.root if gathers else self._gathered(0, last=False)
        # What came in one piece is held until the next group's pieces are there.
        held = self.root if gathers else 0
        state = replace(self.state, gradients=self._found_gradients())
        for number, unit in enumerate(self.units):
            block = self.blocks[number] if gathers else 0
            if block:
                yield replace(
                    state,
                    copies=self.element * whole,
                    activations=self.side + kept,
                    working=self.element * (held + block) + self._left(),
                    peak=f"gathering of {unit.name}",
                )
                held = block
            whole = self._gathered(number, last=part.first)
            yield replace(
                state,
                copies=self.element * whole,
                activations=self.side + kept + unit.kept_bytes,
                working=unit.forward_bytes - unit.kept_bytes + self.element * held + self._left(),
                peak=f"forward of {unit.name}",
            )
            kept += unit.kept_bytes
            if part.strategy == "zero3":
                whole = self.root

    def _backward(self) -> Iterator[Memory]:
        part, units = self.part, self.units
        kept = sum(unit.kept_bytes for unit in units)
        reduced = whole = 0  # elements, bytes
        sent = self._left()
        for number in reversed(range(len(units))):
            unit, block = units[number], self.blocks[number]
            fresh = not part.whole_gradients or self.low
            own = unit.first_backward_bytes if fresh else unit.backward_bytes
            gradients = self._shards(reduced) + (whole if fresh else waiting_bytes(units, number))
            if part.whole_gradients:
                gradients += FLOAT_BYTES * (self.parameters - (reduced if part.last else 0))
            before = self.blocks[number - 1] if part.strategy == "zero3" and number else 0
            copies = self.element * self._gathered(number, part.last)
            yield replace(
                self.state,
                copies=copies,
                gradients=gradients,
                activations=self.side + kept,
                # What was sent of the block behind, and what has come of the one before.
                working=own - unit.kept_bytes + sent + self.element * before,
                peak=f"backward of {unit.name}",
            )
            kept -= unit.kept_bytes
            if not block:
                whole += unit.gradient_bytes
                continue
            if not part.reduces:
                whole += unit.gradient_bytes * (2 if self.low else 1)
                continue
            yield replace(
                self.state,
                copies=copies - (self.element * block if self._gives_up else 0),
                gradients=gradients + (unit.gradient_bytes if fresh else 0),
                activations=self.side + kept,
                working=units[number - 1].output_bytes
                + self._sending(block)
                + self.element * before,
                peak=f"gradients of {unit.name}",
            )
            reduced += block
            sent = FLOAT_BYTES * block
        if part.reduces:
            yield replace(
                self.state,
                copies=self.element * (0 if self._gives_up else self._gathered(0, last=False)),
                gradients=self._shards(reduced)
                + (FLOAT_BYTES * self.root if part.whole_gradients else self.element * self.root),
                working=self._sending(self.root),
                peak="gradients of the root",
            )

    def _left(self) -> int:
        """What the microbatch before sent of the root's gradients: held until a block's are."""
        there = self.part.strategy != "zero1" and not self.part.first
        return FLOAT_BYTES * self.root if there else 0

    @property
    def _gives_up(self) -> bool:
        """Whether whole weights go as soon as the backward pass is past them."""
        return self.part.last or self.part.strategy == "zero3"

    def _gathered(self, number: int, last: bool) -> int:
        """Whole weights while unit `number` computes. last: those of later units are not there."""
        if self.part.strategy == "zero3":
            return self.root + self.blocks[number]
        return self.root + sum(self.blocks[: number + 1]) if last else self.parameters

    def _found_gradients(self) -> int:
        if self.part.first:
            return 0
        if self.part.strategy == "zero1":
            return FLOAT_BYTES * self.parameters
        return self._shard(self.parameters)

    def _shards(self, reduced: int) -> int:
        """Gradients in shards once those of `reduced` weights have been reduced."""
        if not self.part.reduces:
            return 0
        there = self.part.strategy != "zero1" and not self.part.first
        return self._shard(self.parameters if there else reduced)

    def _sending(self, elements: int) -> int:
        """One piece of all gradients of a group, and the shard that comes of it."""
        return FLOAT_BYTES * elements + self._shard(elements)

    def _shard(self, elements: int) -> int:
        return -(-FLOAT_BYTES * elements // self.ranks)
