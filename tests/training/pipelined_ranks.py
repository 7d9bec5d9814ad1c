"""What `test_pipelined` runs in each of two gloo processes; spawned children import it."""

from __future__ import annotations

import os

import torch

from models.decoder import build_decoder
from training import checkpoint, checkpoint_tensors
from training.objectives import Objective
from training.optimisers import build_optimiser
from training.pipelined import Pipelined
from training.recipe import Run, load_recipe
from training.strategy import placed

RANKS = 2
_SETTINGS = ("model.family=decoder", "examples.sequence_length=32", "run.strategy=pipeline",
             "run.device=cpu", "run.pipeline.costs=operations")  # fmt: skip


def save_and_load(rank: int, port: int, folder: str) -> None:
    """A network with a buffer in each layer, saved in stages, read in stages and whole."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS),
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    recipe = load_recipe("demo", list(_SETTINGS))
    with placed(Run.model_validate(recipe.run.model_dump())) as place:
        first, second = (
            Pipelined(_objective(seed), place, recipe, microbatches=2, rows=1) for seed in (1, 2)
        )
        assert first.cut.bounds == second.cut.bounds == (0, 2, 4), "a layer on each rank"
        optimiser = build_optimiser(recipe.optimiser, first.objective.network)
        saved = checkpoint.save(
            folder, 1, objective=first.objective, optimiser=optimiser, state={"step": 1}, keep=1
        )
        checkpoint.load(saved, objective=second.objective)
        _assert_equal(second.objective, first.objective)
        whole = _objective(2)
        checkpoint.load(saved, objective=whole)
        _assert_equal(whole, _objective(1))


def _objective(seed: int) -> Objective:
    torch.manual_seed(seed)
    network = build_decoder("tiny", 90, max_length=32)
    for number, layer in enumerate(network.model.layers):
        layer.register_buffer("seen", torch.tensor([seed, number]))
    return Objective(network)


def _assert_equal(left: torch.nn.Module, right: torch.nn.Module) -> None:
    found, expected = (checkpoint_tensors.network_tensors(one) for one in (left, right))
    assert found.keys() == expected.keys()
    assert any(name.endswith(".seen") for name in found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
