"""What the units of a chain cost, found by running them on tensors without memory.

The chain's forward and backward pass are traced under `FakeTensorMode`, so that a network of any
size takes seconds and no memory; of a run of equal units the first, the second and the last
are. Twice, because the gradients of a step's first microbatch appear one by one, and stay. Fake
tensors are on the CPU whatever the device: its attention keeps what CUDA's kernels keep, but for
attention dropout, which on the CPU keeps the scores too.

Bytes are those of tensors. What a kernel allocates for itself, and gaps between blocks, are not
in them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AlbertForPreTraining, LlamaForCausalLM

from models.tokenizer import CLS_ID
from training.batches import Batch
from training.examples import IGNORED
from training.masking import budget
from training.networks import checkpoint_blocks, network_config
from training.objectives import Objective
from training.parallel.chain import Chain, Unit, objective_chain
from training.parallel.live import LiveBytes, Phase
from training.parallel.unit_times import seconds
from training.parallel.units import Profile, UnitCost
from training.recipe import TrainRecipe
from training.strategy import sharded_blocks


def profile_recipe(
    recipe: TrainRecipe, vocab_size: int, *, microbatch: int | None = None, copies: int = 1
) -> Profile:
    """The costs of a recipe's network in the largest batch that its examples can be.

    Honours examples, precision and activation checkpointing, and what `low_weights` says.
    microbatch: examples, in place of the recipe's. copies: pipelines that share the examples.
    """
    examples = recipe.batch.microbatch if microbatch is None else microbatch
    with FakeTensorMode():
        objective = _objective(recipe, vocab_size)
    return profile_chain(
        objective_chain(objective),
        worst_batch(recipe, examples),
        bf16=recipe.run.precision == "bf16",
        low=low_weights(recipe, copies),
    )


def low_weights(recipe: TrainRecipe, copies: int) -> bool:
    """Whether FSDP2 gathers bf16 weights to compute with. copies: pipelines side by side."""
    run = recipe.run
    sharded = run.strategy in ("zero1", "zero2", "zero3")
    sharded |= run.strategy == "pipeline" and run.pipeline.shard and copies > 1
    return sharded and run.precision == "bf16"


def profile_chain(
    chain: Chain,
    batch: Batch,
    *,
    bf16: bool = False,
    low: bool = False,
    device: torch.device | None = None,
) -> Profile:
    """The costs of any chain for one microbatch, real (of integers: a batch is small).

    The chain's own weights stay as they are, and are not computed with unless `device` is given:
    then the units are timed there. low: memory and operations are those of bf16 weights.
    """
    cost, keys = _traced(chain, batch, bf16=bf16, low=low)
    if device is None:
        return cost
    return _with_seconds(cost, seconds(chain, keys, batch, bf16=bf16, device=device))


def worst_batch(recipe: TrainRecipe, examples: int) -> Batch:
    """A batch of full examples of which each causal one holds two documents, and each of ALBERT
    all labels that masking asks for."""
    length = recipe.examples.sequence_length
    shape = (examples, length)
    ids = torch.full(shape, CLS_ID)
    batch = {"input_ids": ids, "labels": ids.clone(), "domains": torch.zeros(examples).long()}
    if recipe.model.family == "albert":
        batch["labels"][:, budget(length, recipe.examples.masked) :] = IGNORED
        batch["attention_mask"] = torch.ones_like(ids)
        batch["token_type_ids"] = torch.zeros_like(ids)
        batch["sentence_order_label"] = torch.zeros(examples, dtype=torch.int64)
        return batch
    batch["document_ids"] = torch.zeros_like(ids)
    if not recipe.examples.cross_document_attention:
        batch["position_ids"] = (torch.arange(length) % -(-length // 2)).expand(shape).contiguous()
    return batch


def _objective(recipe: TrainRecipe, vocab_size: int) -> Objective:
    config: Any = network_config(recipe, vocab_size)
    kind: Any = AlbertForPreTraining if recipe.model.family == "albert" else LlamaForCausalLM
    network = kind(config)
    if recipe.run.activation_checkpointing:
        checkpoint_blocks(network)
    return Objective(network).train()


@dataclass(frozen=True)
class _Pass:
    """Bytes seen in one forward and backward pass, by phase."""

    before: int
    """Alive when it began."""
    inside: Counter[Phase]
    """Alive at the end of the forward pass, autocast's cache among it."""
    kept: Counter[Phase]
    """Alive when the backward pass began."""
    copies: Counter[Phase]
    """Casts of weights in `kept`."""
    entered: Mapping[int, int]
    """Alive of the backward pass's own when that of a unit began."""
    after: int
    """Alive of its own at the end: gradients."""
    peaks: Mapping[Phase, int]


