"""`run.strategy = "auto"`: the ladder of a plan, climbed on the devices that are here.

Only what leaves the curve of the loss as it is may change: strategy, microbatch, recomputation,
pipeline; not `run.precision`. A recipe that surely fits as it stands is not traced at all, which
spares small runs a second and more.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from models.errors import UserError
from training.networks import network_config
from training.parallel.ladder import Devices, Rung, size
from training.parallel.planner import Climber, missing
from training.recipe import TrainRecipe

_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
_FLOAT_BYTES = 4


def strategy_for(recipe: TrainRecipe, ranks: int, memory_bytes: int, *, vocab_size: int) -> Rung:
    """What `auto` does on `ranks` devices with `memory_bytes` each.

    `single` or `ddp` as the recipe says where that fits, else the first rung that does. Raises
    UserError where none does, in one line.
    """
    devices = Devices(nodes=1, per_node=ranks, memory_bytes=memory_bytes)
    climber = Climber(recipe, devices, vocab_size, keep_precision=True)
    most = most_bytes(recipe, vocab_size)
    if most <= devices.usable_bytes:
        return climber.as_it_stands(f"at most {size(most)} of {size(devices.usable_bytes)}")
    rungs = []
    for rung in climber.climbing():
        if rung.fits:
            return rung
        rungs.append(rung)
    raise UserError(
        f"{climber.network} does not fit on {ranks} x {size(memory_bytes)}: "
        f"{'; '.join(missing(climber, rungs))}; any run.strategy but auto is tried all the same"
    )


def applied(recipe: TrainRecipe, rung: Rung) -> TrainRecipe:
    """The recipe with the settings of a rung."""
    run = recipe.run.model_copy(
        update={
            "strategy": rung.strategy,
            "precision": rung.precision,
            "activation_checkpointing": rung.checkpointing,
        }
    )
    if rung.stages is not None:
        asked = run.pipeline.model_copy(
            update={
                "ranks": rung.stages.ranks,
                "schedule": rung.stages.schedule,
                "stages_per_rank": rung.stages.stages_per_rank,
                "shard": rung.stages.shard,
            }
        )
        run = run.model_copy(update={"pipeline": asked})
    batch = recipe.batch.model_copy(update={"microbatch": rung.microbatch})
    return recipe.model_copy(update={"run": run, "batch": batch})


def device_bytes(device: torch.device, local_ranks: int) -> int:
    """Memory that a rank may fill: that of its CUDA device, or its part of the machine's.

    local_ranks: processes of the run on this machine.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _CGROUP_LIMITS:
        path = Path(name)
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            found = min(found, int(text))
    return found // local_ranks


def most_bytes(recipe: TrainRecipe, vocab_size: int) -> int:
    """More than a rank that holds everything can need, without a trace.

    State, gradients, updates and copies of all weights; of each token and layer every tensor that
    a block makes, twice, scores of attention among them; logits of all positions.
    """
    config = network_config(recipe, vocab_size)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    length = recipe.examples.sequence_length
    tokens = recipe.batch.microbatch * length
    embedding = vocab_size * hidden
    weights = 2 * embedding + layers * (4 * hidden * hidden + 3 * hidden * inner + 20 * hidden)
    scores = 4 * config.num_attention_heads * length
    block = 2 * (16 * hidden + 8 * inner + scores)
    values = 10 * weights + tokens * (layers * block + 6 * vocab_size + 16 * hidden + 4 * length)
    return int(_FLOAT_BYTES * values)
