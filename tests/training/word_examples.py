"""A builder of examples without a tokenizer: tokens are words. Readers start fast with it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from models.errors import UserError
from training.examples import Cut

SKIPPED = "Skipped"
"""First word of a page that gives no example."""


class WordExamples:
    """Packs the words of one page after the other into examples of `words` words.

    Each example also holds its key. encoded: pages in each call of `encode` so far.
    """

    def __init__(self, words: int = 20) -> None:
        self.words = words
        self.encoded: list[int] = []

    def encode(self, texts: Sequence[str]) -> list[list[str]]:
        self.encoded.append(len(texts))
        return [text.split() for text in texts]

    def cut(self, pages: Sequence[list[str]], start: int, key: int, *, last: bool = False) -> Cut:
        if pages and start == 0 and pages[0][:1] == [SKIPPED]:
            return Cut(None, 1, 0, ("skipped",))
        found: list[str] = []
        for number, page in enumerate(pages):
            first = start if number == 0 else 0
            found += page[first : first + self.words - len(found)]
            if len(found) == self.words:
                used = self.words - sum(map(len, pages[:number])) + (start if number else first)
                done = used == len(page)
                arrays = {"words": np.array(found), "key": np.array(key, np.uint64)}
                return Cut(arrays, number + done, 0 if done else used)
        return Cut(None, len(pages), 0) if last else Cut(None, 0, start)

    def build(self, plans: Sequence[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        return list(plans)


class DyingExamples(WordExamples):
    """Its process is gone after some calls of `encode`."""

    def encode(self, texts: Sequence[str]) -> list[list[str]]:
        if len(self.encoded) == 3:
            os._exit(17)
        return super().encode(texts)


class MistakenExamples(WordExamples):
    """Finds a mistake of the user."""

    def encode(self, texts: Sequence[str]) -> list[list[str]]:
        raise UserError("'x' is wrong: choose 'y'")
