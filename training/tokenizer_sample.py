"""A tokenizer from mined crawls: the sample of paragraphs, the training, the fertility.

The sample is drawn by hash: of a domain's paragraphs those with the smallest seeded hashes, as
many as its share of the characters allows (bottom-k sampling, Cohen and Kaplan 2007). It depends
on the text and the seed, not on how the pages are divided into shards. Only when a domain is many
times larger than its share are shards drawn first, so that not all of it has to be read.
Held-out pages are left out: what is evaluated on them later is new to the tokenizer, too.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import xxhash

from models.errors import UserError
from models.tokenizer import VOCABULARY_SIZE, check_output, save_tokenizer, train_tokenizer
from training import domains, fertility, sampler
from training.recipe import Data

SMOOTHED = "smoothed"
# Shares proportional to the square root of the size, as for the vocabulary of XLM (Conneau and
# Lample 2019, section 3.1): small languages get pieces, large ones still get more.
_SMOOTHING = 0.5
_PARAGRAPH_CHARS = 2000
# A domain of more than so many times its share is read in part.
_READ_FACTOR = 4
_FERTILITY_CHARS = 200_000
Progress = Callable[[str], None]


@dataclasses.dataclass
class Drawn:
    """What the sample took of one domain."""

    share: float
    pages_read: int = 0
    paragraphs: int = 0
    chars: int = 0


class ParagraphSample:
    """Paragraphs of `corpus`, `chars` characters in all, by the domains' `weights` (sum 1).

    Iterate once; `drawn` then tells what came from each domain. A domain that has less than its
    share leaves the rest to the others. A paragraph over 2,000 characters counts as several, cut
    at white space where there is any. Memory: the paragraphs of one domain.
    """

    def __init__(
        self,
        corpus: domains.Corpus,
        weights: np.ndarray,
        *,
        data: Data,
        chars: int,
        progress: Progress = lambda _: None,
    ) -> None:
        self._corpus = corpus
        self._data = data
        self._progress = progress
        # Characters to train on, about; of a host group the most that it can have.
        self._sizes = [
            int(sum(shard.chars for shard in domain.shards) * (1 - data.held_out))
            for domain in corpus.domains
        ]
        self._parts = allotments(self._sizes, weights, chars)
        self.drawn = {
            domain.name: Drawn(float(weight))
            for domain, weight in zip(corpus.domains, weights, strict=True)
        }

    def __iter__(self) -> Iterator[str]:
        for number, domain in enumerate(self._corpus.domains):
            chars, drawn = self._parts[number], self.drawn[domain.name]
            if not chars:
                continue
            self._progress(f"reading '{domain.name}' for {chars / 1e6:,.1f} M characters")
            texts = self._paragraphs(self._shards(domain, chars), drawn)
            if chars < self._sizes[number]:
                texts = smallest_hashes(texts, chars, self._data.seed)
            for text in texts:
                drawn.paragraphs += 1
                drawn.chars += len(text)
                yield text

    def _paragraphs(self, domain: domains.Domain, drawn: Drawn) -> Iterator[str]:
        corpus = dataclasses.replace(self._corpus, domains=(domain,))
        for page in sampler.pages(corpus, 0, data=self._data, split="train"):
            drawn.pages_read += 1
            yield from paragraphs_of(page)

    def _shards(self, domain: domains.Domain, chars: int) -> domains.Domain:
        """The domain with all its shards, or with a seeded choice of several times `chars`."""
        if domain.hosts is not None:
            return domain  # how much of a shard belongs to the hosts is not known
        order = list(domain.shards)
        random.Random(f"{self._data.seed} {domain.name}").shuffle(order)
        wanted = _READ_FACTOR * chars / (1 - self._data.held_out)
        chosen = 0
        while chosen < len(order) and wanted > 0:
            wanted -= order[chosen].chars
            chosen += 1
        return dataclasses.replace(domain, shards=tuple(order[:chosen]))


def allotments(sizes: Sequence[int], weights: np.ndarray, total: int) -> list[int]:
    """`total` divided by `weights`, no part over its size; what is over goes to the others."""
    result = [0] * len(sizes)
    waiting = [number for number in range(len(sizes)) if weights[number] > 0]
    while waiting:
        scale = total / sum(float(weights[number]) for number in waiting)
        full = [number for number in waiting if sizes[number] <= float(weights[number]) * scale]
        if not full:
            for number in waiting:
                result[number] = int(float(weights[number]) * scale)
            break
        for number in full:
            result[number] = sizes[number]
            total -= sizes[number]
        waiting = [number for number in waiting if number not in set(full)]
    return result


def smallest_hashes(texts: Iterator[str], chars: int, seed: int) -> Iterator[str]:
    """The texts with the smallest hashes, from the smallest up, until they have `chars`.

    The one that reaches `chars` is the last. The order in which the texts come does not matter.
    """
    heap: list[tuple[int, str]] = []  # the largest hash first
    held = 0
    for text in texts:
        entry = (-xxhash.xxh3_64_intdigest(text.encode(), seed=seed), text)
        if held >= chars and entry <= heap[0]:
            continue
        heapq.heappush(heap, entry)
        held += len(text)
        while held - len(heap[0][1]) >= chars:
            held -= len(heapq.heappop(heap)[1])
    heap.sort(reverse=True)
    for _, text in heap:
        yield text


def paragraphs_of(page: str) -> Iterator[str]:
    """The paragraphs of `page` in parts of at most 2,000 characters, cut at white space."""
    for line in page.split("\n"):
        text = line.strip()
        while len(text) > _PARAGRAPH_CHARS:
            cut = text.rfind(" ", 1, _PARAGRAPH_CHARS + 1)
            cut = cut if cut > 0 else _PARAGRAPH_CHARS
            yield text[:cut].rstrip()
            text = text[cut:].lstrip()
        if text:
            yield text


def shares(corpus: domains.Corpus, weights: dict[str, float] | str) -> np.ndarray:
    """The domains' shares of the sample: `smoothed`, or what `training.domains.mixture` knows."""
    if weights != SMOOTHED:
        return domains.mixture(corpus, weights)
    roots = domains.mixture(corpus, "proportional") ** _SMOOTHING
    smoothed: np.ndarray = roots / roots.sum()
    return smoothed


