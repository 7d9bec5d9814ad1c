"""Which runs a mix has, and which of them can begin: a function of what is finished.

`DoReMiStages.todo` and `LawStages.todo` look at the finished runs and give those that can begin
now, the most urgent ones first: a mix that was killed knows where it was by asking again. Nothing
is trained here and no file is read. Two runs of the same mixture, seed, size and steps are one run:
the reference of the first round at its default is the proportional baseline.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training.doremi import ProxySettings
from training.mix.recipe import MixRecipe
from training.mix.results import RoundEntry, round_entry
from training.recipe import Size, TrainRecipe

if TYPE_CHECKING:
    import numpy as np

RUNS_FOLDER = "runs"
Weights = Mapping[str, float]
Done = Mapping[str, Weights | None]
"""Finished runs by name; of a proxy's run the mean weights that it found."""


@dataclass(frozen=True)
class MixRun:
    """One training run. proxy: set for DoReMi's proxies. weights: shares of the examples, those of
    the reference for a proxy, whose batches are uniform."""

    label: str
    seed: int
    recipe: TrainRecipe = field(repr=False)
    weights: Weights
    proxy: ProxySettings | None = None

    @property
    def name(self) -> str:
        """Its folder below that of the runs."""
        return f"{self.label}/seed-{self.seed}"

    @property
    def folder(self) -> str:
        """Its folder."""
        return self.recipe.output.directory


@dataclass(frozen=True)
class Mixtures:
    """The mixtures that stand before any run. names: of the domains, in order. reference: of the
    first round, which is that of doremi.reference_run where it is given."""

    names: tuple[str, ...]
    proportional: Weights
    reference: Weights

    @property
    def uniform(self) -> Weights:
        """Every domain the same."""
        return {name: 1 / len(self.names) for name in self.names}


class Catalogue:
    """Makes the runs, each once: baselines and specialists at once, the others when asked for."""

    def __init__(self, recipe: MixRecipe, mixtures: Mixtures) -> None:
        self.recipe, self.mixtures = recipe, mixtures
        self._runs: dict[tuple[Any, ...], MixRun] = {}
        seeds = recipe.mix.seeds
        self.baselines = {
            label: [self.main_run(label, seed, weights) for seed in seeds]
            for label, weights in (
                ("proportional", mixtures.proportional),
                ("uniform", mixtures.uniform),
            )
        }
        self.specialists = {
            f"specialist-{number}": [
                self.main_run(f"specialist-{number}", seed, self._only(name))
                for seed in seeds[: recipe.mix.specialists]
            ]
            for number, name in enumerate(mixtures.names)
            if recipe.mix.specialists
        }

    def compared(self) -> list[MixRun]:
        """Baselines and specialists."""
        groups = [*self.baselines.values(), *self.specialists.values()]
        return _distinct(run for group in groups for run in group)

    def main_run(self, label: str, seed: int, weights: Weights) -> MixRun:
        """A run that compares mixtures: of mix.main_size and mix.main_steps."""
        mix = self.recipe.mix
        return self.run(label, seed, weights, size=mix.main_size, steps=mix.main_steps)

    def run(
        self,
        label: str,
        seed: int,
        weights: Weights,
        *,
        size: Size | None = None,
        steps: int | None = None,
    ) -> MixRun:
        """The run of these settings; under another label where there is an equal one already."""
        size, steps = size or self.recipe.model.size, steps or self.recipe.schedule.steps
        values = tuple(weights[name] for name in self.mixtures.names)
        return self._once(
            (values, seed, size, steps, None),
            lambda: MixRun(label, seed, self._recipe(label, seed, weights, size, steps), weights),
        )

    def proxy(self, label: str, seed: int, weights: Weights, reference: str) -> MixRun:
        """DoReMi's proxy against the finished run in the folder `reference`."""
        doremi = self.recipe.doremi
        settings = ProxySettings(
            reference=reference, excess=doremi.excess, step_size=doremi.step_size,
            smoothing=doremi.smoothing,
        )  # fmt: skip
        uniform = self.mixtures.uniform
        return self._once(
            ((), seed, None, None, settings),
            lambda: MixRun(
                label, seed, self._recipe(label, seed, uniform, None, None), weights, settings
            ),
        )

    def _recipe(
        self, label: str, seed: int, weights: Weights, size: Size | None, steps: int | None
    ) -> TrainRecipe:
        named = {"proportional": self.mixtures.proportional, "uniform": self.mixtures.uniform}
        name = next((name for name, one in named.items() if one == weights), None)
        directory = os.path.join(  # noqa: PTH118 - as the user wrote it
            self.recipe.output.directory, RUNS_FOLDER, label, f"seed-{seed}"
        )
        return self.recipe.train_recipe(
            weights=name or dict(weights), seed=seed, directory=directory, size=size, steps=steps
        )

    def _once(self, key: tuple[Any, ...], make: Callable[[], MixRun]) -> MixRun:
        if key not in self._runs:
            self._runs[key] = make()
        return self._runs[key]

    def _only(self, name: str) -> Weights:
        return {one: float(one == name) for one in self.mixtures.names}


