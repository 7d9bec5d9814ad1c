"""What a mix needs before its first run: corpus, mixtures, guards, identity.

Every mistake that can be found without training is found here: a mix takes hours.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from models.errors import UserError
from training import run_manifest, sampler
from training.domain_rows import Split
from training.domains import mixture
from training.mix import guards, law
from training.mix.identity import published, recipe_digest
from training.mix.recipe import MixRecipe
from training.mix.stages import Mixtures, Weights
from training.prepare import Prepared, prepare
from training.reference import checked_reference
from training.run_plan import make_plan

if TYPE_CHECKING:
    from training.mixing_law import RunTable


@dataclass(frozen=True)
class MixInputs:
    """The inputs of a mix, opened and checked.

    tokens_once: of one pass over each domain's training pages. compared: domains with held-out
    pages. epochs: how often the runs whose mixtures are known read each domain. table: the user's
    runs, for a law without small runs of its own; drawn: the mixtures (runs, domains) of these;
    limits: the highest weight of each domain in the mixture that the law may find. identity: all
    that the result depends on, as JSON can hold it.
    """

    prepared: Prepared
    mixtures: Mixtures
    tokens_once: dict[str, float]
    compared: tuple[str, ...]
    epochs: dict[str, dict[str, float]]
    table: RunTable | None
    drawn: np.ndarray | None
    limits: dict[str, float] | None
    identity: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the domains, in order."""
        return self.prepared.corpus.names


def open_inputs(recipe: MixRecipe) -> MixInputs:
    """Open what the recipe names, and check it. Raises UserError in one line."""
    first = recipe.train_recipe(
        weights="proportional", seed=recipe.mix.seeds[0], directory=recipe.output.directory
    )
    prepared = prepare(first)
    names, data = prepared.corpus.names, recipe.data
    if len(names) < 2:
        raise UserError(
            f"data.by = '{', '.join(data.by)}' gives one domain, '{names[0]}': there is nothing to "
            "mix; divide the pages by more: language, bucket, host, source"
        )
    batch_warning = None
    if recipe.mix.method == "doremi":
        batch_warning = guards.check_batch(
            len(names), recipe.batch.examples(recipe.examples.sequence_length)
        )
    _check_pages(prepared, recipe)
    without = [
        name
        for number, name in enumerate(names)
        if not _has_pages(prepared, recipe, number, split="held_out")
    ]
    held_out_warning = guards.not_held_out(names, without)
    compared = tuple(name for name in names if name not in without)
    proportional = _by_name(names, prepared.weights)
    reference, references = _reference(recipe, prepared)
    uniform = replace(prepared, weights=np.full(len(names), 1 / len(names)))
    plan = make_plan(first, uniform, 1)
    once = {one["name"]: one["tokens"] / one["epochs"] for one in plan.domains}
    mixtures = Mixtures(names, proportional, reference)
    table, table_sha256, drawn, limits = None, None, None, None
    if recipe.mix.method == "regress":
        table, table_sha256 = law.checked_table(recipe, names, compared)
        drawn = law.drawn_mixtures(recipe, proportional) if table is None else None
        limits = law.weight_limits(recipe, once, main_steps(recipe) * plan.tokens_per_step)
    epochs = _known_epochs(recipe, mixtures, drawn, once, plan.tokens_per_step)
    return MixInputs(
        prepared=prepared,
        mixtures=mixtures,
        tokens_once=once,
        compared=compared,
        epochs=epochs,
        table=table,
        drawn=drawn,
        limits=limits,
        identity={
            "recipe_digest": recipe_digest(recipe),
            "recipe": {key: value for key, value in published(recipe).items() if key != "name"},
            "tokenizer_sha256": prepared.identity["tokenizer_sha256"],
            "sources": prepared.identity["sources"],
            "domains": proportional,
            "init_sha256": prepared.identity["init_sha256"],
            **references,
            "table_sha256": table_sha256,
        },
        warnings=tuple(
            text
            for text in (batch_warning, held_out_warning, *guards.repeated(epochs))
            if text is not None
        ),
    )


def _known_epochs(
    recipe: MixRecipe,
    mixtures: Mixtures,
    drawn: np.ndarray | None,
    once: Weights,
    tokens_per_step: int,
) -> dict[str, dict[str, float]]:
    """How often the runs whose mixtures are known read each domain. once: tokens of one pass."""
    stage = recipe.schedule.steps * tokens_per_step
    main = main_steps(recipe) * tokens_per_step
    found = {
        "proportional": guards.epochs(mixtures.proportional, main, once),
        "uniform": guards.epochs(mixtures.uniform, main, once),
    }
    if recipe.mix.method == "doremi":
        if main != stage or mixtures.reference not in (mixtures.proportional, mixtures.uniform):
            found["reference"] = guards.epochs(mixtures.reference, stage, once)
        if main != stage:
            found["proxy"] = guards.epochs(mixtures.uniform, stage, once)
    if drawn is not None:
        small = (recipe.regress.steps or recipe.schedule.steps) * tokens_per_step
        most = _by_name(mixtures.names, drawn.max(0))
        found["small runs, at most"] = guards.epochs(most, small, once)
    if recipe.mix.specialists:
        found["one domain alone"] = {name: main / once[name] for name in mixtures.names}
    return found


def main_steps(recipe: MixRecipe) -> int:
    """Steps of the runs that compare the mixtures."""
    return recipe.mix.main_steps or recipe.schedule.steps


def _reference(recipe: MixRecipe, prepared: Prepared) -> tuple[Weights, dict[str, Any]]:
    """The first round's reference mixture; what of it belongs to the identity of the mix."""
    names = prepared.corpus.names
    if recipe.mix.method != "doremi":
        return _by_name(names, prepared.weights), {}
    folder = recipe.doremi.reference_run
    if folder is None:
        found = _by_name(
            names, mixture(prepared.corpus, recipe.doremi.reference, setting="doremi.reference")
        )
        return found, {"reference": found}
    digest = checked_reference(folder, recipe, prepared)
    there = run_manifest.read(folder).domains
    if set(there) != set(names):
        other = sorted(set(there) ^ set(names))[0]
        raise UserError(
            f"doremi.reference_run = '{folder}' has other domains than this mix, as '{other}': "
            "set data.by and data.languages as there, or train another reference"
        )
    ordered = {name: there[name] for name in names}
    return ordered, {"reference": ordered, "reference_sha256": digest}


def _check_pages(prepared: Prepared, recipe: MixRecipe) -> None:
    for number, name in enumerate(prepared.corpus.names):
        if not _has_pages(prepared, recipe, number, split="train"):
            raise UserError(
                f"domain '{name}' has no page to train on (data.held_out = "
                f"'{recipe.data.held_out}'): leave it out, or hold out less"
            )


def _has_pages(prepared: Prepared, recipe: MixRecipe, domain: int, *, split: Split) -> bool:
    pages = sampler.pages(prepared.corpus, domain, data=recipe.data, split=split)
    return next(pages, None) is not None


def _by_name(names: Sequence[str], weights: np.ndarray) -> dict[str, float]:
    return dict(zip(names, weights.tolist(), strict=True))


def ranks_here() -> int:
    """Processes of the run that this one belongs to."""
    return int(os.environ.get("WORLD_SIZE", "1"))
