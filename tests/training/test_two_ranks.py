"""Objective and optimisers on two ranks against one process: DDP and FSDP2 over gloo."""

from __future__ import annotations

import socket

from tests.training import forked, two_ranks


def test_two_ranks_compute_what_one_does() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked.start_ranks(two_ranks.run, (port,), two_ranks.RANKS)
