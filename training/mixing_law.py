"""A mixing law: from finished small runs to the mixture that is predicted to lose least.

The regressors of `training.mixing_regressors` are compared by the rank correlation of their
cross-validated predictions with the losses; the best one (the straight line is only a control) is
fitted to all runs and searched for its lowest mixture. Each target has a law of its own, and
'mean' and 'worst' are taken of what these predict: one exponential for a mean of losses would be
lowest with all weight on one domain, the sum of several is not. A bootstrap over the runs tells
how far the found mixture can be trusted; `Law.doubts` says when it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.errors import UserError
from training.mixing_regressors import (
    REGRESSORS,
    Fitted,
    Regressor,
    check_lightgbm,
    fold_numbers,
    has_lightgbm,
)
from training.mixing_search import Descent, Search, TreeSearch
from training.run_table import (
    REGMIX_SPLITS,
    RunTable,
    draw_mixtures,
    parameters,
    read_regmix,
    read_table,
    write_table,
)

__all__ = [
    "REGMIX_SPLITS",
    "Law",
    "RunTable",
    "draw_mixtures",
    "fit",
    "parameters",
    "read_regmix",
    "read_table",
    "spearman",
    "write_table",
]

CONTROL = "linear"
TRUSTED_CORRELATION = 0.7
RUNS_PER_PARAMETER = 3
_RESAMPLED = 1_000


_Reduce = Callable[[np.ndarray], np.ndarray]
"""One loss (n,) from those of the targets (n, m)."""


@dataclass(frozen=True)
class _Model:
    """The laws of the targets, and what is made of their predictions."""

    parts: tuple[Fitted, ...]
    reduce: _Reduce

    def predict(self, mixtures: np.ndarray) -> np.ndarray:
        return self.reduce(np.column_stack([part.predict(mixtures) for part in self.parts]))

    def again(self, mixtures: np.ndarray, losses: np.ndarray) -> _Model:
        pairs = zip(self.parts, losses.T, strict=True)
        return _Model(tuple(part.again(mixtures, each) for part, each in pairs), self.reduce)


@dataclass(frozen=True)
class Law:
    """A fitted law. Losses are of `target`: 'mean' or 'worst' over the table's, or one's name.

    scores: cross-validated Spearman correlation of each regressor; best: (k,) mixture of least
    predicted loss; spread: (k,) its standard deviation over the bootstrap; predicted: loss at
    `best`, with its standard deviation; observed and fitted: (n,) the runs' losses and what the
    chosen regressor predicted for them without having seen them; doubts: why the fit cannot be
    trusted, empty when nothing speaks against it; notes: what was left out.
    """

    domains: tuple[str, ...]
    target: str
    regressor: str
    scores: dict[str, float]
    best: np.ndarray
    spread: np.ndarray
    predicted: float
    predicted_spread: float
    observed: np.ndarray
    fitted: np.ndarray
    doubts: tuple[str, ...]
    notes: tuple[str, ...]
    model: _Model = field(repr=False)

    def predict(self, mixtures: np.ndarray) -> np.ndarray:
        """Loss (n,) of `mixtures` (n, k)."""
        return self.model.predict(np.atleast_2d(np.asarray(mixtures, np.float64)))

    def to_json(self) -> dict[str, Any]:
        """Plain values for a manifest."""
        return {
            "domains": list(self.domains),
            "target": self.target,
            "regressor": self.regressor,
            "scores": dict(self.scores),
            "best": self.best.tolist(),
            "spread": self.spread.tolist(),
            "predicted": self.predicted,
            "predicted_spread": self.predicted_spread,
            "observed": self.observed.tolist(),
            "fitted": self.fitted.tolist(),
            "doubts": list(self.doubts),
            "notes": list(self.notes),
        }


def fit(
    table: RunTable,
    *,
    target: str = "mean",
    regressor: str = "auto",
    folds: int = 5,
    bootstrap: int = 50,
    seed: int = 0,
    limits: np.ndarray | Sequence[float] | None = None,
) -> Law:
    """Fit a law to `table` and find its best mixture.

    regressor: 'auto' or a name in `REGRESSORS`; folds: of the cross-validation; bootstrap: refits
    that give the spread; limits: (k,) highest weight of each domain. The same seed gives the same
    law. Raises UserError.
    """
    columns, reduce = _target(table, target)
    highest = _limits(table, limits)
    table.check_runs()
    if not 2 <= folds <= len(table.mixtures):
        raise UserError(
            f"'{folds}' folds for {len(table.mixtures)} runs: give 2 to {len(table.mixtures)}"
        )
    if bootstrap < 2:
        raise UserError(f"'{bootstrap}' refits of the bootstrap: give 2 or more, as 50")
    losses, owns = table.losses[:, columns], _owns(table, columns)
    observed = reduce(losses)
    if np.ptp(observed) == 0:
        raise UserError(f"the loss '{target}' is '{observed[0]:g}' in all runs: nothing to fit")
    names, notes = _regressors(regressor)
    fits = {name: _Fit(REGRESSORS[name], owns, reduce, seed) for name in names}
    fold = fold_numbers(len(losses), folds, seed)
    held_out = {name: _cross_validated(fits[name], table.mixtures, losses, fold) for name in names}
    scores = {name: spearman(held_out[name], observed) for name in names}
    chosen = regressor
    if regressor == "auto":
        chosen = max((name for name in names if name != CONTROL), key=scores.__getitem__)
    model = fits[chosen](table.mixtures, losses)
    search: Search
    if chosen == "lightgbm":
        search = TreeSearch(table.mixtures, highest, seed)
    else:
        search = Descent(table.mixtures, highest, edges=target == "worst")
    best = search.best(model.predict)
    refits = _refit(model, search, table.mixtures, losses, best=best, count=bootstrap, seed=seed)
    doubts = [
        *_doubts_of_ranks(held_out[chosen], observed, chosen, scores, seed),
        *_doubts_of_runs(table, best),
        *refits.doubts(table, best, float(observed.min() - model.predict(best[None])[0])),
    ]
    return Law(
        domains=table.domains,
        target=target,
        regressor=chosen,
        scores=scores,
        best=best,
        spread=refits.mixtures.std(0, ddof=1),
        predicted=float(model.predict(best[None])[0]),
        predicted_spread=float(refits.at_best.std(ddof=1)),
        observed=observed,
        fitted=held_out[chosen],
        doubts=tuple(doubts),
        notes=tuple(notes),
        model=model,
    )


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation; values that are equal share their mean rank.

    0 when one of them is the same everywhere.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 8.0, 27.0]))
    1.0
    """
    one, other = _ranks(first), _ranks(second)
    scale = np.sqrt((one @ one) * (other @ other))
    return float(np.clip(one @ other / scale, -1.0, 1.0)) if scale > 0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks (n,), less their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return np.asarray(ranks - ranks.mean())


