"""Bytes on the wire: the formulas, against rings that go chunk by chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from training.parallel.traffic import (
    Traffic,
    all_gather,
    all_reduce,
    by_rank,
    data_parallel,
    pipeline,
)
from training.parallel.units import Cut, Pipe, Profile, UnitCost

PARAMETERS = 1_840_000


def ring_all_reduce(size: int, ranks: int) -> list[int]:
    """What each rank sends when it is done chunk by chunk."""
    sent = [0] * ranks
    chunk = size // ranks
    for _ in range(2 * (ranks - 1)):  # around once to add up, once more to hand out
        for rank in range(ranks):
            sent[rank] += chunk
    return sent


@given(st.integers(1, 16), st.integers(1, 1000))
def test_rings(ranks: int, chunk: int) -> None:
    size = ranks * chunk
    assert [all_reduce(size, ranks)] * ranks == ring_all_reduce(size, ranks)
    assert 2 * all_gather(size, ranks) == all_reduce(size, ranks)


def test_strategies_over_all_ranks() -> None:
    size, ranks = 4 * PARAMETERS, 4

    def sent(strategy: str, blocks: int = 0, microbatches: int = 1, bf16: bool = False) -> int:
        found = data_parallel(strategy, PARAMETERS, blocks, ranks=ranks,
                              microbatches=microbatches, bf16=bf16)  # fmt: skip
        return ranks * found.total

    ddp = sent("ddp")
    assert ddp == 2 * (ranks - 1) * size
    assert sent("ddp", microbatches=5) == ddp  # once a step
    assert sent("zero1") == sent("zero1", microbatches=5) == ddp
    assert sent("zero1", bf16=True) == ddp * 3 // 4
    assert sent("zero2") == ddp
    assert sent("zero2", microbatches=3) == 2 * ddp  # three reductions, one gathering
    assert sent("zero3") == ddp  # nothing is gathered twice: no blocks
    assert sent("zero3", blocks=PARAMETERS) == 3 * (ranks - 1) * size
    assert sent("zero3", blocks=PARAMETERS, microbatches=2) == 6 * (ranks - 1) * size
    assert data_parallel("single", 10, 0, ranks=1, microbatches=1, bf16=False) == Traffic()


def chain(*parameters: int, tied: int = 0) -> Profile:
    """Units that hand on 1,000 bytes; the first and the last share `tied` parameters."""
    shared = {"weight": tied} if tied else {}
    last = len(parameters) - 1
    units = tuple(
        UnitCost(
            f"unit {number}", 1.0, 2.0, count,
            shared=shared if number in (0, last) else {}, output_bytes=1000,
        )
        for number, count in enumerate(parameters)
    )  # fmt: skip
    return Profile(units, microbatch=1, source="given")


def one(profile: Profile, bounds: tuple[int, ...], pipe: Pipe, **more: object) -> Traffic:
    settings: dict[str, object] = {"replicas": 1, "shard": False, "bf16": False}
    return pipeline(profile, Cut(bounds), pipe, **(settings | more))  # type: ignore[arg-type]


def test_hidden_states_go_forwards_and_their_gradients_back() -> None:
    four = chain(10, 10, 10, 10)
    # The middle ranks send to both sides.
    assert one(four, (0, 1, 2, 3, 4), Pipe(4, 8)) == Traffic(hidden=16_000, formula="2 m A")
    assert one(chain(10, 10), (0, 1, 2), Pipe(2, 8)).hidden == 8_000
    # There and back again: ranks 0, 1, 1, 0, so nothing is sent between the two in the middle.
    v = Pipe(2, 8, schedule="zbv", stages_per_rank=2)
    assert one(four, (0, 1, 2, 3, 4), v).hidden == 16_000
    looped = Pipe(2, 8, schedule="looped-bfs", stages_per_rank=2)
    assert one(four, (0, 1, 2, 3, 4), looped).hidden == 3 * 8_000


def test_replicas_add_up_the_gradients_of_a_stage() -> None:
    two = chain(30, 10)
    found = one(two, (0, 1, 2), Pipe(2, 8), replicas=2)
    assert found == Traffic(gradients=120, hidden=8_000, formula="2 m A + 2 (n-1)/n G")
    sharded = one(two, (0, 1, 2), Pipe(2, 8), replicas=2, shard=True, bf16=True)
    assert (sharded.gradients, sharded.weights) == (60, 30)


def test_tied_weights_are_added_up_where_ranks_differ() -> None:
    tied = chain(30, 10, 10, 30, tied=20)
    apart = one(tied, (0, 2, 4), Pipe(2, 8))
    assert apart == Traffic(tied=80, hidden=8_000, formula="2 m A + tied G")
    together = Pipe(2, 8, schedule="zbv", stages_per_rank=2)
    assert one(tied, (0, 1, 2, 3, 4), together).tied == 0
    # The rank with both ends holds the tied matrix once: 30 + 30 - 20, and another 10 + 10.
    several = {"replicas": 2, "shard": False, "bf16": False}
    ranks = by_rank(tied, Cut((0, 1, 2, 3, 4)), together, **several)  # type: ignore[arg-type]
    assert [found.gradients for found in ranks] == [4 * 40, 4 * 20]
    # In shards it alone is whole, and all-reduced: 20 of 40.
    several = {"replicas": 2, "shard": True, "bf16": True}
    ranks = by_rank(tied, Cut((0, 1, 2, 3, 4)), together, **several)  # type: ignore[arg-type]
    assert [(found.gradients, found.weights) for found in ranks] == [(40 + 80, 20), (40, 20)]


def test_all_ranks_of_a_pipeline_together() -> None:
    """4 stages and .524 MB of hidden states in a step: 2 (p - 1) A over all ranks."""
    profile = Profile(
        tuple(UnitCost(f"{n}", 1, 2, 10, output_bytes=131_000) for n in range(4)), 1, "given"
    )
    ranks = by_rank(profile, Cut((0, 1, 2, 3, 4)), Pipe(4, 4), replicas=1, shard=False, bf16=False)
    assert sum(one.total for one in ranks) == 2 * 3 * 524_000
    # The two in the middle send twice what those at the ends do.
    assert [one.hidden for one in ranks] == [524_000, 1_048_000, 1_048_000, 524_000]
