"""Memory of the CPU that is freed after one step and asked for again in the next.

glibc gives blocks above a threshold back to the system at once, and the kernel then fills every
page of them with zeros when they are asked for again. The logits of a step are such blocks: in a
decoder of 64 channels with 8,000 pieces that takes a third of all CPU time.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; whether the C library can do that.

    The price is memory: blocks are aligned and leave gaps, so the heap settles above its highest
    use (that decoder's process at 1.6 to 2.1 GB instead of 0.7 to 1.0).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    # Both succeed or, in another allocator behind the same name, do nothing.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST))