def _target(table: RunTable, target: str) -> tuple[list[int], _Reduce]:
    """Columns of the losses that count, and how one is made of them."""
    everything = list(range(len(table.targets)))
    if target in table.targets:
        return [table.targets.index(target)], _mean
    if target in ("mean", "worst"):
        return everything, _mean if target == "mean" else _worst
    raise UserError(
        f"no loss '{target}' in the table of runs: choose mean, worst, {', '.join(table.targets)}"
    )


def _mean(losses: np.ndarray) -> np.ndarray:
    return np.asarray(losses.mean(1))


def _worst(losses: np.ndarray) -> np.ndarray:
    return np.asarray(losses.max(1))


def _owns(table: RunTable, columns: Sequence[int]) -> list[int | None]:
    names = [table.targets[column] for column in columns]
    return [table.domains.index(name) if name in table.domains else None for name in names]


def _limits(table: RunTable, limits: np.ndarray | Sequence[float] | None) -> np.ndarray:
    count = len(table.domains)
    highest = np.ones(count) if limits is None else np.asarray(limits, np.float64)
    if highest.shape != (count,) or not (highest >= 0).all() or highest.sum() < 1:
        raise UserError(
            f"the limits '{highest.tolist()}' leave no mixture: give one for each of the {count} "
            "domains, 0 or more, that sum to 1 or more"
        )
    return np.minimum(highest, 1.0)


def _regressors(wanted: str) -> tuple[list[str], list[str]]:
    """Those to compare, and notes on those left out."""
    if wanted not in ("auto", *REGRESSORS):
        raise UserError(f"no regressor '{wanted}': choose auto, {', '.join(REGRESSORS)}")
    if has_lightgbm():
        return list(REGRESSORS), []
    if wanted == "lightgbm":
        check_lightgbm()
    note = "LightGBM is not installed, so it was not compared: pip install 'gristmill[mix]'"
    return [name for name in REGRESSORS if name != "lightgbm"], [note]


