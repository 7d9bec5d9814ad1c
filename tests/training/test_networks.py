"""Networks from a recipe: seeds, and folders that fit or do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AlbertForMaskedLM

from models.errors import UserError
from training.networks import build_network
from training.recipe import TrainRecipe

VOCAB = 100


def recipe(length: int = 64, seed: int = 0, **model: object) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "model": {"size": "tiny"} | model,
            "examples": {"sequence_length": length},
            "run": {"seed": seed},
        }
    )


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    build_network(recipe(seed=3), VOCAB).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_the_seed_decides_and_the_global_generator_is_left_alone(family: str) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = build_network(recipe(family=family), VOCAB)
    assert torch.equal(torch.rand(3), expected)
    assert same(first, build_network(recipe(family=family), VOCAB))
    assert not same(first, build_network(recipe(family=family, seed=1), VOCAB))
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}


def test_lengths_and_dropout_reach_the_network() -> None:
    short = build_network(recipe(length=16, dropout=0.2), VOCAB)
    assert short.config.max_position_embeddings == 512
    assert short.config.hidden_dropout_prob == 0.2
    assert build_network(recipe(length=600), VOCAB).config.max_position_embeddings == 600
    decoder = build_network(recipe(length=16, family="decoder", dropout=0.2), VOCAB)
    assert decoder.config.max_position_embeddings == 16
    assert decoder.config.attention_dropout == 0.2


def test_a_folder_gives_its_weights_and_the_recipe_its_dropout(saved: Path) -> None:
    network = build_network(recipe(init=str(saved), dropout=0.2), VOCAB)
    assert same(network, build_network(recipe(seed=3), VOCAB))
    assert not same(network, build_network(recipe(), VOCAB))
    assert network.config.hidden_dropout_prob == 0.2
    assert network.albert.embeddings.dropout.p == 0.2
    assert network.config._attn_implementation == "sdpa"


def test_a_decoder_may_go_on_with_longer_texts(tmp_path: Path) -> None:
    build_network(recipe(length=16, family="decoder"), VOCAB).save_pretrained(tmp_path)
    longer = build_network(recipe(length=64, family="decoder", init=str(tmp_path)), VOCAB)
    assert longer.config.max_position_embeddings == 64
    assert same(longer, build_network(recipe(family="decoder"), VOCAB))


@pytest.mark.parametrize(
    ("vocab", "changes", "message"),
    [
        (101, {}, "a vocabulary of '100' tokens, model.tokenizer one of 101"),
        (VOCAB, {"size": "small"}, "embedding_size = '32', model.size = 'small' has 128"),
        (VOCAB, {"family": "decoder"}, "type 'albert', model.family asks for 'llama'"),
        (VOCAB, {"length": 513}, "knows 512 positions, fewer than .* '513'"),
    ],
)
def test_a_folder_that_does_not_fit(
    saved: Path, vocab: int, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_network(recipe(init=str(saved), **changes), vocab)
    assert str(saved) in str(error.value)
    assert "\n" not in str(error.value)


def damaged(saved: Path, folder: Path, how: str) -> None:
    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_text((saved / "config.json").read_text())
    weights.write_bytes((saved / "model.safetensors").read_bytes())
    match how:
        case "no config":
            config.unlink()
        case "no weights":
            weights.rename(folder / "pytorch_model.bin")
        case "broken config":
            config.write_text("{")
        case "foreign config":
            config.write_text(json.dumps({"model_type": "no such network"}))
        case "cut weights":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "misshapen":
            tensors = load_file(weights)
            tensors["albert.pooler.weight"] = torch.zeros(3, 3)
            save_file(tensors, weights, metadata={"format": "pt"})
        case "no sentence order":
            kept = AlbertForMaskedLM.from_pretrained(saved)
            kept.save_pretrained(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no config", "holds no config.json"),
        ("no weights", "holds no model.safetensors"),
        ("broken config", "its config.json is none of transformers"),
        ("foreign config", "its config.json is none of transformers"),
        ("cut weights", "cannot be loaded: .*; export it again"),
        ("misshapen", "tensor 'albert.pooler.weight' has not the shape that config.json says"),
        ("no sentence order", r"no tensor 'albert.pooler.bias' \(4 are missing\)"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(
    saved: Path, tmp_path: Path, how: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged(saved, tmp_path, how)
    capfd.readouterr()
    with pytest.raises(UserError, match=message) as error:
        build_network(recipe(init=str(tmp_path)), VOCAB)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
