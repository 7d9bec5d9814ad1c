"""What a mix will be, before it runs: its runs, their work, epochs by domain, what to fear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training import microbatches, run_manifest
from training.flops import flops_per_token, labelled_share
from training.mix import guards
from training.mix.inputs import MixInputs
from training.mix.recipe import MixRecipe
from training.mix.stages import Catalogue, DoReMiStages
from training.networks import network_config
from training.recipe import Size

_FORWARD = 1 / 3
"""Of the work of a step is the forward pass."""


@dataclass(frozen=True)
class PlannedRuns:
    """Runs under one label. runs: 0 where they are those of `mixture`, which are trained once.
    tokens, flops: of all of them, at most."""

    label: str
    runs: int
    mixture: str
    size: str
    steps: int
    tokens: int
    flops: float


@dataclass(frozen=True)
class MixPlan:
    """A mix in numbers. epochs: by mixture and domain, of the mixtures that are known before.
    expected_absent: domains that a step of a proxy has no example of."""

    groups: tuple[PlannedRuns, ...]
    domains: dict[str, dict[str, float]]
    epochs: dict[str, dict[str, float]]
    expected_absent: float | None
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "runs": [asdict(group) for group in self.groups],
            "tokens": sum(group.tokens for group in self.groups),
            "flops": sum(group.flops for group in self.groups),
            "domains": self.domains,
            "epochs": self.epochs,
            "expected_absent_domains": self.expected_absent,
            "warnings": list(self.warnings),
        }

    def table(self) -> str:
        """For people."""
        value = self.to_json()
        rows = [f"{'runs':<16}{'':>4}  {'mixture':<34}{'size':>6}{'steps':>9}{'tokens':>17}"
                f"{'FLOPs':>11}"]  # fmt: skip
        rows += [
            f"{one.label:<16}{one.runs:>4}  {one.mixture:<34}{one.size:>6}{one.steps:>9,}"
            f"{one.tokens:>17,}{one.flops:>11.2e}"
            for one in self.groups
        ]
        rows.append(
            f"in all          {sum(one.runs for one in self.groups):>4}  {'at most':<49}"
            f"{value['tokens']:>17,}{value['flops']:>11.2e}"
        )
        rows += ["", f"{'domain':<24}{'share':>8}{'tokens':>14}  epochs of "
                 f"{', '.join(self.epochs)}"]  # fmt: skip
        for name, one in self.domains.items():
            times = "".join(f"{by_domain[name]:>10.2f}" for by_domain in self.epochs.values())
            rows.append(f"{name:<24}{one['share']:>8.2%}{one['tokens_once']:>14,.0f}{times}")
        if self.expected_absent is not None:
            rows.append("")
            rows.append(
                f"domains absent from a proxy's step, on average: {self.expected_absent:.2g}"
            )
        return "\n".join(rows)


def make_plan(recipe: MixRecipe, inputs: MixInputs, ranks: int) -> MixPlan:
    """The plan of `recipe` on `ranks` processes for each run. Raises UserError."""
    catalogue = Catalogue(recipe, inputs.mixtures)
    length = recipe.examples.sequence_length
    examples = recipe.batch.examples(length)
    work = _Work(recipe, inputs.prepared.vocab_size, examples * length, ranks)
    doremi = recipe.mix.method == "doremi"
    groups = _doremi(recipe, catalogue, work) if doremi else _law(recipe, inputs, work)
    return MixPlan(
        groups=(*groups, *_compared(recipe, catalogue, work)),
        domains={
            name: {
                "share": inputs.mixtures.proportional[name],
                "tokens_once": inputs.tokens_once[name],
            }
            for name in inputs.names
        },
        epochs=inputs.epochs,
        expected_absent=guards.expected_absent(len(inputs.names), examples) if doremi else None,
        warnings=inputs.warnings,
    )


class _Work:
    """Tokens and FLOPs of runs."""

    def __init__(
        self, recipe: MixRecipe, vocab_size: int, tokens_per_step: int, ranks: int
    ) -> None:
        self._recipe, self._vocab_size = recipe, vocab_size
        self._tokens_per_step, self._ranks = tokens_per_step, ranks

    def group(
        self,
        label: str,
        runs: int,
        mixture: str,
        *,
        size: Size | None,
        steps: int | None,
        more: float = 0.0,
    ) -> PlannedRuns:
        """more: FLOPs for each token beyond those of training."""
        size, steps = size or self._recipe.model.size, steps or self._recipe.schedule.steps
        tokens = runs * steps * self._tokens_per_step
        return PlannedRuns(
            label, runs, mixture, size, steps, tokens, tokens * (self.per_token(size) + more)
        )

    def per_token(self, size: str) -> float:
        """FLOPs of training, for a token."""
        recipe = self._recipe.train_recipe(
            weights="proportional",
            seed=0,
            directory="",
            size=size,  # type: ignore[arg-type]
        )
        config = network_config(recipe, self._vocab_size)
        return flops_per_token(config, recipe.examples.sequence_length, labelled_share(recipe))

    def of_a_proxy(self, reference_size: str) -> float:
        """FLOPs of the forward passes that a proxy makes beside its training: the reference's,
        and its own once more where a rank has several microbatches in a step."""
        batch = self._recipe.batch
        parts = microbatches.count(
            batch.examples(self._recipe.examples.sequence_length), batch.microbatch, self._ranks
        )
        again = self.per_token(self._recipe.model.size) if parts > self._ranks else 0.0
        return _FORWARD * (self.per_token(reference_size) + again)


def _doremi(recipe: MixRecipe, catalogue: Catalogue, work: _Work) -> list[PlannedRuns]:
    stages, doremi, seeds = DoReMiStages(catalogue), recipe.doremi, recipe.mix.seeds
    found = []
    for number in range(1, doremi.max_rounds + 1):
        size: str = recipe.model.size
        if number == 1 and doremi.reference_run is not None:
            size = run_manifest.read(doremi.reference_run).recipe["model"]["size"]
        else:
            runs, mixture = len(seeds), "mean weights of the round before"
            if number == 1:
                run = stages.reference(1, seeds[0], catalogue.mixtures.reference)
                assert run is not None
                same = not run.label.startswith("reference")
                runs = 0 if same else len(seeds)
                mixture = f"the runs of '{run.label}'" if same else "doremi.reference"
            found.append(work.group(f"reference-{number}", runs, mixture, size=None, steps=None))
        found.append(
            work.group(
                f"proxy-{number}", len(seeds), "batches uniform over domains", size=None,
                steps=None, more=work.of_a_proxy(size),
            )
        )  # fmt: skip
    main = {"size": recipe.mix.main_size, "steps": recipe.mix.main_steps}
    return [*found, work.group("doremi", len(seeds), "mean alpha of each seed", **main)]  # type: ignore[arg-type]


def _law(recipe: MixRecipe, inputs: MixInputs, work: _Work) -> list[PlannedRuns]:
    regress, found = recipe.regress, []
    if inputs.table is None:
        found.append(
            work.group("small", regress.runs, "drawn around the proportional one",
                       size=regress.size, steps=regress.steps)
        )  # fmt: skip
    main = work.group("regress", len(recipe.mix.seeds), "the law's best one",
                      size=recipe.mix.main_size, steps=recipe.mix.main_steps)  # fmt: skip
    return [*found, main]


def _compared(recipe: MixRecipe, catalogue: Catalogue, work: _Work) -> list[PlannedRuns]:
    """Baselines and specialists."""
    found = []
    groups: Sequence[tuple[str, int, str]] = [
        *((label, len(runs), "to characters" if label == "proportional" else "the same for each")
          for label, runs in catalogue.baselines.items()),
        *((label, len(runs), f"'{name}' alone")
          for (label, runs), name in zip(
              catalogue.specialists.items(), catalogue.mixtures.names, strict=False)),
    ]  # fmt: skip
    for label, runs, mixture in groups:
        first = (catalogue.baselines.get(label) or catalogue.specialists[label])[0]
        same = first.label != label
        found.append(
            work.group(
                label, 0 if same else runs, f"the runs of '{first.label}'" if same else mixture,
                size=recipe.mix.main_size, steps=recipe.mix.main_steps,
            )
        )  # fmt: skip
    return found
