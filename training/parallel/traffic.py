"""What one device sends in one optimiser step, by the formulas of ring collectives.

    all-reduce of S bytes on n devices       2 (n - 1) / n x S
    all-gather, reduce-scatter to or of S    (n - 1) / n x S
    neighbours of a pipeline                 hidden states forwards, as many gradients backwards

NCCL's rings send just that. gloo's reduce-scatter is an all-reduce inside and sends twice as much.
Gradients are reduced in float32 in every strategy; weights are gathered in the precision in which
they compute. Losses, counts and the gradient norm (bytes to kilobytes) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.parallel.schedules import SCHEDULES, rank_of
from training.parallel.units import Cut, Pipe, Profile, held_parameters

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends in a step, by what they are."""

    gradients: int = 0
    weights: int = 0
    hidden: int = 0
    """Between the stages of a pipeline, gradients of hidden states among them."""
    tied: int = 0
    """Gradients of parameters that other stages hold too."""
    formula: str = "nothing to send"

    @property
    def total(self) -> int:
        """All of them."""
        return self.gradients + self.weights + self.hidden + self.tied


def all_reduce(size: int, ranks: int) -> int:
    """Bytes that each of `ranks` sends for the sum of `size` bytes on all of them."""
    return 2 * (ranks - 1) * size // ranks


def all_gather(size: int, ranks: int) -> int:
    """Bytes that each of `ranks` sends for `size` bytes whole on all, or in a reduce-scatter."""
    return (ranks - 1) * size // ranks


def data_parallel(
    strategy: str, parameters: int, in_blocks: int, *, ranks: int, microbatches: int, bf16: bool
) -> Traffic:
    """Traffic of `training.strategy.Parallel`: single, ddp, zero1, zero2, zero3.

    parameters: of the network; in_blocks: those of them that FSDP2 gathers block by block.
    microbatches: of one device in a step. bf16: weights are gathered in that precision.
    """
    if ranks == 1:
        return Traffic()
    gradients = _FLOAT_BYTES * parameters
    if strategy == "ddp":
        return Traffic(gradients=all_reduce(gradients, ranks), formula="2 (n-1)/n G")
    weight_bytes = 2 if bf16 else _FLOAT_BYTES
    whole, scatter = all_gather(weight_bytes * parameters, ranks), all_gather(gradients, ranks)
    if strategy == "zero1":
        return Traffic(gradients=scatter, weights=whole, formula="(n-1)/n (G + W)")
    if strategy == "zero2":
        return Traffic(gradients=microbatches * scatter, weights=whole, formula="(n-1)/n (k G + W)")
    # Blocks are gathered for the forward pass and again for the backward pass, the rest once.
    twice = all_gather(weight_bytes * (parameters + in_blocks), ranks)
    return Traffic(
        gradients=microbatches * scatter,
        weights=microbatches * twice,
        formula="(n-1)/n k (G + W + blocks of W)",
    )


def pipeline(
    profile: Profile, cut: Cut, pipe: Pipe, *, replicas: int, shard: bool, bf16: bool
) -> Traffic:
    """Traffic of the busiest device of `replicas` pipelines side by side: see `by_rank`."""
    found = by_rank(profile, cut, pipe, replicas=replicas, shard=shard, bf16=bf16)
    return max(found, key=lambda one: one.total)


def by_rank(
    profile: Profile, cut: Cut, pipe: Pipe, *, replicas: int, shard: bool, bf16: bool
) -> list[Traffic]:
    """Traffic of each device of one of `replicas` pipelines side by side.

    shard: the replicas of a stage hold its gradients and optimiser state in parts (FSDP2), with
    the weights whole for all of a step; but for parameters that several stages of one rank use.
    """
    schedule = SCHEDULES[pipe.schedule]
    places = [rank_of(schedule, stage, pipe.ranks) for stage in range(cut.stages)]
    hidden = [0] * pipe.ranks
    for stage in range(cut.stages - 1):
        here, there = places[stage], places[stage + 1]
        if here != there:
            size = pipe.microbatches * profile.units[cut.bounds[stage + 1] - 1].output_bytes
            hidden[here] += size
            hidden[there] += size
    tied = _tied(profile, cut, places, pipe.ranks, parts=replicas if shard else 1)
    formula = "2 m A"
    if replicas > 1:
        formula += " + (n-1)/n (G + W)" if shard else " + 2 (n-1)/n G"
    if any(tied):
        formula += " + tied G"
    found = []
    for rank in range(pipe.ranks):
        stages = [stage for stage in range(cut.stages) if places[stage] == rank]
        own, several = held_parameters(
            profile.units[cut.bounds[stage] : cut.bounds[stage + 1]] for stage in stages
        )
        divided = own - several if shard else 0
        averaged = all_gather(_FLOAT_BYTES * divided, replicas)
        averaged += all_reduce(_FLOAT_BYTES * (own - divided), replicas)
        weights = all_gather((2 if bf16 else _FLOAT_BYTES) * divided, replicas)
        found.append(Traffic(averaged, weights, hidden[rank], tied[rank], formula))
    return found


def exposed_s(
    sent: Traffic, strategy: str, bandwidth: float, *, passes: int, forward_s: float,
    backward_s: float,
) -> float:  # fmt: skip
    """Seconds of transfers that a device's own work does not hide.

    Gathered weights hide behind the forward pass, gradients behind the backward pass, of the
    microbatches in which they travel: ddp and zero1 the last one, zero2 every one; zero3 gathers
    for both passes of each.
    """
    gather_s, reduce_s = sent.weights / bandwidth, sent.gradients / bandwidth
    if strategy == "zero3":
        half_s = gather_s / passes / 2
        ahead, behind = half_s - forward_s, half_s + reduce_s / passes - backward_s
        return passes * (max(0.0, ahead) + max(0.0, behind))
    times = passes if strategy == "zero2" else 1
    return max(0.0, gather_s - forward_s) + times * max(0.0, reduce_s / times - backward_s)


def _tied(profile: Profile, cut: Cut, places: list[int], ranks: int, parts: int) -> list[int]:
    """Bytes that each rank sends for parameters that other ranks of its pipeline hold too, in
    `parts` that are divided among pipelines."""
    holders: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for stage in range(cut.stages):
        for number in cut.of(stage):
            for name, size in profile.units[number].shared.items():
                holders.setdefault(name, set()).add(places[stage])
                sizes[name] = size
    found = [0] * ranks
    for name, on in holders.items():
        for rank in on:
            found[rank] += all_reduce(-(-_FLOAT_BYTES * sizes[name] // parts), len(on))
    return found
