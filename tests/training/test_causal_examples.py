"""Packing against a naive concatenation."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import CLS_ID, SEP_ID
from tests.training.small_tokenizer import made_up_text, small_tokenizer
from training.causal_examples import CausalExamples
from training.examples import Cut, make_builder
from training.recipe import Examples, TrainRecipe


def pack(builder: CausalExamples, pages: Sequence[np.ndarray]) -> tuple[list[Cut], int]:
    """All full sequences, by the rules of the stream; and the tokens that are left."""
    found, waiting, start = [], list(pages), 0
    pages_open: list[np.ndarray] = []
    while True:
        cut = builder.cut(pages_open, start, len(found))
        if cut.plan is None and not cut.finished:
            if not waiting:
                return found, sum(map(len, pages_open)) - start
            pages_open.append(waiting.pop(0))
            continue
        del pages_open[: cut.finished]
        start = cut.start
        found.append(cut)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=30), st.integers(8, 40))
def test_packing_is_a_concatenation(sizes: list[int], length: int) -> None:
    builder = CausalExamples(small_tokenizer(), Examples(sequence_length=length))
    pages, total = [], 0
    for size in sizes:  # all tokens of the run are different, but for the two special ones
        body = np.arange(100 + total, 100 + total + size, dtype=np.int32)
        pages.append(np.array([CLS_ID, *body, SEP_ID], np.int32) if size else body)
        total += size
    cuts, left = pack(builder, pages)
    naive = np.concatenate([np.empty(0, np.int32), *pages])
    assert left == len(naive) - len(cuts) * length < length
    owner = np.repeat(np.arange(len(pages)), [len(page) for page in pages])
    examples = builder.build([cut.plan for cut in cuts])
    for number, arrays in enumerate(examples):
        part = slice(number * length, (number + 1) * length)
        assert np.array_equal(arrays["input_ids"], naive[part])
        documents, position, expected_ids, expected_positions = -1, 0, [], []
        before = None
        for page in owner[part]:
            if page != before:
                documents, position, before = documents + 1, 0, page
            expected_ids.append(documents)
            expected_positions.append(position)
            position += 1
        assert arrays["document_ids"].tolist() == expected_ids
        assert arrays["position_ids"].tolist() == expected_positions
        assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}
    empty = sum(len(cut.skipped) for cut in cuts)
    assert empty <= sizes.count(0)
    assert {reason for cut in cuts for reason in cut.skipped} <= {"empty_page"}


def test_encode_is_the_tokenizer_between_special_tokens() -> None:
    tokenizer = small_tokenizer()
    texts = [made_up_text(1, 5), "", "  \n", "the river", "\u200b\u0301😀\ud7ff"]
    builder = CausalExamples(tokenizer, Examples(sequence_length=16))
    for text, page in zip(texts, builder.encode(texts), strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert page.tolist() == ([CLS_ID, *ids, SEP_ID] if ids else [])


@pytest.mark.parametrize("family", ["decoder", "albert"])
def test_text_never_makes_special_tokens(family: str) -> None:
    tokenizer = small_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=90)
    try:
        recipe = TrainRecipe.model_validate({"model": {"family": family}})
        builder = make_builder(recipe, tokenizer)
    finally:
        tokenizer.no_truncation()
        tokenizer.no_padding()
    text = "the [MASK] mill [SEP] river [CLS][PAD] bridge"
    for one in (builder, pickle.loads(pickle.dumps(builder))):  # noqa: S301 - our own bytes
        (page,) = one.encode([text])
        ids = page[1:-1] if family == "decoder" else page.ids
        assert 20 < len(ids) < 60
        assert not set(ids.tolist()) & {0, 2, 3, 4}


def test_without_document_borders_there_are_no_positions() -> None:
    builder = CausalExamples(
        small_tokenizer(), Examples(sequence_length=8, cross_document_attention=True)
    )
    cut = builder.cut(builder.encode([made_up_text(0, 3)]), 0, 0)
    (arrays,) = builder.build([cut.plan])
    assert sorted(arrays) == ["document_ids", "input_ids"]
