"""The decoder's sizes: what their names say."""

from __future__ import annotations

import pytest
import torch

from models.decoder import SHAPES, build_decoder, decoder_config
from models.errors import UserError


def parameters(size: str, vocab_size: int) -> int:
    with torch.device("meta"):
        network = build_decoder(size, vocab_size)
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("size", SHAPES)
def test_parameters_by_hand(size: str) -> None:
    vocab = 5_000
    h, f, layers = SHAPES[size].hidden, SHAPES[size].feed_forward, SHAPES[size].layers
    expected = vocab * h + layers * (4 * h * h + 3 * h * f + 2 * h) + h
    assert parameters(size, vocab) == expected


@pytest.mark.parametrize(("size", "exact"), [("120m", 120_146_688), ("280m", 281_846_784)])
def test_the_names_are_true_with_32000_tokens(size: str, exact: int) -> None:
    assert parameters(size, 32_000) == exact
    assert exact == pytest.approx(int(size.removesuffix("m")) * 1e6, rel=0.01)


def test_input_and_output_embeddings_are_one_tensor() -> None:
    network = build_decoder("tiny", 100)
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_settings_arrive() -> None:
    config = decoder_config("tiny", 100, dropout=0.25, max_length=40)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 2, 3)
    assert config.attention_dropout == 0.25
    assert config.max_position_embeddings == 40
    assert build_decoder("tiny", 100).config._attn_implementation == "sdpa"


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(UserError, match="no size 'large': choose tiny, small, 120m, 280m"):
        decoder_config("large", 100)
