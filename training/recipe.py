"""The training recipe: one TOML file, validated into one frozen model.

`TrainRecipe.digest` covers everything that can change the curve of the loss beyond rounding; where
the output goes, on how many devices and in which pieces the work is done does not belong to it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from models import files
from pipelines import recipe_file
from pipelines.recipe_file import Section, Texts

DomainKey = Literal["language", "bucket", "host", "source"]
Size = Literal["tiny", "small", "base", "large", "120m", "280m", "1.3b", "8b", "70b"]
SIZES: dict[str, tuple[str, ...]] = {
    "albert": ("tiny", "small", "base", "large"),
    "decoder": ("tiny", "small", "120m", "280m", "1.3b", "8b", "70b"),
}


class Data(Section):
    """What is read: mined pages, divided into domains."""

    manifests: Texts = Field(
        (), description="mined crawls: folders or manifest.json, any fsspec URL"
    )
    by: tuple[DomainKey, ...] = Field(
        ("language",), description="what tells domains apart: language, bucket, host, source"
    )
    languages: Texts = Field((), description="languages to take; none: all")
    buckets: Texts = Field((), description="buckets to take; none: all")
    host_groups: dict[str, Texts] = Field(
        default_factory=dict,
        description="for by = 'host': name -> host patterns, '*.wikipedia.org'; the rest: 'other'",
    )
    weights: dict[str, float] | str = Field(
        "proportional",
        description="share of the examples by domain: 'proportional' (to characters), 'uniform', "
        "a mapping, or the path of a weights file written by `gristmill mix`",
    )
    held_out: float = Field(
        0.01, ge=0, lt=1, description="share of the pages that are kept for evaluation, by URL hash"
    )
    seed: int = Field(0, ge=0, description="of the order and of every random choice in examples")
    lanes: int = Field(
        48, ge=1, le=4096,
        description="independent streams that the data is dealt to; a run is cheapest when "
        "ranks x readers divides it; part of the order",
    )  # fmt: skip
    window_row_groups: int = Field(
        8, ge=1, description="shuffle buffer: pages of so many row groups of a domain are mixed"
    )
    readers: int = Field(0, ge=0, description="reader processes of each rank; 0: none of their own")
    cache_bytes: int = Field(
        1 << 30, ge=1, description="decoded row groups that each rank keeps in memory, all its "
        "readers together; what is mixed at once (16 MiB x window_row_groups x domains, divided "
        "by ranks) should fit, or it is read again and again"
    )  # fmt: skip

    @property
    def weights_file(self) -> str | None:
        """The path that `weights` names, if it is one."""
        named = isinstance(self.weights, str) and self.weights not in ("proportional", "uniform")
        return str(self.weights) if named else None


class Examples(Section):
    """How pages become examples."""

    sequence_length: int = Field(128, ge=8, description="tokens, special ones included")
    cross_document_attention: bool = Field(
        False, description="causal: a packed token sees the documents before its own"
    )
    masked: float = Field(0.15, gt=0, lt=1, description="share of the tokens to predict (ALBERT)")
    masking: Literal["token", "word", "ngram"] = Field(
        "ngram", description="what is masked as one: a token, a word, up to ngram_words words"
    )
    ngram_words: int = Field(3, ge=1, le=10, description="longest n-gram; p(n) falls as 1/n")
    swapped: float = Field(0.5, ge=0, le=1, description="share of swapped segment pairs (ALBERT)")


class Model(Section):
    """Which network."""

    family: Literal["albert", "decoder"] = Field("albert", description="recipe of the network")
    size: Size = Field("small", description="albert: tiny, small, base, large; "
                       "decoder: tiny, small, 120m, 280m, 1.3b, 8b, 70b")  # fmt: skip
    dropout: float = Field(
        0.0, ge=0, lt=1, description="hidden and attention dropout; decoder: attention only"
    )
    tokenizer: str = Field("", description="folder or tokenizer.json of `models train-tokenizer`")
    init: str | None = Field(
        None,
        description="folder of a transformers model to go on from, with a new data.seed for "
        "other data; none: random",
    )

    @model_validator(mode="after")
    def _size_of_family(self) -> Model:
        if self.size not in SIZES[self.family]:
            raise ValueError(
                f"model.size = '{self.size}' is no size of '{self.family}': "
                f"choose {', '.join(SIZES[self.family])}"
            )
        return self


class Batch(Section):
    """The global batch of one optimiser step, over all devices and microbatches."""

    samples: int | None = Field(None, ge=1, description="examples in a step")
    tokens: int | None = Field(
        None, ge=1, description="or token positions in a step: rounded up to whole examples"
    )
    microbatch: int = Field(
        8, ge=1, description="examples that one device computes at once: less needs less memory; "
        "may change when a run goes on (with dropout the masks are then others)"
    )  # fmt: skip

    @model_validator(mode="after")
    def _one(self) -> Batch:
        if (self.samples is None) == (self.tokens is None):
            raise ValueError(
                f"batch.samples = '{self.samples}' and batch.tokens = '{self.tokens}': "
                "set exactly one of them"
            )
        return self

    def examples(self, sequence_length: int) -> int:
        """Examples in one step."""
        if self.samples is not None:
            return self.samples
        assert self.tokens is not None
        return -(-self.tokens // sequence_length)


Decay = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(Section):
    """Steps of the weights."""

    name: Literal["adamw", "lamb"] = Field("adamw", description="LAMB: You et al. 2020")
    learning_rate: float = Field(1e-3, gt=0, description="at the end of the warm-up")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of the two moments")
    epsilon: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.01, ge=0, description="not on biases and norms")
    max_gradient_norm: float | None = Field(1.0, gt=0, description="clipping; none: no clipping")
    max_trust_weight_norm: float = Field(
        1e4, gt=0,
        description="LAMB: cap of a weight's norm in its trust ratio; 1e4 caps no real weight, as "
        "in the paper's code; a large embedding at 10 would learn at a quarter of the rate",
    )  # fmt: skip


class Schedule(Section):
    """Learning rate over the steps."""

    steps: int = Field(1000, ge=1, description="optimiser steps of the whole run")
    warmup_steps: int = Field(100, ge=0, description="linear from 0 up to learning_rate")
    decay: Literal["linear", "cosine", "constant", "exponential"] = Field(
        "linear", description="after the warm-up, down to final_ratio at the end of the run"
    )
    final_ratio: float = Field(
        0.0, ge=0, le=1, description="learning rate at the end / highest one"
    )

    @model_validator(mode="after")
    def _possible(self) -> Schedule:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"schedule.warmup_steps = '{self.warmup_steps}' leaves nothing of "
                f"schedule.steps = '{self.steps}'"
            )
        if self.decay == "exponential" and self.final_ratio == 0:
            raise ValueError(
                "schedule.decay = 'exponential' never reaches schedule.final_ratio = '0': "
                "give a ratio above 0, as 0.1"
            )
        return self


class Pipeline(Section):
    """For strategy = 'pipeline': the network in stages, one after the other."""

    ranks: int | None = Field(
        None, ge=2, description="processes that share one copy of the network; more processes: "
        "copies of it, data parallel; none: all processes share one"
    )  # fmt: skip
    schedule: Literal[
        "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv",
        "dualpipe-v",
    ] = Field("1f1b", description="order of a rank's stages and microbatches")  # fmt: skip
    stages_per_rank: int | None = Field(
        None, ge=1, description="none: the fewest that the schedule knows"
    )
    cut: Literal["optimal", "tree", "uniform"] = Field(
        "optimal", description="optimal: least step time; tree: the SageMaker library's way; "
        "uniform: the same number of layers"
    )  # fmt: skip
    costs: Literal["measured", "operations"] = Field(
        "measured", description="where the layers' times come from: the device, or counted FLOPs"
    )
    shard: bool = Field(
        False, description="copies share gradients and optimiser state (FSDP2, as zero2)"
    )


class Run(Section):
    """How the work is done. `seed` and `precision` are part of the curve of the loss."""

    seed: int = Field(0, ge=0, description="of the initial weights and of dropout")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA when there")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast")
    strategy: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "pipeline"] = Field(
        "auto", description="auto: single on one device, ddp on more, or where that does not fit "
        "the first of smaller microbatches, recomputation, zeroN and pipeline that does; zeroN: "
        "FSDP2; pipeline: each device holds some of the layers"
    )  # fmt: skip
    pipeline: Pipeline = Pipeline()
    activation_checkpointing: bool = Field(False, description="recompute blocks in backward")
    compile: bool = Field(False, description="torch.compile")
    max_skipped_steps: int = Field(
        5, ge=1, description="stop after so many steps in a row with NaN or infinite gradients"
    )
    log_every: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")
    tensorboard: bool = Field(True, description="write TensorBoard events")


class Evaluation(Section):
    """Held-out loss by domain, during the run and at its end."""

    every: int | None = Field(None, ge=1, description="steps; none: only at the end")
    examples: int = Field(256, ge=1, description="most examples of one domain")


class Checkpoint(Section):
    """Saved states."""

    every: int = Field(500, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints that stay")


class Output(Section):
    """Where everything goes."""

    directory: str = Field("", description="folder of the run")


class TrainRecipe(Section):
    """Everything `gristmill train` needs to know."""

    name: str = Field("train", pattern=r"^[\w.-]+$", description="name of the recipe")
    data: Data = Data()
    examples: Examples = Examples()
    model: Model = Model()
    batch: Batch = Batch(samples=32)
    optimiser: Optimiser = Optimiser()
    schedule: Schedule = Schedule()
    run: Run = Run()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    output: Output = Output()

    def published(self) -> dict[str, Any]:
        """The recipe as the run's manifest shows it: without places on this machine, and without
        what changes the losses by their rounding only.

        `batch.microbatch` and the number of ranks are among these. With dropout they choose other
        masks too, as another seed would; still they are left out, because a run that has outgrown
        its memory must be able to go on with less.
        """
        return self.model_dump(
            mode="json",
            exclude={
                "data": {"manifests", "readers", "cache_bytes"},
                "model": {"tokenizer", "init"},
                "batch": {"microbatch"},
                "run": {
                    "device", "strategy", "pipeline", "activation_checkpointing", "compile",
                    "max_skipped_steps", "log_every", "tensorboard",
                },
                "evaluation": True,
                "checkpoint": True,
                "output": True,
            },
        )  # fmt: skip

    def digest(self) -> str:
        """XXH3 of the settings that can change the curve of the loss (32 hex digits).

        Files that the recipe names (manifests, tokenizer, weights, init) count by their content,
        in the run's manifest.
        """
        recipe = self.published()
        del recipe["name"]
        return files.xxh3_bytes(json.dumps(recipe, sort_keys=True).encode())


def shipped_recipes() -> list[str]:
    """Names of the training recipes that come with Gristmill."""
    return recipe_file.shipped("train")


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> TrainRecipe:
    """Read a training recipe by path or shipped name, apply overrides, validate.

    Raises UserError with one line: the field, the value, what is valid.
    """
    return recipe_file.load(TrainRecipe, "train", name_or_path, overrides or [])
