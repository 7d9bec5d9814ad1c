"""What a mix finds out before its first run; nothing is trained here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.errors import UserError
from tests.training.corpora import make_corpus, random_pages
from tests.training.mix_runs import MixInputs, make_inputs
from training import run_table
from training.mix.inputs import open_inputs

REGRESS = ("mix.method=regress", "mix.seeds=[2]")
STEP_TOKENS = 8 * 32


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> MixInputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_most_epochs_limit_the_weights(inputs: MixInputs, tmp_path: Path) -> None:
    assert open_inputs(inputs.load(tmp_path, *REGRESS)).limits is None
    doremi = open_inputs(inputs.load(tmp_path, "regress.max_epochs=0.001"))
    assert doremi.limits is None and "regress" not in doremi.identity["recipe"]
    opened = open_inputs(
        inputs.load(tmp_path, *REGRESS, "regress.max_epochs=1.5", "mix.main_steps=60")
    )
    assert opened.limits is not None
    once = opened.tokens_once
    tokens = 60 * STEP_TOKENS
    assert once["hi"] < tokens / 1.5 < once["bn"]
    assert opened.limits == {"bn": 1.0, "hi": pytest.approx(1.5 * once["hi"] / tokens)}
    other = open_inputs(inputs.load(tmp_path, *REGRESS, "mix.main_steps=60"))
    assert other.identity["recipe_digest"] != opened.identity["recipe_digest"]


def test_most_epochs_that_leave_no_mixture(inputs: MixInputs, tmp_path: Path) -> None:
    fields = (*REGRESS, "mix.main_steps=600")
    with pytest.raises(
        UserError,
        match=r"regress.max_epochs = '4' leaves no mixture: the main run reads 153,600 tokens, and "
        r"all domains together have [\d,]+: give (\d+\.\d\d) or more, or a smaller mix.main_steps",
    ) as caught:
        open_inputs(inputs.load(tmp_path, *fields, "regress.max_epochs=4"))
    enough = float(str(caught.value).partition("give ")[2].split()[0])
    opened = open_inputs(inputs.load(tmp_path, *fields, f"regress.max_epochs={enough}"))
    assert opened.limits is not None
    assert 1 <= sum(opened.limits.values()) < 1.01


def test_too_few_runs_for_a_law_are_refused_before_they_are_trained(
    inputs: MixInputs, tmp_path: Path
) -> None:
    languages = ["am", "ar", "bn", "de", "en", "hi", "sw"]
    pages = {name: random_pages(30, seed=number) for number, name in enumerate(languages)}
    many = replace(inputs, manifest=make_corpus(tmp_path / "crawl", pages))
    with pytest.raises(
        UserError,
        match=r"regress.runs = '8' are fewer than the 9 parameters .* for 7 domains",
    ):
        open_inputs(many.load(tmp_path, *REGRESS, "regress.runs=8"))
    open_inputs(many.load(tmp_path, *REGRESS, "regress.runs=9"))


def test_small_runs_that_read_a_domain_again_and_again_are_warned_of(
    inputs: MixInputs, tmp_path: Path
) -> None:
    opened = open_inputs(inputs.load(tmp_path, *REGRESS, "regress.steps=600"))
    assert opened.drawn is not None and opened.drawn.shape == (64, 2)
    times = opened.epochs["small runs, at most"]
    for place, name in enumerate(("bn", "hi")):
        most = opened.drawn[:, place].max()
        expected = most * 600 * STEP_TOKENS / opened.tokens_once[name]
        assert times[name] == pytest.approx(expected)
    assert [text for text in opened.warnings if "'small runs, at most' reads domain 'hi'" in text]
    assert not open_inputs(inputs.load(tmp_path, *REGRESS)).warnings


def test_a_reference_that_is_trained_longer_than_the_baselines_has_epochs(
    inputs: MixInputs, tmp_path: Path
) -> None:
    opened = open_inputs(inputs.load(tmp_path, "schedule.steps=600", "mix.main_steps=6"))
    for name, share in opened.mixtures.proportional.items():
        expected = share * 600 * STEP_TOKENS / opened.tokens_once[name]
        assert opened.epochs["reference"][name] == pytest.approx(expected)
    assert any("mixture 'reference' reads domain" in text for text in opened.warnings)
    assert "reference" not in open_inputs(inputs.load(tmp_path)).epochs  # the proportional one


def test_settings_of_small_runs_do_not_count_beside_a_table(
    inputs: MixInputs, tmp_path: Path
) -> None:
    shares = np.linspace(0.1, 0.9, 9)
    mixtures = np.column_stack([shares, 1 - shares])
    table = run_table.RunTable(("hi", "bn"), ("bn",), mixtures, 2 + shares[:, None])
    run_table.write_table(tmp_path / "mine.csv", table)
    fields = (*REGRESS, f'regress.table="{tmp_path / "mine.csv"}"')
    base = open_inputs(inputs.load(tmp_path, *fields))
    assert base.drawn is None
    for same in ("runs=99", "size=small", "steps=7", "concentration=[1, 2]"):
        assert open_inputs(inputs.load(tmp_path, *fields, f"regress.{same}")).identity == (
            base.identity
        )
    other = open_inputs(inputs.load(tmp_path, *fields, "regress.folds=4"))
    assert other.identity["recipe_digest"] != base.identity["recipe_digest"]


@pytest.mark.parametrize(
    ("reference", "said"),
    [("nowhere.json", "^doremi.reference = 'nowhere.json' is not 'proportional', not 'uniform'"),
     ("{bn=1}", "^doremi.reference: no weight for 'hi'"),
     ("{bn=0, hi=0}", "^doremi.reference = .*all domains come to '0'")],
)  # fmt: skip
def test_a_wrong_reference_is_told_by_its_own_name(
    reference: str, said: str, inputs: MixInputs, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        open_inputs(inputs.load(tmp_path, f"doremi.reference={reference}"))


def test_the_identity_is_plain_json(inputs: MixInputs, tmp_path: Path) -> None:
    for fields in ((), REGRESS):
        found = open_inputs(inputs.load(tmp_path, *fields)).identity
        assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(json.dumps(found))
