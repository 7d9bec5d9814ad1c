"""What a rank may count on of a machine's memory."""

from __future__ import annotations

import pytest
import torch

from training.parallel import device_memory
from training.parallel.device_memory import device_bytes, machine_bytes, usable_bytes
from training.recipe import TrainRecipe
from training.strategy import Placement

CPU = torch.device("cpu")


def test_memory_of_this_machine() -> None:
    assert 2**28 < machine_bytes() < 2**50


def test_the_cpu_is_shared_by_ranks_processes_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "machine_bytes", lambda: 16 << 30)
    # A quarter of 16 GiB, less half a GiB of the process and 1 GiB of cache; heap 1.7 times that.
    assert device_bytes(CPU, 4, cache_bytes=1 << 30) == int((2.5 * 2**30) / 1.7)
    assert device_bytes(CPU, 64) == 0


def test_the_rank_with_the_least_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "machine_bytes", lambda: 16 << 30)
    monkeypatch.setattr(Placement, "gather", lambda self, value: [value, 1000, value])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert usable_bytes(Placement(0, 3, CPU, "pipeline", 3), TrainRecipe()) == 950
