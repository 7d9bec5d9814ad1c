"""Ctrl+C and SIGTERM: finish the step, save, leave; on every rank at the same step.

The first SIGTERM or SIGINT only sets a flag. Each rank may get it at another moment, or only one
of them, so the ranks agree on the flag once a step. A second Ctrl+C ends the process at once;
SIGTERM may come several times (torchrun and schedulers repeat it) and stays one request.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from training.together import distributed

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXIT_BY_SIGNAL = 128
_ONE_PRESS_S = 0.5
"""SIGINTs closer than this are one: a terminal and a launcher may both pass it on."""


class StopRequest:
    """Catches SIGTERM and SIGINT while its block runs. Use in the main thread.

    In the block of another one they share what they have caught: a request of before is one here,
    and what comes here is one there, too, afterwards.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._pressed_s = 0.0
        self._before: dict[int, Any] = {}
        self._outer: StopRequest | None = None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._caught) for number in _SIGNALS}
        outer = getattr(self._before[signal.SIGTERM], "__self__", None)
        if isinstance(outer, StopRequest):
            self._outer = outer
            if outer.requested:
                self._signal, self._pressed_s = outer._signal, outer._pressed_s
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._outer is not None and self.requested:
            self._outer._signal, self._outer._pressed_s = self._signal, self._pressed_s

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop. Other ranks may not know yet: see `agreed`."""
        return self._signal is not None

    @property
    def name(self) -> str:
        """The signal that this rank got, as "SIGTERM"; "" when it got none."""
        return "" if self._signal is None else signal.Signals(self._signal).name

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks call it at the same step.

        The flag is on the CPU: the process group has gloo also beside NCCL.
        """
        if not distributed():
            return self.requested
        flag = torch.tensor([float(self.requested)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _caught(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        again = number == self._signal == signal.SIGINT and now_s - self._pressed_s > _ONE_PRESS_S
        if again:
            # Past Python's buffers, in which this very thread may be.
            with contextlib.suppress(OSError):
                os.write(2, b"\ngristmill: stopped at once; the last checkpoint stands\n")
            os._exit(_EXIT_BY_SIGNAL + number)
        if number == signal.SIGINT:
            self._pressed_s = now_s
        self._signal = number
