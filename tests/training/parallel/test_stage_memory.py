"""Peaks of ranks against an action by action, unit by unit account."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.parallel.chains import chain, naive_peaks, profiles
from training.parallel.stage_memory import (
    bytes_of,
    ranks_bytes,
    segments,
    size_text,
    stage_bytes,
)
from training.parallel.units import Cut, Pipe, Profile, UnitCost


def test_a_stage_by_hand() -> None:
    """1F1B: 2 microbatches in flight on rank 0, 1 on rank 1; 16 bytes a parameter; 4 receive
    buffers of 7 bytes on each side of the border."""
    units = (
        UnitCost("a", 1, 1, 10, {}, 5, kept_bytes=100, forward_bytes=130, backward_bytes=120),
        UnitCost("b", 1, 1, 20, {}, 7, kept_bytes=50, forward_bytes=60, backward_bytes=90),
        UnitCost("c", 1, 1, 30, {}, 9, kept_bytes=40, forward_bytes=45, backward_bytes=41),
    )
    pipe = Pipe(2, 4)
    # Of the second microbatch: a at its most 130, b at its most 100 + 90.
    first = 16 * 30 + (150 + 190) + 4 * 7
    assert bytes_of(Profile(units, 1, "given"), Cut((0, 2, 3)), pipe) == (first, 16 * 30 + 45 + 28)


def test_tied_parameters_are_once_on_a_rank_and_a_copy_on_each_other() -> None:
    profile = chain([1.0] * 4, parameters=0, tied={"weight": (10, (0, 3))})
    assert bytes_of(profile, Cut((0, 2, 4)), Pipe(2, 4)) == (160, 160)
    assert bytes_of(profile, Cut((0, 1, 2, 3, 4)), Pipe(2, 4, "zbv", 2)) == (160, 0)


@settings(max_examples=40, deadline=None)
@given(
    profiles(most_units=7),
    st.sampled_from(
        [
            ("gpipe", 2, 1, 3),
            ("1f1b", 3, 1, 5),
            ("interleaved-1f1b", 2, 2, 4),
            ("zbv", 2, 2, 5),
            ("dualpipe-v", 2, 2, 4),
        ]
    ),
)
def test_every_cut_has_the_naive_peaks(profile: Profile, which: tuple[str, int, int, int]) -> None:
    name, ranks, stages_per_rank, microbatches = which
    pipe = Pipe(ranks, microbatches, name, stages_per_rank)
    count = len(profile.units)
    cuts = [Cut((0, *inner, count)) for inner in combinations(range(1, count), pipe.stages - 1)]
    parts = segments(profile)
    found = ranks_bytes(parts, np.array([cut.bounds for cut in cuts]).T, pipe)
    expected = np.array([naive_peaks(profile, cut, pipe) for cut in cuts]).T
    assert found == pytest.approx(expected)
    if stages_per_rank == 1:  # then a stage is a rank
        for stage in range(ranks):
            alone = stage_bytes(parts, pipe, stage)
            each = [alone[cut.bounds[stage], cut.bounds[stage + 1]] for cut in cuts]
            assert each == pytest.approx(expected[stage])


def test_sizes_for_people() -> None:
    assert [size_text(size) for size in (12, 1536, 3 * 2**20, 80 * 2**30)] == [
        "12 B",
        "1.5 KiB",
        "3 MiB",
        "80 GiB",
    ]
