"""Labelled examples as token ids: a word's label on its first token, long sentences in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from models.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """One row for the network.

    `places` are the positions whose label counts, `units` the words (of example `example`) that
    they stand for; a whole text is unit 0 and has its label at place 0.
    """

    input_ids: np.ndarray
    token_type_ids: np.ndarray
    example: int
    places: np.ndarray
    units: np.ndarray


@dataclass(frozen=True)
class EncodedPart:
    """The rows of one part, and what did not fit."""

    rows: list[Encoded]
    split_examples: int
    cut_examples: int
    words_without_token: int


def encode_sentences(
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[str]],
    max_length: int,
    *,
    place: Literal["first", "last"] = "first",
) -> EncodedPart:
    """Words through the tokenizer, each by itself; its first (or last) token is the word's place.

    The first is usual; a network that sees only what stands before needs the last.

    A sentence longer than `max_length` tokens becomes several rows that end between words.
    A word that the normaliser empties has no place (its tag is predicted as O), and one word that
    is longer than a row loses its end.
    """
    room = _room(tokenizer, max_length)
    rows: list[Encoded] = []
    split = cut = without = 0
    plain = tokenizer.encode_batch(
        [list(words) for words in sentences], is_pretokenized=True, add_special_tokens=False
    )
    for number, (words, encoding) in enumerate(zip(sentences, plain, strict=True)):
        sizes = np.bincount(
            np.array([word for word in encoding.word_ids if word is not None], dtype=np.int64),
            minlength=len(words),
        )
        pieces = _pieces(sizes, room)
        split += len(pieces) > 1
        cut += bool((sizes > room).any())
        without += int((sizes == 0).sum())
        for start, stop in pieces:
            whole = tokenizer.encode(list(words[start:stop]), is_pretokenized=True)
            keep = _kept(whole.word_ids, max_length)
            word_ids = [whole.word_ids[token] for token in keep]
            found = {
                word: token
                for token, word in (reversed if place == "first" else iter)(
                    list(enumerate(word_ids))
                )
                if word is not None
            }
            units = sorted(found)
            rows.append(
                Encoded(
                    _ints(whole.ids)[keep],
                    _ints(whole.type_ids)[keep],
                    number,
                    _ints([found[unit] for unit in units]),
                    _ints([start + unit for unit in units]),
                )
            )
    return EncodedPart(rows, split, cut, without)


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> EncodedPart:
    """Whole texts; one longer than `max_length` tokens loses its end."""
    _room(tokenizer, max_length)
    first = np.zeros(1, dtype=np.int64)
    rows = []
    cut = 0
    for number, encoding in enumerate(tokenizer.encode_batch(list(texts))):
        cut += len(encoding.ids) > max_length
        keep = _kept(encoding.word_ids, max_length)
        ids, types = _ints(encoding.ids)[keep], _ints(encoding.type_ids)[keep]
        rows.append(Encoded(ids, types, number, first, first))
    return EncodedPart(rows, 0, cut, 0)


def _room(tokenizer: Tokenizer, max_length: int) -> int:
    """Tokens of a row that are no special ones."""
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    if max_length <= special:
        raise UserError(
            f"fine_tuning.max_length = '{max_length}' has no room beside {special} special tokens"
        )
    return max_length - int(special)


def _pieces(sizes: np.ndarray, room: int) -> list[tuple[int, int]]:
    """Greedy ranges of words whose tokens fit into `room`; a longer word stands alone."""
    pieces, start, used = [], 0, 0
    for word, size in enumerate(sizes.tolist()):
        if used and used + size > room:
            pieces.append((start, word))
            start, used = word, 0
        used += size
    pieces.append((start, len(sizes)))
    return pieces


def _kept(word_ids: Sequence[int | None], max_length: int) -> list[int]:
    """Which tokens stay: all, or all but the last words' ones that are too many."""
    surplus = len(word_ids) - max_length
    inner = [token for token, word in enumerate(word_ids) if word is not None]
    gone = set(inner[-surplus:]) if surplus > 0 else set()
    return [token for token in range(len(word_ids)) if token not in gone]


def _ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
