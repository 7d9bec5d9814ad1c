"""Words to tokens: places, pieces, nothing lost without being told."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from models.errors import UserError
from models.tokenizer import CLS_ID, SEP_ID, train_tokenizer
from training.evaluate.encoding import encode_sentences, encode_texts
from training.evaluate.task_batches import IGNORED, label_ids, labels_of, targets

WORDS = ["grain", "wheat", "flour", "2021", "water-wheel", "Mina's", "মিনা", "বাংলাদেশে", "২০২১", "!?"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([" ".join(WORDS[:7])] * 3, vocab_size=60, at_most=True)


def _ids(tokenizer: Tokenizer, word: str) -> list[int]:
    return list(tokenizer.encode([word], is_pretokenized=True, add_special_tokens=False).ids)


def test_rows_hold_each_word_once(tokenizer: Tokenizer) -> None:
    """Against the tokens of each word by itself, for sentences of all lengths."""
    draw = random.Random(3)
    sentences = [draw.choices(WORDS, k=draw.randint(1, 30)) for _ in range(40)]
    room = 30
    found = encode_sentences(tokenizer, sentences, room + 2)
    for number, words in enumerate(sentences):
        rows = [row for row in found.rows if row.example == number]
        assert [unit for row in rows for unit in row.units.tolist()] == list(range(len(words)))
        inner = []
        for row in rows:
            ids = row.input_ids.tolist()
            assert len(ids) <= room + 2
            assert (ids[0], ids[-1]) == (CLS_ID, SEP_ID)
            assert row.token_type_ids.tolist() == [0] * len(ids)
            inner += ids[1:-1]
            for place, unit in zip(row.places.tolist(), row.units.tolist(), strict=True):
                assert ids[place] == _ids(tokenizer, words[unit])[0]
        assert inner == [one for word in words for one in _ids(tokenizer, word)]
    long = [s for s in sentences if sum(len(_ids(tokenizer, word)) for word in s) > room]
    assert found.split_examples == len(long) > 0
    assert found.cut_examples == 0


def test_a_word_longer_than_a_row_is_cut_and_told(tokenizer: Tokenizer) -> None:
    found = encode_sentences(tokenizer, [["grain", "2" * 40, "wheat"]], 16)
    assert found.cut_examples == found.split_examples == 1
    assert [row.units.tolist() for row in found.rows] == [[0], [1], [2]]
    assert [len(row.input_ids) for row in found.rows][1] == 16
    assert found.rows[1].input_ids[-1] == SEP_ID


def test_a_word_without_tokens_is_told_and_outside(tokenizer: Tokenizer) -> None:
    empty = next((word for word in ("\u200b", "\ufeff", "\x00") if not _ids(tokenizer, word)), None)
    assert empty is not None
    found = encode_sentences(tokenizer, [["grain", empty, "wheat"]], 16)
    assert found.words_without_token == 1
    (row,) = found.rows
    assert row.units.tolist() == [0, 2]
    labels = ("O", "B-X")
    (ids,) = label_ids(found.rows, [("B-X", "B-X", "O")], labels)
    assert ids.tolist() == [1, 0]
    assert labels_of([ids], found.rows, [3], labels) == [["B-X", "O", "O"]]


def test_targets_stand_on_first_tokens(tokenizer: Tokenizer) -> None:
    found = encode_sentences(tokenizer, [["2021", "grain"], ["wheat"]], 32)
    ids = label_ids(found.rows, [("B-X", "O"), ("B-X",)], ("O", "B-X"))
    gold = targets(found.rows, ids)
    first = found.rows[0].places.tolist()
    assert gold[0].tolist() == [
        {first[0]: 1, first[1]: 0}.get(place, IGNORED) for place in range(gold.shape[1])
    ]
    assert (gold[1] != IGNORED).sum() == 1
    assert first[0] == 1
    assert first[1] > 2


def test_the_last_token_for_networks_that_look_back_only(tokenizer: Tokenizer) -> None:
    words = ["2021", "grain", "2" * 40]
    for place in ("first", "last"):
        found = encode_sentences(tokenizer, [words], 16, place=place)
        for row in found.rows:
            ids = row.input_ids.tolist()
            begin = 1
            for token, unit in zip(row.places.tolist(), row.units.tolist(), strict=True):
                end = min(begin + len(_ids(tokenizer, words[unit])), 15)
                assert token == (begin if place == "first" else end - 1)
                begin = end
            assert begin == len(ids) - 1


def test_texts_are_cut_and_told(tokenizer: Tokenizer) -> None:
    found = encode_texts(tokenizer, ["grain", "2021" * 10], 12)
    assert found.cut_examples == 1
    assert [len(row.input_ids) for row in found.rows][1] == 12
    assert found.rows[1].input_ids.tolist()[-1] == SEP_ID
    assert found.rows[0].units.tolist() == found.rows[0].places.tolist() == [0]
    with pytest.raises(UserError, match="max_length = '2' has no room"):
        encode_texts(tokenizer, ["a"], 2)
