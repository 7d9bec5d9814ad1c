"""The network that a recipe names: random weights, or those of a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from transformers import (
    AlbertForPreTraining,
    AutoConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from models.albert import albert_config
from models.decoder import decoder_config
from models.errors import UserError
from training.recipe import TrainRecipe

_SHAPE_FIELDS = (
    "embedding_size",
    "hidden_size",
    "num_hidden_layers",
    "num_hidden_groups",
    "inner_group_num",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)


def network_config(recipe: TrainRecipe, vocab_size: int) -> PretrainedConfig:
    """Configuration of the recipe's network.

    ALBERT keeps its 512 learned positions where the examples are shorter, so that a later run
    with longer examples can go on from it.
    """
    model, length = recipe.model, recipe.examples.sequence_length
    if model.family == "albert":
        return albert_config(
            model.size, vocab_size, dropout=model.dropout, max_length=max(512, length)
        )
    return decoder_config(model.size, vocab_size, dropout=model.dropout, max_length=length)


def build_network(recipe: TrainRecipe, vocab_size: int) -> PreTrainedModel:
    """The recipe's network in float32 on the CPU: the same weights for the same `run.seed`.

    With `model.init` the weights come from that folder (config.json, model.safetensors), and
    the network must have the shape of `model.size` and the tokenizer's vocabulary. Raises
    UserError where it has not, or where a tensor is missing. torch's global generator is left
    as it was.
    """
    config = network_config(recipe, vocab_size)
    kind: Any = AlbertForPreTraining if recipe.model.family == "albert" else LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.run.seed)
        if recipe.model.init is None:
            network: PreTrainedModel = kind(config)
        else:
            network = _loaded(kind, config, recipe.model.init, recipe.model.size)
    return network


def checkpoint_blocks(network: PreTrainedModel) -> None:
    """Recompute the transformer blocks in the backward pass instead of keeping their insides.

    Names of parameters and modules stay as they are, and hooks (FSDP2's) stay outside of what
    is recomputed. For ALBERT the one shared block counts once for each layer. Call it once.
    """
    blocks = (
        network.albert.encoder.albert_layer_groups
        if isinstance(network, AlbertForPreTraining)
        else network.model.layers
    )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _loaded(kind: Any, wanted: PretrainedConfig, folder: str, size: str) -> PreTrainedModel:
    """The network in `folder`, which must fit `wanted`."""
    for name in ("config.json", "model.safetensors"):
        if not (Path(folder) / name).is_file():
            raise UserError(
                f"model.init = '{folder}' holds no {name}: give the folder of a transformers "
                "model saved as safetensors, as the model/ of a run"
            )
    try:
        found = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.init = '{folder}': its config.json is none of transformers: {_line(error)}"
        ) from error
    _check_shape(found, wanted, folder, size)
    for field in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob",
                  "attention_dropout"):  # fmt: skip
        if hasattr(wanted, field):
            setattr(found, field, getattr(wanted, field))
    try:
        with _quiet():
            loaded: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(
                folder,
                config=found,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="sdpa",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(
            f"model.init = '{folder}' cannot be loaded: {_line(error)}; export it again"
        ) from error
    network, report = loaded
    misshapen = sorted(name for name, *_ in report["mismatched_keys"])
    if misshapen:
        raise UserError(
            f"model.init = '{folder}': the tensor '{misshapen[0]}' has not the shape that "
            "config.json says: export it again"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"model.init = '{folder}' has no tensor '{missing[0]}' ({len(missing)} are missing): "
            f"give a model saved from {kind.__name__}"
        )
    return network


def _check_shape(found: PretrainedConfig, wanted: PretrainedConfig, folder: str, size: str) -> None:
    """Raise UserError where the folder's network is another than the recipe's."""
    if found.model_type != wanted.model_type:
        raise UserError(
            f"model.init = '{folder}' is a network of type '{found.model_type}', "
            f"model.family asks for '{wanted.model_type}': change one of them"
        )
    for field in _SHAPE_FIELDS:
        here, there = getattr(found, field, None), getattr(wanted, field, None)
        if here == there:
            continue
        if field == "vocab_size":
            raise UserError(
                f"model.init = '{folder}' has a vocabulary of '{here}' tokens, model.tokenizer "
                f"one of {there}: give the tokenizer that it was trained with"
            )
        raise UserError(
            f"model.init = '{folder}' has {field} = '{here}', model.size = '{size}' has {there}: "
            "give the size that it was trained with"
        )
    longest, length = found.max_position_embeddings, wanted.max_position_embeddings
    if wanted.model_type == "albert" and longest < length:
        raise UserError(
            f"model.init = '{folder}' knows {longest} positions, fewer than "
            f"examples.sequence_length = '{length}': shorten the examples"
        )
    # Rotary positions have no weights: the length is only what the network was trained with.
    if wanted.model_type == "llama":
        found.max_position_embeddings = max(longest, length)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars and tables: what matters is said in one line."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _line(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split())
