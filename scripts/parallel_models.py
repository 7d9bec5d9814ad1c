"""The models of `bench_parallel`: chains of unequal units, of torch and nothing else.

`A` is eight narrow blocks below a large vocabulary head, `B` four wide blocks before eight narrow
ones: two ways in which an even share of layers is no even share of work. `T` is the small model
whose traffic is counted. The peer in an environment of its own imports this file too, so that it
imports torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Shape:
    """Blocks, (count, channels) one group after the other, between an embedding and a head."""

    blocks: tuple[tuple[int, int], ...]
    vocab: int


SHAPES = {
    "A": Shape(((8, 128),), 16_384),
    "B": Shape(((4, 384), (8, 128)), 4096),
    "T": Shape(((8, 128),), 1024),
}
LENGTH = 64
"""Tokens of an example."""
MICROBATCH = 4
"""Examples: 256 tokens a microbatch."""
_HEAD_CHANNELS = 32


class Block(nn.Module):
    """A decoder block: norm, causal attention, norm, feed-forward; `out` other than `channels`
    changes the width at its end."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.heads = channels // _HEAD_CHANNELS
        self.before_attention, self.before_wide = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.output = nn.Linear(channels, channels)
        self.wide, self.narrow = (
            nn.Linear(channels, 4 * channels),
            nn.Linear(4 * channels, channels),
        )
        self.change = nn.Identity() if out == channels else nn.Linear(channels, out)

    def forward(self, hidden: Tensor) -> Tensor:
        """(examples, tokens, channels) -> (examples, tokens, out)."""
        three = self.query_key_value(self.before_attention(hidden)).unflatten(
            -1, (3, self.heads, -1)
        )
        query, key, value = three.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(-2))
        hidden = hidden + self.narrow(F.gelu(self.wide(self.before_wide(hidden))))
        changed: Tensor = self.change(hidden)
        return changed


class Head(nn.Module):
    """Norm and projection to the vocabulary."""

    def __init__(self, channels: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.projection = nn.Linear(channels, vocab, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(examples, tokens, channels) -> (examples, tokens, vocabulary)."""
        logits: Tensor = self.projection(self.norm(hidden))
        return logits


def build(shape: Shape) -> nn.Sequential:
    """The chain embedding, blocks, head: the same weights on every rank and in every program."""
    torch.manual_seed(0)
    widths = [channels for count, channels in shape.blocks for _ in range(count)]
    after = [*widths[1:], widths[-1]]
    return nn.Sequential(
        nn.Embedding(shape.vocab, widths[0]),
        *(Block(channels, out) for channels, out in zip(widths, after, strict=True)),
        Head(widths[-1], shape.vocab),
    )


def tokens(shape: Shape, number: int, examples: int = MICROBATCH) -> tuple[Tensor, Tensor]:
    """Inputs and labels of microbatch `number`: random ids, and those shifted by one."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(shape.vocab, (examples, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the tokens; all microbatches here have as many."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