def _traced(chain: Chain, batch: Batch, *, bf16: bool, low: bool) -> tuple[Profile, list[object]]:
    """With it keys of the units, equal where they do equal work."""
    labels = batch.get("labels")
    labelled = 0 if labels is None else int((labels != IGNORED).sum())
    fake = _fake_mode(chain) or FakeTensorMode(allow_non_fake_inputs=True)
    # What is compiled runs as it was written: the compiler has no place in a trace.
    eager = torch.compiler.set_stance("force_eager")
    with eager, _without_memory(chain, fake, low=low) as weights:
        inputs: Batch = {name: fake.from_tensor(tensor) for name, tensor in batch.items()}
        sizes: list[int] = []
        with fake, LiveBytes(labelled):  # which answers what fake tensors cannot
            keys = _keys(chain, inputs, bf16=bf16)
        shown, stands_for = _distinct(keys)
        with fake, LiveBytes(labelled) as live:
            live.know(weights, weights=True)
            live.know(inputs.values())
            live.know(buffer for module in _modules(chain) for buffer in module.buffers())
            units = [chain.units[number] for number in shown]
            first = _one_pass(chain, units, inputs, live, "1", bf16=bf16, sizes=sizes)
            second = _one_pass(chain, units, inputs, live, "2", bf16=bf16, sizes=[])
    holders, names = chain.holders(), chain.parameter_names()
    costs = []
    for number, unit in enumerate(chain.units):
        place = shown.index(stands_for[number])
        costs.append(
            replace(
                _cost(place, first, second, sizes),
                name=unit.name,
                output_bytes=sizes[place],
                forward_s=float(live.operations["forward2", place]),
                backward_s=float(live.operations["backward2", place]),
                **_parameters(unit, holders, names),
            )
        )
    profile = Profile(
        tuple(costs),
        microbatch=len(batch[chain.input]),
        source="operations",
        batch_bytes=sum(tensor.numel() * tensor.element_size() for tensor in batch.values()),
        side_bytes=second.kept["side2", 0],
        bf16=bf16,
        low_weights=low,
    )
    return profile, keys


def _one_pass(
    chain: Chain,
    units: Sequence[Unit],
    inputs: Batch,
    live: LiveBytes,
    name: str,
    *,
    bf16: bool,
    sizes: list[int],
) -> _Pass:
    before = live.total
    entered: dict[int, int] = {}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        live.enter((f"side{name}", 0))
        side = chain.side(dict(inputs))
        hidden = inputs[chain.input]
        for number, unit in enumerate(units):
            live.enter((f"forward{name}", number))
            hidden = unit.run(hidden, side)
            sizes.append(hidden.numel() * hidden.element_size())
            if hidden.requires_grad and number < len(units) - 1:
                # Its gradient is whole: the backward pass of the unit that made it begins.
                enter = _enters(live, (f"backward{name}", number), entered)
                hidden.register_hook(enter)  # type: ignore[no-untyped-call]
        inside = live.alive()
    del side
    kept, copies = live.alive(), live.alive(copies=True)
    live.enter((f"backward{name}", len(units) - 1))
    hidden.float().sum().backward()  # type: ignore[no-untyped-call]
    del hidden
    return _Pass(before, inside, kept, copies, entered, live.total - before, live.peaks)


def _enters(live: LiveBytes, phase: Phase, entered: dict[int, int]) -> Callable[[Tensor], None]:
    name, number = phase

    def enter(_: Tensor) -> None:
        entered[number] = sum(size for (kind, _), size in live.alive().items() if kind == name)
        live.enter(phase)

    return enter


def _cost(place: int, first: _Pass, second: _Pass, sizes: Sequence[int]) -> UnitCost:
    """The bytes of the traced unit `place`. sizes: of the units' outputs."""
    kept = second.kept["forward2", place]
    below = range(place)
    kept_below = sum(second.kept["forward2", one] for one in below)
    side = second.kept["side2", 0]
    inside_below = sum(second.inside["forward2", one] for one in below)

    def above(seen: _Pass, number: int) -> int:
        """Gradients of weights that the units after `number` leave while it goes backward."""
        if number < 0:
            return seen.after
        return max(0, seen.entered[number] - sizes[number]) if number in seen.entered else 0

    def backward(seen: _Pass, name: str) -> int:
        peak = seen.peaks.get((name, place), 0)
        return max(0, peak - seen.before - side - kept_below - above(seen, place))

    return UnitCost(
        name="",
        forward_s=0.0,
        backward_s=0.0,
        parameters=0,
        kept_bytes=kept,
        copied_bytes=second.copies["forward2", place],
        cached_bytes=second.inside["forward2", place] - kept,
        forward_bytes=second.peaks["forward2", place] - second.before - side - inside_below,
        backward_bytes=backward(second, "backward2"),
        first_backward_bytes=backward(first, "backward1"),
        gradient_bytes=above(first, place - 1) - above(first, place),
    )


