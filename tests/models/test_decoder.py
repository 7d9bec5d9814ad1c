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
    shape = SHAPES[size]
    h, f = shape.hidden, shape.feed_forward
    keys = h // shape.heads * (shape.kv_heads or shape.heads)
    embeddings = vocab * h * (1 if shape.tied else 2)
    block = 2 * h * h + 2 * h * keys + 3 * h * f + 2 * h
    assert parameters(size, vocab) == embeddings + shape.layers * block + h


@pytest.mark.parametrize(
    ("size", "vocab", "named", "exact"),
    [
        ("120m", 32_000, 120e6, 120_146_688),
        ("280m", 32_000, 280e6, 281_846_784),
        ("1.3b", 32_000, 1.3e9, 1_279_887_360),
        ("8b", 128_256, 8e9, 8_030_261_248),  # Llama 3 8B
        ("70b", 128_256, 70e9, 70_553_706_496),  # Llama 3 70B
    ],
)
def test_the_names_are_true(size: str, vocab: int, named: float, exact: int) -> None:
    assert parameters(size, vocab) == exact
    assert exact == pytest.approx(named, rel=0.02)


@pytest.mark.parametrize("size", SHAPES)
def test_input_and_output_embeddings_are_one_tensor_up_to_a_billion(size: str) -> None:
    with torch.device("meta"):
        network = build_decoder(size, 100)
    tied = network.lm_head.weight is network.model.embed_tokens.weight
    assert tied == (size not in ("8b", "70b"))


def test_settings_arrive() -> None:
    config = decoder_config("tiny", 100, dropout=0.25, max_length=40)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 2, 3)
    assert config.attention_dropout == 0.25
    assert config.max_position_embeddings == 40
    assert build_decoder("tiny", 100).config._attn_implementation == "sdpa"


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(UserError, match=r"no size 'large': choose tiny, .*, 280m, 1\.3b, 8b, 70b"):
        decoder_config("large", 100)
