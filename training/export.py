"""A trained network as a folder that `transformers` opens: config, safetensors, tokenizer, card.

Works from a live network, sharded or not, and from any checkpoint without a process group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from models.errors import UserError
from models.tokenizer import TOKENIZER_FILE
from training import checkpoint, checkpoint_tensors, folders, model_card, model_files
from training.together import on_first, rank


def export(
    network: Any,
    tokenizer: str,
    directory: str | os.PathLike[str],
    *,
    max_length: int,
    state: Mapping[str, Any],
) -> Path:
    """Write the model folder `directory`; an older one there goes away. All ranks call it.

    network: on every rank; or whole on rank 0 and None on the others. tokenizer: folder or
    tokenizer.json. max_length: tokens that the network reads at once. state:
    of a checkpoint (`step`, `counters`, `identity`), for the card. The whole network is put
    together in rank 0's memory. Raises Fault on all ranks when it fails on one.
    """
    target = folders.local(directory)
    tensors = _whole_tensors(network)

    def write() -> None:
        with folders.atomic_folder(target) as folder:
            model_files.write_config(network, folder)
            model_files.write_weights(tensors, folder)
            model_files.write_tokenizer(tokenizer, folder)
            model_files.fit_tokenizer(
                folder, max_length, causal=network.config.model_type != "albert"
            )
            parameters = sum(tensor.numel() for tensor in tensors.values())
            (folder / model_card.FILE).write_text(model_card.card(network, parameters, state))

    on_first(write, f"cannot export to '{target}'")
    return target


def export_checkpoint(place: str, directory: str) -> Path:
    """Export the newest sound checkpoint of a run, or one checkpoint. Raises UserError."""
    target = folders.local(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--output '{directory}' is there already: give a new folder, or remove it")
    found = _find(place)
    network = model_files.network_of(found)
    checkpoint_tensors.read_network(str(found), network)
    state = checkpoint.read_state(found)["state"]
    length = int(state["identity"]["recipe"]["examples"]["sequence_length"])
    max_length = max_tokens(network.config, length)
    return export(network, str(found), directory, max_length=max_length, state=state)


def max_tokens(config: Any, sequence_length: int) -> int:
    """Tokens that a network reads at once: its positions, or what it was trained with."""
    return int(getattr(config, "max_position_embeddings", sequence_length))


def _find(place: str) -> Path:
    path = folders.local(place)
    if (path / checkpoint.STATE_FILE).is_file():
        found = checkpoint.checked(path)
    else:
        newest = checkpoint.latest(path) if path.is_dir() else None
        if newest is None:
            raise UserError(
                f"'{place}' is no run and no checkpoint: give the folder of `gristmill train`, or "
                f"a folder in its {checkpoint.FOLDER}/"
            )
        found = newest
    if not (found / TOKENIZER_FILE).is_file():
        raise UserError(f"checkpoint '{found}' has no {TOKENIZER_FILE}")
    return found


def _whole_tensors(network: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Every tensor of the network, whole, on rank 0's CPU; nothing on the other ranks."""
    whole: dict[str, torch.Tensor] = {}
    if network is None:
        return whole
    for name, tensor in checkpoint_tensors.plain_tensors(network).items():
        full = tensor.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()  # all ranks take part
        if rank() == 0:
            whole[name] = full.cpu()
    return whole
