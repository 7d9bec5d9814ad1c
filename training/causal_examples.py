"""Examples for a causal language model: documents packed into full sequences.

Each page is a document, `[CLS] tokens [SEP]`. Documents of a lane follow each other without a
gap, cut into sequences of `sequence_length` tokens: no padding, no token lost or seen twice. A
document that does not fit goes on in the next sequence, as a document of its own there: it sees
only what stands in its own sequence, and its positions start at 0 again, so that no position is
longer than the sequence. The first token of a sequence has nothing before it and is predicted
nowhere: 1 of `sequence_length`.
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

    def cut(self, pages: Sequence[np.ndarray], start: int, key: int) -> Cut:
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
        if missing:
            return ASK._replace(start=begin)
        lengths = [len(part) for part in taken]
        documents = np.repeat(np.arange(len(taken), dtype=np.int32), lengths)
        arrays = {"input_ids": np.concatenate(taken), "document_ids": documents}
        if not self._across:
            firsts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
            arrays["position_ids"] = np.arange(self._length, dtype=np.int32) - firsts[documents]
        return Cut(arrays, finished, start, ("empty_page",) * empty)
