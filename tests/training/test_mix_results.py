"""The manifest of a mix, and the comparison of mixtures, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from models.errors import UserError
from tests.conftest import REPOSITORY
from tests.training.corpora import data, make_corpus, random_pages
from tests.training.fake_mixes import CHARS, fake_mix
from training.domains import characters, load_corpus, mixture
from training.mix import comparison, identity, results
from training.mix.comparison import Estimate, Verdict
from training.mix.recipe import MixRecipe
from training.mix.report_sections import running_mean
from training.mix.results import MixManifest, RunEntry, round_entry
from training.mix.table import markdown, table
from training.trace import Trace

SCHEMA = REPOSITORY / "data_manifests" / "mix_manifest.schema.json"


def run(label: str, seed: int, weights: dict[str, float], losses: dict[str, float]) -> RunEntry:
    return RunEntry(
        label=label, seed=seed, run=f"runs/{label}/seed-{seed}", manifest_sha256="0" * 64,
        size="tiny", steps=5, tokens=50, weights=weights, losses=losses,
        standard_errors=dict.fromkeys(losses),
    )  # fmt: skip


def by_hand(tmp_path: Path, **changes: Any) -> MixManifest:
    """Two domains, two seeds; specialists a: 1.0 and 1.2, b: 2.0."""
    one = fake_mix(tmp_path / "mix", chars={"a": 300, "b": 100}, seeds=(0, 1), rounds=1, steps=4)
    half = {"a": 0.5, "b": 0.5}
    losses = {
        "proportional": [{"a": 1.2, "b": 3.0}, {"a": 1.3, "b": 3.2}],
        "uniform": [{"a": 1.5, "b": 2.5}, {"a": 1.5, "b": 2.7}],
        "doremi": [{"a": 1.4, "b": 2.4}, {"a": 1.7, "b": 2.5}],
    }
    tree = one.model_dump() | {
        "runs": tuple(
            run(label, seed, half, found)
            for label, by_seed in losses.items()
            for seed, found in enumerate(by_seed)
        ),
        "specialists": (
            run("specialist-0", 0, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 9.0}),
            run("specialist-0", 1, {"a": 1.0, "b": 0.0}, {"a": 1.2, "b": 9.0}),
            run("specialist-1", 0, {"a": 0.0, "b": 1.0}, {"a": 9.0, "b": 2.0}),
        ),
    }
    tree = json.loads(json.dumps(tree | changes, default=lambda entry: entry.model_dump()))
    return MixManifest.model_validate(tree)


def close(found: Estimate | None, mean: float, sd: float | None) -> bool:
    assert found is not None
    if (found.sd is None) != (sd is None):
        return False
    return found.mean == pytest.approx(mean) and (sd is None or found.sd == pytest.approx(sd))


def test_comparison_by_hand(tmp_path: Path) -> None:
    manifest = by_hand(tmp_path)
    assert comparison.specialist_losses(manifest.specialists) == pytest.approx({"a": 1.1, "b": 2})
    proportional, uniform, doremi = comparison.scores(manifest)
    root = 2**0.5
    # Excesses of seed 0: 0.1 and 1.0; of seed 1: 0.2 and 1.2.
    assert close(proportional.losses["a"], 1.25, 0.1 / root)
    assert close(proportional.mean_loss, 2.175, 0.15 / root)
    assert close(proportional.worst_excess, 1.1, 0.2 / root)
    assert close(proportional.mean_excess, (0.55 + 0.7) / 2, 0.15 / root)
    assert (proportional.worst, uniform.worst, doremi.worst) == ("b", "b", "b")
    assert close(uniform.worst_excess, 0.6, 0.2 / root)
    # Seed 0: 0.3 and 0.4; seed 1: 0.6 in a, 0.5 in b: the worst of each seed.
    assert close(doremi.worst_excess, 0.5, 0.2 / root)
    found = {(one.measure, one.baseline): one for one in
             comparison.verdicts(manifest, (proportional, uniform, doremi))}  # fmt: skip
    # Seed by seed: 1.9 - 2.1 and 2.1 - 2.25; 1.9 - 2.0 and 2.1 - 2.1.
    below = found["mean_loss", "proportional"]
    assert close(below.difference, -0.175, 0.05 / root)
    assert below.seen is True
    unclear = found["mean_loss", "uniform"]
    assert close(unclear.difference, -0.05, 0.1 / root)
    assert unclear.seen is False
    assert close(found["worst_excess", "proportional"].difference, -0.6, 0)
    assert close(found["worst_excess", "uniform"].difference, -0.1, 0)


def test_sentences(tmp_path: Path) -> None:
    def sentence(mean: float, sd: float | None) -> str:
        return comparison.sentence(Verdict("mean_loss", "uniform", Estimate(mean, sd), 2), "doremi")

    assert sentence(-0.1, 0.05) == (
        "mean held-out loss: doremi is 0.100 ± 0.050 below uniform: better by more than the seed "
        "spread"
    )
    assert sentence(0.1, 0.05).endswith("above uniform: worse by more than the seed spread")
    assert sentence(0.1, 0.2).endswith("inside the seed spread, no difference is shown")
    assert sentence(0.1, 0.1).endswith("inside the seed spread, no difference is shown")
    assert sentence(-0.1, None).endswith(
        "one seed, so whether that is more than chance is not known"
    )

    manifest = by_hand(tmp_path)

    def conclusion(*differences: tuple[str, float, float | None]) -> str:
        found = [
            Verdict("mean_loss", name, Estimate(mean, sd), 2) for name, mean, sd in differences
        ]
        return comparison.conclusion(manifest, found)

    better, worse = ("proportional", -1.0, 0.1), ("uniform", 1.0, 0.1)
    assert conclusion(better, ("uniform", -0.3, 0.1)) == (
        "DoReMi beats proportional and uniform by more than the seed spread."
    )
    assert conclusion(better, ("uniform", -0.3, 0.4)) == (
        "DoReMi is better by more than the seed spread only in mean held-out loss "
        "(against proportional)."
    )
    assert conclusion(("proportional", -0.1, 0.2), worse) == (
        "DoReMi beats neither proportional nor uniform by more than the seed spread; it is worse "
        "in mean held-out loss (against uniform)."
    )
    assert conclusion(("uniform", -1.0, None)).startswith("One seed: whether DoReMi beats uniform")
    assert conclusion().startswith("There is nothing to compare DoReMi with")


def test_what_chance_alone_gives() -> None:
    """Of differences that have no cause, so many are larger than their spread over the seeds."""
    assert comparison.chance(2) == pytest.approx(1 - 2 * math.atan(2**0.5) / math.pi)
    assert comparison.chance(3) == pytest.approx(1 - (3 / 5) ** 0.5)
    for seeds in range(2, 40):
        expected = 2 * stats.t.sf(seeds**0.5, seeds - 1)
        assert comparison.chance(seeds) == pytest.approx(expected, rel=1e-9)
    drawn = np.random.default_rng(0).normal(size=(40_000, 3))
    beyond = np.abs(drawn.mean(1)) > drawn.std(1, ddof=1)
    assert beyond.mean() == pytest.approx(comparison.chance(3), abs=0.01)


def test_the_notes_say_what_the_spread_is_worth(tmp_path: Path) -> None:
    text = table(by_hand(tmp_path))
    assert "chance: with 2 seeds, 39% of differences that have no cause exceed the seed spread" in (
        text
    )
    assert (
        "excess: above the mean loss of a domain's specialist, of 1 to 2 seeds; ± is that of "
        in (text)
    )
    one_seed = table(fake_mix(tmp_path / "one", seeds=(4,), rounds=1, steps=5))
    assert "chance:" not in one_seed
    assert "specialist, of 1 seed; ± is that of the mixture alone" in one_seed


def test_without_specialists_and_with_one_seed(tmp_path: Path) -> None:
    manifest = fake_mix(tmp_path, seeds=(4,), specialists=False, rounds=1, steps=5)
    scores = comparison.scores(manifest)
    assert all(score.worst_excess is None and score.mean_loss.sd is None for score in scores)
    assert [one.seen for one in comparison.verdicts(manifest, scores)] == [None, None]
    assert all(domain.spread is None for domain in manifest.domains)
    assert json.loads((tmp_path / "weights.json").read_bytes())["spread"] is None
    text = table(manifest)
    assert "excess: not measured (mix.specialists = 0)" in text
    assert "worst domain's excess" not in text
    assert "One seed: whether DoReMi beats proportional and uniform is not known." in text


def test_a_domain_without_held_out_examples(tmp_path: Path) -> None:
    manifest = by_hand(tmp_path)
    tree = manifest.model_dump()
    for entry in tree["runs"]:
        if entry["label"] == "uniform":
            del entry["losses"]["b"], entry["standard_errors"]["b"]
    manifest = MixManifest.model_validate(tree)
    scores = comparison.scores(manifest)
    assert [list(score.losses) for score in scores] == [["a"]] * 3
    assert close(scores[0].mean_loss, 1.25, 0.1 / 2**0.5)
    assert "no held-out example in every run: b" in table(manifest)


def test_rounds_by_hand() -> None:
    entry = round_entry(2, {"a": 0.6, "b": 0.4}, {0: {"a": 0.7, "b": 0.3}, 3: {"a": 0.9, "b": 0.1}})
    assert entry.mean == pytest.approx({"a": 0.8, "b": 0.2})
    assert entry.change == pytest.approx(0.2)
    assert entry.spread == pytest.approx(0.2 / 2**0.5)
    assert list(entry.weights) == ["0", "3"]
    alone = round_entry(1, {"a": 0.6, "b": 0.4}, {0: {"a": 0.7, "b": 0.3}})
    assert alone.spread is None


def test_the_running_mean_leaves_out_alpha_0_and_skipped_steps() -> None:
    alpha = np.array([[0.5, 0.5], [0.8, 0.2], [0.8, 0.2], [0.2, 0.8]])
    excess = np.array([[np.nan] * 2, [1.0, 0.0], [np.nan] * 2, [0.0, 1.0]])
    trace = Trace(("a", "b"), alpha, excess, np.ones((4, 2)))
    expected = [[0.5, 0.5], [0.8, 0.2], [0.8, 0.2], [0.5, 0.5]]
    assert running_mean(trace) == pytest.approx(np.array(expected))


def test_the_table_aligns_wide_names(tmp_path: Path) -> None:
    manifest = fake_mix(tmp_path)
    lines = table(manifest).splitlines()
    rows = [line for line in lines if line.startswith(tuple(CHARS))]
    assert len(rows) == len(CHARS)
    # "日本語ウィキペディア" is ten characters that take twenty columns.
    widths = {len(row) + 10 * row.startswith("ja/") for row in rows}
    assert len(widths) == 1
    header = next(line for line in lines if line.startswith("domain "))
    assert header.split() == ["domain", "characters", "alpha_ref", "alpha-bar", "epochs",
                              "proportional", "uniform", "doremi"]  # fmt: skip
    one = next(row for row in rows if row.startswith("bn"))
    bn = manifest.domains[2]
    assert one.split()[:3] == ["bn", "1,900,000", f"{bn.reference:.3f}"]
    assert f"{bn.weight:.3f} ± {bn.spread:.3f}" in one
    assert "round 2: largest change of a weight" in lines[-2]


def test_markdown_has_the_rows_of_the_table(tmp_path: Path) -> None:
    manifest = fake_mix(tmp_path, chars={"a|b": 10, "c_d": 90}, rounds=1, steps=5)
    lines = markdown(manifest).splitlines()
    assert lines[0].startswith("| domain | characters | alpha\\_ref | alpha-bar |")
    assert lines[1].count("---:") == 7
    assert lines[2].startswith("| a\\|b | 10 | 0.100 |")
    assert lines[3].startswith("| c\\_d | 90 | 0.900 |")
    assert lines[4].startswith("| mean loss |")
    assert "| worst domain's excess |" in lines[5]


def recipe(**sections: Any) -> MixRecipe:
    return MixRecipe.model_validate(sections)


def test_the_digest_covers_what_changes_the_result() -> None:
    base = identity.recipe_digest(recipe())
    different = [
        recipe(mix={"seeds": [1]}),
        recipe(mix={"specialists": 1}),
        recipe(mix={"main_steps": 7}),
        recipe(doremi={"step_size": 2.0}),
        recipe(doremi={"excess": "hardest"}),
        recipe(doremi={"reference": "uniform"}),
        recipe(doremi={"reference_run": "/home/me/run"}),
        recipe(schedule={"steps": 77, "warmup_steps": 0}),
        recipe(evaluation={"examples": 9}),
        recipe(examples={"sequence_length": 64}),
        recipe(mix={"method": "regress"}),
    ]
    digests = [base, *map(identity.recipe_digest, different)]
    assert len(set(digests)) == len(digests)
    same = [
        recipe(name="other"),
        recipe(output={"directory": "/home/me/out"}),
        recipe(model={"family": "decoder", "tokenizer": "/home/me/t"}),
        recipe(data={"manifests": ["/home/me/mined"]}),
        recipe(run={"device": "cpu"}),
        recipe(evaluation={"every": 3}),
        recipe(regress={"runs": 99}),
    ]
    assert {identity.recipe_digest(one) for one in same} == {base}


@pytest.mark.parametrize("method", ["doremi", "regress"])
@pytest.mark.parametrize(
    "reference", [{"reference": "/home/me/weights.json"}, {"reference_run": "/home/me/run"}]
)
def test_no_place_of_this_machine_is_published(method: str, reference: dict[str, str]) -> None:
    found = identity.published(recipe(
        data={"manifests": ["/home/me/mined"]},
        model={"family": "decoder", "tokenizer": "/home/me/t", "init": "/home/me/m"},
        output={"directory": "/home/me/out"}, mix={"method": method}, doremi=reference,
        regress={"table": "/home/me/runs.csv"},
    ))  # fmt: skip
    assert "/home" not in json.dumps(found)
    assert ("regress" in found) == (method == "regress")
    assert ("doremi" in found) == (method == "doremi")


def test_build_from_a_corpus(tmp_path: Path) -> None:
    pages = {"bn": random_pages(9), "sw": random_pages(30, seed=1), "am": random_pages(3, seed=2)}
    corpus = load_corpus(data(make_corpus(tmp_path / "mined", pages)))
    shares = mixture(corpus, "proportional")
    names = corpus.names
    uniform = dict.fromkeys(names, 1 / len(names))
    found = {0: dict(zip(names, shares.tolist(), strict=True)), 1: uniform}
    manifest = results.build(
        recipe(mix={"seeds": [0, 1]}), corpus, tokenizer_sha256="aa",
        sources=[{"manifest_sha256": "bb", "recipe_digest": "cc"}], epochs={names[0]: 2.5},
        rounds=[round_entry(1, uniform, found)], runs=[], specialists=[], law=None,
        warnings=["careful"], stopped="max_rounds",
    )  # fmt: skip
    assert [domain.chars for domain in manifest.domains] == [int(n) for n in characters(corpus)]
    assert [domain.proportional for domain in manifest.domains] == pytest.approx(shares.tolist())
    assert [domain.reference for domain in manifest.domains] == [1 / len(names)] * len(names)
    for domain, share in zip(manifest.domains, shares, strict=True):
        assert domain.weight == pytest.approx((share + 1 / len(names)) / 2)
        assert domain.spread == pytest.approx(abs(share - 1 / len(names)) / 2**0.5)
    assert manifest.domains[0].epochs == 2.5
    assert manifest.domains[1].epochs is None
    results.write(tmp_path / "mix", manifest)
    assert results.read(tmp_path / "mix") == manifest
    # The weights are a mixture for `gristmill train`, under our key and under that of DoReMi.
    path = tmp_path / "mix" / "weights.json"
    expected = pytest.approx([domain.weight for domain in manifest.domains])
    assert mixture(corpus, str(path)).tolist() == expected
    tree = json.loads(path.read_bytes())
    del tree["weights"]
    path.write_text(json.dumps(tree))
    assert mixture(corpus, str(path)).tolist() == expected
    assert tree["mix_manifest_recipe_digest"] == manifest.recipe_digest
    law = {"domains": list(names), "best": [1.0, *[0.0] * (len(names) - 1)],
           "spread": [0.1] * len(names)}  # fmt: skip
    lawful = results.build(
        recipe(mix={"method": "regress"}), corpus, tokenizer_sha256="aa", sources=[], epochs={},
        rounds=[], runs=[], specialists=[], law=law, warnings=[], stopped=None,
    )  # fmt: skip
    assert lawful.weights[names[0]] == 1.0
    assert lawful.domains[0].reference == lawful.domains[0].proportional
    assert lawful.domains[1].spread == 0.1


def test_same_mix_same_bytes(tmp_path: Path) -> None:
    one = fake_mix(tmp_path / "one", rounds=1, steps=9)
    fake_mix(tmp_path / "other", rounds=1, steps=9)
    for name in ("weights.json", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert (tmp_path / "one" / "manifest.json").read_text(encoding="utf-8") == one.to_json()


def broken(path: Path, change: Any) -> None:
    tree = json.loads(path.read_bytes())
    change(tree)
    path.write_text(json.dumps(tree))


MISTAKES: dict[str, tuple[Any, str]] = {
    "another field": (lambda tree: tree.update(extra=1), "extra: Extra inputs"),
    "a missing field": (lambda tree: tree.pop("rounds"), "rounds: Field required"),
    "a weight above 1": (lambda tree: tree["domains"][0].update(weight=1.5), "'1.5' is no share"),
    "a loss that is none": (lambda tree: tree["runs"][0]["losses"].update(am=float("nan")),
                            "runs.0.losses.am: Value error, 'nan' is no finite number"),
    "an unknown domain": (lambda tree: tree["runs"][0]["weights"].update(xx=0),
                          "'xx' is none of the domains"),
    "a domain without a weight": (lambda tree: tree["rounds"][0]["mean"].pop("am"),
                                  "round 1: nothing for the domain 'am'"),
    "a domain twice": (lambda tree: tree["domains"].append(tree["domains"][0]),
                       "domains: a name stands twice"),
    "a run twice": (lambda tree: tree["runs"].append(tree["runs"][0]),
                    "run 'proportional' of seed 0 stands twice"),
    "no round": (lambda tree: tree.update(rounds=[]), "rounds: DoReMi has at least one"),
    "no law": (lambda tree: tree.update(method="regress"), "law: method 'regress' lacks it"),
    "a law of DoReMi": (lambda tree: tree.update(law={"domains": [], "best": [], "spread": []}),
                        "law: method 'doremi' has none"),
    "a law without numbers": (lambda tree: tree.update(law={"domains": ["am"], "best": [],
                              "spread": []}), "best and spread need a number for each"),
    "no domain": (lambda tree: tree.update(domains=[]), "domains"),
    "another version": (lambda tree: tree.update(schema_version=7), "schema version '7'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_manifest_that_is_none(mistake: str, tmp_path: Path) -> None:
    change, expected = MISTAKES[mistake]
    fake_mix(tmp_path, rounds=1, steps=3)
    broken(tmp_path / "manifest.json", change)
    with pytest.raises(UserError) as caught:
        results.read(tmp_path)
    assert expected in str(caught.value)
    assert f"'{tmp_path}/manifest.json'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest at .*the mix is not finished"):
        results.read(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"is no manifest of a mix: Invalid JSON"):
        results.read(tmp_path)


def test_the_published_schema_is_the_model() -> None:
    """After a change: python -m training.mix.results > data_manifests/mix_manifest.schema.json"""
    assert json.loads(SCHEMA.read_bytes()) == MixManifest.model_json_schema()
