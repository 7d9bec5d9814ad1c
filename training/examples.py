"""What the stream asks of the code that turns pages into training examples.

The stream (`training.sampler`) owns order, lanes and position; a builder owns tokens. A builder
keeps nothing between calls, so an example depends only on its pages, where in them it starts,
and its key: the same for any number of ranks and readers, before and after a resume.
No torch here: readers run without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

from training.recipe import TrainRecipe

IGNORED = -100
"""Label of a position where nothing is predicted, as in transformers."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example of the global stream."""

    index: int
    """Its number in the global stream, from 0."""
    domain: int
    """Number of its domain in the corpus."""
    arrays: dict[str, np.ndarray]
    """What `training.batches.collate` makes a batch of."""


class Cut(NamedTuple):
    """What `ExampleBuilder.cut` took from the open pages.

    Three cases: an example (`plan`); no example, but pages done with (`finished` > 0);
    or neither, which asks for one more page.
    """

    plan: Any | None
    """What `ExampleBuilder.build` makes the example of."""
    finished: int
    """Pages that are used up entirely, counted from the first."""
    start: int
    """Where the next example starts in the first page that is left; 0 when none is.

    A cut that asks for a page gives back the start that it got.
    """
    skipped: tuple[str, ...] = ()
    """A reason for each page that ended with text no example holds."""


ASK = Cut(None, 0, 0)
"""The cut that asks for one more page."""


class ExampleBuilder(Protocol):
    """Turns pages into examples; without state, so that it can work in any process."""

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Tokenise pages together: one value for each, which `cut` takes."""
        ...

    def cut(self, pages: Sequence[Any], start: int, key: int, *, last: bool = False) -> Cut:
        """Decide on one example from the open pages of one lane and domain.

        `pages`: what `encode` gave, in the order of the stream; empty: one more is asked for.
        `start`: how far the first one is used up, as the last cut said; 0 for a new page.
        `key`: 64 bits; the only source of this example's random choices. `last`: no page follows;
        then the cut never asks for one, and what is left may be a shorter example.
        """
        ...

    def build(self, plans: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """The arrays of several examples at once, which costs less than one by one.

        `plans`: what `cut` gave; an example does not depend on the others.
        """
        ...


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of `tokenizer` that turns text into tokens and does nothing else.

    No truncation, no padding; and a page that writes "[MASK]" or "[SEP]" gets the tokens of
    these letters, never a special one.
    """
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    return plain


def make_builder(recipe: TrainRecipe, tokenizer: Tokenizer) -> ExampleBuilder:
    """The builder that the recipe's network learns from."""
    from training.albert_examples import AlbertExamples  # noqa: PLC0415 - they import this file
    from training.causal_examples import CausalExamples  # noqa: PLC0415

    if recipe.model.family == "albert":
        return AlbertExamples(tokenizer, recipe.examples)
    return CausalExamples(tokenizer, recipe.examples)
