"""ALBERT's sizes against the published ones."""

from __future__ import annotations

import pytest
import torch

from models.albert import SHAPES, albert_config, build_albert
from models.errors import UserError


def parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def on_meta(size: str, vocab_size: int, **options: int) -> torch.nn.Module:
    with torch.device("meta"):
        return build_albert(size, vocab_size, **options)


def test_sahajbert_has_its_18105474_parameters_in_32_tensors() -> None:
    network = on_meta("large", 32_000)
    assert parameters(network) == 18_105_474
    assert len(list(network.parameters())) == 32


@pytest.mark.parametrize(("size", "millions"), [("base", 12), ("large", 18)])
def test_sizes_of_the_paper(size: str, millions: int) -> None:
    """Table 1 of Lan et al. 2020: 12M and 18M with a vocabulary of 30,000."""
    assert round(parameters(on_meta(size, 30_000)) / 1e6) == millions


@pytest.mark.parametrize("size", SHAPES)
def test_parameters_by_hand(size: str) -> None:
    vocab, e = 1_000, SHAPES[size].embedding
    h, f = SHAPES[size].hidden, SHAPES[size].feed_forward
    embeddings = (vocab + 64 + 2) * e + 2 * e
    block = 4 * (h * h + h) + (h * f + f) + (f * h + h) + 2 * (2 * h)
    pooler, order = h * h + h, 2 * h + 2
    masked = h * e + e + 2 * e + vocab
    expected = embeddings + (e * h + h) + block + pooler + order + masked
    assert parameters(on_meta(size, vocab, max_length=64)) == expected


def test_input_and_output_embeddings_are_one_tensor() -> None:
    network = build_albert("tiny", 100)
    assert network.predictions.decoder.weight is network.albert.embeddings.word_embeddings.weight


def test_settings_arrive() -> None:
    config = albert_config("tiny", 100, dropout=0.25, max_length=40)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 2, 3)
    assert config.hidden_dropout_prob == 0.25
    assert config.attention_probs_dropout_prob == 0.25
    assert config.classifier_dropout_prob == 0.25
    assert config.max_position_embeddings == 40
    assert build_albert("tiny", 100).config._attn_implementation == "sdpa"


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(UserError, match="no size 'xl': choose tiny, small, base, large"):
        albert_config("xl", 100)
