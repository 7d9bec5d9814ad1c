"""ALBERT (Lan et al. 2020): one transformer block used for every layer, small embeddings.

Shapes over transformers' `AlbertForPreTraining`: masked tokens and sentence order.
"""

from __future__ import annotations

from typing import NamedTuple

from transformers import AlbertConfig, AlbertForPreTraining

from models.errors import UserError
from models.tokenizer import CLS_ID, PAD_ID, SEP_ID


class AlbertShape(NamedTuple):
    """What tells one size from another."""

    embedding: int
    hidden: int
    layers: int
    heads: int
    feed_forward: int


SHAPES: dict[str, AlbertShape] = {
    "tiny": AlbertShape(embedding=32, hidden=64, layers=2, heads=2, feed_forward=128),
    "small": AlbertShape(embedding=128, hidden=128, layers=4, heads=2, feed_forward=512),
    # albert-base-v2 and albert-large-v2 (Lan et al. 2020, table 1).
    "base": AlbertShape(embedding=128, hidden=768, layers=12, heads=12, feed_forward=3072),
    "large": AlbertShape(embedding=128, hidden=1024, layers=24, heads=16, feed_forward=4096),
}
"""`tiny` is for tests, `small` for minutes on two processor cores."""


def albert_config(
    size: str, vocab_size: int, *, dropout: float = 0.0, max_length: int = 512
) -> AlbertConfig:
    """Configuration of one of `SHAPES`; `max_length` tokens have a position of their own.

    `dropout` counts for hidden states, attention and the sentence-order head: the published
    models have 0 in the first two, which makes them learn faster (Lan et al. 2020, section 4.8).
    Raises UserError for an unknown size.
    """
    if size not in SHAPES:
        raise UserError(f"ALBERT has no size '{size}': choose {', '.join(SHAPES)}")
    shape = SHAPES[size]
    return AlbertConfig(  # type: ignore[call-arg]  # attn_implementation: of the base class
        vocab_size=vocab_size,
        embedding_size=shape.embedding,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        classifier_dropout_prob=dropout,
        max_position_embeddings=max_length,
        pad_token_id=PAD_ID,
        bos_token_id=CLS_ID,
        eos_token_id=SEP_ID,
        attn_implementation="sdpa",
    )


def build_albert(
    size: str, vocab_size: int, *, dropout: float = 0.0, max_length: int = 512
) -> AlbertForPreTraining:
    """A network with random weights from torch's global generator (see `albert_config`)."""
    return AlbertForPreTraining(
        albert_config(size, vocab_size, dropout=dropout, max_length=max_length)
    )