class DoReMiStages:
    """Rounds of reference and proxy, then the main runs."""

    label = "doremi"

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._recipe = catalogue.recipe
        self._seeds = catalogue.recipe.mix.seeds

    def todo(self, done: Done) -> list[MixRun]:
        """Runs that can begin and are not `done`; [] at the end. Gives equal runs once."""
        found = []
        rounds = self.rounds(done)
        if self.stopped(rounds) is None:
            number, reference = len(rounds) + 1, self._reference(rounds)
            for seed in self._seeds:
                run = self.reference(number, seed, reference)
                if run is None or run.name in done:
                    run = self.proxy(number, seed, reference)
                found.append(run)
        else:
            found += self.main_runs(rounds)
        found += self.catalogue.compared()
        return [run for run in _distinct(found) if run.name not in done]

    def rounds(self, done: Done) -> list[RoundEntry]:
        """The rounds whose proxies are all finished, up to the last one that counts."""
        found: list[RoundEntry] = []
        while self.stopped(found) is None:
            number, reference = len(found) + 1, self._reference(found)
            proxies = {seed: self.proxy(number, seed, reference) for seed in self._seeds}
            weights = {seed: done.get(run.name) for seed, run in proxies.items()}
            there = {seed: one for seed, one in weights.items() if one is not None}
            if len(there) < len(weights):
                break
            found.append(round_entry(number, reference, there))
        return found

    def stopped(self, rounds: Sequence[RoundEntry]) -> str | None:
        """Why no round follows the last one; None: one does."""
        if not rounds:
            return None
        last, doremi = rounds[-1], self._recipe.doremi
        if last.change < doremi.tolerance:
            return (
                f"no weight changed by doremi.tolerance = {doremi.tolerance:g} "
                f"in round {last.number}"
            )
        if inside_spread(last):
            return f"every change of round {last.number} lies inside the spread of the seeds"
        if last.number == doremi.max_rounds:
            return f"doremi.max_rounds = {doremi.max_rounds}"
        return None

    def reference(self, number: int, seed: int, weights: Weights) -> MixRun | None:
        """The reference of round `number`; None where the user gave a run for it."""
        if number == 1 and self._recipe.doremi.reference_run is not None:
            return None
        return self.catalogue.run(f"reference-{number}", seed, weights)

    def proxy(self, number: int, seed: int, weights: Weights) -> MixRun:
        """The proxy of round `number`."""
        run = self.reference(number, seed, weights)
        folder = self._recipe.doremi.reference_run if run is None else run.folder
        assert folder is not None
        return self.catalogue.proxy(f"proxy-{number}", seed, weights, folder)

    def main_runs(self, rounds: Sequence[RoundEntry]) -> list[MixRun]:
        """Each seed on its own weights of the last round."""
        return [
            self.catalogue.main_run(self.label, seed, rounds[-1].weights[str(seed)])
            for seed in self._seeds
        ]

    def stage_runs(self, rounds: Sequence[RoundEntry]) -> dict[str, list[MixRun]]:
        """References and proxies of all rounds, by label."""
        found: dict[str, list[MixRun]] = {}
        for entry in rounds:
            for seed in self._seeds:
                reference = self.reference(entry.number, seed, entry.reference)
                if reference is not None:
                    found.setdefault(f"reference-{entry.number}", []).append(reference)
                proxy = self.proxy(entry.number, seed, entry.reference)
                found.setdefault(f"proxy-{entry.number}", []).append(proxy)
        return found

    def most_runs(self) -> int:
        """Runs in all, if it takes every round."""
        seeds, rounds = len(self._seeds), self._recipe.doremi.max_rounds
        weights = self.catalogue.mixtures.reference
        first = [self.reference(1, seed, weights) for seed in self._seeds]
        known = _distinct([*self.catalogue.compared(), *(run for run in first if run)])
        return len(known) + seeds * (2 * rounds - 1) + seeds

    def _reference(self, rounds: Sequence[RoundEntry]) -> Weights:
        return rounds[-1].mean if rounds else self.catalogue.mixtures.reference


class LawStages:
    """Small runs at drawn mixtures, a law, then the main runs on the mixture it finds best.

    drawn: mixtures of the small runs (runs, domains); none when the user has a table. fit: gives
    the best mixture when all small runs are finished; it is asked once.
    """

    label = "regress"

    def __init__(
        self,
        catalogue: Catalogue,
        drawn: np.ndarray | None,
        fit: Callable[[Sequence[MixRun]], Weights],
    ) -> None:
        self.catalogue = catalogue
        self._fit = fit
        self._best: Weights | None = None
        recipe, names = catalogue.recipe, catalogue.mixtures.names
        regress = recipe.regress
        self.small = [
            catalogue.run(
                f"small-{number:03d}", recipe.mix.seeds[0],
                dict(zip(names, map(float, weights), strict=True)),
                size=regress.size, steps=regress.steps,
            )
            for number, weights in enumerate([] if drawn is None else drawn)
        ]  # fmt: skip

    def todo(self, done: Done) -> list[MixRun]:
        """Runs that can begin and are not `done`; [] at the end. Gives equal runs once."""
        found = [run for run in self.small if run.name not in done]
        if not found:
            found = self.main_runs()
        found += self.catalogue.compared()
        return [run for run in _distinct(found) if run.name not in done]

    def main_runs(self) -> list[MixRun]:
        """All seeds on the best mixture."""
        if self._best is None:
            self._best = self._fit(self.small)
        return [
            self.catalogue.main_run(self.label, seed, self._best)
            for seed in self.catalogue.recipe.mix.seeds
        ]

    def most_runs(self) -> int:
        """Runs in all."""
        known = _distinct([*self.small, *self.catalogue.compared()])
        return len(known) + len(self.catalogue.recipe.mix.seeds)


def inside_spread(entry: RoundEntry) -> bool:
    """Whether no domain's weight moved further from the reference's than the seeds differ (one
    sample standard deviation)."""
    if len(entry.weights) < 2:
        return False
    return all(
        abs(entry.mean[name] - entry.reference[name])
        <= statistics.stdev(one[name] for one in entry.weights.values())
        for name in entry.mean
    )


def _distinct(runs: Iterable[MixRun]) -> list[MixRun]:
    return list({run.name: run for run in runs}.values())
