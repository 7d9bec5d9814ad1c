"""Mixtures side by side: held-out loss by domain, and the excess over models of one domain.

The excess of a mixture in a domain is its loss there minus the loss of the specialist, a model of
the same size that saw nothing but that domain for as many steps (Xie et al. 2023, section 3.3:
what DoReMi lowers is the worst excess). Means and sample standard deviations are over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from training.mix.results import BASELINES, MixManifest, RunEntry

Measure = Literal["mean_loss", "worst_excess"]
MEASURES: dict[Measure, str] = {
    "mean_loss": "mean held-out loss",
    "worst_excess": "worst domain's excess",
}

METHODS = {"doremi": "DoReMi", "regress": "the law's mixture"}


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds. sd: sample standard deviation; None for one seed."""

    mean: float
    sd: float | None


@dataclass(frozen=True)
class Score:
    """One mixture. values: of each measure by seed, for differences between mixtures.
    worst: the domain with the largest excess, its losses averaged over seeds."""

    label: str
    seeds: tuple[int, ...]
    losses: dict[str, Estimate]
    mean_loss: Estimate
    worst_excess: Estimate | None
    mean_excess: Estimate | None
    worst: str | None
    values: dict[Measure, dict[int, float]]


@dataclass(frozen=True)
class Verdict:
    """The found mixture less a baseline, over `seeds` that both have: below 0 it is better."""

    measure: Measure
    baseline: str
    difference: Estimate
    seeds: int

    @property
    def seen(self) -> bool | None:
        """Whether the difference is larger than its spread; None for one seed."""
        if self.difference.sd is None:
            return None
        return abs(self.difference.mean) > self.difference.sd


def labels(manifest: MixManifest) -> tuple[str, ...]:
    """The mixtures that are compared, the found one last."""
    there = {run.label for run in manifest.runs}
    return tuple(label for label in (*BASELINES, manifest.method) if label in there)


def specialist_losses(specialists: Iterable[RunEntry]) -> dict[str, float]:
    """Loss of each domain under the model of that domain alone, mean over its seeds."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for run in specialists:
        name = max(run.weights, key=run.weights.__getitem__)
        if name in run.losses:
            found[name].append(run.losses[name])
    return {name: statistics.fmean(losses) for name, losses in found.items()}


def excesses(losses: Mapping[str, float], specialists: Mapping[str, float]) -> dict[str, float]:
    """Loss above the specialist's, of the domains that have one."""
    return {name: loss - specialists[name] for name, loss in losses.items() if name in specialists}


def scores(manifest: MixManifest) -> tuple[Score, ...]:
    """One for each of `labels`, over the domains in which every compared run has a loss."""
    wanted = labels(manifest)
    compared = [run for run in manifest.runs if run.label in wanted]
    names = [name for name in manifest.names if all(name in run.losses for run in compared)]
    if not names:
        return ()
    alone = specialist_losses(manifest.specialists)
    return tuple(
        _score(label, [run for run in compared if run.label == label], names, alone)
        for label in wanted
    )


def _score(
    label: str, runs: Sequence[RunEntry], names: Sequence[str], alone: Mapping[str, float]
) -> Score:
    losses = {run.seed: {name: run.losses[name] for name in names} for run in runs}
    above = {seed: excesses(by_name, alone) for seed, by_name in losses.items()}
    means = {seed: statistics.fmean(by_name.values()) for seed, by_name in losses.items()}
    measured = any(above.values())
    worst_by_seed = {seed: max(found.values()) for seed, found in above.items() if found}
    over_seeds = {
        name: statistics.fmean(found[name] for found in above.values())
        for name in names
        if name in alone
    }
    return Score(
        label=label,
        seeds=tuple(losses),
        losses={name: estimate(by_name[name] for by_name in losses.values()) for name in names},
        mean_loss=estimate(means.values()),
        worst_excess=estimate(worst_by_seed.values()) if measured else None,
        mean_excess=(
            estimate(statistics.fmean(found.values()) for found in above.values())
            if measured
            else None
        ),
        worst=max(over_seeds, key=over_seeds.__getitem__) if over_seeds else None,
        values={"mean_loss": means, "worst_excess": worst_by_seed},
    )


