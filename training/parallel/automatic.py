"""`run.strategy = "auto"`: the ladder of a plan, climbed on the devices that are here.

Only what leaves the curve of the loss as it is may change: strategy, microbatch, recomputation,
pipeline; not `run.precision`. With dropout other microbatches and a pipeline draw other masks, as
another seed would: they are taken all the same, for the run would not fit, and the rung says so.
A recipe that surely fits as it stands is not traced at all, which spares small runs a second and
more.

Memory is that of `parallel.device_memory`. A pipeline is cut by counted operations, so that the cut
that was found to fit is the one that the run makes.
"""

from __future__ import annotations

from dataclasses import replace

from models.errors import UserError
from training.networks import network_config
from training.parallel.ladder import Devices, Rung, size
from training.parallel.planner import Climber, missing
from training.recipe import Pipeline, TrainRecipe

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
    rungs: list[Rung] = []
    for rung in climber.climbing():
        if rung.fits:
            return _with_masks(rung, recipe, climber)
        rungs.append(rung)
    raise UserError(
        f"{climber.network} does not fit on {ranks} x {size(memory_bytes)}: "
        f"{'; '.join(missing(climber, rungs))}; any run.strategy but auto and pipeline is tried "
        "all the same"
    )


def _with_masks(rung: Rung, recipe: TrainRecipe, climber: Climber) -> Rung:
    """With a word on dropout, where its masks are others than those of the recipe as it stands."""
    same = rung.stages is None and rung.microbatches == climber.as_it_stands("").microbatches
    if not recipe.model.dropout or same:
        return rung
    return replace(rung, why=f"{rung.why}; dropout draws other masks than without this")


def applied(recipe: TrainRecipe, rung: Rung) -> TrainRecipe:
    """The recipe with the settings of a rung."""
    run = recipe.run.model_copy(
        update={
            "strategy": rung.strategy,
            "precision": rung.precision,
            "activation_checkpointing": rung.checkpointing,
        }
    )
    pipeline = Pipeline()
    if rung.stages is not None:
        pipeline = run.pipeline.model_copy(
            update={
                "ranks": rung.stages.ranks,
                "schedule": rung.stages.schedule,
                "stages_per_rank": rung.stages.stages_per_rank,
                "shard": rung.stages.shard,
                "costs": "operations",  # those that the rung was cut by
            }
        )
    run = run.model_copy(update={"pipeline": pipeline})
    batch = recipe.batch.model_copy(update={"microbatch": rung.microbatch})
    return recipe.model_copy(update={"run": run, "batch": batch})


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
