"""What a network learns: its losses by example, computed only where there is a label.

A loss is given as sums and counts, never as a mean: only then do microbatches of any size and
padding add up to the loss of the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AlbertForPreTraining, PreTrainedModel

from training.examples import IGNORED


class Losses(NamedTuple):
    """Each float, (terms, examples). A step's loss is the sum over terms of sums / counts.

    `tokens` alone is another thing, of decoders only.
    """

    sums: Tensor
    """Cross entropy in nats, summed over the labels of an example; float32."""
    counts: Tensor
    """Labels; float64."""
    correct: Tensor
    """Labels that the network's best guess met; float64."""
    tokens: Tensor | None = None
    """Next-token loss of each position, without its gradient: (examples, positions) float32, 0
    where there is no label."""


class Objective(nn.Module):
    """The training losses of a network, which it holds as `network`.

    A decoder learns `next_token`, ALBERT `masked_token` and `sentence_order`. Cross entropy is in
    float32 also under autocast. `max_logit_rows`: where more rows (positions) than that need
    logits, they are computed in parts and again in the backward pass, so that memory holds
    the logits of one part only.

    The network's inner modules are called directly: DDP and FSDP2 must wrap this module, not
    the network.
    """

    def __init__(self, network: PreTrainedModel, *, max_logit_rows: int = 8192) -> None:
        super().__init__()
        self.network = network
        self.max_logit_rows = max_logit_rows
        self.terms: tuple[str, ...] = (
            ("masked_token", "sentence_order")
            if isinstance(network, AlbertForPreTraining)
            else ("next_token",)
        )

    def forward(self, batch: Mapping[str, Tensor]) -> Losses:
        """Losses of a batch as `training.batches.collate` makes it."""
        if isinstance(self.network, AlbertForPreTraining):
            return self._albert(self.network, batch)
        hidden = self._last_hidden(self.network, batch)
        return decoder_losses(self.network.lm_head, hidden, batch, self.max_logit_rows)

    @staticmethod
    def counts(batch: Mapping[str, Tensor]) -> Tensor:
        """Labels of each term in the batch, without running a network: (terms,) float64."""
        names = ("labels", "sentence_order_label")
        return torch.stack([(batch[name] != IGNORED).sum() for name in names if name in batch]).to(
            torch.float64
        )

    def token_losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Next-token loss at each position of a causal batch: (examples, positions) float32.

        In nats; 0 where there is no label. Under FSDP2 it has to be registered first
        (`torch.distributed.fsdp.register_fsdp_forward_method`), under DDP it is for evaluation.
        """
        hidden = self._last_hidden(self.network, batch)
        return _next_token(self.network.lm_head, hidden, batch["labels"], self.max_logit_rows)[0]

    @staticmethod
    def _last_hidden(network: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """The hidden states that the head of a decoder takes: (examples, positions, channels)."""
        positions = batch.get("position_ids")
        output = network.model(
            input_ids=batch["input_ids"],
            attention_mask=None if positions is None else document_mask(positions),
            position_ids=positions,
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _albert(self, network: AlbertForPreTraining, batch: Mapping[str, Tensor]) -> Losses:
        output = network.albert(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            token_type_ids=batch["token_type_ids"],
        )
        return albert_losses(
            network.predictions, network.sop_classifier, output.last_hidden_state,
            output.pooler_output, batch=batch, max_logit_rows=self.max_logit_rows,
        )  # fmt: skip


def decoder_losses(
    head: nn.Module, hidden: Tensor, batch: Mapping[str, Tensor], max_logit_rows: int
) -> Losses:
    """Losses of a causal batch from the last hidden states (examples, positions, channels)."""
    losses, correct = _next_token(head, hidden, batch["labels"], max_logit_rows)
    found = _by_example([(losses, correct, batch["labels"])])
    return found._replace(tokens=losses.detach())


def albert_losses(
    predictions: nn.Module,
    order_head: nn.Module,
    hidden: Tensor,
    pooled: Tensor,
    *,
    batch: Mapping[str, Tensor],
    max_logit_rows: int,
) -> Losses:
    """Losses of an ALBERT batch from its last hidden states (examples, positions, channels) and
    what the pooler makes of each example's first one (examples, channels)."""
    labels = batch["labels"]
    # One masked token in seven: worth the stop that a shape read from the data costs on CUDA.
    flat_labels = labels.flatten()
    places = (flat_labels != IGNORED).nonzero().squeeze(1)
    rows = hidden.flatten(0, 1).index_select(0, places)
    found, hits = _head_losses(predictions, rows, flat_labels[places], max_logit_rows)
    losses = found.new_zeros(flat_labels.shape).index_copy(0, places, found).view_as(labels)
    correct = hits.new_zeros(flat_labels.shape).index_copy(0, places, hits).view_as(labels)
    order = batch["sentence_order_label"]
    order_losses, order_correct = _cross_entropy(order_head, pooled, order)
    return _by_example(
        [
            (losses, correct, labels),
            (order_losses[:, None], order_correct[:, None], order[:, None]),
        ]
    )


def _next_token(
    head: nn.Module, hidden: Tensor, labels: Tensor, max_logit_rows: int
) -> tuple[Tensor, Tensor]:
    """Loss and correctness at each position, (examples, positions); 0 without a label.

    Nearly every position has a label, so all of them get logits: shapes stay fixed, which
    `torch.compile` and CUDA need to run without stops.
    """
    losses, correct = _head_losses(head, hidden.flatten(0, 1), labels.flatten(), max_logit_rows)
    return losses.view_as(labels), correct.view_as(labels)


def _head_losses(
    head: nn.Module, rows: Tensor, labels: Tensor, max_logit_rows: int
) -> tuple[Tensor, Tensor]:
    """Loss and correctness of each row of hidden states (rows, channels)."""
    if len(rows) <= max_logit_rows:
        return _cross_entropy(head, rows, labels)
    parts = [
        checkpoint(_cross_entropy, head, *part, use_reentrant=False)
        for part in zip(
            torch.split(rows, max_logit_rows),
            torch.split(labels, max_logit_rows),
            strict=True,
        )
    ]
    losses, correct = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(correct)


def document_mask(position_ids: Tensor) -> Tensor | None:
    """Which positions a token of packed documents may see: itself and those before it in its own.

    A document starts where `position_ids` (examples, positions) is 0. Boolean (examples, 1,
    positions, positions), True where seen; None where every row is one document, so that
    attention takes its causal kernel. On CUDA a mask means the memory-efficient kernel, not
    Flash, and the hidden blocks are computed all the same.
    """
    starts = position_ids == 0
    if not torch.compiler.is_compiling() and not bool(starts[:, 1:].any()):
        return None
    documents = starts.cumsum(dim=1)
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def _cross_entropy(head: nn.Module, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy (float32) and correctness (bool) of `head`'s guesses for rows."""
    logits = head(rows).float()
    losses = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return losses, logits.detach().argmax(dim=-1) == labels


def _by_example(terms: list[tuple[Tensor, Tensor, Tensor]]) -> Losses:
    """Sum (losses, correctness, labels), each (examples, positions), over the positions."""
    return Losses(
        torch.stack([losses.sum(dim=1) for losses, _, _ in terms]),
        torch.stack([(labels != IGNORED).sum(dim=1).double() for _, _, labels in terms]),
        torch.stack([correct.sum(dim=1).double() for _, correct, _ in terms]),
    )
