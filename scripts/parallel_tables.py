"""What `bench_parallel` prints: Markdown tables of its parts, and the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from scripts.parallel_cuts import Bubble, CutRow
from scripts.parallel_ranks import Measured
from scripts.parallel_traffic import Counted

UNIFORM, OPTIMAL = "uniform", "optimal"
_SAVED = 0.20
_PREDICTED_WITHIN = 0.10
_BYTES_WITHIN = 0.02
_BUBBLE_WITHIN = 0.03
_LOSS_WITHIN = 1e-5
_AS_FAST = 1.02
"""A step that is so many times another is not slower: the clock knows no better."""


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cuts_table(rows: Sequence[CutRow]) -> str:
    """One row a cut: predicted and measured step, and that against the uniform cut's."""
    heads = ["model", "units", "cut", "units by stage", "stages, ms", "predicted, ms"]
    heads += ["measured, ms", "median, ms", "measured / predicted", "against uniform"]
    return markdown(heads, [_cut_cells(row, rows) for row in rows])


def _cut_cells(row: CutRow, rows: Sequence[CutRow]) -> list[str]:
    cells = [row.model, row.units, row.cut]
    if row.measured is None:
        return [*cells, f"none: {row.failed}", *[""] * 6]
    least_s = row.measured.least_s
    return [
        *cells,
        _sizes(row.bounds),
        " + ".join(f"{1e3 * one:.1f}" for one in row.stage_s),
        f"{1e3 * row.predicted_s:.0f}",
        f"{1e3 * least_s:.0f}",
        f"{1e3 * row.measured.median_s:.0f}",
        f"{least_s / row.predicted_s:.3f}",
        f"{least_s / _least_s(rows, row.model, row.units, UNIFORM) - 1:+.1%}",
    ]


def _sizes(bounds: Sequence[int]) -> str:
    return " + ".join(str(end - begin) for begin, end in pairwise(bounds))


def _least_s(rows: Sequence[CutRow], model: str, units: str, cut: str) -> float:
    return next(
        row.measured.least_s
        for row in rows
        if (row.model, row.units, row.cut) == (model, units, cut) and row.measured is not None
    )


def cut_targets(rows: Sequence[CutRow], losses: Mapping[str, float]) -> list[str]:
    """What was aimed at with units that sleep, and the exact check of the real ones.

    losses: of each model without a pipeline.
    """
    lines = []
    asleep = [row for row in rows if row.units == "sleep" and row.measured is not None]
    for model in dict.fromkeys(row.model for row in asleep):
        best_s = _least_s(rows, model, "sleep", OPTIMAL)
        saved = 1 - best_s / _least_s(rows, model, "sleep", UNIFORM)
        lines.append(
            target(saved >= _SAVED, f"{model}: optimal {saved:.1%} under uniform ({_SAVED:.0%})")
        )
        for row in asleep:
            if row.model == model and row.cut.startswith("tree") and row.measured:
                ratio = best_s / row.measured.least_s
                text = f"{model}: optimal / {row.cut} {ratio:.3f} (at most {_AS_FAST})"
                lines.append(target(ratio <= _AS_FAST, text))
    if asleep:
        off = max(abs(row.measured.least_s / row.predicted_s - 1) for row in asleep if row.measured)
        text = f"largest difference from the prediction {off:.1%} ({_PREDICTED_WITHIN:.0%})"
        lines.append(target(off <= _PREDICTED_WITHIN, text))
    for row in rows:
        if row.units == "sleep" and row.failed:
            lines.append(f"- not compared: {row.model}: no cut by {row.cut}: {row.failed}")
    differences = [
        abs(row.measured.loss / losses[row.model] - 1)
        for row in rows
        if row.units == "real" and row.measured is not None
    ]
    if differences:
        text = f"losses against one process: largest difference {max(differences):.1e}"
        lines.append(target(max(differences) <= _LOSS_WITHIN, f"{text} ({_LOSS_WITHIN:.0e})"))
    return lines


def bubble_table(found: Bubble) -> str:
    """One row."""
    heads = ["ranks", "microbatches", "one process, ms", "pipeline, ms", "ratio", "formula"]
    cells = [f"{1e3 * found.alone_s:.0f}", f"{1e3 * found.pipeline_s:.0f}"]
    cells += [f"{found.ratio:.3f}", f"{found.formula:.3f}"]
    return markdown(heads, [[str(found.ranks), str(found.microbatches), *cells]])


def bubble_targets(found: Bubble) -> list[str]:
    """The ratio is the formula's."""
    off = abs(found.ratio - found.formula)
    text = f"bubble ratio {found.ratio:.3f}, {off:.3f} from {found.formula:.3f}"
    return [target(off <= _BUBBLE_WITHIN, f"{text} ({_BUBBLE_WITHIN})")]


def traffic_table(found: Sequence[Counted]) -> str:
    """One row a method; the first one is what the others are compared with."""
    heads = ["method", "formula", "ring, MB", "on gloo, MB", "counted, MB", "counted / ring"]
    heads += ["counted / gloo", f"against {found[0].method}"]
    rows = []
    for one in found:
        sizes = [one.ring_bytes, one.gloo_bytes, one.counted_bytes]
        ratios = [one.counted_bytes / size for size in (one.ring_bytes, one.gloo_bytes)]
        ratios.append(one.counted_bytes / found[0].counted_bytes)
        cells = [f"{size / 1e6:.2f}" for size in sizes] + [f"{ratio:.3f}" for ratio in ratios]
        rows.append([one.method, one.formula, *cells])
    return markdown(heads, rows)


def traffic_targets(found: Sequence[Counted]) -> list[str]:
    """Bytes are the formula's, where gloo does what the formula says."""
    lines = []
    for one in found:
        if one.ring_bytes == one.gloo_bytes:
            off = abs(one.counted_bytes / one.ring_bytes - 1)
            text = f"{one.method}: {off:.1%} from the formula ({_BYTES_WITHIN:.0%})"
            lines.append(target(off <= _BYTES_WITHIN, text))
    return lines


PeerRow = tuple[str, tuple[int, ...], Measured]
"""Program and its way to cut, bounds, figures."""


def peer_table(rows: Sequence[PeerRow]) -> str:
    """One row a way to cut; the last one is ours that the others are compared with."""
    heads = ["program", "units by stage", "step, ms", "median, ms", "loss of the first step"]
    heads.append(f"against {rows[-1][0]}")
    best_s = rows[-1][2].least_s
    cells = []
    for name, bounds, figures in rows:
        times = [f"{1e3 * figures.least_s:.0f}", f"{1e3 * figures.median_s:.0f}"]
        ratio = f"{figures.least_s / best_s:.2f}"
        cells.append([name, _sizes(bounds), *times, f"{figures.loss:.5f}", ratio])
    return markdown(heads, cells)


def peer_targets(rows: Sequence[PeerRow]) -> list[str]:
    """Ours is faster, on the same losses."""
    best = rows[-1][2]
    lines = []
    for name, _, figures in rows[:-1]:
        ratio = figures.least_s / best.least_s
        lines.append(target(ratio > 1, f"{name} / {rows[-1][0]}: {ratio:.2f} (above 1)"))
    off = max(abs(figures.loss / best.loss - 1) for _, _, figures in rows)
    text = f"losses of both programs: largest difference {off:.1e} ({_LOSS_WITHIN:.0e})"
    lines.append(target(off <= _LOSS_WITHIN, text))
    return lines


def target(reached: bool, text: str) -> str:
    """One line of the list of targets."""
    return f"- {'reached' if reached else 'missed'}: {text}"
