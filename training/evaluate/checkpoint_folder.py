"""Checkpoints to evaluate: transformers folders, opened offline, safetensors only."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from models import files, tokenizer
from models.errors import UserError
from training.evaluate.checkpoint_place import find_places

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PAD = "[PAD]"


@dataclass(frozen=True)
class CheckpointFolder:
    """An exported model with its tokenizer; `run` is the folder of the run that made it."""

    name: str
    path: Path
    run: Path | None
    config: PretrainedConfig

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        kind = type(self.config)
        return (
            kind in transformers.AutoModelForCausalLM._model_mapping
            and kind not in transformers.AutoModelForMaskedLM._model_mapping
        )

    def digests(self) -> dict[str, str]:
        """SHA-256 of the files that make up the model and its tokenizer, by name."""
        names = [
            path.name
            for path in sorted(self.path.iterdir())
            if path.suffix == ".safetensors" or path.name in {"config.json", "tokenizer.json"}
        ]
        return {name: files.sha256_file(self.path / name) for name in names}


def find_checkpoints(paths: Sequence[str]) -> list[CheckpointFolder]:
    """The checkpoints at `paths`, as `checkpoint_place.find_places` finds and names them.

    Raises UserError for a folder that is none, or is not complete.
    """
    return [
        CheckpointFolder(place.name, place.model, place.run, _config(place.model))
        for place in find_places(paths)
    ]


def load_tokenizer(folder: CheckpointFolder) -> Tokenizer:
    """The checkpoint's tokenizer. Raises UserError where it does not fit the network."""
    found = tokenizer.load_tokenizer(str(folder.path))
    size = found.get_vocab_size()
    if size > folder.config.vocab_size:
        raise UserError(
            f"checkpoint '{folder.path}' has a tokenizer of '{size}' tokens and a network of "
            f"{folder.config.vocab_size}: export the run again"
        )
    return found


def task_network(
    folder: CheckpointFolder,
    kind: str,
    labels: Sequence[str],
    *,
    pad_id: int,
    head_dropout: float,
    random: bool,
) -> PreTrainedModel:
    """A network with a new head for `labels`, float32: the checkpoint's weights, or random ones.

    What is random comes from torch's global generator. Raises UserError when the family has no
    network for `kind`, or a tensor below the head is missing.
    """
    config = type(folder.config).from_dict(
        folder.config.to_dict()
        | {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: number for number, label in enumerate(labels)},
            "pad_token_id": pad_id,
            "classifier_dropout": head_dropout,
            "classifier_dropout_prob": head_dropout,
        }
    )
    auto: Any = (
        transformers.AutoModelForTokenClassification
        if kind == "token-classification"
        else transformers.AutoModelForSequenceClassification
    )
    if type(config) not in auto._model_mapping:
        raise UserError(
            f"checkpoint '{folder.path}' is of the type '{config.model_type}', which transformers "
            f"has no network for {kind} of: give an ALBERT or a Llama-style decoder"
        )
    network: PreTrainedModel
    if random:
        network = auto.from_config(config, dtype=torch.float32)
        return network
    network, missing = _loaded(auto, folder, config=config)
    body = f"{network.base_model_prefix}."
    _refuse(folder, [name for name in missing if name.startswith(body)])
    return network


def load_network(folder: CheckpointFolder, kind: Any) -> PreTrainedModel:
    """The checkpoint as transformers' class `kind`, float32, every tensor from the file.

    Raises UserError when it cannot be loaded or a tensor is missing.
    """
    network, missing = _loaded(kind, folder, config=folder.config)
    _refuse(folder, missing)
    return network


def _loaded(
    kind: Any, folder: CheckpointFolder, *, config: PretrainedConfig
) -> tuple[PreTrainedModel, list[str]]:
    """The network and the names of the tensors that the file lacks."""
    with _quiet_transformers():
        try:
            network, report = kind.from_pretrained(
                folder.path,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise UserError(
                f"checkpoint '{folder.path}' cannot be loaded: {' '.join(str(error).split())}; "
                "export it again"
            ) from error
    return network, sorted(report["missing_keys"])


def _refuse(folder: CheckpointFolder, missing: list[str]) -> None:
    if missing:
        raise UserError(
            f"checkpoint '{folder.path}' has no tensor '{missing[0]}' ({len(missing)} are "
            "missing): it is not whole; export it again"
        )


def pad_id_of(own_tokenizer: Tokenizer, folder: CheckpointFolder) -> int:
    """The id that fills batches up. Raises UserError for a tokenizer and a network without one."""
    found = own_tokenizer.token_to_id(_PAD)
    if found is None:
        found = folder.config.pad_token_id
    if found is None:
        raise UserError(f"checkpoint '{folder.path}' has no padding token: add '{_PAD}' to it")
    return int(found)


def _config(model: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"checkpoint '{model}': its config.json is none that transformers knows: "
            f"{' '.join(str(error).split())}"
        ) from None
    return config


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the table of unused heads, which says nothing new: a task has its own head."""
    level = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
