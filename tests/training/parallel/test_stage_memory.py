"""Peaks of ranks against an action by action, unit by unit account."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.parallel.chains import chain, naive_peaks, profiles
from training.parallel.layout import state_bytes
from training.parallel.profile import profile_recipe
from training.parallel.rank_memory import pipeline_memory
from training.parallel.stage_memory import ranks_bytes, segments, stage_bytes
from training.parallel.units import Cut, Pipe, Profile, UnitCost
from training.recipe import load_recipe


def bytes_of(profile: Profile, cut: Cut, pipe: Pipe) -> tuple[int, ...]:
    peaks = ranks_bytes(segments(profile), np.array([cut.bounds]).T, pipe)
    return tuple(round(peak) for peak in peaks[:, 0].tolist())


def test_a_stage_by_hand() -> None:
    """1F1B: 2 microbatches in flight on rank 0, 1 on rank 1; 16 bytes a parameter; 4 receive
    buffers of 7 bytes on each side of the border."""
    units = (
        UnitCost("a", 1, 1, 10, {}, 5, kept_bytes=100, forward_bytes=130, backward_bytes=120),
        UnitCost("b", 1, 1, 20, {}, 7, kept_bytes=50, forward_bytes=60, backward_bytes=90),
        UnitCost("c", 1, 1, 30, {}, 9, kept_bytes=40, forward_bytes=45, backward_bytes=41),
    )
    pipe = Pipe(2, 4)
    # Of the second microbatch: a at its most 130, b at its most 100 + 90, its output's gradient of
    # 7 bytes among them, which is in a buffer.
    first = 16 * 30 + (150 + 190 - 7) + 4 * 7
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


def test_updates_of_lamb_by_hand() -> None:
    """Rank 0 holds the tied matrix, then those of a and b: 4 x (100 + 50 + 4 x 10) of updates; or
    4 x (100 + 4 x 50) while a's is computed."""
    units = (
        UnitCost("a", 1, 1, 150, {"tied": 100}, matrices=(50,)),
        UnitCost("b", 1, 1, 10, matrices=(10,)),
        UnitCost("c", 1, 1, 110, {"tied": 100}, matrices=(10,)),
    )
    profile, cut = Profile(units, 1, "given"), Cut((0, 2, 3))
    assert bytes_of(profile, cut, Pipe(2, 4)) == (16 * 160, 16 * 110)
    # The bound takes the tied matrix for the last of the tied ones, of which there is one: exact.
    expected = (16 * 160 + 4 * 400, 16 * 110 + 4 * 400)
    assert bytes_of(profile, cut, Pipe(2, 4, optimiser="lamb")) == expected
    told = pipeline_memory(profile, cut, Pipe(2, 4, optimiser="lamb"))
    assert tuple(one.total for one in told) == expected


_PROFILES: dict[tuple[str, str], Profile] = {}


def _real(name: str, precision: str, copies: int) -> Profile:
    key = (name, f"{precision} {copies}")
    if key not in _PROFILES:
        recipe = load_recipe(
            name,
            ["examples.sequence_length=32", f"run.precision={precision}", "run.strategy=pipeline",
             "run.pipeline.shard=true"],
        )  # fmt: skip
        _PROFILES[key] = profile_recipe(recipe, 2000, microbatch=2, copies=copies)
    return _PROFILES[key]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_that_fits_by_segments_fits(data: st.DataObject) -> None:
    """The search's account is not clearly below that of the chosen cut."""
    draw = data.draw
    name = draw(st.sampled_from(["decoder-small", "albert-small"]))
    precision = draw(st.sampled_from(["fp32", "bf16"]))
    shards = draw(st.sampled_from([1, 2, 4]))
    schedule, each = draw(st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zbv", 2)]))
    profile = _real(name, precision, shards)
    pipe = Pipe(
        2, draw(st.sampled_from([2, 4, 5])), schedule, each, shards=shards,
        bytes_per_parameter=state_bytes(shards, bf16=precision == "bf16"),
        optimiser=draw(st.sampled_from(["adamw", "lamb"])),
    )  # fmt: skip
    count = len(profile.units)
    inner = draw(st.sets(st.integers(1, count - 1), min_size=pipe.stages - 1,
                         max_size=pipe.stages - 1))  # fmt: skip
    cut = Cut((0, *sorted(inner), count))
    found = bytes_of(profile, cut, pipe)
    told = [one.total for one in pipeline_memory(profile, cut, pipe)]
    for searched, peak in zip(found, told, strict=True):
        # The account of the chosen cut counts a step's first gradients of a weight that several
        # stages of a rank use twice: 2.5 % of ALBERT's peak under zbv.
        several = each > 1 and name == "albert-small"
        assert (0.97 if several else 0.98) * peak <= searched <= 1.35 * peak
