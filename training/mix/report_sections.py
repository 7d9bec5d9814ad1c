"""The charts of a mix's report: losses, weights before and after, alpha by step, the law."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from pipelines.report_charts import SMALL, Bar, bar_chart
from pipelines.report_parts import Chart, Column, Section, Table, counted, visible
from pipelines.report_plots import (
    Dot,
    DotRow,
    Line,
    dot_chart,
    line_chart,
    scatter_chart,
)
from training.mix import comparison
from training.mix.comparison import Estimate, Score, number
from training.mix.results import LawEntry, MixManifest
from training.trace import Trace

_SEED_CHARTS = 5


def warnings(manifest: MixManifest) -> list[str]:
    """What the guards said, and what speaks against the law; each once."""
    doubts = manifest.law.doubts if manifest.law is not None else ()
    said = list(dict.fromkeys(manifest.warnings))
    return said + [doubt for doubt in doubts if not any(line.endswith(doubt) for line in said)]


def loss_charts(manifest: MixManifest, scores: Sequence[Score]) -> tuple[Chart, ...]:
    """Held-out losses by domain, and what they are above the specialists'."""
    if not scores:
        return ()
    labels = tuple(score.label for score in scores)
    losses = [score.losses for score in scores]
    found = [_dots("Held-out loss by domain", "loss in nats", labels, losses)]
    alone = comparison.specialist_losses(manifest.specialists)
    above = [
        {name: Estimate(one.mean - alone[name], one.sd) for name, one in by_name.items()
         if name in alone}
        for by_name in losses
    ]  # fmt: skip
    if above[0]:
        caption = "Excess over a model of that domain alone"
        found.append(_dots(caption, "excess in nats", labels, above))
    return tuple(found)


def _dots(
    caption: str, unit: str, labels: tuple[str, ...], values: Sequence[Mapping[str, Estimate]]
) -> Chart:
    kinds = {"proportional": 0, "uniform": 1}
    rows = [
        DotRow(
            visible(name),
            tuple(
                Dot(by_name[name].mean, by_name[name].sd or 0.0, kinds.get(label, 2))
                for label, by_name in zip(labels, values, strict=True)
            ),
        )
        for name in values[0]
    ]
    many = any(one.sd is not None for by_name in values for one in by_name.values())
    if many:
        caption += ", with the standard deviation over seeds"
    described = f"{caption}. " + "; ".join(
        f"{label}: " + ", ".join(f"{visible(name)} {one.mean:.3f}" for name, one in by_name.items())
        for label, by_name in zip(labels, values, strict=True)
    )
    numbers = Table(
        caption,
        (Column("domain", "name"), *(Column(label, "number") for label in labels)),
        tuple((visible(name), *(number(by_name[name]) for by_name in values))
              for name in values[0]),
    )  # fmt: skip
    return Chart(caption, dot_chart(rows, described, x_title=unit), labels, numbers)


def weights(manifest: MixManifest) -> Section:
    """The mixture before and after."""
    law = manifest.method == "regress"
    before = "proportional mixture" if law else "reference mixture"
    bars, rows = [], []
    for domain in manifest.domains:
        found = number(Estimate(domain.weight, domain.spread))
        whisker = None
        if domain.spread:
            whisker = (domain.weight - domain.spread, domain.weight + domain.spread)
        bars.append(
            Bar(
                visible(domain.name),
                f"{domain.reference:.3f} → {domain.weight:.3f}",
                ((0, domain.reference, "--all"),),
                ((0, domain.weight, "--dot-2"),),
                whisker,
            )
        )
        rows.append((visible(domain.name), f"{domain.reference:.4f}", found,
                     f"{_ratio(domain.weight, domain.reference)}"))  # fmt: skip
    top = max(
        edge
        for domain in manifest.domains
        for edge in (domain.reference, domain.weight + (domain.spread or 0))
    )
    caption = f"Weights of the domains: {before}, and the one found"
    described = f"{caption}. " + ", ".join(f"{bar.label} {bar.value}" for bar in bars)
    columns = (Column("domain", "name"), Column("reference", "number"), Column("found", "number"),
               Column("found / reference", "number"))  # fmt: skip
    over = "the law's bootstrap" if law else "seeds"
    intro = []
    if any(domain.spread is not None for domain in manifest.domains):
        intro.append(f"The thin line is the standard deviation over {over}, to each side.")
    return Section(
        "weights",
        "Weights",
        tuple(intro),
        charts=(
            Chart(
                caption,
                bar_chart(bars, described, full=min(1.0, top)),
                ("reference", "found"),
                Table(caption, columns, tuple(rows)),
            ),
        ),
    )


