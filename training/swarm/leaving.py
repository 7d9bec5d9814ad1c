"""Leaving on a signal although the main thread waits for something.

`StopRequest` sets a flag, which a loop sees between two microbatches. A round or a download may
keep it for minutes, and what they give is lost for a peer that leaves: so a second after the
signal, wherever the main thread is, `Leave` is raised there.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from training.stopping import StopRequest

_SOON_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Leave(BaseException):
    """A signal came a second ago."""


class _Alarm:
    """Whether a signal may still interrupt what the main thread does."""

    armed = False


@contextlib.contextmanager
def interrupted(stop: StopRequest) -> Iterator[None]:
    """Raise Leave in the main thread a second after `stop` was requested, unless `disarm` was
    called: whoever cleans up does that first. Use inside the block of `stop`."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def soon() -> None:
        if _Alarm.armed:
            _Alarm.armed = False
            signal.setitimer(signal.ITIMER_REAL, _SOON_S)

    def caught(number: int, frame: FrameType | None) -> None:
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        if stop.requested:
            soon()

    def leave(number: int, frame: FrameType | None) -> None:
        raise Leave

    alarm = signal.signal(signal.SIGALRM, leave)
    for number in _SIGNALS:
        signal.signal(number, caught)
    _Alarm.armed = True
    if stop.requested:
        soon()
    try:
        yield
    finally:
        disarm()
        signal.signal(signal.SIGALRM, alarm)
        for number in _SIGNALS:
            signal.signal(number, before[number])


def disarm() -> None:
    """From now on nothing is interrupted, by a signal that came or by one that is to come."""
    _Alarm.armed = False
    signal.setitimer(signal.ITIMER_REAL, 0.0)
