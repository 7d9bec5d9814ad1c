"""Some consecutive units of a chain as one module, which a schedule of torch's can call.

Submodules stay where they are in the root, so that names of parameters do too: a stage with the
layers 2 and 3 of a decoder has `network.model.layers.2....` and nothing else. The batch does not
travel: every rank has all of it, a stage is told the number of the microbatch and looks it up.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from training.batches import Batch
from training.parallel.chain import Chain

Seeds = Callable[[int, int], int]
"""Seed of the random choices of (microbatch of this rank, unit)."""


class Stage(nn.Module):
    """The units `numbers` of a chain. `prepare` says what the next passes are about."""

    def __init__(
        self,
        chain: Chain,
        numbers: Sequence[int],
        *,
        device: torch.device,
        bf16: bool,
        splits: bool,
    ) -> None:
        """splits: whether the schedule splits the backward pass."""
        super().__init__()
        self._units = [(number, chain.units[number]) for number in numbers]
        self._first = numbers[0] == 0
        self._last = numbers[-1] == len(chain.units) - 1
        self._side, self._input = chain.side, chain.input
        self._device, self._bf16, self._splits = device, bf16, splits
        self.splittable: bool | None = None
        """Whether torch can split a backward pass well; None before the first forward pass.

        Not where a pass uses a parameter more than once (ALBERT's block; two modules that share a
        weight): on its way to a weight's first use torch frees what the gradients of other weights
        need. Nor where blocks are recomputed: torch would do that again for every few weights (11
        forward passes of a decoder's layer where a whole backward pass takes 2)."""
        self._batches: Sequence[Batch] = ()
        self._seeds: Seeds | None = None
        put(self, (named for _, unit in self._units for named in unit.modules))

    def prepare(self, batches: Sequence[Batch], seeds: Seeds | None) -> None:
        """Let `forward` find these microbatches. Without seeds random choices are torch's own."""
        self._batches, self._seeds = batches, seeds

    def forward(self, hidden: Tensor | None, *, number: Tensor) -> Tensor:
        """Hidden states after the last unit, contiguous; of the chain's last unit what it gives.

        hidden: those of the stage before; the first stage takes the batch's instead. number: of
        the microbatch among those of `prepare`, one element.
        """
        which = int(number)
        batch = self._batches[which]
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._bf16):
            side = self._side(batch)
            found = batch[self._input] if self._first or hidden is None else hidden
            with _calls(self) if self.splittable is None else contextlib.nullcontext() as calls:
                for position, unit in self._units:
                    if self._seeds is not None:
                        torch.manual_seed(self._seeds(which, position))
                    found = unit.run(found, side)
        if calls is not None:
            self.splittable = max(calls.values(), default=1) == 1 and not _recomputes(self)
        if self._last:
            return found
        found = found.contiguous()
        # Nor can it when the result is a view of another tensor.
        return found.clone() if self._splits and found._is_view() else found


@contextlib.contextmanager
def _calls(root: nn.Module) -> Iterator[Counter[nn.Parameter]]:
    """How often the modules that hold each parameter are called, all together."""
    found: Counter[nn.Parameter] = Counter()

    def count(module: nn.Module, _: object) -> None:
        found.update({one for one in module._parameters.values() if one is not None})

    hooks = [
        module.register_forward_pre_hook(count) for module in root.modules() if module._parameters
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _recomputes(root: nn.Module) -> bool:
    """Whether a module is recomputed in the backward pass: by our `checkpoint_blocks`, torch's
    wrapper or transformers' own switch."""
    return any(
        (isinstance(module.forward, partial) and module.forward.func is checkpoint)
        or isinstance(module, CheckpointWrapper)
        or getattr(module, "gradient_checkpointing", False)
        for module in root.modules()
    )


def unit_seed(seed: int, step: int, microbatch: int, unit: int) -> int:
    """Seed of the random choices of one unit for one microbatch of a step, over all ranks.

    It knows no stages: the dropout masks are the same for every cut and number of ranks.
    """
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {microbatch} {unit}".encode()) >> 1


def put(root: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Hang modules under `root` by their names with dots, with empty ones between them."""
    # The shorter names first: of 'a' and 'a.b' the second is there when the first is.
    for path, module in sorted(dict(modules).items(), key=lambda named: named[0].count(".")):
        *above, name = path.split(".")
        parent: Any = root
        for part in above:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        if parent._modules.get(name) is not module:
            parent.add_module(name, module)
