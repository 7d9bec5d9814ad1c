"""The bubble of a pipeline, by the clock: p = 2, m = 4 takes (m + p - 1) / (m p) = 0.625 of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.parallel_cuts import bubble
from tests.training import forked


def test_two_ranks_and_four_microbatches_take_five_eighths(tmp_path: Path) -> None:
    forked.context()
    found = bubble(2, tmp_path, start_method="forkserver")
    # Two stages of 0.3 s, four microbatches: 2.4 s in one process, whatever the machine does.
    assert found.alone_s == pytest.approx(2.4, rel=0.03)
    assert found.ratio == pytest.approx(found.formula, abs=0.03)
    assert found.formula == 0.625