def _ratio(weight: float, reference: float) -> str:
    return f"{weight / reference:.2f}" if reference else "-"


def found_by(manifest: MixManifest, traces: Mapping[str, Trace]) -> list[Section]:
    """How the mixture was found: the proxies' weights and the rounds, or the law."""
    if manifest.law is not None:
        return [_law(manifest.law)]
    return [*_trace(manifest, traces), _rounds(manifest)]


def _trace(manifest: MixManifest, traces: Mapping[str, Trace]) -> list[Section]:
    if not traces:
        return []
    means = {seed: running_mean(trace) for seed, trace in traces.items()}
    top = _top(list(means.values()))
    shown = dict(list(means.items())[:_SEED_CHARTS])
    charts = []
    for seed, mean in shown.items():
        last = mean[-1]
        lines = [
            Line(visible(name), _points(mean[:, place]), place)
            for place, name in enumerate(manifest.names)
        ]
        caption = f"Seed {seed}: mean of alpha up to each step"
        ends = ", ".join(f"{line.name} {last[place]:.3f}" for place, line in enumerate(lines))
        described = f"{caption}. At the last of {len(mean):,} steps: {ends}."
        charts.append(Chart(caption, line_chart(lines, described, x_title="step", top=top)))
    steps = max(len(mean) for mean in means.values())
    highest = min(1.0, 1.05 * max(float(trace.alpha.max()) for trace in traces.values()))
    intro = [
        f"Round {manifest.rounds[-1].number}, the last one: {counted(steps, 'step')} of the proxy, "
        f"{counted(len(traces), 'seed')}. What is used is the mean over all steps, where a line "
        "ends; what is above the axis in the first steps is drawn at its top.",
        "By domain: alpha at each step (thin; between the points shown the lowest and the highest "
        "values stay) and its mean so far, one line for each seed.",
    ]
    if len(means) > len(shown):
        intro.insert(1, f"Charts of the first {len(shown)} of {len(means)} seeds.")
    return [
        Section(
            "trace",
            "Alpha by step",
            tuple(intro),
            charts=tuple(charts),
            small=tuple(
                _domain_chart(visible(name), place, traces, means, highest)
                for place, name in enumerate(manifest.names)
            ),
        )
    ]


def _domain_chart(
    name: str,
    place: int,
    traces: Mapping[str, Trace],
    means: Mapping[str, np.ndarray],
    top: float,
) -> Chart:
    lines = [Line("", _points(trace.alpha[:, place]), faint=True) for trace in traces.values()]
    lines += [Line("", _points(mean[:, place]), place) for mean in means.values()]
    ends = ", ".join(f"seed {seed} {mean[-1, place]:.3f}" for seed, mean in means.items())
    described = f"Alpha of {name} by step. Mean over all steps: {ends}."
    return Chart(name, line_chart(lines, described, x_title="step", top=top, sizes=[SMALL]))


def running_mean(trace: Trace) -> np.ndarray:
    """Mean of alpha over the steps so far, without skipped ones: float64 (steps, domains)."""
    done = ~np.isnan(trace.excess).any(axis=1, keepdims=True)
    sums = np.cumsum(np.where(done, trace.alpha, 0.0), axis=0)
    counts = np.cumsum(done, axis=0)
    uniform = 1 / len(trace.domains)  # alpha_0, until a step is done
    return np.where(counts, sums / np.maximum(counts, 1), uniform)


def _points(values: np.ndarray) -> tuple[tuple[float, float], ...]:
    return tuple((float(step), float(value)) for step, value in enumerate(values, 1))


