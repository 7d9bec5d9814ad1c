"""The lowest mixture of a fitted law: weights from 0 to a limit, that sum to 1.

No gradients, so that one search serves every smooth regressor and the worst of several losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from training.run_table import draw_mixtures

Predict = Callable[[np.ndarray], np.ndarray]
"""Loss (n,) of mixtures (n, k)."""

_FIRST_MOVE, _LAST_MOVE = 0.25, 1e-5
_STARTS = 6
_DRAWN = 500
_DRAWN_STRENGTHS = (0.5, 5.0)
"""Of the starts: Dirichlet parameters of each domain."""
_CANDIDATES = 20_000
_CANDIDATES_REFIT = 4_000
_AVERAGED = 0.005
"""RegMix averages the best 100 of its candidates: this share of ours."""
_CANDIDATE_STRENGTHS = (0.5, 200.0)
_BISECTIONS = 60


class Search(Protocol):
    """Finds the lowest mixture."""

    def best(self, predict: Predict, start: np.ndarray | None = None) -> np.ndarray:
        """The mixture (k,). start: the end of an earlier search of a law that is much like this
        one, which makes the search short."""


class Descent:
    """Weight moves between two domains while that lowers the loss, in ever smaller portions.

    For a convex smooth law (a mean of exponentials) the end is the lowest of all; for others it is
    the lowest that several starts lead to. edges: the law has some, as the worst of several losses
    does: moves in random directions are tried too where no two domains can trade.
    """

    def __init__(self, runs: np.ndarray, highest: np.ndarray, *, edges: bool) -> None:
        count = len(highest)
        self.highest, self.edges = highest, edges
        self.giver, self.taker = np.nonzero(~np.eye(count, dtype=bool))
        random = np.random.default_rng(count).normal(size=(8 * count, count))
        random -= random.mean(1, keepdims=True)
        self.directions = random / (np.abs(random).sum(1, keepdims=True) / 2)
        uniform = np.full(count, 1 / count)
        low, high = _DRAWN_STRENGTHS
        drawn = draw_mixtures(
            uniform, _DRAWN, seed=count, concentration=(low * count, high * count)
        )
        self.starts = project(np.vstack([uniform, runs.mean(0), runs, drawn]), highest)

    def best(self, predict: Predict, start: np.ndarray | None = None) -> np.ndarray:
        """The mixture (k,)."""
        likely = self.starts[predict(self.starts).argsort(kind="stable")]
        starts = [*likely[:_STARTS], self.starts[0]] if start is None else [likely[0], start]
        ends = np.array([self._descend(predict, each) for each in starts])
        return np.asarray(ends[predict(ends).argmin()])

    def _descend(self, predict: Predict, mixture: np.ndarray) -> np.ndarray:
        move, lowest = _FIRST_MOVE, float(predict(mixture[None])[0])
        while move > _LAST_MOVE:
            for moved in (self._traded, self._anywhere) if self.edges else (self._traded,):
                trials = moved(mixture, move)
                losses = predict(trials)
                if losses.min() < lowest - 1e-12 * abs(lowest):
                    lowest, mixture = float(losses.min()), trials[losses.argmin()]
                    break
            else:
                move /= 2
        return mixture

    def _traded(self, mixture: np.ndarray, move: float) -> np.ndarray:
        """`move` from each domain to each other, less where there is less, or less room."""
        room = self.highest[self.taker] - mixture[self.taker]
        amount = np.minimum(np.minimum(move, mixture[self.giver]), room)
        trials = np.tile(mixture, (len(amount), 1))
        rows = np.arange(len(amount))
        trials[rows, self.giver] -= amount
        trials[rows, self.taker] += amount
        return trials

    def _anywhere(self, mixture: np.ndarray, move: float) -> np.ndarray:
        return project(mixture + move * self.directions, self.highest)


class TreeSearch:
    """For a law in steps: the mean of the lowest of many drawn mixtures, as RegMix does."""

    def __init__(self, runs: np.ndarray, highest: np.ndarray, seed: int) -> None:
        drawn = draw_mixtures(
            runs.mean(0), _CANDIDATES, seed=seed, concentration=_CANDIDATE_STRENGTHS
        )
        self.candidates = project(drawn, highest)

    def best(self, predict: Predict, start: np.ndarray | None = None) -> np.ndarray:
        """The mixture (k,)."""
        candidates = self.candidates if start is None else self.candidates[:_CANDIDATES_REFIT]
        order = predict(candidates).argsort(kind="stable")
        return np.asarray(candidates[order[: int(_AVERAGED * len(candidates))]].mean(0))


def project(points: np.ndarray, highest: np.ndarray) -> np.ndarray:
    """The mixtures nearest to `points` (n, k) with weights from 0 to `highest` (k,).

    min(max(point - shift, 0), highest), where bisection finds the shift that makes the sum 1.
    """
    low, high = points.min(1) - highest.max() - 1.0, points.max(1)
    for _ in range(_BISECTIONS):
        shift = (low + high) / 2
        above = np.clip(points - shift[:, None], 0, highest).sum(1) > 1
        low, high = np.where(above, shift, low), np.where(above, high, shift)
    return np.asarray(np.clip(points - low[:, None], 0, highest))
