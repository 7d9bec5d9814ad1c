"""What forked processes share, and what is given back."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, os, sys
from training.swarm.process_memory import keep_shared

def own_kb():
    table = open("/proc/self/smaps_rollup").read()
    return sum(int(line.split()[1]) for line in table.splitlines() if line.startswith("Private_"))

held = [[None] for _ in range(400_000)]
if sys.argv[1] == "kept":
    keep_shared()
reading, writing = os.pipe()
if not os.fork():
    before = own_kb()
    gc.collect()
    os.write(writing, str(own_kb() - before).encode())
    os._exit(0)
os.wait()
print(os.read(reading, 100).decode())
"""


def _copied_kb(how: str) -> int:
    """By the first full collection of a child whose parent holds 400,000 lists."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_collection_in_a_child_copies_nothing_that_was_kept_shared() -> None:
    size_kb = 400_000 * (56 + 8 + 16) / 1024  # lists of one, with the collector's own 16 bytes
    assert _copied_kb("not") > size_kb / 2
    assert _copied_kb("kept") < size_kb / 10


_FREED = """
import ctypes
from training.swarm.process_memory import give_back

def anonymous_kb():
    table = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in table if line.startswith("Anonymous:"))

malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
places = [malloc(size) for _ in range(500) for size in (50_000, 100)]
for place in places:
    ctypes.memset(place, 1, 100)
for place in places[::2]:
    ctypes.memset(place, 1, 50_000)
for place in places[::2]:  # what is between them stays
    free(place)
before = anonymous_kb()
give_back()
print(before - anonymous_kb())
"""


def test_freed_buffers_between_objects_that_stay_are_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FREED], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 500 * 40  # of 500 times 49 kB
