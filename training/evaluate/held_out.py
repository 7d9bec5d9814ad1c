"""Loss on the held-out pages, domain by domain.

Works inside the training loop, on any number of ranks (each has the same number of forwards,
which FSDP2 and DDP ask for), and on a checkpoint alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from models.tokenizer import SPACE, UNK_ID
from training import batches, sampler
from training.evaluate.domain_loss import (
    SUMS,
    DomainLoss,
    example_sums,
    term_losses,
    total,
)
from training.evaluate.unigrams import NO_TEXT, Unigrams, text_counts
from training.together import distributed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from training.domains import Corpus
    from training.examples import Example, ExampleBuilder
    from training.objectives import Losses
    from training.recipe import Data

__all__ = ["DomainLoss", "held_out_losses", "token_bytes", "total"]


def held_out_losses(
    objective: torch.nn.Module,
    corpus: Corpus,
    builder: ExampleBuilder,
    *,
    data: Data,
    limit: int,
    microbatch: int,
    device: torch.device | str,
    rank: int = 0,
    ranks: int = 1,
    precision: Literal["fp32", "bf16"] = "fp32",
    tokenizer: Tokenizer | None = None,
    unigrams: Unigrams | None = None,
) -> dict[str, DomainLoss]:
    """Losses of `objective` on at most `limit` held-out examples of each domain, by its name.

    All ranks call it together; rank r computes examples i with i % ranks == r, and all return the
    same sums. Neither `microbatch` nor `ranks` changes a loss beyond rounding. `tokenizer` is
    needed for `bits_per_byte` alone, `unigrams` (of the same corpus, counted once for any number of
    calls) for `unigram_loss`. The module is left in the mode (training or not) it was in.
    """
    wrapped: Any = getattr(objective, "module", objective)
    terms: tuple[str, ...] = wrapped.terms
    bytes_of_id = None if tokenizer is None else token_bytes(tokenizer)
    device = torch.device(device)
    was_training = objective.training
    objective.eval()
    sums = np.zeros((len(corpus.names), len(terms), SUMS))
    examples = [0] * len(corpus.names)
    texts = [_Text(bytes_of_id, unigrams) for _ in corpus.names]
    try:
        with (
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
        ):
            for domain in range(len(corpus.names)):
                found = sampler.held_out_examples(corpus, domain, builder, data=data, limit=limit)
                for group in _groups(found, microbatch * ranks):
                    examples[domain] += len(group)
                    texts[domain].add(group)
                    own = group[rank::ranks]
                    # A rank without a share of the last group runs the network all the same.
                    batch = batches.collate(own or group[:1])
                    losses = objective({key: value.to(device) for key, value in batch.items()})
                    if own:
                        sums[domain] += _sums(losses)
    finally:
        objective.train(was_training)
    if distributed():
        shared = torch.from_numpy(sums).to(device)
        torch.distributed.all_reduce(shared)
        sums = shared.cpu().numpy()
    causal = bytes_of_id is not None and "next_token" in terms
    return {
        name: DomainLoss(
            examples[domain],
            term_losses(terms, sums[domain], examples[domain]),
            texts[domain].tokens,
            texts[domain].bytes if causal else None,
            texts[domain].unigram_nats(domain),
        )
        for domain, name in enumerate(corpus.names)
    }


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes that each id stands for (vocabulary,): a word's space counts one, a special
    token and an unknown piece none. The space that is put before a document counts too."""
    sizes = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for piece, index in tokenizer.get_vocab().items():
        if index not in (*NO_TEXT, UNK_ID):
            sizes[index] = len(piece.replace(SPACE, " ").encode())
    return sizes


class _Text:
    """The tokens in one domain's examples."""

    def __init__(self, bytes_of_id: np.ndarray | None, unigrams: Unigrams | None) -> None:
        self._bytes_of_id = bytes_of_id
        self._unigrams = unigrams
        self._counts = None if unigrams is None else np.zeros(unigrams.vocab_size, dtype=np.int64)
        self.tokens = 0
        self.bytes = 0

    def add(self, examples: Sequence[Example]) -> None:
        found = [_own_tokens(example) for example in examples]
        self.tokens += sum(int((~np.isin(ids, NO_TEXT)).sum()) for ids in found)
        if self._counts is not None:
            self._counts += text_counts(found, len(self._counts))
        if self._bytes_of_id is not None:
            self.bytes += sum(int(self._bytes_of_id[ids[1:]].sum()) for ids in found)

    def unigram_nats(self, domain: int) -> float | None:
        if self._unigrams is None or self._counts is None:
            return None
        return self._unigrams.nats(domain, self._counts)


def _own_tokens(example: Example) -> np.ndarray:
    """The ids of an example before masking."""
    ids, labels = example.arrays["input_ids"], example.arrays.get("labels")
    return ids if labels is None else np.where(labels >= 0, labels, ids)


def _groups(found: Iterator[Example], size: int) -> Iterator[list[Example]]:
    while group := list(islice(found, size)):
        yield group


def _sums(losses: Losses) -> np.ndarray:
    counts, sums, correct = (
        one.detach().double().cpu().numpy() for one in (losses.counts, losses.sums, losses.correct)
    )
    return example_sums(counts, sums, correct)
