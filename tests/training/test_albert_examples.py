"""ALBERT's examples: whole pages used once, order labels, masks by naive counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import CLS_ID, MASK_ID, SEP_ID, UNK_ID
from tests.training.small_tokenizer import CHINESE, THAI, made_up_text, small_tokenizer
from training.albert_examples import MAX_WORD_TOKENS, MIN_LONE_TOKENS, AlbertExamples, Page
from training.examples import IGNORED, Cut
from training.masking import FIRST_ORDINARY_ID, budget
from training.recipe import Examples
from training.sentences import sentences

SWAPPED, KEPT = 1, 0


def builder(**settings: Any) -> AlbertExamples:
    return AlbertExamples(
        small_tokenizer(), Examples.model_validate({"sequence_length": 64} | settings)
    )


def built(maker: AlbertExamples, cut: Cut) -> dict[str, np.ndarray]:
    (arrays,) = maker.build([cut.plan])
    return arrays


def cuts(maker: AlbertExamples, page: Page, key: int = 0) -> list[Cut]:
    """One pass over a page."""
    found, start = [], 0
    while True:
        found.append(maker.cut([page], start, key + 1000 * len(found)))
        if found[-1].finished:
            return found
        start = found[-1].start


def unmasked(arrays: dict[str, np.ndarray]) -> tuple[list[int], list[int]]:
    """The tokens of A and B (as the page has them) by the labels and the layout."""
    ids = np.where(arrays["labels"] == IGNORED, arrays["input_ids"], arrays["labels"]).tolist()
    types = arrays["token_type_ids"].tolist()
    second = types.index(1)
    assert types == [0] * second + [1] * (len(ids) - second)
    assert ids[0] == CLS_ID and ids[second - 1] == ids[-1] == SEP_ID
    parts = ids[1 : second - 1], ids[second:-1]
    return parts if not arrays["swapped"] else parts[::-1]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 30),
    st.integers(8, 90),
    st.sampled_from(["token", "word", "ngram"]),
)
def test_each_token_of_a_page_is_used_once(
    seed: int, sentence_count: int, length: int, masking: str
) -> None:
    maker = builder(sequence_length=length, masking=masking)
    (page,) = maker.encode([made_up_text(seed, sentence_count) + " 😀 " + THAI])
    used: list[int] = []
    found = cuts(maker, page, seed)
    for cut in found:
        if cut.plan is None:
            assert cut.skipped in {("one_sentence",), ("last_sentence",)}
            assert len(page.ids) - len(used) < MIN_LONE_TOKENS
            used += page.ids[len(used) :].tolist()
            continue
        arrays = built(maker, cut)
        assert len(arrays["input_ids"]) <= length
        a, b = unmasked(arrays)
        assert a and b
        used += a + b
        # The border between the segments is one between sentences, or pieces of the last one.
        border = len(used) - len(b)
        assert border in page.ends or cut.finished
    assert used == page.ids.tolist()
    assert [cut.finished for cut in found] == [0] * (len(found) - 1) + [1]


def test_encode_is_the_tokenizer_on_sentences() -> None:
    texts = [made_up_text(5, 9), "", " \n", "\u200b", THAI * 3, "one", made_up_text(6, 3)]
    maker = builder(sequence_length=512)
    alone = [maker.encode([text])[0] for text in texts]
    for text, page, same in zip(texts, maker.encode(texts), alone, strict=True):
        parts = sentences(text)
        lists = [small_tokenizer().encode(part, add_special_tokens=False).ids for part in parts]
        assert page.ids.tolist() == [token for ids in lists for token in ids]
        assert page.ends == np.cumsum([len(ids) for ids in lists if ids]).tolist()
        for mine, other in zip(page, same, strict=True):
            assert np.array_equal(mine, other)
        assert page.sizes.sum() == len(page.ids)
        assert len(page.word_ends) == len(page.ends)
        assert np.array_equal(np.cumsum(page.sizes)[[w - 1 for w in page.word_ends]], page.ends)


def test_pages_that_make_no_pair_are_counted() -> None:
    maker = builder()
    for text, reason in [("", "empty_page"), ("the mill", "one_sentence")]:
        (page,) = maker.encode([text])
        assert maker.cut([page], 0, 1) == Cut(None, 1, 0, (reason,))
    assert maker.cut([], 0, 1) == Cut(None, 0, 0)


def test_a_long_lone_sentence_is_halved_at_a_word() -> None:
    maker = builder(sequence_length=512)
    text = " ".join(["the mill grinds grain slowly"] * 6)
    (page,) = maker.encode([text])
    assert len(page.ends) == 1 and len(page.ids) >= MIN_LONE_TOKENS
    cut = maker.cut([page], 0, 9)
    assert cut.plan is not None and cut.finished == 1
    a, b = unmasked(built(maker, cut))
    assert abs(len(a) - len(b)) <= MAX_WORD_TOKENS
    words = np.cumsum(page.sizes).tolist()
    assert len(a) in words


def test_no_sentence_is_left_alone_where_two_can_stay_together() -> None:
    maker = builder(sequence_length=43)  # room for 40, pieces of 20 at most
    page = page_of([10, 10, 10, 10, 10])
    assert [cut.start for cut in cuts(maker, page)] == [3, 0]
    assert [cut.start for cut in cuts(maker, page_of([10] * 8))] == [4, 0]
    assert [cut.skipped for cut in cuts(maker, page_of([20, 20, 5]))] == [(), ("last_sentence",)]


def page_of(lengths: list[int], words: list[int] | None = None) -> Page:
    """A page of sentences of so many one-token words (or words of `words` tokens)."""
    total = sum(lengths)
    ids = np.arange(FIRST_ORDINARY_ID, FIRST_ORDINARY_ID + total, dtype=np.int32)
    sizes = np.array(words or [1] * total, np.int32)
    ends = np.cumsum(lengths).tolist()
    word_ends = (np.searchsorted(np.cumsum(sizes), ends) + 1).tolist()
    return Page(ids, sizes, sizes, ends, word_ends)


def test_border_and_order_are_drawn_evenly() -> None:
    maker = builder(swapped=0.25)
    page = page_of([10, 10, 10, 10, 10])
    borders: Counter[int] = Counter()
    orders: Counter[int] = Counter()
    for key in range(4000):
        arrays = built(maker, maker.cut([page], 0, key))
        a, b = unmasked(arrays)
        assert a + b == page.ids.tolist()
        borders[len(a)] += 1
        orders[int(arrays["swapped"])] += 1
    assert set(borders) == {10, 20, 30, 40}
    assert all(abs(count - 1000) < 5 * 28 for count in borders.values())  # 5 sigma
    assert abs(orders[SWAPPED] - 1000) < 5 * 28
    for share, order in [(0.0, KEPT), (1.0, SWAPPED)]:
        maker = builder(swapped=share)
        found = maker.build([maker.cut([page], 0, key).plan for key in range(50)])
        assert {int(arrays["swapped"]) for arrays in found} == {order}


@pytest.mark.parametrize("masking", ["token", "word", "ngram"])
def test_share_and_actions_of_masks(masking: str) -> None:
    maker = builder(sequence_length=128, masking=masking)
    vocabulary = small_tokenizer().get_vocab_size()
    actions: Counter[str] = Counter()
    short = 0
    for seed in range(300):
        (page,) = maker.encode([made_up_text(seed, 12, (4, 12))])
        for cut in cuts(maker, page, seed):
            if cut.plan is None:
                continue
            arrays = built(maker, cut)
            seen, labels = arrays["input_ids"], arrays["labels"]
            ordinary = np.count_nonzero(
                np.where(labels == IGNORED, seen, labels) >= FIRST_ORDINARY_ID
            )
            masked = labels != IGNORED
            assert labels[masked].min() >= FIRST_ORDINARY_ID  # never a special token
            wanted = budget(int(ordinary), 0.15)
            short += wanted - int(masked.sum())
            assert 0 <= wanted - masked.sum() <= (0 if masking == "token" else 1)
            same = seen[masked] == labels[masked]
            is_mask = seen[masked] == MASK_ID
            assert ((seen[masked] >= FIRST_ORDINARY_ID) | is_mask).all()
            assert seen.max() < vocabulary
            actions["mask"] += int(is_mask.sum())
            actions["same"] += int(same.sum())
            actions["other"] += int((~same & ~is_mask).sum())
    total = sum(actions.values())
    assert total > 3000 and short < total / 100
    assert abs(actions["mask"] / total - 0.8) < 0.03
    assert abs(actions["same"] / total - 0.1) < 0.03  # 1 in 600 of the others is the same one
    assert abs(actions["other"] / total - 0.1) < 0.03


@pytest.mark.parametrize("masking", ["word", "ngram"])
def test_words_are_masked_whole(masking: str) -> None:
    maker = builder(sequence_length=200, masking=masking)
    draw = np.random.default_rng(0)
    runs: Counter[int] = Counter()
    for key in range(500):
        words = draw.integers(1, MAX_WORD_TOKENS + 1, 40).tolist()
        total = sum(words)
        half = sum(words[:20])
        page = page_of([half, total - half], words)
        if total > 197:
            continue
        arrays = built(maker, maker.cut([page], 0, key))
        a, _ = unmasked(arrays)
        second = arrays["token_type_ids"].tolist().index(1)
        parts = [arrays["labels"][1 : second - 1], arrays["labels"][second:-1]]
        parts = parts[::-1] if arrays["swapped"] else parts
        assert len(parts[0]) == len(a) == half
        masked = np.concatenate(parts) != IGNORED
        ends = np.cumsum(words)
        per_word = [masked[end - size : end] for end, size in zip(ends, words, strict=True)]
        assert all(part.all() or not part.any() for part in per_word)
        assert 0 < masked.sum() <= budget(total, 0.15)
        flags = "".join("x" if part[0] else "." for part in per_word)
        for run in flags.split("."):
            runs[len(run)] += bool(run)
    # Runs of two or three words are rare by chance alone and common as n-grams.
    longer = sum(runs[size] for size in runs if size > 1) / sum(runs.values())
    assert longer > 0.35 if masking == "ngram" else longer < 0.25


def test_lengths_of_ngrams_fall_as_one_over_n() -> None:
    maker = builder(sequence_length=512, ngram_words=3, masked=0.01)
    page = page_of([250, 250])
    counts: Counter[int] = Counter()
    for key in range(3000):  # a budget of 5 tokens: the first n-gram always fits
        random = np.random.default_rng(key).integers(0, 2**64, 500, dtype=np.uint64)
        chosen = maker._masking.choose(page.sizes, np.array([500]), np.array([250]), random)
        first = int(np.argmin(random))
        run = 0
        while first + run < 500 and chosen[first + run]:
            run += 1
        counts[run] += 1
    shares = [counts[size] / 3000 for size in (1, 2, 3)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.035)


def test_no_ngram_crosses_the_border_of_the_segments() -> None:
    maker = builder(ngram_words=10, masked=0.5)
    sizes = np.ones(20, np.int32)
    order = np.full(20, 5, np.uint64)
    order[7] = 0  # the first one begins at word 7
    order[15] = 4  # the second one at word 15
    random = order << np.uint64(32) | np.uint64(2**32 - 1)  # the longest n-grams
    chosen = maker._masking.choose(sizes, np.array([20]), np.array([10]), random)
    assert chosen[7:10].all() and chosen[15:20].all()
    assert chosen.sum() == 10


def test_unknown_tokens_and_long_chains() -> None:
    maker = builder(sequence_length=128, masking="word", masked=0.9)
    (page,) = maker.encode(["the 龘龘 mill. Grain slowly turning.\n" + CHINESE * 3])
    unknown = np.flatnonzero(page.ids == UNK_ID)
    assert len(unknown)
    word_of = np.repeat(np.arange(len(page.sizes)), page.sizes)
    assert (page.costs[word_of[unknown]] == 0).all()
    assert page.sizes.max() <= MAX_WORD_TOKENS
    for key in range(30):
        arrays = built(maker, maker.cut([page], 0, key))
        assert UNK_ID not in arrays["labels"].tolist()
        assert np.count_nonzero(arrays["input_ids"] == UNK_ID) == len(unknown)


def test_a_key_decides_everything() -> None:
    (one, two) = builder(), builder()
    (page,) = one.encode([made_up_text(3, 30)])
    (again,) = two.encode([made_up_text(3, 30)])
    plans = [one.cut([page], 0, key).plan for key in (2**64 - 1, 2**64 - 2)]
    first = built(one, one.cut([page], 0, 2**64 - 1))
    second = built(two, two.cut([again, again], 0, 2**64 - 1))
    together, other = one.build(plans)
    assert all(np.array_equal(first[name], together[name]) for name in first)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["labels"], other["labels"])


def test_golden_example() -> None:
    """The content of examples is part of a run: a change here changes every loss curve."""
    maker = builder(sequence_length=32)
    found = built(maker, maker.cut([page_of([6, 9, 7])], 0, 12345))
    ids = [CLS_ID, 4, 6, 4, 8, 9, 10, SEP_ID, 245, *range(12, 27), SEP_ID]
    labels = [IGNORED] * 25
    labels[1], labels[3], labels[8] = 5, 7, 11
    assert found["input_ids"].tolist() == ids
    assert found["labels"].tolist() == labels
    assert found["token_type_ids"].tolist() == [0] * 8 + [1] * 17
    assert int(found["swapped"]) == KEPT


def test_the_mark_between_sentences_is_no_text() -> None:
    maker = builder(sequence_length=512)
    marked, plain = maker.encode(["the mill\ufdd0grinds. Grain\ufdd0", "the mill grinds. Grain"])
    assert marked.ids.tolist() == plain.ids.tolist()
    assert marked.ends == plain.ends and len(plain.ends) == 2
