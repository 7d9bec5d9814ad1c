"""More charts of reports: lines over steps, dots of several runs on a row, and a scatter.

As in `report_charts`, places are computed here, so that no text is measured and the same numbers
give the same bytes. Lines are told apart by colour, by dashes and by a name at their end; dots by
colour and by shape: each of these alone would do for a reader who sees no colours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.report_charts import LINE_HEIGHT, SIZES, Size, spec_of, svg
from pipelines.report_parts import cut_columns

MAX_POINTS = 400
STYLES = "report_page.plots.css"
"""The colours of these charts: a file of style for `report_page.render_page`."""
_COLOURS = 6
_DASHES = ((), (7, 3), (2, 2), (9, 3, 2, 3))
_SHAPES = {"circle": 60, "square": 60, "diamond": 100}  # area in CSS pixels
_TOP, _BOTTOM, _LEFT = 10, 40, 44
_CONNECTOR = 16  # CSS pixels between the end of a line and its name
_COLUMN = 8  # CSS pixels of a character, of a wide font: no text is measured
_NICE = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Line:
    """Points with rising x. style: number of the colour and the dashes. name: stands at the end
    of the line; "" for none. faint: thin, in the background."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: int = 0
    faint: bool = False


@dataclass(frozen=True)
class Dot:
    """A value with its spread (0: none known). kind: number of the colour and the shape."""

    value: float
    spread: float
    kind: int


@dataclass(frozen=True)
class DotRow:
    """Values that are compared."""

    label: str
    dots: tuple[Dot, ...]


def line_chart(
    lines: Sequence[Line],
    description: str,
    *,
    x_title: str,
    top: float,
    sizes: Sequence[Size] = SIZES,
) -> str:
    """Lines from 0 to `top` as SVG; what is above is drawn at `top`. Names stand to the right."""
    return "".join(svg(_lines(lines, x_title, top, size), size.name, description) for size in sizes)


def dot_chart(rows: Sequence[DotRow], description: str, *, x_title: str) -> str:
    """Dots with whiskers of one spread to each side, a row for each label, as SVG."""
    return "".join(svg(_dots(rows, x_title, size), size.name, description) for size in SIZES)


def scatter_chart(
    points: Sequence[tuple[float, float]], description: str, *, x_title: str, y_title: str
) -> str:
    """Points on two equal axes with the diagonal, as SVG."""
    return "".join(
        svg(_scatter(points, x_title, y_title, size), size.name, description) for size in SIZES
    )


