"""Charts of lines, dots and points: what is drawn, where, and that it is the same each time."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.report_charts import SIZES, Bar, bar_chart
from pipelines.report_parts import columns, cut_columns
from pipelines.report_plots import (
    MAX_POINTS,
    Dot,
    DotRow,
    Line,
    dot_chart,
    line_chart,
    round_ticks,
    scatter_chart,
    spread_out,
    thinned,
)

pytest.importorskip("vl_convert", reason="the report needs the extra 'report'")

HOSTILE = '</svg><script>window.hacked=1</script>"&'


@given(st.lists(st.floats(0, 1), min_size=1, max_size=700), st.integers(4, 60))
def test_thinned_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    found = np.array(values)
    kept = thinned(found, most)
    assert len(kept) <= max(most, 1)
    assert list(kept) == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert found[kept].min() == found.min()
    assert found[kept].max() == found.max()


def test_thinned_by_hand() -> None:
    values = np.array([0.5, 0.1, 0.2, 0.9, 0.3, 0.4, 0.8, 0.35, 0.6])
    # Between the ends two stretches: 0.1 0.2 0.9 and 0.3 0.4 0.8 0.35.
    assert thinned(values, 6).tolist() == [0, 1, 3, 4, 6, 8]
    assert thinned(values, 9).tolist() == list(range(9))


@given(st.lists(st.floats(-50, 250), min_size=1, max_size=30))
def test_spread_out_keeps_order_gap_and_bounds(wanted: list[float]) -> None:
    gap, low = 16.0, 0.0
    high = max(200.0, gap * (len(wanted) - 1))
    places = spread_out(wanted, gap, low, high)
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    for one, other in itertools.pairwise(order):
        assert places[other] - places[one] >= gap - 1e-6
    assert min(places) >= low - 1e-6
    assert max(places) <= high + 1e-6


def test_spread_out_by_hand() -> None:
    assert spread_out([10, 90, 40], 16, 0, 200) == [10, 90, 40]
    assert spread_out([50, 50], 16, 0, 200) == [42, 58]
    assert spread_out([50, 50], 16, 50, 200) == [50, 66]
    assert spread_out([199, 198, 200], 16, 0, 200) == [184, 168, 200]


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.integers(2, 9))
def test_round_ticks(low: float, width: float, most: int) -> None:
    ticks = round_ticks(low, low + width, most)
    assert 1 <= len(ticks) <= most
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in ticks)


def test_round_ticks_by_hand() -> None:
    assert round_ticks(0, 1000, 7) == [0, 200, 400, 600, 800, 1000]
    assert round_ticks(0, 0.33, 5) == [0, 0.1, 0.2, 0.3]
    assert round_ticks(2.7, 3.2, 4) == [2.8, 3.0, 3.2]
    assert round_ticks(5, 5, 4) == [5]


def lines(count: int, steps: int) -> list[Line]:
    return [
        Line(f"domain {number}", tuple((float(x), (number + 1) / count) for x in range(1, steps)),
             number)
        for number in range(count)
    ]  # fmt: skip


def test_every_line_has_a_name_and_a_look_of_its_own() -> None:
    drawn = line_chart(lines(22, 50), "described", x_title="step", top=1.0)
    wide, narrow = re.findall(r"<svg .*?</svg>", drawn, re.DOTALL)
    for drawing in (wide, narrow):
        for number in range(22):
            assert f">domain {number}<" in drawing
    assert 'aria-label="described"' in wide
    strokes = re.findall(r'<path [^>]*stroke="(var\(--line-\d\))"([^>]*)>', wide)
    looks = {
        (colour, (re.search(r'stroke-dasharray="([^"]*)"', rest) or [""])[0])
        for colour, rest in strokes
    }
    # 22 lines, and their connectors, which are solid: some as the line itself.
    assert len({look for look in looks if look[1]}) == 16
    assert len(looks) == 22


def test_points_are_thinned() -> None:
    many = Line("one", tuple((float(x), 0.5 + 0.4 * (x % 2)) for x in range(5000)))
    drawn = line_chart([many], "described", x_title="step", top=1.0)
    paths = [re.findall("[ML]", path) for path in re.findall(r' d="([^"]*)"', drawn)]
    assert MAX_POINTS - 2 <= max(map(len, paths)) <= MAX_POINTS


def test_names_are_cut_and_escaped() -> None:
    line = Line(HOSTILE, ((0.0, 0.1), (1.0, 0.2)))
    drawn = line_chart([line], HOSTILE, x_title="step", top=1.0)
    assert "<script" not in drawn
    assert "&lt;/svg&gt;" in drawn
    assert cut_columns("ja/日本語ウィキ", 8) == "ja/日本…"
    assert cut_columns("short", 5) == "short"
    assert columns("日本") == 4
    assert columns("e\u0301") == 1


def test_dots_and_their_whiskers() -> None:
    rows = [DotRow("bn", (Dot(2.0, 0.1, 0), Dot(3.0, 0.0, 1), Dot(4.0, 0.5, 2)))]
    drawn = dot_chart(rows, "described", x_title="loss in nats")
    assert len(re.findall("<svg ", drawn)) == len(SIZES) == 2
    for kind in range(3):
        assert f"var(--dot-{kind})" in drawn
    assert ">loss in nats<" in drawn
    assert ">2.5<" in drawn
    assert dot_chart(rows, "described", x_title="loss in nats") == drawn


def test_a_scatter_of_one_point_and_of_equal_ones() -> None:
    for points in ([(2.0, 2.5)], [(3.0, 3.0)] * 4):
        drawn = scatter_chart(points, "described", x_title="observed", y_title="predicted")
        assert ">observed<" in drawn
        assert "NaN" not in drawn


def test_a_second_bar_and_a_whisker() -> None:
    one = bar_chart([Bar("bn", "1", ((0, 1, "--all"),))], "described", full=2)
    two = bar_chart(
        [Bar("bn", "1", ((0, 1, "--all"),), ((0, 2, "--dot-2"),), (1.5, 2.0))], "described", full=2
    )
    assert (one.count("var(--all)"), one.count("var(--dot-2)")) == (2, 0)
    assert (two.count("var(--all)"), two.count("var(--dot-2)")) == (2, 2)

    wide = two.partition("</svg>")[0]
    paths = re.findall(r'd="(M[^"]*)" fill="var\(--(all|dot-2|ink)\)"', wide)
    assert paths == [("M0,6h245v8h-245Z", "all"), ("M0,14h490v8h-490Z", "dot-2"),
                     ("M367.5,17.25h122.5v1.5h-122.5Z", "ink")]  # fmt: skip
