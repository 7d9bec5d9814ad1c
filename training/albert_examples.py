"""Examples for ALBERT: masked tokens, and two segments in order or swapped (Lan et al. 2020, §3.1).

An example is `[CLS] A [SEP] B [SEP]`. A and B are neighbouring runs of whole sentences of one
page, as many as fit in `sequence_length`; the border between them is drawn among the sentences'
borders, and then with probability `swapped` B comes first. Differences from sahajBERT's code,
which collects until the length is passed and then truncates the longer segment:

- Nothing is truncated. A sentence that does not fit begins the next example. A sentence longer
  than half the room is cut into pieces, before words where it has some, so that two always fit.
- Of a page's last three sentences two stay together where they can, so that none is left alone.
  A sentence that is alone (a page of one sentence) is cut in two at a word near its middle; only
  one shorter than `MIN_LONE_TOKENS` is skipped, and counted: "one_sentence", "last_sentence".
- Each sentence is in one example of a pass over its page; masks are new in each pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer

from models.errors import Fault
from models.tokenizer import CLS_ID, SEP_ID, SPACE, UNK_ID, word_starts
from training.examples import ASK, IGNORED, Cut, plain_tokenizer
from training.masking import Masking
from training.order import mix
from training.recipe import Examples
from training.sentences import sentences

MAX_WORD_TOKENS = 8
"""A longer chain without a space is no word but a phrase (Thai, Chinese): each token counts."""
MIN_LONE_TOKENS = 16
"""A shorter sentence that is alone makes no pair of segments."""
_SPECIAL_TOKENS = 3
_LOW = 2**32 - 1
_ORDER = 1  # mix(key) itself is the first number that masks a word
_BORDER = "\ufdd0"
"""Between sentences while they are tokenised: a code point that is no character."""


class Page(NamedTuple):
    """A page's tokens."""

    ids: np.ndarray
    """(tokens,) int32, without special tokens (but [UNK])."""
    sizes: np.ndarray
    """(words,) uint8: the tokens of what is masked as one."""
    costs: np.ndarray
    """(words,) uint8: the same, but 0 for a word with [UNK] in it, which is never masked."""
    ends: list[int]
    """Token at which each sentence, or piece of one, ends."""
    word_ends: list[int]
    """Word at which it ends."""


class Plan(NamedTuple):
    """An example before it is masked: where it stands in its page, and how it is divided."""

    page: Page
    tokens: slice
    words: slice
    border: int
    """B's first token, counted from A's first."""
    wall: int
    """B's first word."""
    swapped: bool
    key: int


