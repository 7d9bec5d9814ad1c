"""Examples for a causal language model: documents packed into full sequences.

Each page is a document, `[CLS] tokens [SEP]`. Documents of a lane follow each other without a
gap, cut into sequences of `sequence_length` tokens: no padding, no token lost or seen twice. A
document that does not fit goes on in the next sequence, as a document of its own there: it sees
only what stands in its own sequence, and its positions start at 0 again, so that no position is
longer than the sequence. The first token of a sequence has nothing before it and is predicted
nowhere: 1 of `sequence_length`. Where a pass ends (held-out pages) the rest is one shorter example.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from models.tokenizer import CLS_ID, SEP_ID
from training.examples import ASK, Cut, plain_tokenizer
from training.recipe import Examples


class CausalExamples:
    """An `ExampleBuilder`; arrays of (sequence_length,) int32: `input_ids`, `document_ids`

    (0, 1, 2, ... inside the sequence) and, unless tokens see the documents before their own,
    `position_ids`, which start at 0 in each document.
    """

    def __init__(self, tokenizer: Tokenizer, examples: Examples) -> None:
        self._made_of = tokenizer, examples
        self._tokenizer = plain_tokenizer(tokenizer)
        self._length = examples.sequence_length
        self._across = examples.cross_document_attention

    def __reduce__(self) -> tuple[Any, ...]:
        # For reader processes: made anew, since a pickled tokenizer forgets a setting.
        return CausalExamples, self._made_of

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One int32 array a page; of length 0 for a page without a token."""
        lists = [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]
        pages: list[np.ndarray] = []
        ids = np.fromiter(chain.from_iterable(lists), np.int32, sum(map(len, lists)))
        start = 0
        for tokens in lists:
            stop = start + len(tokens)
            # Its own memory: a slice would keep the whole batch alive with one open page.
            page = np.empty(len(tokens) + 2 if tokens else 0, np.int32)
            if tokens:
                page[0], page[-1] = CLS_ID, SEP_ID
                page[1:-1] = ids[start:stop]
            pages.append(page)
            start = stop
        return pages

    def cut(self, pages: Sequence[np.ndarray], start: int, key: int, *, last: bool = False) -> Cut:
        """The next `sequence_length` tokens; nothing here is random, `key` changes nothing."""
        del key
        taken: list[np.ndarray] = []
        missing, begin = self._length, start
        finished = empty = 0
        for page in pages:
            if not len(page):
                finished, empty = finished + 1, empty + 1
                continue
            part = page[start : start + missing]
            taken.append(part)
            missing -= len(part)
            start += len(part)
            if start == len(page):
                finished, start = finished + 1, 0
            if not missing:
                break
        skipped = ("empty_page",) * empty
        if missing and not last:
            return ASK._replace(start=begin)
        # One token alone predicts nothing.
        if self._length - missing < 2:
            return Cut(None, finished, 0, skipped)
        return Cut(taken, finished, start, skipped)

    def build(self, plans: Sequence[list[np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """The parts of each example in a row, all examples in one array that they are views of."""
        if not plans:
            return []
        parts = list(chain.from_iterable(plans))
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        counts = [len(plan) for plan in plans]
        numbers = np.arange(len(parts)) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        flat = {
            "input_ids": np.concatenate(parts),
            "document_ids": np.repeat(numbers.astype(np.int32), lengths),
        }
        ends = np.cumsum(lengths)
        if not self._across:
            firsts = np.repeat((ends - lengths).astype(np.int32), lengths)
            flat["position_ids"] = np.arange(len(firsts), dtype=np.int32) - firsts
        stops = ends[np.cumsum(counts) - 1].tolist()
        return [
            {name: array[start:stop] for name, array in flat.items()}
            for start, stop in zip([0, *stops], stops, strict=False)
        ]
