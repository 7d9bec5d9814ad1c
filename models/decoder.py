"""Llama-style decoders (Touvron et al. 2023): RMS norm, rotary positions, SwiGLU, no biases.

Shapes over transformers' `LlamaForCausalLM`.
"""

from __future__ import annotations

from typing import NamedTuple

from transformers import LlamaConfig, LlamaForCausalLM

from models.errors import UserError
from models.tokenizer import CLS_ID, PAD_ID, SEP_ID


class DecoderShape(NamedTuple):
    """What tells one size from another. Each head has hidden / heads channels."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    kv_heads: int | None = None
    """Heads of keys and values, each shared by heads / kv_heads queries (Ainslie et al. 2023);
    None: as many as `heads`."""
    tied: bool = True
    """Whether input and output embeddings are one matrix."""


SHAPES: dict[str, DecoderShape] = {
    "tiny": DecoderShape(hidden=64, layers=2, heads=2, feed_forward=176),
    "small": DecoderShape(hidden=256, layers=4, heads=4, feed_forward=704),
    "120m": DecoderShape(hidden=768, layers=12, heads=12, feed_forward=2432),
    "280m": DecoderShape(hidden=1024, layers=20, heads=16, feed_forward=2688),
    "1.3b": DecoderShape(hidden=2048, layers=24, heads=16, feed_forward=5504),
    "8b": DecoderShape(4096, layers=32, heads=32, feed_forward=14336, kv_heads=8, tied=False),
    "70b": DecoderShape(8192, layers=80, heads=64, feed_forward=28672, kv_heads=8, tied=False),
}
"""The names are true with Gristmill's default vocabulary of 32,000 (120.1 M, 281.8 M, 1.28 B);
those of the two largest with 128,256: they have the shapes of Llama 3 (Grattafiori et al. 2024).

DoReMi's 280M (Xie et al. 2023) has 12 layers of 768 channels, and a vocabulary of 256,000 holds
70 % of it. With 32,000 the same budget buys layers instead. Heads have 64 channels (from 1.3b on
128), and every width is a multiple of 128, which suits tensor cores.
"""


def decoder_config(
    size: str, vocab_size: int, *, dropout: float = 0.0, max_length: int = 1024
) -> LlamaConfig:
    """Configuration of one of `SHAPES`, for texts of up to `max_length` tokens.

    Input and output embeddings are one matrix up to 1.3b: a second one would take a fifth of
    120m's parameters and learns the same thing (Press and Wolf 2017). `dropout` counts for
    attention, the only dropout that Llama has. Raises UserError for an unknown size.
    """
    if size not in SHAPES:
        raise UserError(f"the decoder has no size '{size}': choose {', '.join(SHAPES)}")
    shape = SHAPES[size]
    return LlamaConfig(  # type: ignore[call-arg]  # attn_implementation: of the base class
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        intermediate_size=shape.feed_forward,
        attention_dropout=dropout,
        max_position_embeddings=max_length,
        tie_word_embeddings=shape.tied,
        pad_token_id=PAD_ID,
        bos_token_id=CLS_ID,
        eos_token_id=SEP_ID,
        attn_implementation="sdpa",
    )


def build_decoder(
    size: str, vocab_size: int, *, dropout: float = 0.0, max_length: int = 1024
) -> LlamaForCausalLM:
    """A network with random weights from torch's global generator (see `decoder_config`)."""
    return LlamaForCausalLM(
        decoder_config(size, vocab_size, dropout=dropout, max_length=max_length)
    )
