"""Charts of the report: Vega-Lite specifications, rendered to SVG that stands in the page.

The SVG holds no script and no style attribute. Its colours are CSS variables of the page, so one
drawing serves the light and the dark theme. Places are fixed and nothing is laid out by the width
of text, so the same figures give the same bytes whatever fonts the machine has. Each chart is
drawn twice, for wide and for narrow screens; the page shows one of the two.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from models.errors import Fault, UserError
from pipelines.buckets import BUCKETS, NO_BUCKET
from pipelines.report_figures import Histogram

_VEGA_LITE = "6.4"
LINE_HEIGHT = 16  # CSS pixels: a row of text
_CHARACTER = 7  # of a wide font of 12 px: no text is measured, so that bytes do not depend on fonts
_GAP = 6  # between the names of cutoffs and the numbers of the axis
_TICK_ROOM = 40
_TICKS = (
    (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9),
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8),
    (1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,),
)  # fmt: skip
_SVG = re.compile(r'<svg [^>]*viewBox="([^"]*)"[^>]*>')


@dataclass(frozen=True)
class Size:
    """A drawing. width: CSS pixels in all; labels: of those, left of the bars, 0 puts the labels
    above the bars; label_chars: a longer label is cut."""

    name: str
    width: int
    labels: int
    values: int
    label_chars: int
    height: int


SIZES = (
    Size("wide", width=880, labels=250, values=140, label_chars=38, height=240),
    Size("narrow", width=312, labels=0, values=0, label_chars=26, height=200),
)
SMALL = Size("small", width=300, labels=0, values=0, label_chars=26, height=170)
"""One of many charts side by side; the same on every screen."""


Segment = tuple[float, float, str]


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart. segments: (start, stop, CSS variable of the colour). below: those of a
    second bar in the row. whisker: start and stop of a thin line on the last bar."""

    label: str
    value: str
    segments: tuple[Segment, ...]
    below: tuple[Segment, ...] = ()
    whisker: tuple[float, float] | None = None


def bar_chart(bars: Sequence[Bar], description: str, *, full: float) -> str:
    """Horizontal bars on a scale from 0 to `full`, as SVG for both sizes."""
    return "".join(svg(_bars(bars, full, size), size.name, description) for size in SIZES)


def histogram_chart(
    histogram: Histogram,
    cutoffs: Mapping[str, float],
    description: str,
    *,
    sizes: Sequence[Size] = SIZES,
) -> str:
    """Bins on a logarithmic axis, stacked by bucket, with a line and a name at each cutoff."""
    return "".join(
        svg(_histogram(histogram, cutoffs, size), size.name, description) for size in sizes
    )


def require_renderer() -> Any:
    """The module that draws. Raises UserError when it is not installed."""
    try:
        import vl_convert  # noqa: PLC0415
    except ImportError:
        raise UserError(
            "--html needs the extra 'report' for its charts: pip install 'gristmill[report]'"
        ) from None
    return vl_convert


def svg(spec: dict[str, Any], name: str, description: str) -> str:
    """A Vega-Lite specification drawn as SVG of the class `name`."""
    text: str = require_renderer().vegalite_to_svg(
        json.dumps(spec), vl_version=_VEGA_LITE, allowed_base_urls=[]
    )
    # The outer tag fixes the size in pixels; here the page does that.
    outer = _SVG.match(text)
    if outer is None:
        raise Fault("the chart renderer gave no SVG drawing")
    head = (
        f'<svg class="{name}" viewBox="{outer[1]}" role="img" aria-label="{escape(description)}">'
    )
    return head + text[outer.end() :]


