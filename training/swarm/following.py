"""Child processes that end when their parent does.

hivemind's DHT and averager processes, and the p2pd daemon below them, run on for ever after the
trainer was killed. A thread in each child looks at its parent's id twice a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

_LOOK_S = 0.5


def follow_parent(parent: int) -> None:
    """End this process and its own children once `parent` is no longer its parent.

    Its parent's answer to SIGTERM, which a service manager sends to all processes of a service, is
    not this process's: it would raise in the midst of hivemind's loop.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="follow-parent").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    for child in own_children():
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    os._exit(1)


def own_children() -> list[int]:
    """Process ids of the direct children of this process (Linux)."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.extend(int(pid) for pid in path.read_text().split())
    return found
