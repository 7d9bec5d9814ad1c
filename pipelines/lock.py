"""One process at a time: a lock file that a crash lets go of."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_TRIES = 20


def take(path: Path) -> int | None:
    """Lock the file `path`, made where it is missing; None when another process holds it.

    Gives the open descriptor: closing it, as the end of the process does, unlocks. Whoever removes
    the file does so before that. Where the file system has no locks everybody gets one. Raises
    OSError.
    """
    for _ in range(_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
        except FileNotFoundError:
            continue  # a run that ended has just removed the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            pass  # this file system has no locks
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # the lock of a file that was removed guards nothing
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
