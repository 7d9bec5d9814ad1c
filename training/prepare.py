"""What a run needs before the first tensor: corpus, weights, tokenizer, examples, identity.

Every mistake in a recipe that can be found without a network is found here, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from models.errors import UserError
from models.tokenizer import load_tokenizer
from training import identity
from training.domains import Corpus, load_corpus, mixture
from training.examples import ExampleBuilder, make_builder
from training.folders import local
from training.recipe import Pipeline, Run, TrainRecipe


@dataclass(frozen=True)
class Prepared:
    """The inputs of a run, opened and checked."""

    corpus: Corpus
    weights: np.ndarray
    """Share of the examples by domain (domains,)."""
    tokenizer: Tokenizer
    vocab_size: int
    builder: ExampleBuilder
    identity: dict[str, Any]


def prepare(recipe: TrainRecipe) -> Prepared:
    """Open what the recipe names. Raises UserError in one line."""
    if not recipe.data.manifests:
        raise UserError(
            "no data: name a mined crawl with --data DIR, or data.manifests in the recipe"
        )
    if not recipe.model.tokenizer:
        raise UserError(
            "no tokenizer: give --tokenizer DIR, or make one: "
            f"gristmill models train-tokenizer {recipe.data.manifests[0]} --output out/tokenizer"
        )
    if not recipe.output.directory:
        raise UserError("no output folder: give --output DIR, or output.directory in the recipe")
    directory = local(recipe.output.directory)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"output '{directory}' is a file: give a folder with --output")
    if recipe.model.init is not None and not Path(recipe.model.init).is_dir():
        raise UserError(
            f"model.init = '{recipe.model.init}' is no folder: give that of a transformers model"
        )
    tokenizer = load_tokenizer(recipe.model.tokenizer)
    corpus = load_corpus(recipe.data)
    weights = mixture(corpus, recipe.data.weights)
    return Prepared(
        corpus=corpus,
        weights=weights,
        tokenizer=tokenizer,
        vocab_size=tokenizer.get_vocab_size(),
        builder=make_builder(recipe, tokenizer),
        identity=identity.identity(recipe, corpus, [float(weight) for weight in weights]),
    )


def strategy_of(run: Run, ranks: int) -> str:
    """The strategy that `ranks` processes use. Raises UserError."""
    if run.strategy not in ("auto", "pipeline") and run.pipeline != Pipeline():
        name, value = next(
            (name, value) for name, value in run.pipeline if value != getattr(Pipeline(), name)
        )
        raise UserError(
            f"run.pipeline.{name} = '{value}' with run.strategy = '{run.strategy}', which has no "
            "stages: set run.strategy=pipeline, or leave run.pipeline as it is"
        )
    if run.strategy == "auto":
        return "single" if ranks == 1 else "ddp"
    if run.strategy == "single" and ranks > 1:
        raise UserError(
            f"run.strategy = 'single' on {ranks} processes: choose auto, ddp, zero1, zero2, zero3 "
            "or pipeline"
        )
    if run.strategy == "pipeline":
        pipeline_ranks(run, ranks)
    return run.strategy


def pipeline_ranks(run: Run, ranks: int) -> int:
    """Processes of one pipeline among `ranks`. Raises UserError."""
    if ranks == 1:
        raise UserError(
            "run.strategy = 'pipeline' on 1 process: start more with --processes N or torchrun"
        )
    asked = run.pipeline.ranks or ranks
    if ranks % asked:
        valid = ", ".join(str(one) for one in range(2, ranks + 1) if ranks % one == 0)
        raise UserError(
            f"run.pipeline.ranks = '{asked}' does not divide the {ranks} processes: choose {valid}"
        )
    if run.pipeline.shard and asked == ranks:
        fewer = [str(one) for one in range(2, ranks) if ranks % one == 0]
        more = f"run.pipeline.ranks to {' or '.join(fewer)}" if fewer else "more processes"
        raise UserError(
            f"run.pipeline.shard = 'True' with one pipeline of {ranks} processes: there is no copy "
            f"to share with: set run.pipeline.shard=false, or {more}"
        )
    return asked


def check_pipeline(recipe: TrainRecipe, ranks: int) -> None:
    """UserError where strategy 'pipeline' cannot be on `ranks` processes; no network is built."""
    if strategy_of(recipe.run, ranks) != "pipeline":
        return
    # torch and transformers, which no other mistake waits for
    from training import microbatches  # noqa: PLC0415
    from training.parallel import layout  # noqa: PLC0415

    stages, asked = pipeline_ranks(recipe.run, ranks), recipe.batch.microbatch
    examples = recipe.batch.examples(recipe.examples.sequence_length)

    def wrong(microbatch: int) -> UserError | None:
        copies = ranks // stages
        number = microbatches.count(examples, microbatch, copies)
        try:
            layout.pipe_of(recipe, stages, number // copies)
        except UserError as error:
            return error
        return None

    if (found := wrong(asked)) is not None:
        smaller = next((one for one in range(asked - 1, 0, -1) if wrong(one) is None), None)
        repair = f": set batch.microbatch={smaller}, not {asked}" if smaller else ""
        raise UserError(f"run.pipeline: {found}{repair}")
