"""Processes that need not import torch and transformers each: a server does it once and forks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing as mp

_PRELOADED = ["training.loop", "training.export", "scripts.train_command", "scripts.cli"]


def context() -> ForkServerContext:
    """The server of this process, to start others from."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOADED)
    return found


def start_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run `work(rank, *arguments)` on some ranks; raises what one of them raises."""
    context()
    mp.start_processes(work, args=arguments, nprocs=ranks, start_method="forkserver")