def train_on_crawls(
    data: Data,
    directory: str,
    *,
    profile: str,
    vocab_size: int | None,
    character_coverage: float | None,
    sample_chars: int,
    progress: Progress = lambda _: None,
) -> tuple[dict[str, Any], dict[str, fertility.Fertility]]:
    """Train a tokenizer on the pages of `data` into the folder `directory`.

    `data.weights` may be "smoothed" besides what `training.domains.mixture` knows.
    vocab_size None: 32,000 pieces, or as many as the sample gives; `character_coverage`: see
    `train_tokenizer`. Returns what `manifest.json` says, and the fertility by language.
    Raises UserError for every mistake in what was asked.
    """
    check_output(directory)
    corpus = domains.load_corpus(data)
    sample = ParagraphSample(
        corpus, shares(corpus, data.weights), data=data, chars=sample_chars, progress=progress
    )
    tokenizer = train_tokenizer(
        _watched(sample, progress),
        profile=profile,
        vocab_size=vocab_size or VOCABULARY_SIZE,
        at_most=vocab_size is None,
        character_coverage=character_coverage,
    )
    progress("measuring")
    measured = _fertilities(tokenizer, corpus, data)
    facts = {
        "sources": [source.digest for source in corpus.sources],
        "sample": {
            "chars_asked": sample_chars,
            "by": list(data.by),
            "weights": _published(data.weights),
            "seed": data.seed,
            "held_out": data.held_out,
            "domains": {name: dataclasses.asdict(drawn) for name, drawn in sample.drawn.items()},
        },
        "character_coverage": character_coverage,
        "fertility_on": _measured_split(data),
        "fertility": {language: row.figures() for language, row in measured.items()},
        "made_with": {name: version(name) for name in ("sentencepiece", "tokenizers")},
    }
    return save_tokenizer(tokenizer, directory, facts), measured


def _published(weights: dict[str, float] | str) -> dict[str, float] | str:
    """The weights without the path of a file: the shares that came of it stand by the domains."""
    named = isinstance(weights, str) and weights not in (SMOOTHED, "proportional", "uniform")
    return "file" if named else weights


def _measured_split(data: Data) -> Literal["held_out", "train"]:
    return "held_out" if data.held_out > 0 else "train"


def _fertilities(
    tokenizer: Any, corpus: domains.Corpus, data: Data
) -> dict[str, fertility.Fertility]:
    by_language: dict[str, dict[domains.Shard, None]] = {}
    for domain in corpus.domains:
        for shard in domain.shards:  # one shard may serve several groups of hosts
            by_language.setdefault(shard.language, {})[shard] = None
    rows = {}
    for language, shards in sorted(by_language.items()):
        whole = domains.Domain(name=language, shards=tuple(shards), hosts=None)
        part = dataclasses.replace(corpus, domains=(whole,))
        pages = sampler.pages(part, 0, data=data, split=_measured_split(data))
        rows[language] = fertility.measure(tokenizer, pages, language, max_chars=_FERTILITY_CHARS)
    return rows


def _watched(sample: ParagraphSample, progress: Progress) -> Iterator[str]:
    yield from sample
    if not any(drawn.chars for drawn in sample.drawn.values()):
        raise UserError(
            "no text in the pages that were asked for: choose other languages, or mine more"
        )
    progress("choosing the pieces")
