"""Where a run's pipeline is cut: from its recipe and a profile of its network to the cut.

`gristmill plan`, `run.strategy = "auto"`, `--dry-run` and the run itself come here: with the same
recipe, profile and memory they get the same cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from models.errors import UserError
from training.parallel import cut_table, partition, tree
from training.parallel.chain import Chain
from training.parallel.ladder import size
from training.parallel.memory import Memory
from training.parallel.profile import low_weights, profile_chain, worst_batch
from training.parallel.rank_memory import pipeline_memory
from training.parallel.schedules import SCHEDULES, check
from training.parallel.units import Cut, Pipe, Profile
from training.recipe import Pipeline, TrainRecipe

if TYPE_CHECKING:
    from training.strategy import Placement

_FLOAT_BYTES, _LOW_BYTES = 4, 2


def stages_per_rank(settings: Pipeline) -> int:
    """As the recipe says, or the fewest that the schedule knows."""
    return settings.stages_per_rank or SCHEDULES[settings.schedule].stages_per_rank[0]


def pipe_of(recipe: TrainRecipe, ranks: int, microbatches: int) -> Pipe:
    """The recipe's pipeline on `ranks` processes. Raises UserError where it cannot be."""
    settings, run = recipe.run.pipeline, recipe.run
    schedule, each = SCHEDULES[settings.schedule], stages_per_rank(settings)
    if run.compile and schedule.splits_backward:
        whole = ", ".join(one.name for one in SCHEDULES.values() if not one.splits_backward)
        raise UserError(
            f"schedule '{schedule.name}' splits the backward pass, and torch cannot split one of "
            f"compiled blocks (run.compile = 'true'): set run.compile=false, or run.pipeline."
            f"schedule to one of {whole}"
        )
    check(schedule, ranks, each, microbatches)
    # A backward pass is not split where blocks are recomputed, or use their weights several times.
    whole_backward = run.activation_checkpointing or recipe.model.family == "albert"
    return Pipe(ranks, microbatches, settings.schedule, each, whole_backward=whole_backward)


def pipe_for(
    recipe: TrainRecipe,
    ranks: int,
    microbatches: int,
    *,
    copies: int,
    usable_bytes: int | None = None,
    bandwidth_bytes_s: float | None = None,
) -> Pipe:
    """`pipe_of` with what the search for a cut and the account of memory need.

    copies: pipelines that share the examples. usable_bytes: that a rank may fill; None: any.
    Raises UserError.
    """
    shards = copies if recipe.run.pipeline.shard else 1
    return replace(
        pipe_of(recipe, ranks, microbatches),
        bandwidth_bytes_s=bandwidth_bytes_s,
        memory_bytes=usable_bytes,
        bytes_per_parameter=state_bytes(shards, bf16=recipe.run.precision == "bf16"),
        shards=shards,
        optimiser=recipe.optimiser.name,
    )


def state_bytes(shards: int, *, bf16: bool) -> float:
    """Bytes of a parameter on its rank: weights, gradients and two moments in float32.

    In shards (FSDP2) beside them the whole weights, rounded under bf16, and the whole gradients,
    which are float32 and reduced once, at the end of the step. Autocast's casts of weights, without
    shards, belong to the activations.
    """
    whole = 4.0 * _FLOAT_BYTES
    if shards == 1:
        return whole
    return whole / shards + (_LOW_BYTES if bf16 else _FLOAT_BYTES) + _FLOAT_BYTES


def key(
    recipe: TrainRecipe, ranks: int, microbatches: int, *, rows: int, copies: int
) -> dict[str, Any]:
    """What a cut is for, as JSON: a run that goes on under the same keeps its cut.

    rows: examples of a microbatch. copies: pipelines side by side.
    """
    settings = recipe.run.pipeline
    return {
        "ranks": ranks,
        "copies": copies,
        "schedule": settings.schedule,
        "stages_per_rank": stages_per_rank(settings),
        "microbatches": microbatches,
        "rows": rows,
        "cut": settings.cut,
        "costs": settings.costs,
        "shard": settings.shard,
        "activation_checkpointing": recipe.run.activation_checkpointing,
    }


def choose(
    chain: Chain,
    recipe: TrainRecipe,
    place: Placement,
    microbatches: int,
    rows: int,
    *,
    usable_bytes: int,
) -> tuple[Cut, str]:
    """The recipe's cut of `chain` for microbatches of `rows` examples, and its table.

    Units are timed on the device of this rank, or their operations counted. usable_bytes: that
    each rank may fill. Raises UserError.
    """
    measured = recipe.run.pipeline.costs == "measured"
    profile = profile_chain(
        chain,
        worst_batch(recipe, rows),
        bf16=recipe.run.precision == "bf16",
        low=low_weights(recipe, place.data_ranks),
        device=place.device if measured else None,
    )
    pipe = pipe_for(
        recipe, place.copies, microbatches, copies=place.data_ranks, usable_bytes=usable_bytes
    )
    found, _ = fitting(profile, recipe, pipe)
    return found, cut_table.table(profile, found, pipe)


def fitting(profile: Profile, recipe: TrainRecipe, pipe: Pipe) -> tuple[Cut, Memory]:
    """The recipe's cut and what the fullest rank holds. UserError where no rank may hold that."""
    try:
        found = cut(profile, recipe, pipe)
    except UserError:
        # The search reckons with a little more than there is: the smallest cut may still fit.
        found, memory = smallest(profile, recipe, pipe)
        if pipe.memory_bytes is None or memory.total > pipe.memory_bytes:
            raise
        return found, memory
    memory = fullest(profile, found, pipe)
    if pipe.memory_bytes is not None and memory.total > pipe.memory_bytes:
        raise UserError(
            f"run.pipeline.cut = '{recipe.run.pipeline.cut}': a rank holds {size(memory.total)} at "
            f"the {memory.peak}, and {size(pipe.memory_bytes)} are to be had; more ranks, smaller "
            "microbatches or activation checkpointing would help"
        )
    return found, memory


def smallest(profile: Profile, recipe: TrainRecipe, pipe: Pipe) -> tuple[Cut, Memory]:
    """As `fitting` for any memory: of the cuts that the recipe allows the one with the least."""
    pipe = replace(pipe, memory_bytes=None)
    optimal = recipe.run.pipeline.cut == "optimal"
    found = partition.smallest(profile, pipe) if optimal else cut(profile, recipe, pipe)
    return found, fullest(profile, found, pipe)


def fullest(profile: Profile, cut: Cut, pipe: Pipe) -> Memory:
    """The memory of the rank that needs the most."""
    return max(pipeline_memory(profile, cut, pipe), key=lambda one: one.total)


def cut(profile: Profile, recipe: TrainRecipe, pipe: Pipe) -> Cut:
    """The recipe's cut of a profiled network. Raises UserError."""
    way = recipe.run.pipeline.cut
    if way == "uniform":
        return partition.uniform(profile, pipe)
    if way == "tree":
        return _tree(profile, pipe)
    return partition.optimal(profile, pipe)


def _tree(profile: Profile, pipe: Pipe) -> Cut:
    try:
        found = tree.place(tree.profile_tree(profile), pipe.ranks).cut()
    except UserError:  # it goes back to a device
        found = None
    if found is None or found.stages != pipe.stages:
        raise UserError(
            f"run.pipeline.cut = 'tree' finds no {pipe.stages} stages: it merges layers that share "
            "weights and knows one stage a rank; choose optimal or uniform"
        )
    return found
