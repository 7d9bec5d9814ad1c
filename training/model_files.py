"""Files of a model folder in the form of transformers: configuration, weights, tokenizer."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.distributed.fsdp import FSDPModule

from models import files
from models.errors import UserError
from models.tokenizer import CLS_ID, SEP_ID, TOKENIZER_FILE, load_tokenizer, save_tokenizer
from models.tokenizer import CONFIG_FILE as TOKENIZER_CONFIG_FILE

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
NETWORKS = ("AlbertForPreTraining", "LlamaForCausalLM")


def write_config(network: Any, folder: Path) -> None:
    """Write config.json of `network` (float32), with the name of its transformers class."""
    config = copy.deepcopy(network.config)
    # FSDP2 puts a class of its own in front; a stage of a pipeline says what it is a part of.
    kind = next(kind for kind in type(network).__mro__ if not issubclass(kind, FSDPModule))
    config.architectures = [getattr(network, "transformers_class", kind.__name__)]
    config.dtype = "float32"
    config.save_pretrained(folder)


def network_of(folder: Path) -> Any:
    """A network with random weights after config.json in `folder`. Raises UserError."""
    place = folder / CONFIG_FILE
    try:
        kind = json.loads(place.read_bytes())["architectures"][0]
        if kind not in NETWORKS:
            raise UserError(f"'{place}' is of '{kind}', not of one of {', '.join(NETWORKS)}")
        network: type[transformers.PreTrainedModel] = getattr(transformers, kind)
        assert network.config_class is not None
        return network(network.config_class.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"'{place}' is no configuration of a network: {error}") from None


def write_weights(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write model.safetensors; tied parameters are left out but for their first name."""
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )


def write_tokenizer(tokenizer: str, folder: Path) -> None:
    """Copy a tokenizer (folder or tokenizer.json) into `folder`, byte for byte.

    tokenizer_config.json is made where it is missing. Raises OSError, UserError.
    """
    source = tokenizer if tokenizer.endswith(".json") else files.join(tokenizer, TOKENIZER_FILE)
    config_place = source.removesuffix(source.rpartition("/")[2]) + TOKENIZER_CONFIG_FILE
    if files.exists(config_place):
        config = files.read_bytes(config_place)
    else:
        with tempfile.TemporaryDirectory(prefix="gristmill-") as made:
            save_tokenizer(load_tokenizer(tokenizer), made, {})
            config = (Path(made) / TOKENIZER_CONFIG_FILE).read_bytes()
    (folder / TOKENIZER_FILE).write_bytes(files.read_bytes(source))
    (folder / TOKENIZER_CONFIG_FILE).write_bytes(config)


def fit_tokenizer(folder: Path, max_length: int, *, causal: bool) -> None:
    """Adapt the tokenizer in `folder` to its network.

    causal: a text becomes `[CLS] text`, the beginning of a document to go on with; as trained for
    ALBERT it ends with [SEP]. tokenizer.json changes for that: transformers takes no other word.
    """
    place = folder / TOKENIZER_CONFIG_FILE
    config = json.loads(place.read_bytes()) | {"model_max_length": max_length}
    if causal:
        config["model_input_names"] = ["input_ids", "attention_mask"]
        whole = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text())
        whole.post_processor = TemplateProcessing(
            single="[CLS] $A",
            pair="[CLS] $A [SEP] $B:1",
            special_tokens=[("[CLS]", CLS_ID), ("[SEP]", SEP_ID)],
        )
        (folder / TOKENIZER_FILE).write_text(whole.to_str(pretty=True))
    place.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
