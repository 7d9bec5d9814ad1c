"""Which tokens a masked language model predicts, and what it sees in their place.

15 % of the tokens are chosen; of these 80 % become [MASK], 10 % another token, 10 % stay
(Devlin et al. 2019, §3.1). What is chosen as one: a token; a whole word; or an n-gram of whole
words, with p(n) in proportion to 1/n (Lan et al. 2020, §4.1).

Many examples are masked at once: NumPy's calls cost more than the work on one. Each example's
random numbers are the SplitMix64 generator of its own key (`training.order`), so that the others
do not change it.
"""

from __future__ import annotations

import numpy as np

from models.tokenizer import MASK_ID
from training.order import hashes_at
from training.recipe import Examples

FIRST_ORDINARY_ID = MASK_ID + 1
"""Special tokens have the ids below: they are neither chosen nor put in another's place."""
_MASKED = np.uint64(0.8 * 2**32)
_REPLACED = np.uint64(0.9 * 2**32)
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


def budget(tokens: int, share: float) -> int:
    """How many of `tokens` to predict: the share, rounded, at least one."""
    return max(1, round(tokens * share))


class Masking:
    """Masks token ids as a recipe says."""

    def __init__(self, examples: Examples, vocab_size: int) -> None:
        self._share = examples.masked
        longest = examples.ngram_words if examples.masking == "ngram" else 1
        weights = 1 / np.arange(1, longest + 1)
        self._gram_thresholds = (np.cumsum(weights)[:-1] / weights.sum() * 2**32).astype(np.uint64)
        self._ordinary_ids = np.uint64(vocab_size - FIRST_ORDINARY_ID)

    def apply(
        self,
        *,
        ids: np.ndarray,
        token_counts: np.ndarray,
        sizes: np.ndarray,
        costs: np.ndarray,
        word_counts: np.ndarray,
        walls: np.ndarray,
        keys: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the network sees in place of `ids`, and where it is asked: (n,) int32, (m,) int64.

        Examples lie one after the other: `ids` (n,) their tokens, `token_counts` of each;
        `sizes`, `costs`, `word_counts`, `walls`: see `choose`; `keys`: uint64, one an example.
        """
        firsts = np.cumsum(word_counts) - word_counts
        places = np.arange(len(sizes)) - np.repeat(firsts, word_counts)
        random = hashes_at(np.repeat(keys, word_counts), places.astype(np.uint64))
        chosen = self.choose(costs, word_counts, walls, random)
        positions = np.flatnonzero(np.repeat(chosen, sizes))
        # What becomes of a token is drawn by its place, from a part of the generator that no
        # word reaches.
        example = np.searchsorted(np.cumsum(token_counts), positions, "right")
        places = positions - (np.cumsum(token_counts) - token_counts)[example]
        random = hashes_at(keys[example], places.astype(np.uint64) + np.uint64(2**32))
        action = random >> _HALF
        other = ((random & _LOW) * self._ordinary_ids >> _HALF).astype(np.int32)
        seen = ids.copy()
        seen[positions] = np.where(
            action < _MASKED,
            np.int32(MASK_ID),
            np.where(action < _REPLACED, other + np.int32(FIRST_ORDINARY_ID), ids[positions]),
        )
        return seen, positions

    def choose(
        self, costs: np.ndarray, word_counts: np.ndarray, walls: np.ndarray, random: np.ndarray
    ) -> np.ndarray:
        """Which words to predict: bool, (words,).

        `costs`: tokens in each word, or 0 for a word that must not be chosen; `word_counts`: words
        of each example; `walls`: number, in its example, of the word that no n-gram reaches over
        from before it; `random`: uint64 (words,), whose upper half orders the words, and whose
        lower half is the length of the n-gram that begins there. Never more than `budget` of the
        tokens of words that may be chosen; fewer only when no word that is left fits in the rest.
        """
        example = np.repeat(np.arange(len(word_counts), dtype=np.uint64), word_counts)
        order = np.argsort((example << _HALF) | (random >> _HALF), kind="stable").tolist()
        more = np.searchsorted(self._gram_thresholds, random & _LOW, "right").tolist()
        cost = costs.tolist()
        chosen = bytearray(len(cost))
        first = 0
        for count, wall in zip(word_counts.tolist(), walls.tolist(), strict=True):
            stop, border = first + count, first + wall
            left = sum(cost[first:stop])
            left = left and budget(left, self._share)
            for word in order[first:stop]:
                if not left:
                    break
                end = min(word + more[word] + 1, border if word < border else stop)
                for reached in range(word, end):
                    if chosen[reached] or not 0 < cost[reached] <= left:
                        break
                    chosen[reached] = 1
                    left -= cost[reached]
            first = stop
        return np.frombuffer(chosen, bool)
