"""Buckets: CCNet's golden vectors, and percentiles against NumPy's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from pipelines.buckets import buckets_of, histogram, percentile_cutoffs, read_cutoffs


def test_ccnet_golden(golden_dir: Path, data_dir: Path) -> None:
    golden = json.loads((golden_dir / "ccnet_golden.json").read_text())
    cutoffs = read_cutoffs(str(data_dir / "models" / "ccnet_cutoff.csv"), (30, 60))
    assert {k: list(v) for k, v in cutoffs.items()} == golden["bucket_cutoffs_30_60"]
    for case in golden["bucket"]:
        perplexity = math.nan if case["perplexity"] is None else case["perplexity"]
        (bucket,) = buckets_of(np.array([perplexity]), cutoffs.get(case["language"]))
        assert bucket == case["bucket"], case
    assert len(golden["bucket"]) == 54


@given(
    st.lists(st.floats(0.01, 1e7), min_size=1, max_size=300),
    st.integers(1, 98),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_percentiles_within_a_thousandth(
    values: list[float], low: int, step: int, parts: int
) -> None:
    high = min(99, low + step)
    all_pages = np.array([*values, math.nan])  # a page that is not scored does not count
    histograms = [histogram(piece) for piece in np.array_split(all_pages, parts)]
    got = percentile_cutoffs(histograms, (low, high))
    assert got is not None
    expected = np.percentile(values, [low, high], method="inverted_cdf")
    assert got == pytest.approx(expected.tolist(), rel=1.01e-3)
    assert got == percentile_cutoffs([histogram(all_pages)], (low, high))


def test_nothing_scored() -> None:
    assert percentile_cutoffs([histogram(np.array([math.nan]))], (30, 60)) is None
    assert buckets_of(np.array([5.0]), None).tolist() == ["all"]


def test_thirty_thirty_forty() -> None:
    pages = np.arange(1.0, 1001.0)
    cutoffs = percentile_cutoffs([histogram(pages)], (30, 60))
    names, counts = np.unique(buckets_of(pages, cutoffs).astype(str), return_counts=True)
    found = dict(zip(names.tolist(), counts.tolist(), strict=True))
    assert found["head"] == pytest.approx(300, abs=2)
    assert found["middle"] == pytest.approx(300, abs=2)


def test_bad_cutoff_files(tmp_path: Path) -> None:
    path = tmp_path / "cutoff.csv"
    with pytest.raises(UserError, match="cannot be read"):
        read_cutoffs(str(path), (30, 60))
    path.write_text(",bn,hi\n30,1,2\n")
    with pytest.raises(UserError, match="no row for percentile '60': rows are 30"):
        read_cutoffs(str(path), (30, 60))
    path.write_text(",bn,hi\n30,1,2\n60,x,3\n")
    with pytest.raises(UserError, match="not a table of numbers"):
        read_cutoffs(str(path), (30, 60))
    path.write_text(",bn,hi\n30,1,\n60,2,\n")
    assert read_cutoffs(str(path), (30, 60)) == {"bn": (1.0, 2.0)}