def thinned(values: np.ndarray, most: int = MAX_POINTS) -> np.ndarray:
    """Indices of at most `most` (4 or more) of `values`, rising: the first, the last, and of each
    stretch between them the lowest and the highest."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(1, count - 1, (most - 2) // 2 + 1).round().astype(int)
    chosen = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        stretch = values[start:stop]
        chosen |= {start + int(stretch.argmin()), start + int(stretch.argmax())}
    return np.array(sorted(chosen))


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places in order of the `wanted` ones, at least `gap` apart, within `low` to `high` where
    they fit, and moved as little as that takes (least squares)."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    # Less its number of gaps, each place may equal the one before: neighbours in the wrong order
    # share their mean (pool adjacent violators).
    pools: list[tuple[float, int]] = []
    for number, place in enumerate(order):
        pool = (wanted[place] - number * gap, 1)
        while pools and pools[-1][0] >= pool[0]:
            total, count = pools.pop()
            size = count + pool[1]
            pool = ((total * count + pool[0] * pool[1]) / size, size)
        pools.append(pool)
    limit = max(low, high - (len(wanted) - 1) * gap)
    places = [min(max(mean, low), limit) for mean, count in pools for _ in range(count)]
    found = [0.0] * len(wanted)
    for number, place in enumerate(order):
        found[place] = places[number] + number * gap
    return found


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round numbers, evenly apart, from `low` to `high`."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / max(1, most - 1)))
    for step in (factor * power for factor in (*_NICE, *(10 * one for one in _NICE[1:]))):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [round(number * step, 12) for number in range(first, last + 1)]
    return [low]


def _lines(lines: Sequence[Line], x_title: str, top: float, size: Size) -> dict[str, Any]:
    named = [line for line in lines if line.name]
    names_width = (170 if size.labels else 112) if named else 22
    height = float(size.height - _TOP - _BOTTOM)
    if named:
        height = max(height, len(named) * LINE_HEIGHT)
    padding = {"left": _LEFT, "right": names_width, "top": _TOP, "bottom": _BOTTOM}
    inner = size.width - _LEFT - names_width
    last = max((line.points[-1][0] for line in lines if line.points), default=1)
    scale_x = {"domain": [0, last], "nice": False}
    ticks = [tick for tick in round_ticks(0, last, 3 if inner < 300 else 7) if tick % 1 == 0]
    y_ticks = round_ticks(0, top, 5)
    axis_y = {"values": y_ticks, "domain": False, "ticks": False, "format": _format(y_ticks)}
    x = _place("x", scale_x, {"values": ticks, "grid": False, "format": ",d"})
    y = _place("y", {"domain": [0, top], "nice": False}, axis_y)
    layers: list[dict[str, Any]] = []
    for line in sorted(lines, key=lambda line: not line.faint):
        points = _within(line.points, inner)
        mark = {"type": "line", **_stroke(line, solid=not named)}
        layers.append({
            # Not clipped by the renderer, whose names for clips are not the same each time.
            "data": {"values": [{"x": x, "y": min(y, top)} for x, y in points]},
            "mark": mark, "encoding": {"x": x, "y": y},
        })  # fmt: skip
    ends = [height * (1 - min(line.points[-1][1], top) / top) for line in named]
    places = spread_out(ends, LINE_HEIGHT, 0, height)
    room_columns = (names_width - _CONNECTOR - 5) // _COLUMN
    for line, end, place in zip(named, ends, places, strict=True):
        beyond = {"x": last * (1 + _CONNECTOR / inner), "y": top * (1 - place / height)}
        layers.append({
            "data": {"values": [{"x": last, "y": top * (1 - end / height)}, beyond]},
            "mark": {"type": "line", **_stroke(line, solid=True)},
            "encoding": {"x": x, "y": y},
        })  # fmt: skip
        layers.append(
            _text(cut_columns(line.name, room_columns), inner + _CONNECTOR + 5, place, "left")
        )
    layers.append(_text(x_title, inner, height + _BOTTOM - 8, "right", muted=True))
    return spec_of(size, height, padding, layers)


def _within(points: Sequence[tuple[float, float]], inner: int) -> list[tuple[float, float]]:
    """At most a point for each pixel, and at most MAX_POINTS."""
    kept = thinned(np.array([y for _, y in points]), min(MAX_POINTS, inner))
    return [points[place] for place in kept]


def _stroke(line: Line, *, solid: bool) -> dict[str, Any]:
    if line.faint:
        return {"color": "var(--all)", "strokeWidth": 0.8, "opacity": 0.6}
    number = line.style
    # With 6 colours and 4 dashes, so turned that neighbours differ in both, 24 lines differ.
    dashes = _DASHES[(number + number // _COLOURS) % len(_DASHES)]
    dashed = {"strokeDash": list(dashes)} if dashes and not solid else {}
    return {"color": f"var(--line-{number % _COLOURS})", "strokeWidth": 2, **dashed}


def _dots(rows: Sequence[DotRow], x_title: str, size: Size) -> dict[str, Any]:
    above = size.labels == 0
    step, middle = (50, 34) if above else (30, 15)
    right = 16
    padding = {"left": size.labels or 10, "right": right, "top": 4, "bottom": _BOTTOM}
    inner = size.width - padding["left"] - right
    height = float(len(rows) * step)
    ends = [dot.value + side * dot.spread for row in rows for dot in row.dots for side in (-1, 1)]
    low, high = _widened(min(ends), max(ends))
    ticks = round_ticks(low, high, 4 if above else 8)
    scale_x = {"domain": [low, high], "nice": False}
    x = _place("x", scale_x, {"values": ticks, "format": _format(ticks)})
    scale_y = {"domain": [0, height], "range": [0, height], "nice": False}
    y = _place("y", scale_y, None)
    dots, whiskers, labels = [], [], []
    for number, row in enumerate(rows):
        for dot in row.dots:
            # Side by side in height too: equal values stay seen.
            place = number * step + middle + 5 * (dot.kind - 1)
            dots.append({"x": dot.value, "y": place, "kind": dot.kind})
            whiskers.append({"x": dot.value - dot.spread, "x2": dot.value + dot.spread, "y": place,
                             "kind": dot.kind})  # fmt: skip
        labels.append(_text(cut_columns(row.label, size.label_chars), -padding["left"],
                            number * step + (10 if above else middle), "left"))  # fmt: skip
    layers: list[dict[str, Any]] = []
    for kind, (shape, area) in enumerate(_SHAPES.items()):
        colour = f"var(--dot-{kind})"
        layers.append({
            "data": {"values": [one for one in whiskers if one["kind"] == kind]},
            "mark": {"type": "rule", "color": colour, "strokeWidth": 1.5},
            "encoding": {"x": x, "x2": {"field": "x2"}, "y": y},
        })  # fmt: skip
        layers.append({
            "data": {"values": [one for one in dots if one["kind"] == kind]},
            "mark": {"type": "point", "shape": shape, "filled": True, "color": colour,
                     "size": area, "opacity": 1},
            "encoding": {"x": x, "y": y},
        })  # fmt: skip
    layers += labels
    layers.append(_text(x_title, inner, height + _BOTTOM - 8, "right", muted=True))
    return spec_of(size, height, padding, layers)


def _scatter(
    points: Sequence[tuple[float, float]], x_title: str, y_title: str, size: Size
) -> dict[str, Any]:
    side = min(size.width - _LEFT - 16, 380)
    top = _TOP + LINE_HEIGHT
    padding = {"left": _LEFT, "right": size.width - _LEFT - side, "top": top, "bottom": _BOTTOM}
    low, high = _widened(min(min(point) for point in points), max(max(point) for point in points))
    ticks = round_ticks(low, high, 5)
    axis = {"values": ticks, "format": _format(ticks)}
    scale = {"domain": [low, high], "nice": False}
    x, y = _place("x", scale, axis), _place("y", scale, axis)
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": [{"x": low, "y": low}, {"x": high, "y": high}]},
            "mark": {"type": "line", "color": "var(--axis)", "strokeDash": [4, 3]},
            "encoding": {"x": x, "y": y},
        },
        {
            "data": {"values": [{"x": x, "y": y} for x, y in points]},
            "mark": {"type": "point", "filled": True, "color": "var(--dot-2)", "size": 40,
                     "opacity": 0.75},
            "encoding": {"x": x, "y": y},
        },
        _text(x_title, side, side + _BOTTOM - 8, "right", muted=True),
        _text(y_title, -_LEFT, -top + LINE_HEIGHT / 2, "left", muted=True),
    ]  # fmt: skip
    return spec_of(size, side, padding, layers)


def _place(field: str, scale: dict[str, Any], axis: dict[str, Any] | None) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "scale": scale | {"zero": False}, "axis": axis}


def _text(text: str, x: float, y: float, align: str, *, muted: bool = False) -> dict[str, Any]:
    """One text at a place in CSS pixels from the corner of the axes."""
    colour = {"color": "var(--muted)"} if muted else {}
    mark = {"type": "text", "x": x, "y": y, "align": align, "baseline": "middle", "limit": 0,
            "fontSize": 12, **colour}  # fmt: skip
    return {"data": {"values": [{"text": text}]}, "mark": mark,
            "encoding": {"text": {"field": "text"}}}  # fmt: skip


def _widened(low: float, high: float) -> tuple[float, float]:
    """The range with a margin, so that nothing stands on its edge."""
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 0.04
    return low - margin, high + margin


def _format(ticks: Sequence[float]) -> str:
    """As many decimals as the ticks have."""
    decimals = max((len(f"{tick:.12f}".rstrip("0").partition(".")[2]) for tick in ticks), default=0)
    return f",.{decimals}f"
