"""One cut for the plan, for `auto` and for the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.errors import UserError
from tests.training.parallel.chains import chain
from training.networks import build_network
from training.objectives import Objective
from training.parallel import layout
from training.parallel.automatic import applied
from training.parallel.chain import objective_chain
from training.parallel.ladder import Devices
from training.parallel.planner import Climber
from training.parallel.profile import profile_recipe
from training.parallel.units import Cut
from training.recipe import TrainRecipe, load_recipe
from training.strategy import Placement

VOCAB = 90
SETS = ["model.size=tiny", "examples.sequence_length=16", "batch.microbatch=4"]


def recipe(*sets: str, name: str = "decoder-small") -> TrainRecipe:
    batch = "batch.samples=32" if name == "albert-small" else "batch.tokens=512"
    return load_recipe(name, [*SETS, batch, *sets])


def test_bytes_of_a_parameter() -> None:
    assert layout.state_bytes(1, bf16=False) == layout.state_bytes(1, bf16=True) == 16
    # Shards of weights, gradients and moments; whole weights, bf16 or not; whole float32 gradients.
    assert layout.state_bytes(4, bf16=True) == 4 + 2 + 4
    assert layout.state_bytes(4, bf16=False) == 4 + 4 + 4


def test_a_pipe_knows_shards_optimiser_and_memory() -> None:
    found = recipe("run.pipeline.shard=true", "run.precision=bf16", "optimiser.name=lamb")
    pipe = layout.pipe_for(found, 2, 4, copies=2, usable_bytes=1000, bandwidth_bytes_s=5.0)
    assert (pipe.shards, pipe.optimiser, pipe.bytes_per_parameter) == (2, "lamb", 8 + 2 + 4)
    assert (pipe.memory_bytes, pipe.bandwidth_bytes_s, pipe.whole_backward) == (1000, 5.0, False)
    assert layout.pipe_for(recipe(), 2, 4, copies=2).shards == 1


@pytest.mark.parametrize("sets", [(), ("run.pipeline.shard=true", "run.precision=bf16"),
                                  ("run.pipeline.schedule=zbv",)])  # fmt: skip
def test_the_run_makes_the_cut_that_auto_promised(sets: tuple[str, ...]) -> None:
    base = recipe(*sets)
    devices = Devices(1, 4, 10**9)
    climber = Climber(base, devices, VOCAB, keep_precision=True)
    # Devices on which it just fits, so that memory narrows the search.
    (rung,) = (one for one in climber.climbing() if one.name == "pipeline")
    tight = replace(devices, memory_bytes=int(rung.total_bytes / 0.95) + 2)
    climber = Climber(base, tight, VOCAB, keep_precision=True)
    (rung,) = (one for one in climber.climbing() if one.name == "pipeline")
    assert rung.fits
    assert rung.stages is not None
    found = applied(base, rung)
    place = Placement(0, 4, torch.device("cpu"), "pipeline", rung.stages.ranks)
    network = objective_chain(Objective(build_network(found, VOCAB)).train())
    assert not rung.checkpointing  # for which Pipelined wraps the blocks
    cut, table = layout.choose(
        network, found, place, rung.microbatches, rung.microbatch, usable_bytes=tight.usable_bytes
    )
    assert cut == Cut(rung.stages.bounds)
    assert "FLOPs" in table
    with pytest.raises(UserError, match=r"stage|a rank holds") as refusal:
        layout.choose(
            network, found, place, rung.microbatches, rung.microbatch, usable_bytes=10_000
        )
    assert "\n" not in str(refusal.value)


def test_a_given_cut_that_does_not_fit_is_refused() -> None:
    found = recipe("run.pipeline.cut=uniform", "run.strategy=pipeline")
    profile = profile_recipe(found, VOCAB)
    pipe = layout.pipe_for(found, 2, 4, copies=1, usable_bytes=10_000)
    with pytest.raises(UserError, match=r"cut = 'uniform': a rank holds .* are to be had"):
        layout.fitting(profile, found, pipe)
    cut, memory = layout.fitting(profile, found, replace(pipe, memory_bytes=None))
    assert layout.fitting(profile, found, replace(pipe, memory_bytes=memory.total)) == (cut, memory)


@pytest.mark.parametrize(
    ("name", "ranks", "sets"),
    [
        ("decoder-small", 2, []),  # tied: the head goes back to the embedding
        ("albert-small", 2, []),  # one block for all layers
        ("decoder-small", 2, ["run.pipeline.schedule=interleaved-1f1b"]),
    ],
)
def test_a_tree_that_is_no_pipeline_is_refused(name: str, ranks: int, sets: list[str]) -> None:
    found = recipe("run.pipeline.cut=tree", *sets, name=name)
    profile = profile_recipe(found, VOCAB)
    pipe = layout.pipe_for(found, ranks, 4, copies=1)
    with pytest.raises(UserError, match=r"shares? weights.*choose optimal or uniform") as refusal:
        layout.cut(profile, found, pipe)
    assert "\n" not in str(refusal.value)


def test_a_tree_of_an_untied_network_is_a_cut() -> None:
    found = recipe("run.pipeline.cut=tree")
    pipe = layout.pipe_for(found, 2, 4, copies=1)
    assert layout.cut(chain([1.0] * 8), found, pipe) == Cut((0, 4, 8))


def test_compiled_blocks_are_refused_where_backward_passes_are_split() -> None:
    found = recipe("run.pipeline.schedule=zbv").model_copy(deep=True)
    compiled = found.model_copy(update={"run": found.run.model_copy(update={"compile": True})})
    with pytest.raises(UserError, match=r"'zbv' splits .*run\.compile=false.*1f1b"):
        layout.pipe_of(compiled, 2, 4)
    layout.pipe_of(found, 2, 4)


def test_a_cut_is_kept_for_the_same_pipeline_only() -> None:
    def key(*sets: str, rows: int = 4, copies: int = 1) -> dict[str, object]:
        return layout.key(recipe(*sets), 2, 4, rows=rows, copies=copies)

    others = [
        key("run.pipeline.shard=true"),
        key("run.activation_checkpointing=true"),
        key("run.pipeline.cut=uniform"),
        key(rows=8),
        key(copies=2),
    ]
    assert key() == key()
    assert key() not in others
