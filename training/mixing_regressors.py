"""What predicts a held-out loss from a mixture: four regressors behind one interface.

- exponential: c + K exp(t.r), the mixing law of Ye et al. 2025 (arXiv:2403.16952);
- quadratic: a quadratic form in the square roots of the weights;
- lightgbm: boosted trees, as RegMix (Liu et al. 2025); an optional dependency;
- linear: a straight line, the control that the others have to beat.

How strongly each is held back (penalty, number of trees) is chosen by cross-validation on the
runs it is given, never on others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from models.errors import UserError


class Fitted(Protocol):
    """A regressor after its fit."""

    def predict(self, mixtures: np.ndarray) -> np.ndarray:
        """Loss (n,) of `mixtures` (n, k)."""

    def again(self, mixtures: np.ndarray, losses: np.ndarray) -> Fitted:
        """Fitted to other runs, held back as much as this one: for a bootstrap."""


Regressor = Callable[[np.ndarray, np.ndarray, "int | None", int], Fitted]
"""Fits (mixtures (n, k), losses (n,), the domain that the loss is of or none, seed)."""

_FOLDS = 5
_PENALTIES = np.array([1e-8, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0])
_STARTS = (0.02, 0.1, 0.3, 1.0, 5.0)
"""Where the search for c begins: so many ranges of the losses below the lowest one."""
_RIDGE = np.logspace(-12, 4, 49)
_LEAST_ROOM = 1e-4
_OWN_SCALE = 10.0
_ITERATIONS = 200
_LARGEST_EXPONENT = 50.0
_TREES = 300
_TREE_SETTINGS = {
    "objective": "regression", "learning_rate": 0.1, "num_leaves": 15, "verbosity": -1,
    "num_threads": 1, "deterministic": True, "force_row_wise": True,
}  # fmt: skip


@dataclass(frozen=True)
class Exponential:
    """c + exp(a + t.r): K = exp(a), which t could hold as well, since the weights sum to 1.

    values: a, t (k,), c. The penalty on |t|^2 draws all domains to one value of t (a is free);
    the domain that the loss is of is left out of it, since its own data work as no other's.
    """

    values: np.ndarray
    penalty: float
    own: int | None

    def predict(self, mixtures: np.ndarray) -> np.ndarray:
        """Loss (n,)."""
        exponent = self.values[0] + mixtures @ self.values[1:-1]
        return np.asarray(self.values[-1] + np.exp(np.minimum(exponent, _LARGEST_EXPONENT)))

    def again(self, mixtures: np.ndarray, losses: np.ndarray) -> Exponential:
        """From where this one stands."""
        search = _LawSearch(mixtures, losses, self.own)
        values, _ = search.run(self.values[None], np.array([self.penalty]))
        return Exponential(values[0], self.penalty, self.own)


def fit_exponential(
    mixtures: np.ndarray, losses: np.ndarray, own: int | None, seed: int
) -> Exponential:
    """Penalised least squares from several starts; the penalty is that of the least squared error
    in cross-validation."""
    search = _LawSearch(mixtures, losses, own)
    starts = np.concatenate([search.starts(penalty) for penalty in _PENALTIES])
    values, costs = search.run(starts, np.repeat(_PENALTIES, len(_STARTS)))
    chosen = costs.reshape(len(_PENALTIES), -1).argmin(1)
    values = values.reshape(len(_PENALTIES), len(_STARTS), -1)[range(len(_PENALTIES)), chosen]
    folds = fold_numbers(len(losses), _FOLDS, seed)
    counts = np.concatenate(
        [np.tile(folds != fold, (len(_PENALTIES), 1)) for fold in range(_FOLDS)]
    )
    parts, _ = search.run(
        np.tile(values, (_FOLDS, 1)), np.tile(_PENALTIES, _FOLDS), counts.astype(np.float64)
    )
    errors = np.zeros(len(_PENALTIES))
    for number, part in enumerate(parts):
        held = ~counts[number]
        predicted = Exponential(part, 0.0, own).predict(mixtures[held])
        errors[number % len(_PENALTIES)] += ((predicted - losses[held]) ** 2).sum()
    best = int(errors.argmin())
    return Exponential(values[best], float(_PENALTIES[best]), own)


class _LawSearch:
    """Levenberg-Marquardt on many starts, penalties and weights of the runs at once."""

    def __init__(self, mixtures: np.ndarray, losses: np.ndarray, own: int | None) -> None:
        self.losses = losses
        self.design = np.column_stack([np.ones(len(losses)), mixtures])  # (n, 1 + k)
        n, p = self.design.shape
        self.products = (self.design[:, :, None] * self.design[:, None]).reshape(n, p * p)
        self.variance = float(losses.var()) or 1.0
        self.range = float(np.ptp(losses)) or 1.0
        self.lowest_c = min(0.0, float(losses.min()) - 10 * self.range)
        self.penalised = np.ones(p + 1)
        self.penalised[[0, -1]] = 0.0
        if own is not None:
            self.penalised[1 + own] = 1e-8 / _PENALTIES.max()

    def starts(self, penalty: float) -> np.ndarray:
        """For each of several c, the a and t that fit log(loss - c) best: (starts, k + 2)."""
        found = []
        for share in _STARTS:
            c = max(float(self.losses.min()) - share * self.range, self.lowest_c)
            above = np.maximum(self.losses - c, 1e-3 * self.range)
            weight = (above / self.range) ** 2
            ridge = np.diag(self.penalised[:-1] * (1e-3 + penalty) * weight.mean())
            gram = (self.design.T * weight) @ self.design + ridge
            right = self.design.T @ (weight * np.log(above))
            found.append(np.append(np.linalg.lstsq(gram, right)[0], c))
        return np.array(found)

    def run(
        self, starts: np.ndarray, penalties: np.ndarray, counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values (B, k + 2) and costs (B,) that the searches end with.

        The cost is the sum of squared errors in units of the losses' variance, plus
        penalty * |t|^2. counts: weight of each run in each search (B, n); none: 1.
        """
        batch, n = len(starts), len(self.losses)
        weight = (np.ones((batch, n)) if counts is None else counts) / self.variance
        ridge = penalties[:, None] * self.penalised
        values, damping = starts.copy(), np.full(batch, 1e-3)
        above, error, cost = self._cost(values, weight, ridge)
        still = np.zeros(batch, int)
        for _ in range(_ITERATIONS):
            gradient, hessian = self._derivatives(values, above, error, weight, ridge)
            diagonal = np.einsum("bii->bi", hessian)
            extra = damping[:, None] * diagonal + 1e-12 * diagonal.max(1, keepdims=True)
            damped = hessian + extra[:, :, None] * np.eye(values.shape[1])
            trial = values + np.linalg.solve(damped, gradient[:, :, None])[:, :, 0]
            trial[:, -1] = np.maximum(trial[:, -1], self.lowest_c)
            new_above, new_error, new_cost = self._cost(trial, weight, ridge)
            better = new_cost < cost
            still = np.where(better & (cost - new_cost > 1e-9 * cost + 1e-14), 0, still + 1)
            damping = np.clip(np.where(better, damping / 5, damping * 4), 1e-12, 1e9)
            taken = better[:, None]
            values = np.where(taken, trial, values)
            above, error = np.where(taken, new_above, above), np.where(taken, new_error, error)
            cost = np.where(better, new_cost, cost)
            if (still >= 6).all():
                break
        return values, cost

    def _cost(
        self, values: np.ndarray, weight: np.ndarray, ridge: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        above = np.exp(np.minimum(values[:, :-1] @ self.design.T, _LARGEST_EXPONENT))
        error = self.losses - values[:, -1:] - above
        return above, error, (weight * error**2).sum(1) + (ridge * values**2).sum(1)

    def _derivatives(
        self,
        values: np.ndarray,
        above: np.ndarray,
        error: np.ndarray,
        weight: np.ndarray,
        ridge: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Descent direction (half of it) and Gauss-Newton matrix; c that stands at its bound and
        would cross it is held."""
        batch, p = len(values), self.design.shape[1]
        slope = weight * above
        hessian = np.empty((batch, p + 1, p + 1))
        hessian[:, :p, :p] = ((slope * above) @ self.products).reshape(batch, p, p)
        hessian[:, :p, p] = hessian[:, p, :p] = slope @ self.design
        hessian[:, p, p] = weight.sum(1)
        hessian += ridge[:, :, None] * np.eye(p + 1)
        gradient = np.column_stack([(slope * error) @ self.design, (weight * error).sum(1)])
        gradient -= ridge * values
        held = (values[:, -1] <= self.lowest_c) & (gradient[:, -1] < 0)
        hessian[held, :p, p] = hessian[held, p, :p] = 0.0
        gradient[held, p] = 0.0
        return gradient, hessian


@dataclass(frozen=True)
class Ridge:
    """A constant plus a linear form of the features. own: as for `Exponential`."""

    features: Callable[[np.ndarray], np.ndarray]
    mean: np.ndarray
    slopes: np.ndarray
    constant: float
    penalty: float
    own: int | None

    def predict(self, mixtures: np.ndarray) -> np.ndarray:
        """Loss (n,)."""
        return np.asarray(self.constant + (self.features(mixtures) - self.mean) @ self.slopes)

    def again(self, mixtures: np.ndarray, losses: np.ndarray) -> Ridge:
        """With the penalty of this one."""
        return _ridge(self.features, mixtures, losses, self.own, np.array([self.penalty]))


def square_roots(mixtures: np.ndarray) -> np.ndarray:
    """Square roots of the weights, and all products of two of them (k (k + 3) / 2 features)."""
    roots = np.sqrt(np.maximum(mixtures, 0.0))
    first, second = np.triu_indices(roots.shape[1])
    return np.hstack([roots, roots[:, first] * roots[:, second]])


def weights_alone(mixtures: np.ndarray) -> np.ndarray:
    """The weights as they are."""
    return mixtures


def fit_quadratic(mixtures: np.ndarray, losses: np.ndarray, own: int | None, seed: int) -> Ridge:
    """Ridge regression on `square_roots`."""
    return _ridge(square_roots, mixtures, losses, own, _RIDGE)


def fit_linear(mixtures: np.ndarray, losses: np.ndarray, own: int | None, seed: int) -> Ridge:
    """Ridge regression on the weights."""
    return _ridge(weights_alone, mixtures, losses, own, _RIDGE)


def _ridge(
    features: Callable[[np.ndarray], np.ndarray],
    mixtures: np.ndarray,
    losses: np.ndarray,
    own: int | None,
    penalties: np.ndarray,
) -> Ridge:
    """The penalty of least squared error when each run is left out in turn (closed form).

    The features are not standardised: weights that vary little in the runs say little. The first
    k features belong to the domains; the slope of `own` is nearly free.
    """
    given = features(mixtures)
    mean, scale = given.mean(0), np.ones(given.shape[1])
    if own is not None:
        scale[own] = _OWN_SCALE
    left, sizes, right = np.linalg.svd((given - mean) * scale, full_matrices=False)
    constant = float(losses.mean())
    along = left.T @ (losses - constant)
    shrunk = sizes**2 / (sizes**2 + penalties[:, None])  # (penalties, p)
    errors = (losses - constant) - (shrunk * along) @ left.T
    leverage = shrunk @ (left**2).T + 1 / len(losses)
    # With more features than runs a small penalty goes through every run: 0 / 0.
    exact = leverage.max(1) > 1 - _LEAST_ROOM
    left_out = ((errors / np.maximum(1 - leverage, _LEAST_ROOM)) ** 2).sum(1)
    best = int(np.where(exact, np.inf, left_out).argmin())
    slopes = scale * (right.T @ (along * sizes / (sizes**2 + penalties[best])))
    return Ridge(features, mean, slopes, constant, float(penalties[best]), own)


@dataclass(frozen=True)
class Trees:
    """Boosted trees of LightGBM."""

    booster: Any
    rounds: int
    seed: int

    def predict(self, mixtures: np.ndarray) -> np.ndarray:
        """Loss (n,)."""
        return np.asarray(self.booster.predict(mixtures), np.float64)

    def again(self, mixtures: np.ndarray, losses: np.ndarray) -> Trees:
        """With as many trees."""
        return _trees(mixtures, losses, self.rounds, self.seed)


def has_lightgbm() -> bool:
    """Whether LightGBM is installed."""
    return importlib.util.find_spec("lightgbm") is not None


def check_lightgbm() -> None:
    """Raise UserError when LightGBM is not installed."""
    if not has_lightgbm():
        raise UserError(
            "the regressor 'lightgbm' needs LightGBM, which is not installed: "
            "pip install 'gristmill[mix]', or choose exponential, quadratic or linear"
        )


def fit_lightgbm(mixtures: np.ndarray, losses: np.ndarray, own: int | None, seed: int) -> Trees:
    """As many trees as give the least error in cross-validation on these runs.

    Raises UserError when LightGBM is not installed.
    """
    check_lightgbm()
    import lightgbm  # noqa: PLC0415 - optional, and slow to load

    folds = fold_numbers(len(losses), _FOLDS, seed)
    found: dict[str, Any] = lightgbm.cv(
        _tree_settings(len(losses), seed),
        lightgbm.Dataset(mixtures, losses),
        num_boost_round=_TREES,
        folds=[(np.flatnonzero(folds != f), np.flatnonzero(folds == f)) for f in range(_FOLDS)],
        metrics="l2",
    )
    return _trees(mixtures, losses, int(np.asarray(found["valid l2-mean"]).argmin()) + 1, seed)


def _trees(mixtures: np.ndarray, losses: np.ndarray, rounds: int, seed: int) -> Trees:
    import lightgbm  # noqa: PLC0415 - optional, and slow to load

    data = lightgbm.Dataset(mixtures, losses)
    booster = lightgbm.train(_tree_settings(len(losses), seed), data, num_boost_round=rounds)
    return Trees(booster, rounds, seed)


def _tree_settings(runs: int, seed: int) -> dict[str, Any]:
    """LightGBM's 20 runs at least in a leaf leave too few leaves when there are 64 runs."""
    return _TREE_SETTINGS | {"seed": seed, "min_data_in_leaf": int(np.clip(runs // 25, 3, 20))}


def fold_numbers(count: int, folds: int, seed: int) -> np.ndarray:
    """The fold of each of `count` runs: (count,), sizes that differ by one at most."""
    return np.random.default_rng((seed, folds)).permutation(np.arange(count) % folds)


REGRESSORS: dict[str, Regressor] = {
    "exponential": fit_exponential,
    "quadratic": fit_quadratic,
    "lightgbm": fit_lightgbm,
    "linear": fit_linear,
}
