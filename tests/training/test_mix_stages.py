"""Which runs a mix has and when each can begin; nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from models.errors import UserError
from training.mix.recipe import MixRecipe, load_recipe
from training.mix.stages import Catalogue, DoReMiStages, LawStages, MixRun, Mixtures, Weights

NAMES = ("a", "b", "c")
PROPORTIONAL = {"a": 0.5, "b": 0.3, "c": 0.2}


def recipe(*fields: str) -> MixRecipe:
    return load_recipe(
        "doremi", ["output.directory=out", "mix.seeds=[3, 5]", "schedule.steps=100", *fields]
    )


def catalogue(*fields: str, reference: Weights = PROPORTIONAL) -> Catalogue:
    return Catalogue(recipe(*fields), Mixtures(NAMES, PROPORTIONAL, reference))


def names(runs: Sequence[MixRun]) -> list[str]:
    return [run.name for run in runs]


def both(*labels: str) -> list[str]:
    return [f"{label}/seed-{seed}" for label in labels for seed in (3, 5)]


def test_one_round_of_doremi() -> None:
    stages = DoReMiStages(catalogue("mix.specialists=1"))
    compared = [*both("uniform"), *(f"specialist-{number}/seed-3" for number in range(3))]
    done: dict[str, Any] = {}
    assert names(stages.todo(done)) == [*both("proportional"), *compared]
    assert stages.most_runs() == 4 + 3 + 2 + 2

    done["proportional/seed-3"] = None
    todo = stages.todo(done)
    assert names(todo) == ["proxy-1/seed-3", "proportional/seed-5", *compared]
    proxy = todo[0]
    assert proxy.proxy is not None
    assert proxy.proxy.reference == proxy.recipe.output.directory.replace("proxy-1", "proportional")
    assert proxy.folder == "out/runs/proxy-1/seed-3"
    assert (proxy.recipe.data.weights, proxy.recipe.run.seed) == ("uniform", 3)

    found = {3: {"a": 0.2, "b": 0.2, "c": 0.6}, 5: {"a": 0.1, "b": 0.3, "c": 0.6}}
    done |= {"proportional/seed-5": None, "proxy-1/seed-3": found[3], "proxy-1/seed-5": found[5]}
    (entry,) = rounds = stages.rounds(done)
    assert entry.mean == pytest.approx({"a": 0.15, "b": 0.25, "c": 0.6})
    assert entry.change == pytest.approx(0.4)
    assert stages.stopped(rounds) == "doremi.max_rounds = 1"
    main = stages.todo(done)[:2]
    assert names(main) == both("doremi")
    assert [run.recipe.data.weights for run in main] == [found[3], found[5]]
    assert [run.recipe.data.seed for run in main] == [3, 5]

    done |= dict.fromkeys([*both("doremi"), *compared])
    assert stages.todo(done) == []


def test_rounds_go_on_from_the_mean() -> None:
    stages = DoReMiStages(catalogue("doremi.max_rounds=3"))
    done: dict[str, Any] = dict.fromkeys(both("proportional", "uniform"))
    done["proxy-1/seed-3"] = {"a": 0.2, "b": 0.2, "c": 0.6}
    done["proxy-1/seed-5"] = {"a": 0.1, "b": 0.3, "c": 0.6}
    assert stages.stopped(stages.rounds(done)) is None
    todo = stages.todo(done)
    assert names(todo) == both("reference-2")
    assert todo[0].recipe.data.weights == pytest.approx({"a": 0.15, "b": 0.25, "c": 0.6})
    done |= dict.fromkeys(both("reference-2"))
    assert names(stages.todo(done)) == both("proxy-2")
    done["proxy-2/seed-3"] = {"a": 0.19, "b": 0.2, "c": 0.61}
    done["proxy-2/seed-5"] = {"a": 0.1, "b": 0.29, "c": 0.61}
    # a and b moved by .005, c by .01, and the seeds agree on c
    assert stages.stopped(stages.rounds(done)) is None
    done["proxy-2/seed-5"] = {"a": 0.12, "b": 0.29, "c": 0.59}
    rounds = stages.rounds(done)
    assert rounds[1].reference == rounds[0].mean
    assert stages.stopped(rounds) == ("every change of round 2 lies inside the spread of the seeds")
    assert names(stages.todo(done)) == both("doremi")
    assert {label: names(runs) for label, runs in stages.stage_runs(rounds).items()} == {
        "reference-1": both("proportional"), "proxy-1": both("proxy-1"),
        "reference-2": both("reference-2"), "proxy-2": both("proxy-2"),
    }  # fmt: skip


def test_rounds_end_when_nothing_changes() -> None:
    fields = ("mix.seeds=[3]", "doremi.max_rounds=3", "doremi.tolerance=0.01")
    stages = DoReMiStages(catalogue(*fields))
    done: dict[str, Any] = {"proportional/seed-3": None}
    done["proxy-1/seed-3"] = {"a": 0.495, "b": 0.305, "c": 0.2}
    rounds = stages.rounds(done)
    assert stages.stopped(rounds) == "no weight changed by doremi.tolerance = 0.01 in round 1"
    assert stages.most_runs() == 2 + 5 + 1  # baselines; three proxies, two references; main


def test_a_reference_of_its_own_and_one_that_is_there() -> None:
    weights = {"a": 0.1, "b": 0.1, "c": 0.8}
    stages = DoReMiStages(catalogue(reference=weights))
    assert names(stages.todo({}))[:2] == both("reference-1")
    assert stages.most_runs() == 4 + 2 + 2 + 2

    uniform = dict.fromkeys(NAMES, 1 / 3)
    assert names(DoReMiStages(catalogue(reference=uniform)).todo({}))[:2] == both("uniform")
    # Main models of another budget: then the reference is a run of its own.
    stages = DoReMiStages(catalogue("mix.main_steps=200"))
    first = stages.todo({})
    assert names(first)[:4] == both("reference-1", "proportional")
    assert [run.recipe.schedule.steps for run in first[:4]] == [100, 100, 200, 200]
    assert first[2].recipe.schedule.warmup_steps == 2 * first[0].recipe.schedule.warmup_steps
    assert first[0].recipe.data.weights == first[2].recipe.data.weights == "proportional"

    stages = DoReMiStages(catalogue("doremi.reference_run=ref", reference=weights))
    todo = stages.todo({})
    assert names(todo)[:2] == both("proxy-1")
    assert todo[0].proxy is not None and todo[0].proxy.reference == "ref"
    assert list(stages.stage_runs(stages.rounds({}))) == []


def test_equal_baselines_are_trained_once() -> None:
    uniform = {"a": 0.5, "b": 0.5}
    one = Catalogue(recipe("mix.specialists=2"), Mixtures(("a", "b"), uniform, uniform))
    assert names(one.baselines["uniform"]) == both("proportional")
    assert names(one.compared()) == [*both("proportional"), *both("specialist-0", "specialist-1")]
    assert one.specialists["specialist-1"][0].recipe.data.weights == {"a": 0.0, "b": 1.0}


def test_small_runs_come_before_the_law() -> None:
    drawn = np.array([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2]])
    asked: list[list[str]] = []
    best = {"a": 0.25, "b": 0.25, "c": 0.5}

    def fit(small: Sequence[MixRun]) -> Weights:
        asked.append(names(small))
        return best

    fields = ("mix.method=regress", "regress.size=tiny", "regress.steps=50")
    stages = LawStages(catalogue(*fields), drawn, fit)
    small = [f"small-00{number}/seed-3" for number in range(3)]
    assert names(stages.todo({})) == [*small, *both("proportional", "uniform")]
    first = stages.small[0].recipe
    assert (first.model.size, first.schedule.steps, first.schedule.warmup_steps) == ("tiny", 50, 30)
    assert first.data.weights == {"a": 0.2, "b": 0.3, "c": 0.5}
    assert stages.most_runs() == 3 + 4 + 2
    done: dict[str, Any] = dict.fromkeys(small[:2])
    assert names(stages.todo(done))[:1] == small[2:]
    assert asked == []
    done[small[2]] = None
    for _ in range(2):
        todo = stages.todo(done)
        assert names(todo) == both("regress", "proportional", "uniform")
    assert asked == [small]
    assert todo[0].recipe.data.weights == best
    assert names(LawStages(catalogue(*fields), None, fit).todo({}))[:2] == both("regress")
    assert asked == [small, []]


MISTAKES = {
    "data.weights=uniform": "data.weights has no use here",
    "data.seed=3": "data.seed = '3' has no use here: give mix.seeds",
    "run.seed=3": "run.seed = '3' has no use here: give mix.seeds",
    "data.held_out=0": "data.held_out = '0' leaves nothing to compare",
    "model.family=albert": "model.family = 'albert'",
    "mix.seeds=[1, 1]": "names a seed twice",
    "mix.specialists=3": "mix.specialists = '3' is more than the 2",
    "mix.method=dro": "mix.method = 'dro'",
    "doremi.step_size=inf": "doremi.step_size = 'inf'",
    "regress.concentration=[0.1, inf]": r"regress.concentration = '\[0.1, inf\]' is no range",
    "regress.max_epochs=0": "regress.max_epochs = '0'",
    "regress.max_epochs=nan": "regress.max_epochs = 'nan'",
}


@pytest.mark.parametrize("field", MISTAKES)
def test_settings_that_a_mix_has_no_use_for(field: str) -> None:
    with pytest.raises(UserError, match=MISTAKES[field]):
        recipe(field)


def test_two_references_are_one_too_many() -> None:
    with pytest.raises(UserError, match="both name the first reference"):
        recipe("doremi.reference=uniform", "doremi.reference_run=ref")
