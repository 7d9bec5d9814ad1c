"""The mixing recipe: a training recipe of a small decoder, and how its mixture is found.

The sections of `training.recipe.TrainRecipe` describe every run of the mix: reference, proxy,
baselines, main runs, specialists, small runs.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipelines import recipe_file
from pipelines.recipe_file import Section
from training.recipe import Model, Size, TrainRecipe

Seed = Annotated[int, Field(ge=0)]
Excess = Literal["excess", "hardest", "easiest"]
Regressor = Literal["auto", "exponential", "quadratic", "lightgbm", "linear"]


class Mix(Section):
    """Which method, how often, against what."""

    method: Literal["doremi", "regress"] = Field(
        "doremi", description="doremi: Xie et al. 2023; regress: a law fitted to many small runs"
    )
    seeds: tuple[Seed, ...] = Field(
        (0,), min_length=1, description="everything is done once for each: weights, data order"
    )
    specialists: int = Field(
        0, ge=0, description="seeds, the first ones, for which a model is trained on each domain "
        "alone: what the excess of a mixture is measured from"
    )  # fmt: skip
    main_size: Size | None = Field(
        None, description="size of the models that compare the mixtures; none: model.size"
    )
    main_steps: int | None = Field(
        None, ge=1, description="steps of these models; none: schedule.steps"
    )

    @model_validator(mode="after")
    def _seeds(self) -> Mix:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"mix.seeds = '{list(self.seeds)}' names a seed twice: once is enough")
        if self.specialists > len(self.seeds):
            raise ValueError(
                f"mix.specialists = '{self.specialists}' is more than the {len(self.seeds)} of "
                "mix.seeds: lower it, or give more seeds"
            )
        return self


class DoReMi(Section):
    """The constants of DoReMi (Xie et al. 2023, Algorithm 1), with the paper's values."""

    reference: dict[str, float] | str = Field(
        "proportional",
        description="alpha_ref, the mixture of the reference model: as data.weights",
    )
    reference_run: str | None = Field(
        None,
        description="folder of a finished `gristmill train` to take as the reference of the first "
        "round, for all seeds; none: it is trained",
    )
    excess: Excess = Field(
        "excess",
        description="what raises a domain: excess (loss above the reference's), or the paper's "
        "ablations hardest (the proxy's loss), easiest (the reference's, the lower the more)",
    )
    step_size: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="eta, of the update of the domain weights"
    )
    smoothing: float = Field(1e-3, gt=0, lt=1, description="c, the share of uniform weights")
    max_rounds: int = Field(1, ge=1, description="iterated DoReMi: at most so many rounds")
    tolerance: float = Field(
        1e-3, gt=0, description="iterated DoReMi ends when no weight changed by so much"
    )


class Regress(Section):
    """Small runs at random mixtures, and the law that is fitted to them."""

    table: str | None = Field(
        None, description="CSV of runs that are there already, instead of training them"
    )
    runs: int = Field(64, ge=8, description="small runs, each at its own mixture")
    size: Size | None = Field(None, description="of the small models; none: model.size")
    steps: int | None = Field(None, ge=1, description="of a small run; none: schedule.steps")
    concentration: tuple[float, float] = Field(
        (0.1, 5.0),
        description="lowest and highest strength of the Dirichlet draws around the proportional "
        "mixture (RegMix: Liu et al. 2025)",
    )
    target: str = Field(
        "mean", description="what is lowered: 'mean' over domains, 'worst', or a domain's name"
    )
    max_epochs: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="the found mixture lets a main run read no "
        "domain more often; none: any mixture is right"
    )  # fmt: skip
    regressor: Regressor = Field("auto", description="auto: the best in cross-validation")
    folds: int = Field(5, ge=2, description="of the cross-validation")
    bootstrap: int = Field(50, ge=2, description="refits that give the uncertainty")

    @model_validator(mode="after")
    def _ordered(self) -> Regress:
        low, high = self.concentration
        if not 0 < low <= high < math.inf:
            raise ValueError(
                f"regress.concentration = '{[low, high]}' is no range: give two finite numbers "
                "above 0, the lower one first"
            )
        return self


class MixRecipe(TrainRecipe):
    """Everything `gristmill mix` needs to know."""

    name: str = Field("mix", pattern=r"^[\w.-]+$", description="name of the recipe")
    model: Model = Model(family="decoder")
    mix: Mix = Mix()
    doremi: DoReMi = DoReMi()
    regress: Regress = Regress()

    @model_validator(mode="after")
    def _decoder(self) -> MixRecipe:
        if self.model.family != "decoder":
            raise ValueError(
                f"model.family = '{self.model.family}': mixing compares next-token losses, "
                "set 'decoder'"
            )
        return self

    @model_validator(mode="after")
    def _whole_networks(self) -> MixRecipe:
        if self.run.strategy == "pipeline":
            raise ValueError(
                "run.strategy = 'pipeline': a mix compares losses of whole networks, choose auto, "
                "single, ddp, zero1, zero2 or zero3"
            )
        return self

    @model_validator(mode="after")
    def _set_by_the_mix(self) -> MixRecipe:
        """What every run of the mix gets anew is not taken from the sections of training."""
        if self.data.weights != "proportional":
            raise ValueError(
                "data.weights has no use here, a mix finds the weights: set doremi.reference for "
                "another alpha_ref than the proportional one"
            )
        for name, value in (("data.seed", self.data.seed), ("run.seed", self.run.seed)):
            if value:
                raise ValueError(f"{name} = '{value}' has no use here: give mix.seeds")
        if self.data.held_out == 0:
            raise ValueError(
                "data.held_out = '0' leaves nothing to compare the mixtures on: set it above 0, "
                "as 0.01"
            )
        if self.model.init is not None and (self.mix.main_size or self.regress.size):
            raise ValueError(
                "model.init gives its weights to models of model.size only: leave mix.main_size "
                "and regress.size out, or model.init"
            )
        return self

    @model_validator(mode="after")
    def _one_reference(self) -> MixRecipe:
        doremi = self.doremi
        if doremi.reference_run is not None and doremi.reference != "proportional":
            raise ValueError(
                "doremi.reference and doremi.reference_run both name the first reference: give one"
            )
        return self

    def train_recipe(
        self,
        *,
        weights: dict[str, float] | str,
        seed: int,
        directory: str,
        size: Size | None = None,
        steps: int | None = None,
    ) -> TrainRecipe:
        """One run of the mix: the sections of training, at a mixture and a seed.

        `seed` is that of the weights and of the data. With other `steps` the warm-up keeps its
        share of them.
        """
        tree: dict[str, Any] = self.model_dump(mode="python", exclude={"mix", "doremi", "regress"})
        tree["data"] |= {"weights": weights, "seed": seed}
        tree["run"]["seed"] = seed
        tree["output"]["directory"] = directory
        if size is not None:
            tree["model"]["size"] = size
        if steps is not None:
            schedule = tree["schedule"]
            schedule["warmup_steps"] = schedule["warmup_steps"] * steps // schedule["steps"]
            schedule["steps"] = steps
        return TrainRecipe.model_validate(tree)


def shipped_recipes() -> list[str]:
    """Names of the mixing recipes that come with Gristmill."""
    return recipe_file.shipped("mix")


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> MixRecipe:
    """Read a mixing recipe by path or shipped name, apply overrides, validate.

    Raises UserError with one line: the field, the value, what is valid.
    """
    return recipe_file.load(MixRecipe, "mix", name_or_path, overrides or [])
