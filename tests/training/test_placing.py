"""What `auto` would do on this machine, for a run that is not started."""

from __future__ import annotations

import pytest

from training import placing
from training.parallel.ladder import Devices
from training.parallel.planner import Climber
from training.recipe import TrainRecipe, load_recipe

VOCAB = 500


def recipe(*sets: str) -> TrainRecipe:
    return load_recipe(
        "decoder-small",
        ["examples.sequence_length=64", "batch.tokens=1024", "batch.microbatch=8", *sets],
    )


def test_a_recipe_that_fits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "memory_here", lambda *_: 10**12)
    assert placing.foreseen(recipe(), 2, VOCAB) == (recipe(), "")


def test_what_is_asked_for_stays_whatever_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "memory_here", lambda *_: 1)
    asked = recipe("run.strategy=zero3")
    assert placing.foreseen(asked, 2, VOCAB) == (asked, "")


def test_a_recipe_that_does_not_fit_is_changed_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    climber = Climber(recipe(), Devices(1, 2, 10**12), VOCAB, keep_precision=True)
    memory_bytes = int(0.8 * next(climber.climbing()).total_bytes)
    monkeypatch.setattr(placing, "memory_here", lambda *_: memory_bytes)
    found, line = placing.foreseen(recipe(), 2, VOCAB)
    assert found.digest() == recipe().digest()
    assert found != recipe()
    name = line.split(":")[0]
    assert name in ("microbatch", "recomputation", "zero1", "zero2", "zero3", "pipeline")


def test_what_fits_nowhere_is_told_and_planned_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing, "memory_here", lambda *_: 10_000)
    found, line = placing.foreseen(recipe(), 2, VOCAB)
    assert found == recipe()
    assert line.startswith("not on this machine: decoder small does not fit on 2 x 9.77 KiB")
    assert "\n" not in line