class AlbertExamples:
    """An `ExampleBuilder`; arrays of an example with n <= sequence_length tokens:

    `input_ids`, `token_type_ids`, `labels` (n,) int32; `swapped` () int32: 1 when B comes first.
    """

    def __init__(self, tokenizer: Tokenizer, examples: Examples) -> None:
        self._made_of = tokenizer, examples
        self._tokenizer = plain_tokenizer(tokenizer)
        # A sentence of its own costs a tokenizer 20 us. So a page is normalised as a whole, and
        # cut at this mark before it is cut into words: each sentence gets the tokens that it has
        # alone.
        self._tokenizer.add_tokens([AddedToken(_BORDER, normalized=True, lstrip=True, rstrip=True)])
        self._border_id = self._tokenizer.token_to_id(_BORDER)
        self._room = examples.sequence_length - _SPECIAL_TOKENS
        self._swapped = int(examples.swapped * 2**32)
        self._masking = Masking(examples, tokenizer.get_vocab_size())
        self._word_starts = word_starts(tokenizer)
        if examples.masking == "token":
            self._word_starts[:] = True
        pieces = (
            tokenizer.id_to_token(number) or SPACE for number in range(tokenizer.get_vocab_size())
        )
        # A mark or digit that is a word by itself, so that what follows is another: "(word".
        self._alone = self._word_starts & [
            len(piece) == 1 and not piece.isalpha() and piece != SPACE for piece in pieces
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # For reader processes: made anew, since a pickled tokenizer forgets a setting.
        return AlbertExamples, self._made_of

    def encode(self, texts: Sequence[str]) -> list[Page]:
        """One `Page` a text; without tokens for a text without any."""
        pages = [sentences(text.replace(_BORDER, " ")) for text in texts]
        ids, sentence_ends = self._tokens(pages)
        if not len(ids):
            nothing = np.empty(0, np.int32)
            return [Page(nothing, nothing, nothing, [], []) for _ in texts]
        # All pages at once: where words begin; then where sentences, and pieces of them, end.
        starts = self._word_starts[ids]
        starts[1:] |= self._alone[ids[:-1]]
        _split_chains(starts, sentence_ends)
        page_ends: list[list[int]] = []
        sentence = 0
        for page in pages:
            page_ends.append(
                self._pieces(
                    sentence_ends[sentence - 1] if sentence else 0,
                    sentence_ends[sentence : sentence + len(page)],
                    starts,
                )
            )
            sentence += len(page)
        firsts = np.flatnonzero(starts)
        sizes = np.diff(firsts, append=len(ids)).astype(np.uint8)  # MAX_WORD_TOKENS at most
        costs = np.where(np.logical_or.reduceat(ids == UNK_ID, firsts), np.uint8(0), sizes)
        word_ends = np.searchsorted(firsts, list(chain.from_iterable(page_ends))).tolist()

        found: list[Page] = []
        token = word = piece = 0
        for ends in page_ends:
            words = word_ends[piece : piece + len(ends)]
            piece += len(ends)
            token_stop, word_stop = (ends[-1], words[-1]) if ends else (token, word)
            found.append(
                Page(
                    # Their own memory: slices would keep the whole batch alive with one open page.
                    ids[token:token_stop].copy(),
                    sizes[word:word_stop].copy(),
                    costs[word:word_stop].copy(),
                    [end - token for end in ends],
                    [end - word for end in words],
                )
            )
            token, word = token_stop, word_stop
        return found

    def _tokens(self, pages: list[list[str]]) -> tuple[np.ndarray, list[int]]:
        """Tokens of all sentences of all pages, and where each sentence ends."""
        encodings = self._tokenizer.encode_batch_fast(
            [_BORDER.join([*page, ""]) for page in pages], add_special_tokens=False
        )
        lists = [encoding.ids for encoding in encodings]
        ids = np.fromiter(chain.from_iterable(lists), np.int32, sum(map(len, lists)))
        borders = np.flatnonzero(ids == self._border_id)
        if len(borders) != sum(map(len, pages)):
            raise Fault(
                "the tokenizer's normaliser changes U+FDD0, and with it the sentences; "
                "take a tokenizer that 'gristmill models train-tokenizer' made"
            )
        return np.delete(ids, borders), (borders - np.arange(len(borders))).tolist()

    def _pieces(self, start: int, ends: list[int], starts: np.ndarray) -> list[int]:
        """`ends` without empty sentences, and with more where one has over half the room.

        A piece that begins inside a word is marked in `starts`.
        """
        most = self._room // 2
        pieces: list[int] = []
        for end in ends:
            while end - start > most:
                # Even pieces, so that no last one is a word or two.
                size = -(-(end - start) // -(-(end - start) // most))
                found = np.flatnonzero(starts[start + size // 2 + 1 : start + size + 1])
                start += size // 2 + 1 + int(found[-1]) if len(found) else size
                starts[start] = True
                pieces.append(start)
            if end > start:
                pieces.append(end)
                start = end
        return pieces

    def cut(self, pages: Sequence[Page], start: int, key: int, *, last: bool = False) -> Cut:
        """The next sentences of the first page; `start` counts sentences (pieces) used."""
        del last  # an example is of one page: none waits for the next one
        if not pages:
            return ASK
        page = pages[0]
        ends = page.ends
        sentence_count = len(ends)
        if not sentence_count:
            return Cut(None, 1, 0, ("empty_page",))
        stop = bisect_right(ends, (ends[start - 1] if start else 0) + self._room, start)
        if stop - start == 1:
            return self._lone(page, start, key)
        if sentence_count - stop == 1 and stop - start > 2:
            stop -= 1
        tokens, words = _span(page, start, stop)
        random = mix(key)
        middle = start + ((random >> 32) * (stop - start - 1) >> 32)
        border, wall = ends[middle] - tokens.start, page.word_ends[middle] - words.start
        swapped = random & _LOW < self._swapped
        plan = Plan(page, tokens, words, border, wall, swapped, key)
        return Cut(plan, 1, 0) if stop == sentence_count else Cut(plan, 0, stop)

    def _lone(self, page: Page, start: int, key: int) -> Cut:
        """The page's last sentence, with no other to pair it with."""
        tokens, words = _span(page, start, start + 1)
        size = tokens.stop - tokens.start
        if size < MIN_LONE_TOKENS:
            return Cut(None, 1, 0, ("last_sentence" if start else "one_sentence",))
        # Two words at least: none is as long as MIN_LONE_TOKENS.
        borders = np.cumsum(page.sizes[words], dtype=np.int64)[:-1]
        nearest = int(np.argmin(np.abs(borders - size // 2)))
        swapped = mix(key) & _LOW < self._swapped
        border = int(borders[nearest])
        return Cut(Plan(page, tokens, words, border, nearest + 1, swapped, key), 1, 0)

    def build(self, plans: Sequence[Plan]) -> list[dict[str, np.ndarray]]:
        """A and B masked and put in their order; the examples are views of the same arrays."""
        if not plans:
            return []
        count = len(plans)
        ids = np.concatenate([plan.page.ids[plan.tokens] for plan in plans])
        sizes = np.concatenate([plan.page.sizes[plan.words] for plan in plans])
        costs = np.concatenate([plan.page.costs[plan.words] for plan in plans])
        table = np.array(
            [(plan.tokens.stop - plan.tokens.start, plan.words.stop - plan.words.start,
              plan.border, plan.wall, plan.swapped) for plan in plans]
        )  # fmt: skip
        tokens, words, borders, walls, swapped = table.T
        keys = np.array([plan.key for plan in plans], np.uint64)
        seen, asked = self._masking.apply(
            ids=ids,
            token_counts=tokens,
            sizes=sizes,
            costs=costs,
            word_counts=words,
            walls=walls,
            keys=keys,
        )

        # Where each token goes: an example has its three special tokens around A and B.
        lengths = tokens + _SPECIAL_TOKENS
        firsts = np.cumsum(lengths) - lengths
        seconds = firsts + np.where(swapped, tokens - borders, borders) + 2
        segments = np.empty((count, 2), np.int64)
        segments[:, 0] = np.where(swapped, seconds, firsts + 1)
        segments[:, 1] = np.where(swapped, firsts + 1, seconds)
        segment_tokens = np.stack([borders, tokens - borders], 1).ravel()
        before = np.cumsum(segment_tokens) - segment_tokens
        goal = np.arange(len(ids)) + np.repeat(segments.ravel() - before, segment_tokens)

        stops = firsts + lengths
        input_ids = np.empty(int(stops[-1]), np.int32)
        input_ids[goal] = seen
        input_ids[firsts] = CLS_ID
        input_ids[seconds - 1] = input_ids[stops - 1] = SEP_ID
        labels = np.full(len(input_ids), IGNORED, np.int32)
        labels[goal[asked]] = ids[asked]
        token_types = np.repeat(
            np.tile(np.array([0, 1], np.int32), count),
            np.stack([seconds - firsts, stops - seconds], 1).ravel(),
        )
        order = swapped.astype(np.int32)
        return [
            {
                "input_ids": input_ids[first:stop],
                "labels": labels[first:stop],
                "token_type_ids": token_types[first:stop],
                "swapped": order[number, ...],
            }
            for number, (first, stop) in enumerate(
                zip(firsts.tolist(), stops.tolist(), strict=True)
            )
        ]


def _span(page: Page, start: int, stop: int) -> tuple[slice, slice]:
    """Tokens and words of the sentences `start:stop`."""
    first, word = (page.ends[start - 1], page.word_ends[start - 1]) if start else (0, 0)
    return slice(first, page.ends[stop - 1]), slice(word, page.word_ends[stop - 1])


def _split_chains(starts: np.ndarray, sentence_ends: list[int]) -> None:
    """A word begins with each sentence, and at each token of a chain that is no word."""
    starts[0] = True
    starts[[end for end in sentence_ends if end < len(starts)]] = True
    sizes = np.diff(np.flatnonzero(starts), append=len(starts))
    starts |= np.repeat(sizes > MAX_WORD_TOKENS, sizes)
