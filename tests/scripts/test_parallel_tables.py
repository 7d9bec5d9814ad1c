"""The tables and the targets of the parallel benchmark."""

from __future__ import annotations

from scripts import parallel_tables
from scripts.parallel_cuts import Bubble, CutRow
from scripts.parallel_ranks import Measured
from scripts.parallel_traffic import Counted


def _row(cut: str, predicted_s: float, measured_s: float, *, units: str = "sleep") -> CutRow:
    figures = Measured(measured_s, measured_s + 0.01, 9.0)
    return CutRow("A", units, cut, (0, 2, 10), (0.05, 0.06), predicted_s, figures)


def test_the_table_of_cuts_compares_with_uniform() -> None:
    rows = [
        _row("uniform", 0.8, 0.84),
        CutRow("A", "sleep", "tree, speed", failed="'head' goes back"),
        _row("optimal", 0.6, 0.63),
    ]
    lines = parallel_tables.cuts_table(rows).split("\n")
    assert lines[2] == (
        "| A | sleep | uniform | 2 + 8 | 50.0 + 60.0 | 800 | 840 | 850 | 1.050 | +0.0% |"
    )
    assert lines[3].startswith("| A | sleep | tree, speed | none: 'head' goes back |")
    assert lines[4].endswith("| 600 | 630 | 640 | 1.050 | -25.0% |")
    assert len({line.count("|") for line in lines}) == 1


def test_targets_of_cuts_are_judged_by_units_that_sleep() -> None:
    rows = [_row("uniform", 0.8, 0.84), _row("tree, speed", 0.6, 0.62), _row("optimal", 0.6, 0.63)]
    real = [_row("uniform", 1.0, 5.0, units="real"), _row("optimal", 1.0, 9.0, units="real")]
    assert parallel_tables.cut_targets([*rows, *real], {"A": 9.0}) == [
        "- reached: A: optimal 25.0% under uniform (20%)",
        "- reached: A: optimal / tree, speed 1.016 (at most 1.02)",
        "- reached: largest difference from the prediction 5.0% (10%)",
        "- reached: losses against one process: largest difference 0.0e+00 (1e-05)",
    ]
    none = CutRow("A", "sleep", "tree, speed", failed="'head' goes back")
    assert parallel_tables.cut_targets([*rows, none, *real], {"A": 9.0})[3] == (
        "- not compared: A: no cut by tree, speed: 'head' goes back"
    )
    slow = [_row("uniform", 0.8, 0.80), _row("tree, memory", 0.6, 0.60), _row("optimal", 0.6, 0.68)]
    assert parallel_tables.cut_targets([*slow, *real], {"A": 9.001}) == [
        "- missed: A: optimal 15.0% under uniform (20%)",
        "- missed: A: optimal / tree, memory 1.133 (at most 1.02)",
        "- missed: largest difference from the prediction 13.3% (10%)",
        "- missed: losses against one process: largest difference 1.1e-04 (1e-05)",
    ]


def test_the_bubble_is_the_formula_of_its_numbers() -> None:
    found = Bubble(2, 4, alone_s=0.96, pipeline_s=0.624)
    assert (found.ratio, found.formula) == (0.65, 0.625)
    assert parallel_tables.bubble_table(found).endswith("| 2 | 4 | 960 | 624 | 0.650 | 0.625 |")
    assert parallel_tables.bubble_targets(found)[0].startswith("- reached")
    late = Bubble(2, 4, alone_s=0.96, pipeline_s=0.65)
    assert parallel_tables.bubble_targets(late)[0].startswith("- missed")
    assert Bubble(4, 2, 1.0, 1.0).formula == 0.625


def test_bytes_are_judged_where_gloo_follows_the_formula() -> None:
    found = [
        Counted("DDP", "2 (n-1) P", 44_000_000, 44_000_000, 44_100_000.0),
        Counted("FSDP2, no reshard", "2 (n-1) P", 44_000_000, 66_000_000, 66_500_000.0),
        Counted("pipeline of 4", "2 (p-1) A", 3_000_000, 3_000_000, 3_200_000.0),
    ]
    lines = parallel_tables.traffic_table(found).split("\n")
    assert lines[3] == (
        "| FSDP2, no reshard | 2 (n-1) P | 44.00 | 66.00 | 66.50 | 1.511 | 1.008 | 1.508 |"
    )
    assert parallel_tables.traffic_targets(found) == [
        "- reached: DDP: 0.2% from the formula (2%)",
        "- missed: pipeline of 4: 6.7% from the formula (2%)",
    ]


def test_the_peer_is_compared_with_the_last_of_ours() -> None:
    rows = [
        ("DeepSpeed, uniform", (0, 5, 10), Measured(0.9, 1.0, 9.89808)),
        ("Gristmill, optimal", (0, 9, 10), Measured(0.6, 0.7, 9.89808)),
    ]
    lines = parallel_tables.peer_table(rows).split("\n")
    assert lines[2] == "| DeepSpeed, uniform | 5 + 5 | 900 | 1000 | 9.89808 | 1.50 |"
    assert parallel_tables.peer_targets(rows) == [
        "- reached: DeepSpeed, uniform / Gristmill, optimal: 1.50 (above 1)",
        "- reached: losses of both programs: largest difference 0.0e+00 (1e-05)",
    ]
