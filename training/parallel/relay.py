"""Forward passes through a pipeline without gradients: hidden states go from rank to rank.

For evaluation, with any number of microbatches of any shapes, where torch's schedules want theirs;
and to find the shapes between the stages, which torch's schedules then need not ask for. Before
each hidden state goes a line of numbers with its type and shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.batches import Batch
from training.parallel.stage import Stage

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMENSIONS = 6


class Relay:
    """The stages of this rank, by number, among all stages of a pipeline."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        number: int,
        rank_of_stage: Callable[[int], int],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._stages, self._number, self._rank_of = stages, number, rank_of_stage
        self._group, self._device = group, device
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._handed: deque[Tensor] = deque()
        # Two ranks that send to each other: NCCL does what two ranks have with each other in the
        # order in which it was asked, so all of a stage's must be taken before any is sent.
        self._send_late = device.type == "cuda" and group.size() == 2 and len(stages) > 1

    @torch.no_grad()
    def run(
        self, batches: Sequence[Batch], *, seen: Callable[[int, Tensor], None] | None = None
    ) -> list[Tensor]:
        """What the last stage gives for each batch, on its rank; elsewhere an empty list.

        seen: called with the number of a stage and each hidden state that it takes, here and on
        the rank that gives it. Every rank must call this, with the same batches.
        """
        found: list[Tensor] = []
        for number, stage in sorted(self._stages.items()):
            last = number == self._number - 1
            stage.prepare(batches, None)
            given: list[Tensor] = []
            for which in range(len(batches)):
                hidden = self._take(number)
                if seen is not None and hidden is not None:
                    seen(number, hidden)
                given.append(stage(hidden, number=torch.tensor([which])))
                if seen is not None and not last:
                    seen(number + 1, given[-1])
                if not last and not self._send_late:
                    self._give(number, given.pop())
            if last:
                found = given
            else:
                for hidden in given:
                    self._give(number, hidden)
            stage.prepare((), None)
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()
        return found

    def _take(self, number: int) -> Tensor | None:
        """The next hidden state for a stage; the first takes none."""
        if number == 0:
            return None
        rank = self._rank_of(number - 1)
        if rank == self._rank_of(number):
            return self._handed.popleft()
        head = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=self._device)
        dist.recv(head, group=self._group, group_src=rank)
        kind, dimensions, *sizes = head.tolist()
        hidden = torch.empty(sizes[:dimensions], dtype=_TYPES[kind], device=self._device)
        dist.recv(hidden, group=self._group, group_src=rank)
        return hidden

    def _give(self, number: int, hidden: Tensor) -> None:
        """Hand a stage's result to the next one."""
        rank = self._rank_of(number + 1)
        if rank == self._rank_of(number):
            self._handed.append(hidden)
            return
        sizes = [*hidden.shape, *[0] * (_MOST_DIMENSIONS - hidden.dim())]
        head = torch.tensor([_TYPES.index(hidden.dtype), hidden.dim(), *sizes], device=self._device)
        for tensor in (head, hidden):
            work = dist.isend(tensor, group=self._group, group_dst=rank)
            self._sent.append((work, tensor))
