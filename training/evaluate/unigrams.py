"""What the frequencies of the tokens alone tell: the baseline of every held-out loss.

The frequencies are those of a domain's training pages, smoothed, so that the baseline has seen as
little of the held-out pages as the network has. (The entropy of the held-out tokens themselves is
no such baseline: of few tokens it is far too low, as each one is then among the frequent ones.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer

from models.tokenizer import CLS_ID, MASK_ID, PAD_ID, SEP_ID
from training import sampler
from training.domains import Corpus
from training.recipe import Data

NO_TEXT = (PAD_ID, CLS_ID, SEP_ID, MASK_ID)
"""Ids that stand for no text."""
_SAMPLE_CHARS = 8_000_000
_DOMAIN_CHARS = 1_000_000
_BATCH_PAGES = 64


@dataclass(frozen=True)
class Unigrams:
    """Token counts of training pages: ids and their counts for each domain, in its order."""

    domains: tuple[tuple[np.ndarray, np.ndarray], ...]
    vocab_size: int

    def nats(self, domain: int, counts: np.ndarray) -> float:
        """Nats that the tokens `counts` (ids,) of a domain cost, summed: cross entropy x tokens.

        p = (c + t q) / (n + t), n tokens of t different ids in the domain's training pages
        (Witten and Bell 1991, method C); q are the frequencies of all domains, each id's count
        plus one.
        """
        ids, own = self.domains[domain]
        wanted = np.flatnonzero(counts)
        q = self._of_all(wanted)
        there = np.zeros(self.vocab_size)
        there[ids] = own
        shares = (there[wanted] + len(ids) * q) / (own.sum() + len(ids)) if len(ids) else q
        return float(-(counts[wanted] * np.log(shares)).sum())

    def _of_all(self, wanted: np.ndarray) -> np.ndarray:
        whole = np.ones(self.vocab_size)
        for ids, own in self.domains:
            whole[ids] += own
        whole[list(NO_TEXT)] = 0
        share: np.ndarray = whole[wanted] / whole.sum()
        return share


def training_unigrams(corpus: Corpus, tokenizer: Tokenizer, *, data: Data) -> Unigrams:
    """Counts over training pages: of each domain 1 M characters at most, of all about 8 M.

    The pages come in the shuffled order of `sampler.pages`: the same on every rank and each time.
    A process that asks again for the same, as the many runs of a mix do, gets the same object.
    """
    return _counted(corpus, tokenizer.to_str(), data.held_out, data.cache_bytes)


@lru_cache(maxsize=1)
def _counted(corpus: Corpus, tokenizer_json: str, held_out: float, cache_bytes: int) -> Unigrams:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    data = Data(held_out=held_out, cache_bytes=cache_bytes)  # all that `sampler.pages` looks at
    size = tokenizer.get_vocab_size()
    chars = min(_DOMAIN_CHARS, _SAMPLE_CHARS // len(corpus.names))
    found = []
    for domain in range(len(corpus.names)):
        counts = np.zeros(size, dtype=np.int64)
        pages = _first(sampler.pages(corpus, domain, data=data, split="train"), chars)
        while batch := list(itertools.islice(pages, _BATCH_PAGES)):
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                counts += np.bincount(encoding.ids, minlength=size)
        counts[list(NO_TEXT)] = 0
        ids = np.flatnonzero(counts)
        found.append((ids, counts[ids]))
    return Unigrams(tuple(found), size)


def text_counts(ids: Sequence[np.ndarray], size: int) -> np.ndarray:
    """How often each id stands in `ids`, (size,); ids without text do not count."""
    counts = np.bincount(np.concatenate(ids), minlength=size)
    counts[list(NO_TEXT)] = 0
    return counts


def _first(pages: Iterable[str], chars: int) -> Iterator[str]:
    """The first pages, cut where they have `chars` characters."""
    for page in pages:
        yield page[:chars]
        chars -= len(page)
        if chars <= 0:
            return
