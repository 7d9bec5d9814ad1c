"""What is freed stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_BLOCK_BYTES = 64 << 20
_SETTLING, _TIMES = 40, 10
"""Blocks that the heap finds its places with (it takes 1 to 10), and those that are counted."""
_PROGRAM = f"""
import resource, sys
import torch
from training.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for time in range({_SETTLING + _TIMES}):
    if time == {_SETTLING}:
        before = faults()
    torch.ones({_BLOCK_BYTES // 4})
print((faults() - before) * resource.getpagesize())
"""


def _touched_bytes(how: str) -> int:
    """Memory that the kernel had to give anew while blocks were freed and asked for again."""
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_a_freed_block_is_used_again() -> None:
    assert _touched_bytes("keep") < _BLOCK_BYTES / 8


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_without_it_every_block_is_new() -> None:
    """Else there would be no reason for it; huge pages make fewer faults of the same bytes."""
    assert _touched_bytes("plain") > _touched_bytes("keep")