def verdicts(manifest: MixManifest, found: Sequence[Score]) -> tuple[Verdict, ...]:
    """The found mixture against each baseline, by the seeds that both have."""
    by_label = {score.label: score for score in found}
    ours = by_label.get(manifest.method)
    if ours is None:
        return ()
    results = []
    for measure in MEASURES:
        for baseline in BASELINES:
            theirs = by_label[baseline].values[measure] if baseline in by_label else {}
            pairs = [
                value - theirs[seed]
                for seed, value in ours.values[measure].items()
                if seed in theirs
            ]
            if pairs:
                results.append(Verdict(measure, baseline, estimate(pairs), len(pairs)))
    return tuple(results)


def sentence(verdict: Verdict, label: str) -> str:
    """ "mean held-out loss: doremi 0.123 ± 0.010 below uniform: more than the seed spread"."""
    size, sd = abs(verdict.difference.mean), verdict.difference.sd
    side = "below" if verdict.difference.mean < 0 else "above"
    text = (
        f"{MEASURES[verdict.measure]}: {label} is {number(Estimate(size, sd))} {side} "
        f"{verdict.baseline}: "
    )
    if verdict.seen is None:
        return text + "one seed, so whether that is more than chance is not known"
    if not verdict.seen:
        return text + "inside the seed spread, no difference is shown"
    return text + ("better" if side == "below" else "worse") + " by more than the seed spread"


def chance(seeds: int) -> float:
    """Probability that the mean of `seeds` differences is larger than their sample standard
    deviation, although there is no true one: that of |t| > sqrt(seeds), for Student's t with
    seeds - 1 degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).

    >>> f"{chance(2):.3f} {chance(3):.3f} {chance(5):.3f}"
    '0.392 0.225 0.089'
    """
    freedom = seeds - 1
    odd = freedom % 2
    angle = math.atan(math.sqrt(seeds / freedom))
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= number / (number + 1) * math.cos(angle) ** 2
    inside = total * math.sin(angle)
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


def conclusion(manifest: MixManifest, found: Sequence[Verdict]) -> str:
    """Whether the mixture is worth having, in one sentence."""
    label = METHODS[manifest.method]
    start = label[0].upper() + label[1:]
    if not found:
        return f"There is nothing to compare {label} with: no held-out loss of all mixtures."
    baselines = tuple(dict.fromkeys(verdict.baseline for verdict in found))
    against = " and ".join(baselines)
    if any(verdict.seen is None for verdict in found):
        return (
            f"One seed: whether {label} beats {against} is not known. Give mix.seeds two or more."
        )
    better = [verdict for verdict in found if verdict.seen and verdict.difference.mean < 0]
    worse = [verdict for verdict in found if verdict.seen and verdict.difference.mean > 0]
    if len(better) == len(found):
        return f"{start} beats {against} by more than the seed spread."
    if not better:
        tail = f"; it is worse in {_listed(worse)}" if worse else ""
        return (
            f"{start} beats neither {' nor '.join(baselines)} by more than the seed spread{tail}."
        )
    tail = f"; worse in {_listed(worse)}" if worse else ""
    return f"{start} is better by more than the seed spread only in {_listed(better)}{tail}."


def estimate(values: Iterable[float]) -> Estimate:
    """Mean and sample standard deviation."""
    found = list(values)
    sd = statistics.stdev(found) if len(found) > 1 else None
    return Estimate(statistics.fmean(found), sd)


def number(value: Estimate | None, digits: int = 3) -> str:
    """ "2.345 ± 0.012"; "-" for what is not known."""
    if value is None:
        return "-"
    text = f"{value.mean:.{digits}f}"
    return text if value.sd is None else f"{text} ± {value.sd:.{digits}f}"


def _listed(found: Sequence[Verdict]) -> str:
    by_measure: defaultdict[Measure, list[str]] = defaultdict(list)
    for verdict in found:
        by_measure[verdict.measure].append(verdict.baseline)
    return ", ".join(
        f"{MEASURES[measure]} (against {' and '.join(baselines)})"
        for measure, baselines in by_measure.items()
    )
