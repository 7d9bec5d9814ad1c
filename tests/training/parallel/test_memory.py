"""The foretold peak of a step is that of real steps, by torch's MemTracker."""

from __future__ import annotations

import itertools
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training import forked
from tests.training.parallel import memory_ranks
from tests.training.parallel.measured_steps import (
    VOCAB,
    fake_group,
    lone_group,
    peak_bytes,
)
from training.parallel.memory import Memory, memory_of, update_bytes, waiting_bytes
from training.parallel.profile import profile_recipe
from training.parallel.rank_memory import pipeline_memory
from training.parallel.units import Profile, UnitCost
from training.recipe import TrainRecipe, load_recipe

LENGTHS = {"albert-small": 64, "decoder-small": 64, "decoder-120m": 32}


def recipe(name: str, *fields: str) -> TrainRecipe:
    return load_recipe(
        name,
        ["batch.microbatch=2", f"examples.sequence_length={LENGTHS[name]}", "run.compile=false",
         "run.precision=fp32", *fields],
    )  # fmt: skip


def foretold(found: TrainRecipe, microbatches: int, ranks: int = 1) -> Memory:
    strategy = "single" if found.run.strategy == "auto" else found.run.strategy
    return memory_of(
        profile_recipe(found, VOCAB),
        strategy=strategy,
        ranks=ranks,
        optimiser=found.optimiser.name,
        microbatches=microbatches,
    )


@pytest.mark.parametrize("again", ["false", "true"])
@pytest.mark.parametrize("name", ["albert-small", "decoder-small"])
def test_one_device(name: str, again: str) -> None:
    found = recipe(name, f"run.activation_checkpointing={again}", "optimiser.name=adamw")
    assert foretold(found, 2).total == pytest.approx(peak_bytes(found, 2), rel=0.01)


