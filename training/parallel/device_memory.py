"""How much of its device's memory a rank may count on, in a plan, for `auto` and for a cut.

A CUDA device is a rank's own. The CPU's memory is shared: by the ranks of the machine, by their
processes, by the readers' caches; and with `host_memory.keep_freed_memory` glibc's heap settles at
1.5 to 1.7 times what the tensors take at their peak (measured with `scripts.bench_memory`).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from training.parallel.ladder import usable
from training.recipe import TrainRecipe
from training.strategy import Placement

PROCESS_BYTES = 1 << 29
"""Of a rank without tensors: Python, torch, transformers."""
HEAP = 1.7
"""Times the tensors that the heap of a process takes on the CPU."""
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def device_bytes(device: torch.device, local_ranks: int, *, cache_bytes: int = 0) -> int:
    """Bytes of tensors that a rank may fill: the memory of its CUDA device, or its part of the
    machine's.

    local_ranks: processes of the run on this machine. cache_bytes: of a rank's readers.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    own = machine_bytes() // local_ranks - cache_bytes - PROCESS_BYTES
    return max(0, int(own / HEAP))


def machine_bytes() -> int:
    """Memory of this machine, or of the container in it."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _CGROUP_LIMITS:
        path = Path(name)
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            found = min(found, int(text))
    return found


def least_bytes(place: Placement, recipe: TrainRecipe) -> int:
    """Of the rank that has the least; every rank calls it."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(place.ranks)))
    own = device_bytes(place.device, local_ranks, cache_bytes=recipe.data.cache_bytes)
    return int(min(place.gather(own)))


def usable_bytes(place: Placement, recipe: TrainRecipe) -> int:
    """What a cut may plan with of `least_bytes`; every rank calls it."""
    return usable(least_bytes(place, recipe))
