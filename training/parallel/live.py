"""Bytes that are alive while operations run, by the phase in which they were allocated.

A dispatch mode to enter inside `FakeTensorMode`: it sees each operation, also those of a backward
pass, and hears when a storage is freed. With fake tensors nothing is computed and nothing
allocated; the sizes are the real ones. What a kernel allocates inside itself (workspaces) is not
seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Phase = tuple[str, int]
"""('forward', 3), ('backward', 3): what is done, and the unit's number."""

_aten = torch.ops.aten
_CAST = _aten._to_copy.default


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks storages from their first appearance until they are freed.

    `phase` is set by the caller; `peaks` and `operations` (FLOPs) are kept for each phase.
    labelled: rows that `nonzero` finds, which fake tensors cannot know. Where a program asks a
    fake tensor for its value the answer is that of mixed data: `any` is true, `all` is not.
    """

    def __init__(self, labelled: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labelled = labelled
        self._alive: dict[int, tuple[weakref.ref[Any], int, Phase, bool]] = {}
        self._weights: set[int] = set()
        self._alls: set[int] = set()
        self.phase: Phase = ("outside", 0)
        self.total = 0
        self.peaks: dict[Phase, int] = {}
        self.operations: Counter[Phase] = Counter()

    def know(self, tensors: Iterable[Tensor], *, weights: bool = False) -> None:
        """Storages from outside, which are not counted. weights: casts of them are copies."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if weights:
                self._weights.add(storage._cdata)
            self._enter(storage, 0, copy=False)

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase = phase
        self._mark()

    def alive(self, *, copies: bool = False) -> Counter[Phase]:
        """Bytes alive now by the phase that allocated them; copies: casts of weights alone."""
        found: Counter[Phase] = Counter()
        for _, size, phase, copy in self._alive.values():
            if copy or not copies:
                found[phase] += size
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        fake = isinstance(args[0] if args else None, FakeTensor)
        if fake and func is _aten._local_scalar_dense.default:
            return self._answer(args[0])
        if fake and func is _aten.nonzero.default:
            like = args[0]
            size = (self._labelled, like.ndim)
            result = torch.empty(size, dtype=torch.int64, device=like.device)
        else:
            result = func(*args, **kwargs)
        if func._overloadpacket is _aten.all:
            self._alls.add(result.untyped_storage()._cdata)
        copy = func is _CAST and args[0].untyped_storage()._cdata in self._weights
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._enter(storage, storage.nbytes(), copy=copy)
        self._mark()
        self.operations[self.phase] += _operations(func, args, kwargs, result)
        return result

    def _answer(self, asked: Tensor) -> bool | int:
        if asked.dtype == torch.bool:
            return asked.untyped_storage()._cdata not in self._alls
        return 1

    def _enter(self, storage: torch.UntypedStorage, size: int, *, copy: bool) -> None:
        key = storage._cdata
        if key in self._alive:
            return

        def freed(_: object) -> None:
            self.total -= self._alive.pop(key)[1]
            self._alls.discard(key)

        self._alive[key] = (weakref.ref(storage, freed), size, self.phase, copy)
        self.total += size

    def _mark(self) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.total)


def _operations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of one operation as torch's own counter counts them, and attention's on the CPU."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = (one.shape for one in args[:3])
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        gradient, query, key, value = (one.shape for one in args[:4])
        return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]
    return 0
