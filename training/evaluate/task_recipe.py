"""The recipe of a fine-tuning task: one TOML file, validated into one frozen model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelines import recipe_file
from pipelines.recipe_file import Section

Rate = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0)]


class TaskFiles(Section):
    """Labelled files and how they are divided."""

    directory: str = Field("", description="folder of the files; --data is short for it")
    train: str = Field(description="file of the training examples, or of all: see test")
    validation: str | None = Field(None, description="file; none: a part of the training examples")
    test: str | None = Field(None, description="file; none: a part of the training file")
    validation_share: float = Field(0.1, gt=0, lt=1, description="of the training examples")
    test_share: float = Field(0.2, gt=0, lt=1, description="of the training file")
    split_seed: int = Field(0, ge=0, description="of the parts; stratified by label where one "
                            "example has one label")  # fmt: skip
    text_column: str = Field("text", description="sequence classification: column of the text")
    label_column: str = Field("label", description="sequence classification: column of the label")
    unprefixed_tags: Literal["refuse", "entity"] = Field(
        "refuse",
        description="token classification: what a tag as 'LOC', without B- or I-, means; "
        "entity: equal ones in a row are one entity",
    )
    train_examples: int | None = Field(
        None, ge=1, description="train on so many, drawn by split_seed; none: on all"
    )


class FineTuning(Section):
    """How each model is trained, and what is chosen on the validation examples."""

    learning_rates: tuple[Rate, ...] = Field(
        (1e-4, 3e-4, 1e-3), min_length=1, description="tried; the best on validation is taken"
    )
    search_seeds: int = Field(
        1, ge=1, description="first seeds, whose mean validation score decides the learning rate"
    )
    seeds: tuple[Seed, ...] = Field(
        (0, 1, 2), min_length=1, description="each: new head (or network), order and dropout"
    )
    epochs: int = Field(10, ge=1, description="most passes; the best one on validation is taken")
    patience: int = Field(3, ge=1, description="stop after so many epochs without a better one")
    batch: int = Field(32, ge=1, description="examples in an optimiser step")
    max_length: int = Field(
        128, ge=8, description="tokens; a longer sentence is split, a longer text is cut"
    )
    warmup_share: float = Field(0.1, ge=0, lt=1, description="of the steps; then linear to 0")
    weight_decay: float = Field(0.01, ge=0, description="not on biases and norms")
    max_gradient_norm: float = Field(1.0, gt=0, description="clipping")
    head_dropout: float = Field(0.1, ge=0, lt=1, description="before the new head")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA when there")

    @model_validator(mode="after")
    def _distinct(self) -> FineTuning:
        for name in ("learning_rates", "seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"fine_tuning.{name} = '{list(values)}' has one value twice")
        if self.search_seeds > len(self.seeds):
            raise ValueError(
                f"fine_tuning.search_seeds = '{self.search_seeds}' is more than the "
                f"{len(self.seeds)} of fine_tuning.seeds"
            )
        return self


class TaskRecipe(Section):
    """Everything that `gristmill evaluate CHECKPOINT... TASK` needs to know."""

    name: str = Field("task", pattern=r"^[\w.-]+$", description="name of the recipe")
    kind: Literal["token-classification", "sequence-classification"] = Field(
        description="token-classification: 'token TAB tag' lines; "
        "sequence-classification: tab separated with named columns"
    )
    data: TaskFiles
    fine_tuning: FineTuning = FineTuning()


def shipped_tasks() -> list[str]:
    """Names of the task recipes that come with Gristmill."""
    return recipe_file.shipped("evaluate")


def load_task_recipe(name_or_path: str, overrides: list[str] | None = None) -> TaskRecipe:
    """Read a task recipe by path or shipped name, apply overrides, validate.

    Raises UserError with one line: the field, the value, what is valid.
    """
    return recipe_file.load(TaskRecipe, "evaluate", name_or_path, overrides or [])