@pytest.mark.parametrize("again", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_many_layers(again: str) -> None:
    found = recipe("decoder-120m", f"run.activation_checkpointing={again}")
    assert foretold(found, 1).total == pytest.approx(peak_bytes(found, 1, fake=True), rel=0.01)


def test_ddp() -> None:
    """The buckets are the gradients, and stay."""
    found = recipe("decoder-small", "run.strategy=ddp", "batch.microbatch=1")
    with lone_group():
        measured = peak_bytes(found, 1, strategy="ddp")
    assert foretold(found, 1).total == pytest.approx(measured, rel=0.01)
    assert foretold(found, 1).gradients > 0


@pytest.mark.parametrize(
    ("name", "optimiser", "precision", "microbatches", "peak"),
    [
        ("albert-small", "lamb", "bf16", 1, "optimiser"),
        ("decoder-small", "lamb", "fp32", 1, "optimiser"),
        ("decoder-small", "adamw", "bf16", 2, "backward of head"),
    ],
)
def test_short_examples(
    name: str, optimiser: str, precision: str, microbatches: int, peak: str
) -> None:
    found = recipe(
        name, f"optimiser.name={optimiser}", f"run.precision={precision}",
        "batch.microbatch=1", "examples.sequence_length=16",
    )  # fmt: skip
    told = foretold(found, microbatches)
    assert told.total == pytest.approx(peak_bytes(found, microbatches), rel=0.02)
    assert told.peak == peak


@pytest.mark.parametrize(
    ("strategy", "precision", "microbatches"),
    [("zero1", "fp32", 2), ("zero2", "bf16", 2), ("zero2", "fp32", 1), ("zero3", "fp32", 2)],
)
def test_fsdp2(strategy: str, precision: str, microbatches: int) -> None:
    found = recipe("decoder-small", f"run.strategy={strategy}", f"run.precision={precision}",
                   "optimiser.name=adamw", "batch.microbatch=1")  # fmt: skip
    with fake_group(4):
        measured = peak_bytes(found, microbatches, strategy=strategy, ranks=4)
    assert foretold(found, microbatches, 4).total == pytest.approx(measured, rel=0.02)


def test_fsdp2_without_blocks() -> None:
    """ALBERT's one block is gathered with the rest."""
    found = recipe("albert-small", "run.strategy=zero2", "batch.microbatch=1",
                   "run.activation_checkpointing=true")  # fmt: skip
    with fake_group(2):
        measured = peak_bytes(found, 2, strategy="zero2", ranks=2)
    assert foretold(found, 2, 2).total == pytest.approx(measured, rel=0.02)


def test_each_strategy_needs_less_than_the_one_before() -> None:
    found = [
        foretold(recipe("decoder-120m", f"run.strategy={name}"), 4, 8).total
        for name in ("ddp", "zero1", "zero2", "zero3")
    ]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4


def test_weights_of_another_precision_are_a_mistake_of_the_caller() -> None:
    profile = profile_recipe(recipe("decoder-small", "run.precision=bf16"), VOCAB)
    with pytest.raises(ValueError, match="profile a recipe with this strategy"):
        memory_of(profile, strategy="zero3", ranks=2)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Peaks of two ranks by case."""
    folder = tmp_path_factory.mktemp("memory")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forked.start_ranks(memory_ranks.run, (port, str(folder)), 2)
    by_rank = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("number", range(len(memory_ranks.CASES)))
def test_pipelines(pipelines: list[list[int]], number: int) -> None:
    case = memory_ranks.CASES[number]
    cut, pipe = case.cut_and_pipe()
    told = pipeline_memory(profile_recipe(case.recipe(), VOCAB), cut, pipe)
    assert [one.total for one in told] == pytest.approx(pipelines[number], rel=0.05)


def _plain(*numbers: tuple[int, int, int]) -> Profile:
    """Units of (parameters, kept, most at once)."""
    units = (
        UnitCost(str(at), 1.0, 1.0, parameters, kept_bytes=kept, forward_bytes=most,
                 backward_bytes=most, first_backward_bytes=most + 4 * parameters,
                 gradient_bytes=4 * parameters)
        for at, (parameters, kept, most) in enumerate(numbers)
    )  # fmt: skip
    return Profile(tuple(units), 1, "given")


def test_peak_by_hand() -> None:
    profile = _plain((10, 100, 100), (20, 100, 500), (5, 40, 340))
    # Unit 1 computes over 100 of unit 0, unit 2 over 200; unit 2's needs less than unit 1's.
    found = memory_of(profile, microbatches=2)
    assert found == Memory(
        weights=140, gradients=140, moments=280, activations=200, working=400,
        peak="forward of 1",
    )  # fmt: skip
    # One microbatch: gradients come on the way back, of unit 2 (20 bytes) and 1 (80).
    found = memory_of(profile, microbatches=1)
    assert (found.peak, found.total) == ("backward of 1", 420 + 100 + 500 + 80 + 20)


_numbers = st.integers(0, 10**6)


@given(st.lists(st.tuples(_numbers, _numbers, _numbers), min_size=1, max_size=6))
def test_peak_is_the_most_of_a_walk(rows: list[tuple[int, int, int]]) -> None:
    rows = [(parameters, kept, kept + more) for parameters, kept, more in rows]
    state = 4 * sum(parameters for parameters, _, _ in rows)
    most, below = 0, 0
    for _, kept, peak in rows:
        most, below = max(most, below + peak), below + kept
    assert memory_of(_plain(*rows), microbatches=3).total == 4 * state + most


def test_updates_of_lamb_by_hand() -> None:
    units = (
        UnitCost("a", 1, 1, 150, shared={"tied": 100}, matrices=(50,)),
        UnitCost("b", 1, 1, 110, shared={"tied": 100}, matrices=(10,)),
    )
    # 100 and three more such; or 100, and 50 with three more; or 150, and 10 with three more.
    assert update_bytes(units, 1, "lamb") == 4 * 400
    assert update_bytes(units, 4, "lamb") == 400
    assert update_bytes(units, 1, "adamw") == 0


def test_gradients_wait_between_the_uses_of_a_weight() -> None:
    units = tuple(
        UnitCost(str(at), 1, 1, 10, shared=dict.fromkeys(names, 10))
        for at, names in enumerate([("a",), ("b",), ("b",), ("a", "c")])
    )
    assert [waiting_bytes(units, number) for number in range(4)] == [40, 80, 40, 0]


def test_more_microbatches_need_only_their_batches() -> None:
    profile = profile_recipe(recipe("albert-small"), VOCAB)
    totals = [memory_of(profile, microbatches=count).total for count in (2, 3, 4)]
    assert {after - before for before, after in itertools.pairwise(totals)} == {profile.batch_bytes}
