"""Fixtures of the tests that mine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def registered_models(data_dir: Path) -> Iterator[None]:
    """The language model comes from the shared data: nothing is fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_DATA", str(data_dir))
        yield


@pytest.fixture(scope="module")
def small(data_dir: Path) -> list[Path]:
    """Four small shards of real text."""
    return sorted((data_dir / "wet_docs_small").glob("*.warc.wet.gz"))
