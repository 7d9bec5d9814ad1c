"""The table of a cut, to the letter."""

from __future__ import annotations

from training.parallel.cut_table import heavy_unit, table
from training.parallel.ladder import size
from training.parallel.rank_memory import pipeline_memory
from training.parallel.units import Cut, Pipe, Profile, UnitCost


def _model(head_s: float, source: str = "given") -> Profile:
    """Embedding, four layers and a head; a forward pass is a third of it."""
    mib = 1 << 20
    names = ("embedding", "layer 0", "layer 1", "layer 2", "layer 3", "head")
    times = (0.3, 3.0, 3.0, 3.0, 3.0, head_s)
    return Profile(
        tuple(
            UnitCost(name, time / 3, 2 * time / 3, 1 << 20, {}, mib, 2 * mib, 3 * mib, 5 * mib)
            for name, time in zip(names, times, strict=True)
        ),
        4,
        source,
    )


def test_the_table_of_a_cut() -> None:
    """Stage 0: 3 x 16 MiB of state, one microbatch more than the one that computes, 3 x 2, and of
    that one at most 2 + 2 + 5 - 1; 4 buffers of a MiB."""
    found = table(_model(6.0), Cut((0, 3, 6)), Pipe(2, 4))
    assert found.splitlines() == [
        "stage  rank  units                 parameters  in flight  rank memory   time     sends",
        "    0     0  embedding .. layer 1   3,145,728          2     66.0 MiB  6.3 s  1.00 MiB",
        "    1     1  layer 2 .. head        3,145,728          1     61.0 MiB   12 s       0 B",
        "step by 1f1b, 4 microbatches on 2 ranks: 54.3 s, bubble 32.6%; 45.75 s if all stages were "
        "even",
        "stage 1 (layer 2 .. head) bounds the step: the others wait for it",
    ]


def test_a_unit_that_no_cut_divides_is_told() -> None:
    profile = _model(12.0)
    assert heavy_unit(profile, Pipe(2, 4)) is None  # 12 of 24.3: an even share of two
    assert heavy_unit(profile, Pipe(3, 4)) == 5
    last = table(profile, Cut((0, 3, 5, 6)), Pipe(3, 4)).splitlines()[-1]
    assert last == (
        "'head' bounds the step: it takes 49.4% of the time of a microbatch, an even share of 3 "
        "ranks is 33.3%, and no cut divides it; what helps: a smaller vocabulary, or a head that "
        "is split over the ranks, fewer ranks (2 at most keep up with it)"
    )


def test_memory_is_that_of_the_rank_with_all_its_stages() -> None:
    cut, pipe = Cut((0, 2, 3, 4, 6)), Pipe(2, 4, "zbv", 2)
    lines = table(_model(3.0), cut, pipe).splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["0", "0"],
        ["1", "1"],
        ["2", "1"],
        ["3", "0"],
    ]
    first, second = (size(one.total) for one in pipeline_memory(_model(3.0), cut, pipe))
    assert [line.count(shown) for line, shown in zip(
        lines[1:5], (first, second, second, first), strict=True
    )] == [1] * 4  # fmt: skip


def test_even_stages_bound_nothing_and_operations_are_no_seconds() -> None:
    profile = _model(3.0, "operations")
    found = table(profile, Cut((0, 3, 6)), Pipe(2, 4))
    assert "bounds the step" in found  # 6.3 against 9
    even = table(profile, Cut((0, 4, 6)), Pipe(2, 4, "gpipe"))
    assert "9.3 FLOPs" in even
    assert " s," not in even
