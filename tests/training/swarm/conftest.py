"""Fixtures of tests that run whole swarms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.swarm.swarm_commands import Commands


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Commands of one test; those that still run at its end are killed."""
    found = Commands(tmp_path)
    yield found
    for name in list(found.running):
        found.kill(name)
