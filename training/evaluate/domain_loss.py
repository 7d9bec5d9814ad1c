"""Losses on held-out pages as numbers: of one domain, of all, with their uncertainty, in nats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# Sums over examples that a mean, an accuracy and their standard errors are made of.
SUMS = 8
_LABELS, _LOSS, _CORRECT, _LABELS2, _LOSS2, _CORRECT2, _LOSS_LABELS, _CORRECT_LABELS = range(SUMS)


def example_sums(counts: np.ndarray, losses: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Labels, summed losses and met labels of examples, (terms, examples) float64 each, as
    `TermLoss.sums`: (terms, SUMS)."""
    c, s, a = counts, losses, correct
    rows = [c, s, a, c * c, s * s, a * a, s * c, a * c]
    return np.stack([row.sum(axis=1) for row in rows], axis=1)


def term_losses(terms: tuple[str, ...], sums: np.ndarray, examples: int) -> dict[str, TermLoss]:
    """The terms that have a label, from their sums (terms, SUMS)."""
    return {
        name: TermLoss(tuple(row.tolist()), examples)
        for name, row in zip(terms, sums, strict=True)
        if row[_LABELS] > 0
    }


@dataclass(frozen=True)
class TermLoss:
    """One term of the objective on one domain: sums over its examples."""

    sums: tuple[float, ...]
    examples: int

    @property
    def count(self) -> int:
        """Labels."""
        return round(self.sums[_LABELS])

    @property
    def loss(self) -> float:
        """Mean over the labels, nats."""
        return self.sums[_LOSS] / self.sums[_LABELS]

    @property
    def accuracy(self) -> float:
        """Share of the labels that have the highest logit."""
        return self.sums[_CORRECT] / self.sums[_LABELS]

    @property
    def standard_error(self) -> float | None:
        """Of `loss`, examples being the independent units; None for a single example."""
        return self._error(self.loss, _LOSS2, _LOSS_LABELS)

    @property
    def accuracy_error(self) -> float | None:
        """Standard error of `accuracy`."""
        return self._error(self.accuracy, _CORRECT2, _CORRECT_LABELS)

    def _error(self, ratio: float, squares: int, products: int) -> float | None:
        # Linearised variance of a ratio of sums (Cochran, Sampling Techniques, 1977, 6.4).
        if self.examples < 2:
            return None
        residual = (
            self.sums[squares]
            - 2 * ratio * self.sums[products]
            + ratio * ratio * self.sums[_LABELS2]
        )
        spread = max(residual, 0.0) * self.examples / (self.examples - 1)
        return math.sqrt(spread) / self.sums[_LABELS]


@dataclass(frozen=True)
class DomainLoss:
    """Held-out losses of one domain. `terms` is empty when the domain has no held-out example."""

    examples: int
    terms: dict[str, TermLoss]
    text_tokens: int = 0
    """Tokens of the examples' text, masked ones among them; no special tokens."""
    text_bytes: int | None = None
    """UTF-8 bytes of the causal labels' text as the tokenizer normalised it."""
    unigram_nats: float | None = None
    """What these tokens cost by the frequencies of the training pages (`unigrams.Unigrams`)."""

    @property
    def perplexity(self) -> float | None:
        """exp of the next-token loss; None for another objective."""
        term = self.terms.get("next_token")
        return None if term is None else _exp(term.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Next-token loss by byte of normalised text, so that tokenizers compare.

        An unknown piece costs its loss and counts no byte, and so flatters nobody.
        """
        term = self.terms.get("next_token")
        if term is None or not self.text_bytes:
            return None
        return term.sums[_LOSS] / math.log(2) / self.text_bytes

    @property
    def unigram_loss(self) -> float | None:
        """Nats by token of guessing by the frequencies of the training pages' tokens, without
        looking at the context: what a network has to be better than."""
        if self.unigram_nats is None or not self.text_tokens:
            return None
        return self.unigram_nats / self.text_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for logs and `--json`."""
        return {
            "examples": self.examples,
            "terms": {
                name: {
                    "loss": term.loss,
                    "standard_error": term.standard_error,
                    "accuracy": term.accuracy,
                    "accuracy_standard_error": term.accuracy_error,
                    "labels": term.count,
                }
                for name, term in self.terms.items()
            },
            "unigram_loss": self.unigram_loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


def total(losses: Iterable[DomainLoss]) -> DomainLoss:
    """All domains as one: each label counts the same. Each keeps its own unigram baseline."""
    losses = list(losses)
    examples = sum(loss.examples for loss in losses)
    names = dict.fromkeys(name for loss in losses for name in loss.terms)
    terms = {}
    for name in names:
        sums = np.sum([loss.terms[name].sums for loss in losses if name in loss.terms], axis=0)
        terms[name] = TermLoss(tuple(sums.tolist()), examples)
    tokens = sum(loss.text_tokens for loss in losses)
    sizes = [loss.text_bytes for loss in losses if loss.text_bytes is not None]
    nats = [loss.unigram_nats for loss in losses if loss.unigram_nats is not None]
    return DomainLoss(
        examples, terms, tokens, sum(sizes) if sizes else None, math.fsum(nats) if nats else None
    )


@dataclass(frozen=True)
class MeanLoss:
    """Plain mean over the domains that have held-out examples: each domain counts the same."""

    domains: int
    loss: float
    standard_error: float | None
    accuracy: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


def mean(losses: Iterable[DomainLoss], term: str) -> MeanLoss | None:
    """The plain mean of `term` over domains; None where no domain has it."""
    found = [loss.terms[term] for loss in losses if term in loss.terms]
    if not found:
        return None
    errors = [one.standard_error for one in found]
    known = [error for error in errors if error is not None]
    error = math.sqrt(sum(e * e for e in known)) / len(found) if len(known) == len(found) else None
    return MeanLoss(
        len(found),
        sum(one.loss for one in found) / len(found),
        error,
        sum(one.accuracy for one in found) / len(found),
    )


def without_examples(losses: Mapping[str, DomainLoss]) -> list[str]:
    """Names of the domains that have no held-out example."""
    return [name for name, loss in losses.items() if not loss.examples]


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