@dataclass(frozen=True)
class _Fit:
    """Fits one kind of regressor to all targets. owns: the domain that each is the loss of."""

    regressor: Regressor
    owns: Sequence[int | None]
    reduce: _Reduce
    seed: int

    def __call__(self, mixtures: np.ndarray, losses: np.ndarray) -> _Model:
        pairs = zip(losses.T, self.owns, strict=True)
        parts = [self.regressor(mixtures, each, own, self.seed) for each, own in pairs]
        return _Model(tuple(parts), self.reduce)


def _cross_validated(
    fit_to: _Fit, mixtures: np.ndarray, losses: np.ndarray, fold: np.ndarray
) -> np.ndarray:
    """Prediction for each run by a fit to the other folds, penalty and all: (n,)."""
    found = np.empty(len(mixtures))
    for number in range(fold.max() + 1):
        rest = fold != number
        found[~rest] = fit_to(mixtures[rest], losses[rest]).predict(mixtures[~rest])
    return found


@dataclass(frozen=True)
class _Bootstrap:
    """Refits to runs drawn with replacement. mixtures: (b, k) the best of each; at_best: (b,) its
    loss at the best mixture of all runs."""

    mixtures: np.ndarray
    at_best: np.ndarray

    def doubts(self, table: RunTable, best: np.ndarray, gain: float) -> list[str]:
        """What the spread speaks against. gain: of the best mixture over the best run."""
        found = []
        spread = float(np.sqrt(self.mixtures.var(0, ddof=1).sum()))
        plain = {
            "uniform mixture": np.full(len(best), 1 / len(best)),
            "runs' mean mixture": table.mixtures.mean(0),
        }
        for name, mixture in plain.items():
            distance = float(np.linalg.norm(best - mixture))
            if spread >= distance:
                found.append(
                    f"the best mixture cannot be told from the {name}: it is {distance:.3f} away, "
                    f"and its own spread over the bootstrap is {spread:.3f}"
                )
        noise = float(self.at_best.std(ddof=1))
        if gain < noise:
            found.append(
                f"the predicted gain over the best run seen, {gain:.4f}, is smaller than the "
                f"spread of the prediction, {noise:.4f}"
            )
        return found


def _refit(
    model: _Model,
    search: Search,
    mixtures: np.ndarray,
    losses: np.ndarray,
    *,
    best: np.ndarray,
    count: int,
    seed: int,
) -> _Bootstrap:
    """`count` refits of `model`, whose best mixture is `best`."""
    random = np.random.default_rng((seed, count))
    found, at_best = [], []
    for _ in range(count):
        drawn = random.integers(len(mixtures), size=len(mixtures))
        refit = model.again(mixtures[drawn], losses[drawn])
        found.append(search.best(refit.predict, best))
        at_best.append(refit.predict(best[None])[0])
    return _Bootstrap(np.array(found), np.array(at_best))


def _doubts_of_ranks(
    predicted: np.ndarray, observed: np.ndarray, chosen: str, scores: dict[str, float], seed: int
) -> list[str]:
    found = []
    score = scores[chosen]
    random = np.random.default_rng(seed)
    draws = random.integers(len(observed), size=(_RESAMPLED, len(observed)))
    resampled = [spearman(predicted[drawn], observed[drawn]) for drawn in draws]
    low, high = np.quantile(resampled, (0.025, 0.975))
    if score < TRUSTED_CORRELATION:
        found.append(
            f"the cross-validated rank correlation of '{chosen}' is {score:.2f}, below "
            f"{TRUSTED_CORRELATION}"
        )
    if low <= 0:
        found.append(
            f"the rank correlation may be none: its 95 % interval is {low:.2f} to {high:.2f}"
        )
    if chosen != CONTROL and scores[CONTROL] > score:
        found.append(
            f"a straight line ranks the runs better ({scores[CONTROL]:.3f}) than '{chosen}' "
            f"({score:.3f})"
        )
    return found


def _doubts_of_runs(table: RunTable, best: np.ndarray) -> list[str]:
    found = []
    runs, wanted = len(table.mixtures), RUNS_PER_PARAMETER * table.parameters
    if runs < wanted:
        found.append(
            f"{runs} runs are few for a law with {table.parameters} parameters: {wanted} or more "
            "are wanted"
        )
    between = np.abs(table.mixtures[:, None] - table.mixtures).sum(2) / 2
    np.fill_diagonal(between, np.inf)
    usual = float(np.quantile(between.min(1), 0.95))
    distance = float(np.abs(table.mixtures - best).sum(1).min() / 2)
    if distance > usual:
        found.append(
            f"the best mixture is far from every run: {distance:.2f} of its weight differs from "
            f"the nearest one, where 95 % of the runs have another within {usual:.2f}"
        )
    return found