def spec_of(
    size: Size, height: float, padding: dict[str, int], layers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Layers in the style of the page. height: CSS pixels between the axes."""
    return {
        "width": size.width - padding["left"] - padding["right"],
        "height": height,
        "autosize": "none",
        "padding": padding,
        "background": None,
        "config": {
            "aria": False,
            "view": {"stroke": None},
            "text": {"font": "sans-serif", "fontSize": 13, "color": "var(--ink)"},
            "axis": {
                "labelColor": "var(--muted)",
                "labelFont": "sans-serif",
                "labelFontSize": 12,
                "labelLimit": 0,
                "labelOverlap": False,
                "labelFlush": False,
                "gridColor": "var(--line)",
                "domainColor": "var(--axis)",
                "tickColor": "var(--axis)",
                "title": None,
            },
        },
        "layer": layers,
    }


def _bars(bars: Sequence[Bar], full: float, size: Size) -> dict[str, Any]:
    above = size.labels == 0
    step, thickness = (42, 12) if above else (28, 16)
    top = 22 if above else 6
    padding = {"left": size.labels, "right": size.values, "top": 2, "bottom": 2}
    inner = size.width - size.labels - size.values
    rectangles, texts = [], []
    for row, bar in enumerate(bars):
        y = row * step + top
        for start, stop, lane_top, lane_height, colour in _rectangles(bar, y, thickness):
            # One pixel at least: a small number is not nothing.
            a, b = (inner * max(0.0, min(1.0, edge / full)) if full else 0.0
                    for edge in (start, stop))  # fmt: skip
            if stop > start:
                a = min(a, inner - 1)
                rectangles.append({"x": a, "x2": max(b, a + 1), "y": lane_top,
                                   "y2": lane_top + lane_height,
                                   "colour": f"var({colour})"})  # fmt: skip
        middle = y - 9 if above else y + thickness / 2
        texts.append({"x": -size.labels, "y": middle, "text": cut(bar.label, size.label_chars),
                      "side": "left"})  # fmt: skip
        texts.append({"x": inner + size.values, "y": middle, "text": bar.value, "side": "right"})
    scale_x = {"domain": [0, inner], "nice": False, "zero": False}
    height = len(bars) * step
    scale_y = {"domain": [0, height], "range": [0, height], "nice": False, "zero": False}
    x = {"field": "x", "type": "quantitative", "scale": scale_x, "axis": None}
    y_axis = {"field": "y", "type": "quantitative", "scale": scale_y, "axis": None}
    layers = [
        {
            "data": {"values": rectangles},
            "mark": {"type": "rect"},
            "encoding": {
                "x": x,
                "x2": {"field": "x2"},
                "y": y_axis,
                "y2": {"field": "y2"},
                "color": {"field": "colour", "type": "nominal", "scale": None},
            },
        },
        *(
            {
                "data": {"values": [text for text in texts if text["side"] == side]},
                "mark": {"type": "text", "align": side, "baseline": "middle", "limit": 0},
                "encoding": {"x": x, "y": y_axis, "text": {"field": "text"}},
            }
            for side in ("left", "right")
        ),
    ]
    return spec_of(size, height, padding, layers)


def _rectangles(
    bar: Bar, y: float, thickness: float
) -> list[tuple[float, float, float, float, str]]:
    """Start, stop, top, height and colour of what is drawn in a row."""
    height = thickness / 2 if bar.below else thickness
    found = [(start, stop, y, height, colour) for start, stop, colour in bar.segments]
    last = y + thickness - height
    found += [(start, stop, last, height, colour) for start, stop, colour in bar.below]
    if bar.whisker is not None:
        found.append((*bar.whisker, last + height / 2 - 0.75, 1.5, "--ink"))
    return found


def _histogram(histogram: Histogram, cutoffs: Mapping[str, float], size: Size) -> dict[str, Any]:
    edges = histogram.edges
    stacks = []
    tallest = 0
    for place, (low, high) in enumerate(itertools.pairwise(edges)):
        bottom = 0
        for bucket in (*BUCKETS, NO_BUCKET):
            pages = histogram.pages.get(bucket, (0,) * (len(edges) - 1))[place]
            if pages:
                stacks.append({"x": low, "x2": high, "y": bottom, "y2": bottom + pages,
                               "colour": f"var(--{bucket})"})  # fmt: skip
            bottom += pages
        tallest = max(tallest, bottom)
    low = min([edges[0], *(value for value in cutoffs.values() if value > 0)])
    high = max([edges[-1], *cutoffs.values()])
    padding = {"left": 44, "right": 12, "top": 2 * _GAP + LINE_HEIGHT * len(cutoffs), "bottom": 24}
    height = size.height - padding["top"] - padding["bottom"]
    inner = size.width - padding["left"] - padding["right"]
    scale_x = {"type": "log", "domain": [low, high], "nice": False}
    x = {
        "field": "x",
        "type": "quantitative",
        "scale": scale_x,
        "axis": {"values": _round_numbers(low, high, inner), "format": "~s", "grid": False},
    }
    y = {
        "field": "y",
        "type": "quantitative",
        "scale": {"domain": [0, tallest], "nice": True},
        "axis": {
            "tickCount": 4,
            "tickMinStep": 1,
            "format": ",d" if tallest < 10_000 else "~s",
            "domain": False,
            "ticks": False,
        },
    }
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": stacks},
            "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 0.7},
            "encoding": {
                "x": x,
                "x2": {"field": "x2"},
                "y": y,
                "y2": {"field": "y2"},
                "color": {"field": "colour", "type": "nominal", "scale": None},
            },
        }
    ]
    at = {"x": {"field": "x", "type": "quantitative", "scale": scale_x}}
    for name, value, row, side in _placed(cutoffs, low, high, inner, padding):
        line = {"data": {"values": [{"x": value, "text": name}]}}
        top = -LINE_HEIGHT * row - _GAP
        rule = {"type": "rule", "color": "var(--ink)", "strokeDash": [4, 3],
                "y": top + 2, "y2": height}  # fmt: skip
        text = {"type": "text", "align": side, "y": top + LINE_HEIGHT / 2, "baseline": "middle",
                "dx": -5 if side == "right" else 5, "fontSize": 12, "limit": 0}  # fmt: skip
        layers.append(line | {"mark": rule, "encoding": at})
        layers.append(line | {"mark": text, "encoding": at | {"text": {"field": "text"}}})
    return spec_of(size, height, padding, layers)


def _placed(
    cutoffs: Mapping[str, float], low: float, high: float, inner: int, padding: Mapping[str, int]
) -> list[tuple[str, float, int, str]]:
    """Name, value, row (1 is the lowest) and alignment of each cutoff, which rise.

    A name is "right" (aligned) left of its line. No line passes through another's name: names
    right of their lines step down, names left of their lines step up.
    """
    found: list[tuple[str, float, int, str]] = []
    count = len(cutoffs)
    for number, (name, value) in enumerate(cutoffs.items()):
        place = inner * math.log(value / low) / math.log(high / low)
        needed = _CHARACTER * len(name) + 5
        fits_left = place + padding["left"] >= needed
        fits_right = inner - place + padding["right"] >= needed
        if fits_left and (number < count - 1 or not fits_right):
            found.append((name, value, number + 1, "right"))
        else:
            found.append((name, value, count - number, "left"))
    if [side for *_, side in found] == ["right", "left"]:
        found = [(name, value, 1, side) for name, value, _, side in found]
    return found


def _round_numbers(low: float, high: float, inner: float) -> list[float]:
    """Places for the ticks of a logarithmic axis, as many as stand apart."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found: list[float] = []
    for steps in _TICKS:
        found = [step * 10.0**decade for decade in range(first, last + 1) for step in steps]
        found = [round(value, 6) for value in found if low <= value <= high]
        gaps = [inner * math.log(b / a) / math.log(high / low)
                for a, b in itertools.pairwise(found)]  # fmt: skip
        if min(gaps, default=math.inf) >= _TICK_ROOM:
            break
    return found


def cut(label: str, chars: int) -> str:
    """`label`, or its beginning where it is longer than `chars`."""
    return label if len(label) <= chars else label[: chars - 1] + "…"
