"""Which tokens a masked language model predicts, and what it sees in their place.

15 % of the tokens are chosen; of these 80 % become [MASK], 10 % another token, 10 % stay
(Devlin et al. 2019, §3.1). What is chosen as one: a token; a whole word; or an n-gram of whole
words, with p(n) in proportion to 1/n (Lan et al. 2020, §4.1).

The random numbers are the bytes of SHAKE-128 of a key: the same in every version and on every
machine, and to begin one costs 3 µs; a NumPy generator takes 40 µs, a good part of what
tokenising the example takes.
"""

from __future__ import annotations

import hashlib

import numpy as np

from models.tokenizer import MASK_ID
from training.examples import IGNORED
from training.recipe import Examples

FIRST_ORDINARY_ID = MASK_ID + 1
"""Special tokens have the ids below: they are neither chosen nor put in another's place."""
_MASKED = np.uint32(0.8 * 2**32)
_REPLACED = np.uint32(0.9 * 2**32)


def random_words(key: int, count: int) -> np.ndarray:
    """`count` random uint32 that depend on the 64-bit `key` alone."""
    digest = hashlib.shake_128(key.to_bytes(8, "little")).digest(4 * count)
    return np.frombuffer(digest, "<u4")


def budget(tokens: int, share: float) -> int:
    """How many of `tokens` to predict: the share, rounded, at least one."""
    return max(1, round(tokens * share))


class Masking:
    """Masks token ids as a recipe says. Every random choice comes from the caller."""

    def __init__(self, examples: Examples, vocab_size: int) -> None:
        self._share = examples.masked
        longest = examples.ngram_words if examples.masking == "ngram" else 1
        weights = 1 / np.arange(1, longest + 1)
        self._gram_thresholds = (np.cumsum(weights)[:-1] / weights.sum() * 2**32).astype(np.uint32)
        self._ordinary_ids = vocab_size - FIRST_ORDINARY_ID

    @staticmethod
    def random_words_needed(tokens: int) -> int:
        """Length of `apply`'s `random` for `tokens` tokens."""
        return 4 * tokens

    def apply(
        self, ids: np.ndarray, sizes: np.ndarray, costs: np.ndarray, wall: int, random: np.ndarray
    ) -> np.ndarray:
        """(2, n) int32: what the network sees, and the labels, `IGNORED` where none is asked.

        `ids`: (n,) int32, n > 0; `sizes`, `costs`, `wall`: see `choose`;
        `random`: (random_words_needed(n),) uint32.
        """
        count = len(ids)
        positions = np.flatnonzero(np.repeat(self.choose(sizes, costs, wall, random), sizes))
        originals = ids[positions]
        rows = np.empty((2, count), np.int32)
        rows[0] = ids
        rows[0, positions] = MASK_ID
        rows[1] = IGNORED
        rows[1, positions] = originals
        actions = random[2 * count : 2 * count + len(positions)]
        for index in np.flatnonzero(actions >= _MASKED).tolist():
            if actions[index] < _REPLACED:
                draw = int(random[3 * count + index])
                rows[0, positions[index]] = FIRST_ORDINARY_ID + (draw * self._ordinary_ids >> 32)
            else:
                rows[0, positions[index]] = originals[index]
        return rows

    def choose(
        self, sizes: np.ndarray, costs: np.ndarray, wall: int, random: np.ndarray
    ) -> np.ndarray:
        """Which words to predict: bool, (words,).

        `sizes`: tokens in each word; `costs`: the same, or 0 for a word that must not be chosen;
        `wall`: number of a word that no n-gram reaches over from before it; `random`: at least
        2 x words. Never more than `budget` of the tokens of words that may be chosen; fewer only
        when no word that is left fits in the rest.
        """
        words = len(sizes)
        cost = costs.tolist()
        left = sum(cost)
        left = left and budget(left, self._share)
        order = np.argsort(random[:words]).tolist()
        more = np.searchsorted(self._gram_thresholds, random[words : 2 * words], "right").tolist()
        chosen = bytearray(words)
        for word in order:
            if not left:
                break
            for reached in range(word, min(word + more[word] + 1, wall if word < wall else words)):
                if chosen[reached] or not 0 < cost[reached] <= left:
                    break
                chosen[reached] = 1
                left -= cost[reached]
        return np.frombuffer(chosen, bool)
