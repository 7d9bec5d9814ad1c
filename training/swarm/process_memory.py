"""What the processes of a peer hold in memory, and need not.

A peer's DHT and averager are forks of its trainer, and share with it what they all have loaded: 270
of 290 MB each.
"""

from __future__ import annotations

import ctypes
import gc


def keep_shared() -> None:
    """Call before a fork: what this process has now is left out of its garbage collections and of
    its children's. The first full one of each writes into every object that it looks at, and so
    copies what was shared: 100 MB a process of a peer, after some minutes of its life.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Give freed memory back to the system. Buffers of rounds, freed between objects that stay,
    would leave a peer with 10 kB more after every round.
    """
    if _TRIM is not None:
        _TRIM(0)


_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
