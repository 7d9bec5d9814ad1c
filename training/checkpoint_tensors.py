"""The tensors of a checkpoint: their names, and their way to and from safetensors files.

A parameter is called `network.` + its name in the plain transformers network, whatever wraps it
(DDP, FSDP2, torch.compile, activation checkpointing); its optimiser state `optimiser.` + that
name + the key, as `optimiser.model.norm.weight.exp_avg`. Tied parameters are saved once, under
their first name.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterator

import torch
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.nn.parallel import DistributedDataParallel

from models.errors import UserError
from training.together import distributed

_NETWORK, _OPTIMISER = "network.", "optimiser."
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def write(folder: str, objective: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Write every rank's part into `folder`, as shard-00001-… for rank 0; all ranks call it.

    A part is put together in memory, so a rank needs as much again as its part. Raises
    CheckpointException on all ranks when one fails.
    """
    network = network_tensors(objective)
    names = {id(tensor): name for name, tensor in network.items()}
    tensors = {_NETWORK + name: tensor.detach() for name, tensor in network.items()}
    for parameter, state in optimiser.state.items():
        for key, value in state.items():
            tensors[f"{_OPTIMISER}{names[id(parameter)]}.{key}"] = value
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    with _without_warning():
        save_tensors(tensors, storage_writer=writer, no_dist=not distributed())


def read(folder: str, objective: torch.nn.Module, optimiser: torch.optim.Optimizer | None) -> None:
    """Fill the network and the optimiser from `folder`; all ranks call it.

    Raises UserError when the network there has other parameters.
    """
    reader = HuggingFaceStorageReader(folder)
    saved = _saved_shapes(reader)
    network = network_tensors(objective)
    elsewhere = _on_other_stages(objective, network)
    _check(folder, saved, network, elsewhere)
    target = {_NETWORK + name: tensor.detach() for name, tensor in network.items()}
    if optimiser is not None:
        target |= _empty_state(saved, network, optimiser, elsewhere)
    with _without_warning():
        load_tensors(target, storage_reader=reader, no_dist=not distributed())


def read_network(folder: str, network: torch.nn.Module) -> None:
    """Fill a plain `network` from `folder`, in this process alone. Raises UserError."""
    reader = HuggingFaceStorageReader(folder)
    tensors = plain_tensors(network)
    _check(folder, _saved_shapes(reader), tensors)
    target = {_NETWORK + name: tensor.detach() for name, tensor in tensors.items()}
    with _without_warning():
        load_tensors(target, storage_reader=reader, no_dist=True)


def network_tensors(objective: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`plain_tensors` of `objective.network`.

    Asked for through the whole objective: FSDP2 then puts this rank's parts back where an
    evaluation has left whole parameters behind. A stage of a pipeline gives its own part; what
    another stage holds too has the name that the whole network calls it by.
    """
    inner = plain(objective)
    first_names = getattr(inner, "parameter_names", {})
    found = {
        first_names.get(id(tensor), name): tensor for name, tensor in plain_tensors(inner).items()
    }
    return {
        name.removeprefix(_NETWORK): tensor
        for name, tensor in found.items()
        if name.startswith(_NETWORK)
    }


def _on_other_stages(objective: torch.nn.Module, network: dict[str, torch.Tensor]) -> set[str]:
    """Names of the parameters that other stages of a pipeline hold and this rank does not."""
    whole = getattr(plain(objective), "whole_names", ())
    return {name.removeprefix(_NETWORK) for name in whole} - network.keys()


def plain_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, each once, by its name in the module as it was built.

    They are the live ones; under FSDP2 this rank's DTensors.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for wrapped_name, tensor in module.state_dict(keep_vars=True).items():
        name = wrapped_name
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def plain(objective: torch.nn.Module) -> torch.nn.Module:
    """`objective` without DistributedDataParallel and torch.compile around it."""
    while True:
        if isinstance(objective, DistributedDataParallel):
            objective = objective.module
        elif isinstance(inner := getattr(objective, "_orig_mod", None), torch.nn.Module):
            objective = inner
        else:
            return objective


def _saved_shapes(reader: HuggingFaceStorageReader) -> dict[str, torch.Size]:
    entries = reader.read_metadata().state_dict_metadata.items()
    return {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _check(
    folder: str | os.PathLike[str],
    saved: dict[str, torch.Size],
    network: dict[str, torch.Tensor],
    elsewhere: Collection[str] = (),
) -> None:
    there = {
        name.removeprefix(_NETWORK): tuple(shape)
        for name, shape in saved.items()
        if name.startswith(_NETWORK) and name.removeprefix(_NETWORK) not in elsewhere
    }
    here = {name: tuple(tensor.shape) for name, tensor in network.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise UserError(
                f"checkpoint '{folder}' is of another network: '{name}' has the shape "
                f"{there.get(name, 'of nothing')} there and {here.get(name, 'of nothing')} here: "
                "use the recipe that wrote it"
            )


def _empty_state(
    saved: dict[str, torch.Size],
    network: dict[str, torch.Tensor],
    optimiser: torch.optim.Optimizer,
    elsewhere: Collection[str],
) -> dict[str, torch.Tensor]:
    """Give `optimiser` room for every saved tensor of its state; these tensors by their names."""
    fused = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    optimiser.state.clear()
    room: dict[str, torch.Tensor] = {}
    for name, shape in saved.items():
        if not name.startswith(_OPTIMISER):
            continue
        owner, _, key = name.removeprefix(_OPTIMISER).rpartition(".")
        if owner in elsewhere:
            continue
        parameter = network.get(owner)
        if parameter is None or id(parameter) not in fused:
            raise UserError(f"the checkpoint has '{name}', but nothing here learns '{owner}'")
        if len(shape) == 0:  # the count of steps: where torch's optimisers expect it
            device = parameter.device if fused[id(parameter)] else torch.device("cpu")
            value = torch.zeros((), dtype=torch.float32, device=device)
        else:
            value = torch.zeros_like(parameter, requires_grad=False)
        optimiser.state[parameter][key] = value
        room[name] = value
    return room


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """DCP warns of a single process even where it was told of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