def _top(means: Sequence[np.ndarray]) -> float:
    """Where the axis ends: above all means but those of the first steps, which are of few."""
    settled = max(float(mean[len(mean) // 20 :].max()) for mean in means)
    return min(1.0, 1.1 * settled)


def _rounds(manifest: MixManifest) -> Section:
    rounds = manifest.rounds
    rows = tuple(
        (
            str(entry.number),
            f"{entry.change:.4f}",
            visible(
                max(entry.mean, key=lambda name: abs(entry.mean[name] - entry.reference[name]))
            ),
            "-" if entry.spread is None else f"{entry.spread:.4f}",
        )
        for entry in rounds
    )
    columns = (
        Column("round", "name"), Column("largest change of a weight", "number"),
        Column("in the domain", "name"), Column("largest spread over seeds", "number"),
    )  # fmt: skip
    charts = []
    if len(rounds) > 1:
        lines = [
            Line(
                visible(name),
                ((0.0, rounds[0].reference[name]),
                 *((float(entry.number), entry.mean[name]) for entry in rounds)),
                place,
            )
            for place, name in enumerate(manifest.names)
        ]  # fmt: skip
        caption = "Weights after each round, mean over seeds (0: the first reference)"
        top = min(1.0, 1.1 * max(y for line in lines for _, y in line.points))
        described = f"{caption}. " + ", ".join(
            f"{line.name} {line.points[-1][1]:.3f}" for line in lines
        )
        charts.append(Chart(caption, line_chart(lines, described, x_title="round", top=top)))
    last = rounds[-1]
    seeds = list(last.weights)
    by_seed = Table(
        f"Weights of round {last.number} by seed",
        (Column("domain", "name"), Column("reference", "number"),
         *(Column(f"seed {seed}", "number") for seed in seeds), Column("mean", "number")),
        tuple(
            (visible(name), f"{last.reference[name]:.4f}",
             *(f"{last.weights[seed][name]:.4f}" for seed in seeds), f"{last.mean[name]:.4f}")
            for name in manifest.names
        ),
        folded=True,
    )  # fmt: skip
    intro = (f"Ended: {visible(manifest.stopped)}",) if manifest.stopped else ()
    return Section(
        "rounds",
        "Rounds",
        intro,
        charts=tuple(charts),
        tables=(Table("Rounds", columns, rows), by_seed),
    )


def _law(law: LawEntry) -> Section:
    charts = []
    if law.scores:
        charts.append(_scores(law))
    if law.observed:
        pairs = list(zip(law.observed, law.fitted, strict=True))
        caption = "Loss that the law predicts, over the one that was observed"
        off = statistics.fmean(abs(one - other) for one, other in pairs)
        described = f"{caption}, {len(pairs)} runs, mean difference {off:.3f}"
        drawn = scatter_chart(pairs, described, x_title="observed, nats", y_title="predicted, nats")
        charts.append(Chart(caption, drawn))
    facts = [("regressor", visible(law.regressor)), ("lowered", visible(law.target))]
    if law.predicted is not None:
        predicted = number(Estimate(law.predicted, law.predicted_spread))
        facts.append(("predicted at the best mixture", predicted))
    columns = (Column("what", "name"), Column("value", "name"))
    intro = [f"Doubt: {visible(doubt)}" for doubt in law.doubts]
    intro = intro or ["Nothing speaks against the fit."]
    intro += [visible(note) for note in law.notes]
    return Section(
        "law",
        "Mixing law",
        tuple(intro),
        tuple(charts),
        tables=(Table("Law", columns, tuple(facts)),),
    )


def _scores(law: LawEntry) -> Chart:
    """Each regressor's rank correlation, the best first; one below 0 has no bar."""
    ranks = sorted(law.scores.items(), key=lambda item: (item[1] is None, -(item[1] or 0.0)))
    bars = [
        Bar(
            visible(name) + (", chosen" if name == law.regressor else ""),
            "none" if value is None else f"{value:.3f}",
            ((0, max(0.0, value or 0.0), "--dot-2" if name == law.regressor else "--all"),),
        )
        for name, value in ranks
    ]
    caption = "Rank correlation of predicted and observed, in cross-validation (Spearman)"
    described = f"{caption}. " + ", ".join(f"{bar.label} {bar.value}" for bar in bars)
    return Chart(caption, bar_chart(bars, described, full=1.0))
