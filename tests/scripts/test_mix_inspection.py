"""`gristmill inspect` on a mix: what is printed, checked, and shown by a browser."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models import files
from scripts.cli import main
from tests.conftest import REPOSITORY
from tests.pipelines.report_crawl import HOSTILE
from tests.pipelines.shown_pages import Shown
from tests.training.fake_mixes import CHARS, fake_mix
from training.mix import comparison
from training.mix.report import read_traces, render
from training.mix.results import MixManifest

WARNING = "domain 'am' is read 6.2 times"


@pytest.fixture(scope="module")
def mixes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """doremi: 7 domains of several scripts, 3 seeds, 2 rounds. regress: the same by a law. many:
    22 domains, one seed, no specialist. hostile: names that would like to be markup."""
    folder = tmp_path_factory.mktemp("mixes")
    fake_mix(folder / "doremi", warnings=(WARNING,))
    fake_mix(folder / "regress", method="regress")
    fake_mix(folder / "many", chars={f"host-{n:02d}/lang": 1000 * (n + 1) for n in range(22)},
             rounds=1, seeds=(0,), specialists=False)  # fmt: skip
    fake_mix(folder / "hostile", chars={HOSTILE: 900, "\u202egnp": 100, "bn": 400}, rounds=1,
             steps=40, name=HOSTILE, warnings=(HOSTILE,))  # fmt: skip
    for name in ("doremi", "regress", "many", "hostile"):
        pytest.importorskip("vl_convert", reason="the report needs the extra 'report'")
        assert main(["inspect", str(folder / name), "--html", str(folder / f"{name}.html")]) == 0
    return folder


def manifest_of(folder: Path) -> MixManifest:
    return MixManifest.model_validate_json((folder / "manifest.json").read_bytes())


@pytest.mark.parametrize("inside", ["", "/manifest.json"])
def test_the_table(inside: str, mixes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{mixes}/doremi{inside}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fake: doremi, 7 domains\n")
    assert re.search(r"^bn +1,900,000 +0\.081 +0\.\d{3} ± 0\.\d{3} ", out, re.MULTILINE)
    assert re.search(r"^worst domain's excess +\d\.\d{3} ± ", out, re.MULTILINE)
    assert f"warning: {WARNING}\n" in out
    assert main(["inspect", f"{mixes}/doremi{inside}", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text) == manifest_of(mixes / "doremi").model_dump(mode="json")


def test_verify(mixes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mix"
    shutil.copytree(mixes / "doremi", folder)
    assert main(["inspect", str(folder), "--verify"]) == 0
    assert capsys.readouterr().out.endswith("\nverified: weights.json and 16 runs as listed\n")
    (folder / "weights.json").write_text("{}")
    (folder / "runs" / "uniform" / "seed-1" / "manifest.json").write_text("another")
    (folder / "runs" / "specialist-3" / "seed-0" / "manifest.json").unlink()
    assert main(["inspect", str(folder), "--verify"]) == 1
    wrong = capsys.readouterr().out.splitlines()[-3:]
    assert wrong[0] == "'weights.json' differs from the manifest"
    assert wrong[1] == "'runs/uniform/seed-1/manifest.json' differs from the manifest"
    assert wrong[2].startswith("'runs/specialist-3/seed-0/manifest.json' cannot be read")
    assert main(["inspect", str(folder), "--verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"] == wrong


def test_verify_of_a_law_looks_at_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_mix(tmp_path, method="regress", chars={"a": 1, "b": 3})
    (tmp_path / "runs.csv").write_text("a table")
    tree = json.loads((tmp_path / "manifest.json").read_bytes())
    tree["law"]["table_sha256"] = files.sha256_file(tmp_path / "runs.csv")
    (tmp_path / "manifest.json").write_text(json.dumps(tree))
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    (tmp_path / "runs.csv").write_text("another table")
    assert main(["inspect", str(tmp_path), "--verify"]) == 1
    assert "'runs.csv' differs from the manifest" in capsys.readouterr().out
    tree["recipe"]["regress"]["table"] = "a table of runs"  # the user's: it need not be here
    (tmp_path / "manifest.json").write_text(json.dumps(tree))
    assert main(["inspect", str(tmp_path), "--verify"]) == 0


def test_an_unfinished_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mix.json").write_text("{}")
    for label in ("uniform", "proportional"):
        (tmp_path / "runs" / label / "seed-0").mkdir(parents=True)
    (tmp_path / "runs" / "uniform" / "seed-0" / "manifest.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("unfinished mix; 1 runs finished, 1 begun; ")
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "finished": False, "runs_finished": 1, "runs_begun": 2
    }  # fmt: skip
    for option in (["--verify"], ["--html", str(tmp_path / "new.html")]):
        assert main(["inspect", str(tmp_path), *option]) == 2
        assert "the mix is not finished" in capsys.readouterr().err


MISTAKES = {
    "sample": (["--sample"], "'{mix}' is a mix: --sample needs a mined folder"),
    "html and verify": (["--html", "r.html", "--verify"], "--html 'r.html' stands alone"),
    "html and json": (["--html", "r.html", "--json"], "--html 'r.html' stands alone"),
    "over the weights": (["--html", "{mix}/weights.json"], "is no name for a page"),
    "a folder": (["--html", "{mix}"], "is a folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, mixes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, expected = MISTAKES[mistake]
    mix = str(mixes / "doremi")
    assert main(["inspect", mix, *(option.replace("{mix}", mix) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gristmill: ")
    assert err.count("\n") == 1
    assert expected.replace("{mix}", mix) in err
    assert (mixes / "doremi" / "weights.json").read_text().startswith("{")


def test_a_look_at_a_mix_loads_no_torch() -> None:
    program = (
        "import sys, scripts.inspection, training.mix.report\n"
        "print(sorted({'torch', 'transformers', 'jinja2', 'vl_convert'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("name", ["doremi", "regress", "many", "hostile"])
@pytest.mark.parametrize(("width", "theme"), [*itertools.product((360, 1440), ("light", "dark"))])
def test_the_page_in_a_browser(
    browser: Any, mixes: Path, name: str, width: int, theme: str
) -> None:
    path = mixes / f"{name}.html"
    assert path.stat().st_size < 1_500_000
    shown = Shown(browser, path, width, theme)
    tab = shown.tab
    assert shown.said == []
    assert shown.asked == [path.as_uri()]
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert shown.low_contrast() == []
    charts = tab.locator("svg:visible")
    names = charts.evaluate_all("all => all.map(s => [s.getAttribute('role'), s.ariaLabel])")
    # Losses, excess, weights; a trace by seed and by domain, rounds; ranks and the law's fit.
    expected = {"doremi": 3 + 3 + 7 + 1, "regress": 3 + 2, "many": 2 + 1 + 22, "hostile": 3 + 3 + 3}
    assert len(names) == expected[name]
    assert all(role == "img" and label for role, label in names)
    assert len({label for _, label in names}) == len(names)
    identifiers = tab.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(identifiers) == len(set(identifiers))
    targets = tab.locator("nav a").evaluate_all("all => all.map(a => a.hash.slice(1))")
    assert set(targets) <= set(identifiers)
    # No text of a drawing is cut off by its edge, or stands on another one.
    overlaps = tab.evaluate("""() => {
        const found = [];
        for (const svg of document.querySelectorAll('svg')) {
            if (!svg.getClientRects().length) continue;
            const edge = svg.getBoundingClientRect();
            const boxes = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim())
                .map(t => [t.textContent, t.getBoundingClientRect()]);
            for (const [text, box] of boxes)
                if (box.left < edge.left - 1 || box.right > edge.right + 1) found.push([text]);
            for (let i = 0; i < boxes.length; i++)
                for (let j = 0; j < i; j++) {
                    const [a, b] = [boxes[i][1], boxes[j][1]];
                    if (a.left < b.right - 1 && b.left < a.right - 1 &&
                        a.top < b.bottom - 5 && b.top < a.bottom - 5)
                        found.push([boxes[i][0], boxes[j][0]]);
                }
        }
        return found;
    }""")
    assert overlaps == []
    # Every colour of a drawing is known to the page.
    unknown = tab.evaluate("""() => [...document.querySelectorAll('svg *')].flatMap(
        e => ['fill', 'stroke'].map(a => e.getAttribute(a) || '')
            .filter(v => v.startsWith('var(') && !getComputedStyle(document.documentElement)
                .getPropertyValue(v.slice(4, -1))))""")
    assert unknown == []


def test_the_page_says_what_the_manifest_says(browser: Any, mixes: Path) -> None:
    manifest = manifest_of(mixes / "doremi")
    shown = Shown(browser, mixes / "doremi.html")
    tab = shown.tab
    scores = comparison.scores(manifest)
    verdicts = comparison.verdicts(manifest, scores)
    assert tab.locator(".lead").inner_text() == comparison.conclusion(manifest, verdicts)
    assert WARNING in tab.inner_text(".notices")
    whole = shown.table("Domains and mixtures")
    assert list(whole) == [*CHARS, "mean loss", "worst domain's excess", "mean excess"]
    bn = manifest.domains[2]
    assert whole["bn"][:4] == [
        "1,900,000", f"{bn.reference:.3f}", f"{bn.weight:.3f} ± {bn.spread:.3f}",
        f"{bn.epochs:.2f}",
    ]  # fmt: skip
    assert whole["bn"][4:] == [comparison.number(score.losses["bn"]) for score in scores]
    assert whole["mean excess"][4:] == [comparison.number(score.mean_excess) for score in scores]
    rounds = shown.table("Rounds")
    assert rounds["1"][0] == f"{manifest.rounds[0].change:.4f}"
    assert rounds["2"][2] == f"{manifest.rounds[1].spread:.4f}"
    by_seed = shown.table("Weights of round 2 by seed")
    assert by_seed["sw"][1] == f"{manifest.rounds[1].weights['0']['sw']:.4f}"
    assert tab.inner_text("#rounds p") == f"Ended: {manifest.stopped}"
    settings = shown.table("Recipe, every setting")
    assert settings["doremi.max_rounds"][0] == "2"
    assert settings["doremi.max_rounds"][1].startswith("iterated DoReMi")
    assert shown.table("Mix")["recipe digest (XXH3)"] == [manifest.recipe_digest]
    assert shown.table("Runs (16)")["uniform, seed 1"][-1] == manifest.runs[4].manifest_sha256
    # The trace ends at the weights of its seed.
    trace = tab.locator("#trace svg.wide").first
    assert f"am {manifest.rounds[1].weights['0']['am']:.3f}" in trace.get_attribute("aria-label")
    tiles = dict(zip(tab.locator(".tiles dt").all_inner_texts(),
                     tab.locator(".tiles dd").all_inner_texts(), strict=True))  # fmt: skip
    assert tiles["mean loss, doremi"].split()[0] == f"{scores[2].mean_loss.mean:.3f}"


def test_the_page_of_a_law(browser: Any, mixes: Path) -> None:
    shown = Shown(browser, mixes / "regress.html")
    law = shown.tab.locator("#law")
    assert "Nothing speaks against the fit." in law.inner_text()
    ranks = law.locator("svg.wide").first
    assert "exponential, chosen 0.930" in ranks.get_attribute("aria-label")
    assert shown.table("Law")["predicted at the best mixture"] == ["3.310 ± 0.020"]
    points = law.locator("svg.wide").nth(1).locator("path[fill='var(--dot-2)']")
    assert points.count() == 64
    assert shown.tab.locator("#trace, #rounds").count() == 0


def test_doubts_of_a_law_are_said(tmp_path: Path) -> None:
    doubt = "the best mixture lies outside the runs"
    warning = f"the law: {doubt}"
    manifest = fake_mix(
        tmp_path, method="regress", chars={"a": 1, "b": 3}, warnings=(warning,),
        law={"domains": ["a", "b"], "best": [0.9, 0.1], "spread": [0.2, 0.2], "notes": ["a note"],
             "doubts": [doubt, "few"], "scores": {"quadratic": float("nan"), "linear": -0.2}},
    )  # fmt: skip
    text = render(manifest, {})
    notices = re.findall("<li>([^<]*)</li>", text.partition('class="notices"')[2])
    assert notices == [warning, "few"]
    assert f"<p>Doubt: {doubt}</p>" in text
    assert "<p>a note</p>" in text
    assert "linear -0.200, quadratic none" in text
    assert manifest_of(tmp_path).law == manifest.law


def test_hostile_text_stays_text(browser: Any, mixes: Path) -> None:
    shown = Shown(browser, mixes / "hostile.html")
    tab = shown.tab
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("script").count() == 1
    assert tab.locator("img, iframe, object, embed, link, form, base").count() == 0
    attributes = tab.evaluate(
        "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on") or name == "style"]
    assert HOSTILE in tab.inner_text("h1")
    assert HOSTILE in shown.table("Domains and mixtures")
    assert "\\u202egnp" in shown.table("Domains and mixtures")
    assert "\u202e" not in tab.content()


def test_traces_that_are_missing_are_said(mixes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mix"
    shutil.copytree(mixes / "doremi", folder)
    runs = folder / "runs" / "proxy-2"
    shutil.rmtree(runs / "seed-0")
    (runs / "seed-1" / "alpha.jsonl").write_text('{"domains": ["other"]}\n')
    manifest = manifest_of(folder)
    traces, missing = read_traces(manifest, folder)
    assert list(traces) == ["2"]
    assert "no trace at" in missing[0]
    assert "has the trace of other domains" in missing[1]
    text = render(manifest, traces, missing)
    assert text.count("<li>No trace of alpha: ") == 2
    assert "Seed 2: mean of alpha up to each step" in text
    assert "Seed 0:" not in text


def test_same_mix_same_page(mixes: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(mixes / "doremi", moved)
    assert main(["inspect", str(moved), "--html", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_bytes() == (mixes / "doremi.html").read_bytes()