def _parameters(
    unit: Unit, holders: Mapping[str, tuple[int, ...]], names: Mapping[int, str]
) -> dict[str, Any]:
    """Fields of a unit's cost that tell of its parameters."""
    own = {
        names[id(parameter)]: parameter
        for _, module in unit.modules
        for parameter in module.parameters()
    }
    return {
        "parameters": sum(parameter.numel() for parameter in own.values()),
        "shared": {
            name: parameter.numel() for name, parameter in own.items() if len(holders[name]) > 1
        },
        "sharded_alone": any(module in sharded_blocks(module) for _, module in unit.modules),
        "matrices": tuple(
            parameter.numel()
            for name, parameter in own.items()
            if parameter.ndim > 1 and len(holders[name]) == 1
        ),
    }


def _distinct(shapes: Sequence[object]) -> tuple[list[int], list[int]]:
    """Which units are traced, and for each unit the one that stands for it."""
    shown: list[int] = []
    stands_for = list(range(len(shapes)))
    for number, shape in enumerate(shapes):
        first, last = number, number
        while first > 0 and shapes[first - 1] == shape:
            first -= 1
        while last + 1 < len(shapes) and shapes[last + 1] == shape:
            last += 1
        if first + 1 < number < last:
            stands_for[number] = first + 1
        else:
            shown.append(number)
    return shown, stands_for


def _keys(chain: Chain, inputs: Batch, *, bf16: bool) -> list[object]:
    """Of each unit what its work depends on: itself and what comes in, under fake tensors."""
    found: list[object] = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        side = chain.side(dict(inputs))
        hidden, same = inputs[chain.input], False
        for number, unit in enumerate(chain.units):
            shape = _shape(unit)
            # Behind a unit that gives what it took an equal one need not run.
            if not (same and number and shape == _shape(chain.units[number - 1])):
                came = _form(hidden)
                hidden = unit.run(hidden, side)
                same = _form(hidden) == came
            found.append((shape, came))
    return found


def _form(tensor: Tensor) -> object:
    return tuple(tensor.shape), tensor.dtype, tensor.stride()


def _shape(unit: Unit) -> object:
    """Equal for units that are built the same, with other weights; a unit without modules, whose
    work nothing tells, is equal to itself alone."""
    if not unit.modules:
        return id(unit)
    return tuple(
        (
            repr(module),
            tuple((p.shape, p.dtype, p.requires_grad) for p in module.parameters()),
            # A forward that was put in the place of the class's own recomputes.
            tuple((part.training, "forward" in vars(part)) for part in module.modules()),
        )
        for _, module in unit.modules
    )


def _modules(chain: Chain) -> list[nn.Module]:
    held = [module for unit in chain.units for _, module in unit.modules]
    return [*held, *(module for _, module in chain.common)]


def _fake_mode(chain: Chain) -> FakeTensorMode | None:
    """The mode in which the chain's weights were made, if one."""
    parameters = [one for module in _modules(chain) for one in module.parameters()]
    found: FakeTensorMode | None = detect_fake_mode(parameters)
    return found


@contextlib.contextmanager
def _without_memory(chain: Chain, fake: FakeTensorMode, *, low: bool) -> Iterator[list[Tensor]]:
    """Put fake tensors in the place of the chain's parameters and buffers while the block runs.

    low: parameters of bf16."""
    if _fake_mode(chain) is not None and not low:
        yield [one for module in _modules(chain) for one in module.parameters()]
        return
    swapped: list[tuple[Any, str, Tensor]] = []
    made: dict[int, Tensor] = {}
    parts = {id(part): part for one in _modules(chain) for part in one.modules()}
    try:
        for held in (held for part in parts.values() for held in (part._parameters, part._buffers)):
            for name, tensor in held.items():
                if tensor is not None:
                    swapped.append((held, name, tensor))
                    made.setdefault(id(tensor), _fake(tensor, fake, low=low))
        for held, name, tensor in swapped:
            held[name] = made[id(tensor)]
        yield [one for one in made.values() if isinstance(one, nn.Parameter)]
    finally:
        for held, name, tensor in swapped:
            held[name] = tensor


def _fake(tensor: Tensor, fake: FakeTensorMode, *, low: bool) -> Tensor:
    """A tensor of the same shape and kind on the CPU, without memory and without gradient.

    low: of bf16 where it is a parameter."""
    lowered = low and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    dtype = torch.bfloat16 if lowered else tensor.dtype
    with fake:
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found


def _with_seconds(profile: Profile, times: Sequence[tuple[float, float]]) -> Profile:
    units = tuple(
        replace(unit, forward_s=forward_s, backward_s=backward_s)
        for unit, (forward_s, backward_s) in zip(profile.units, times, strict=True)
    )
    return replace(profile, units=units, source="measured")
