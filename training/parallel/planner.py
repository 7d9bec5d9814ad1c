"""From a recipe and the devices to the cheapest way of training that fits in memory.

The rungs, each with what the ones before it have gained (bf16, a small microbatch, recomputation):

    data parallel    every device holds everything
    bf16             autocast: activations of half the size, a second copy of the weights
    microbatch       fewer examples at once, more passes a step
    recomputation    activation checkpointing: a third more work
    zero1, 2, 3      FSDP2: optimiser state, gradients, weights in shards
    pipeline         layers on different devices, cut as the recipe says, copies side by side

Rungs are ordered by what they cost a run that would fit without them, not by the step's time: where
times are known, `Ladder.faster` says when a later one is quicker. From zero1 on a rung recomputes
only where that is needed, or where it saves more traffic than it costs work.

Memory comes from a trace with fake tensors (`parallel.profile`), so nothing is allocated and any
size can be planned; time from counted operations, a peak and the share of it that is reached.
Left out: tensor parallelism, which Gristmill has not, and the time of the optimiser, of reading
and of checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from models.errors import UserError
from training import microbatches as dealing
from training.parallel.ladder import PLANNED, Devices, Ladder, Rung, size
from training.parallel.layout import stages_per_rank
from training.parallel.ways import SHARDED, Settings, Way, Ways
from training.recipe import TrainRecipe

_NEARLY = 1.01
"""Times within this factor are one: the simpler of two settings wins."""
_MORE_DEVICES = (2, 4, 8, 16)
_SHORTER = (2, 4, 8)
_SHORTEST = 64
"""Tokens of an example."""


def climb(recipe: TrainRecipe, devices: Devices, vocab_size: int) -> Ladder:
    """All rungs of `recipe` on `devices`. Raises UserError."""
    climber = Climber(recipe, devices, vocab_size)
    rungs = climber.rungs()
    lacking: tuple[str, ...] = ()
    if not any(rung.fits for rung in rungs):
        lacking = missing(climber, rungs)
    return Ladder(
        recipe=recipe.name,
        network=climber.network,
        parameters=climber.parameters,
        vocab_size=vocab_size,
        examples=climber.ways.examples,
        sequence_length=recipe.examples.sequence_length,
        devices=devices,
        rungs=tuple(rungs),
        missing=lacking,
    )


class Climber:
    """Finds the rungs of one recipe on one set of devices; profiles are made once."""

    def __init__(
        self,
        recipe: TrainRecipe,
        devices: Devices,
        vocab_size: int,
        *,
        keep_precision: bool = False,
    ) -> None:
        self.recipe, self.devices, self.vocab_size = recipe, devices, vocab_size
        self.keep_precision = keep_precision
        self.network = f"{recipe.model.family} {recipe.model.size}"
        self.ways = Ways(recipe, vocab_size)

    @property
    def parameters(self) -> int:
        """Of the network."""
        found = self.ways.profile(self._settings("ddp"))
        return found.parameters(0, len(found.units))

    def on(self, recipe: TrainRecipe, devices: Devices) -> Rung | None:
        """The first rung that fits another recipe or other devices."""
        other = Climber(recipe, devices, self.vocab_size, keep_precision=self.keep_precision)
        if recipe is self.recipe:
            other.ways = self.ways
        return next((rung for rung in other.climbing() if rung.fits), None)

    def rungs(self) -> list[Rung]:
        """All of them."""
        return list(self.climbing())

    def climbing(self) -> Iterator[Rung]:
        """One after the other; those after the first that fits are computed only when asked for."""
        run, alone = self.recipe.run, self.devices.ranks == 1
        strategy = "single" if alone else "ddp"
        first = self._settings(strategy)
        yield self._rung("one device" if alone else "data parallel", [[first]])
        precision = run.precision
        if not self.keep_precision:
            if precision == "bf16":
                yield self._left_out("bf16", "the recipe has it already: see the rung above")
            else:
                precision = "bf16"
                yield self._rung("bf16", [[replace(first, precision=precision)]])
        first = replace(first, precision=precision)
        smaller = self._microbatches(self.devices.ranks)
        if first.microbatch == 1:
            yield self._left_out("microbatch", "it is of one example already")
        else:
            yield self._rung("microbatch", [self._sizes(first, smaller[1:])])
        if run.activation_checkpointing:
            yield self._left_out("recomputation", "the recipe has it already: see the first rung")
        else:
            again = replace(first, checkpointing=True)
            yield self._rung("recomputation", [self._sizes(again, smaller)])
        for name in SHARDED:
            if alone:
                yield self._left_out(name, "one device has none to share its state with")
                continue
            here = replace(first, strategy=name)
            yield self._rung(name, [self._sizes(one, smaller) for one in self._recomputing(here)])
        if alone:
            yield self._left_out("pipeline", "it needs two devices or more")
        else:
            yield self._pipelines(replace(first, strategy="pipeline"))

    def _settings(self, strategy: str) -> Settings:
        run = self.recipe.run
        sizes = self._microbatches(self.devices.ranks)
        return Settings(strategy, run.precision, run.activation_checkpointing, sizes[0])

    def _microbatches(self, ranks: int) -> list[int]:
        """Sizes to try on `ranks` data-parallel devices: the recipe's and its halves, as they
        come out when a step's examples are dealt evenly."""
        sizes: dict[int, None] = {}
        asked = self.recipe.batch.microbatch
        while asked >= 1:
            count = dealing.count(self.ways.examples, asked, ranks)
            sizes[-(-self.ways.examples // count)] = None
            asked //= 2
        return list(sizes)

    def as_it_stands(self, why: str) -> Rung:
        """The first rung without its numbers, for a recipe of which `why` tells that it fits."""
        settings = self._settings("single" if self.devices.ranks == 1 else "ddp")
        return Rung(
            name="one device" if self.devices.ranks == 1 else "data parallel",
            strategy=settings.strategy,
            precision=settings.precision,
            microbatch=self.recipe.batch.microbatch,
            microbatches=self.ways.passes(settings.microbatch, self.devices.ranks),
            checkpointing=settings.checkpointing,
            status="fits",
            why=why,
        )

    @staticmethod
    def _sizes(settings: Settings, sizes: Sequence[int]) -> list[Settings]:
        return [replace(settings, microbatch=one) for one in sizes]

    @staticmethod
    def _recomputing(settings: Settings) -> list[Settings]:
        """Without recomputation, where that is open, and with it."""
        again = replace(settings, checkpointing=True)
        return [again] if settings.checkpointing else [settings, again]

    def _rung(self, name: str, groups: Sequence[Sequence[Settings]]) -> Rung:
        """The best way among groups of settings, of which each is no quicker than the one before
        it. It mostly needs less memory too, but not always: one pass alone finds no gradients."""
        fitting: list[Way] = []
        tried: list[Way] = []
        for group in groups:
            if fitting and not fitting[-1].waits:
                break  # recomputation could only save traffic
            for settings in group:
                way = self.ways.in_parallel(settings, self.devices)
                tried.append(way)
                if self._fits(way):
                    fitting.append(way)
                    break
        return self._told(name, fitting, tried)

    def _fits(self, way: Way) -> bool:
        return way.total_bytes <= self.devices.usable_bytes

    def _told(self, name: str, fitting: Sequence[Way], tried: Sequence[Way]) -> Rung:
        """fitting: ways that fit; where none does, the one that needs the least of those tried is
        told."""
        usable = self.devices.usable_bytes
        if fitting:
            quickest = min(way.work for way in fitting)
            way = next(way for way in fitting if way.work <= _NEARLY * quickest)
            why = f"{size(usable - way.total_bytes)} to spare"
        else:
            way = min(tried, key=lambda one: one.total_bytes)
            why = f"{size(way.total_bytes - usable)} more than there is: {_largest(way.memory)}"
        settings = way.settings
        return Rung(
            name=name,
            strategy=settings.strategy,
            precision=settings.precision,
            microbatch=settings.microbatch,
            microbatches=way.microbatches,
            checkpointing=settings.checkpointing,
            status="fits" if fitting else "too big",
            why=why,
            memory=way.memory,
            traffic=way.sent,
            step_s=way.work if self.devices.speed(settings.precision) else None,
            stages=way.stages,
        )

    def _left_out(self, name: str, why: str) -> Rung:
        first = self._settings(name)
        return Rung(
            name=name, strategy=name, precision=first.precision, microbatch=first.microbatch,
            microbatches=0, checkpointing=first.checkpointing, status="left out", why=why,
        )  # fmt: skip

    def _pipelines(self, first: Settings) -> Rung:
        """The rung of the pipelines: all numbers of stages that the devices and the batch allow."""
        asked = self.recipe.run.pipeline
        if asked.ranks is not None and self.devices.ranks % asked.ranks:
            return self._left_out(
                "pipeline",
                f"run.pipeline.ranks = '{asked.ranks}' does not divide {self.devices.ranks} "
                "devices",
            )
        units = len(self.ways.profile(first).units)
        per_rank = stages_per_rank(asked)
        fitting: list[Way] = []
        tried: list[_Try] = []
        refused = (
            f"no number of stages divides {self.devices.ranks} devices and is at most that of the "
            f"network's units, {units}"
        )
        for ranks in _divisors(self.devices.ranks, units // per_rank):
            if asked.ranks not in (None, ranks):
                continue
            try:
                found, others = self._of_stages(first, ranks)
            except UserError as error:
                refused = str(error)
                continue
            tried += others
            if found is None:
                continue
            before = min((way.work for way in fitting), default=None)
            fitting.append(found)
            if before is not None and _NEARLY * found.work > before:
                break  # more stages idle more
        if fitting:
            return self._told("pipeline", fitting, [])
        least = []
        for settings, ranks, shard in tried:
            try:
                least.append(
                    self.ways.pipeline(settings, self.devices, ranks, shard=shard, capped=False)
                )
            except UserError as error:
                refused = str(error)  # no cut of the kind that the recipe wants
        return self._told("pipeline", [], least) if least else self._left_out("pipeline", refused)

    def _of_stages(self, first: Settings, ranks: int) -> tuple[Way | None, list[_Try]]:
        """The best way with so many ranks for a pipeline: without recomputation and shards where
        that fits. A larger microbatch, where it makes the step hardly longer: a device computes it
        better. With it, where nothing fits, what was tried with both. Raises UserError where the
        schedule takes no number of microbatches that the batch allows."""
        replicas = self.devices.ranks // ranks
        must_shard = self.recipe.run.pipeline.shard and replicas > 1
        shards = [True] if must_shard else [False, True][: min(replicas, 2)]
        tried: list[_Try] = []
        refused: UserError | None = None
        for settings, shard in itertools.product(self._recomputing(first), shards):
            best: Way | None = None
            tried = []
            for microbatch in reversed(self._microbatches(replicas)):
                here = replace(settings, microbatch=microbatch)
                try:
                    self.ways.pipe(here, self.devices, ranks, shard=shard)
                except UserError as error:
                    refused = error
                    continue
                tried.append(_Try(here, ranks, shard))
                try:
                    way = self.ways.pipeline(here, self.devices, ranks, shard=shard)
                except UserError:
                    if best is None:
                        continue  # GPipe's larger microbatches need less: fewer buffers
                    break
                if best is not None and way.work > _NEARLY * best.work:
                    break
                best = way
            if best is not None:
                return best, []
        if not tried:
            assert refused is not None
            raise refused
        return None, tried


class _Try(NamedTuple):
    """A pipeline that may fit."""

    settings: Settings
    ranks: int
    shard: bool


def _divisors(number: int, most: int) -> list[int]:
    """Those from 2 to `most`."""
    return [one for one in range(2, min(number, most) + 1) if number % one == 0]


def _largest(memory: Mapping[str, int]) -> str:
    """What there is most of, for a reason."""
    kind = max(memory, key=lambda one: memory[one])
    return f"{size(memory[kind])} are {kind}"


@dataclass(frozen=True)
class Remedies:
    """What would make a recipe fit."""

    memory_bytes: int
    """Of each device, as many devices as there are."""
    devices: Devices | None
    """More of them; None: even the most that were tried do not help."""
    sequence_length: int | None
    """Shorter examples; None: nor do those."""


def remedies(climber: Climber, rungs: Sequence[Rung]) -> Remedies:
    """For a ladder in which nothing fits."""
    least = min(rung.total_bytes for rung in rungs if rung.memory)
    memory_bytes = int(least / PLANNED) + 1
    devices, recipe = climber.devices, climber.recipe
    field = "nodes" if devices.nodes > 1 else "per_node"
    more = (replace(devices, **{field: getattr(devices, field) * n}) for n in _MORE_DEVICES)
    length = recipe.examples.sequence_length
    shorter = (length // n for n in _SHORTER if length // n >= _SHORTEST)
    return Remedies(
        memory_bytes,
        next((one for one in more if climber.on(recipe, one)), None),
        next((one for one in shorter if climber.on(_of_length(recipe, one), devices)), None),
    )


def missing(climber: Climber, rungs: Sequence[Rung]) -> tuple[str, ...]:
    """Where nothing fits: by how much the smallest rung is too big, and what would help."""
    best = min((rung for rung in rungs if rung.memory), key=lambda rung: rung.total_bytes)
    usable, found = climber.devices.usable_bytes, remedies(climber, rungs)
    help_ = [f"devices of {size(found.memory_bytes)}"]
    if found.sequence_length is not None:
        help_.insert(0, f"examples.sequence_length={found.sequence_length}")
    if found.devices is not None:
        help_.insert(0, f"{found.devices.ranks} devices")
    return (
        f"nothing fits: the least is '{best.name}' with {size(best.total_bytes)} of "
        f"{size(usable)}, {size(best.total_bytes - usable)} too many",
        f"what would help: {', or '.join(help_)}",
        "tensor parallelism, which divides layers themselves, would help too; Gristmill has none",
    )


def _of_length(recipe: TrainRecipe, length: int) -> TrainRecipe:
    """The recipe with shorter examples, as many tokens in a step."""
    examples = recipe.examples.model_copy(update={"sequence_length": length})
    return recipe.model_copy(update={"examples": examples})
