"""The README: its commands run, its snippets open what the demo made."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from models.errors import UserError
from pipelines import recipe_file
from pipelines.manifest import Manifest, read_manifest
from pipelines.recipe import load_recipe
from scripts.build_kenlm import build
from scripts.cli import main
from scripts.make_sample_crawl import make
from tests.conftest import REPOSITORY
from training import run_manifest

README = (REPOSITORY / "README.md").read_text()
CODE = [line.strip() for line in README.split("\n") if line.startswith("    ")]
COMMANDS = [
    shlex.split(line)[1:] for line in CODE if line.startswith(".venv/bin/gristmill ")
]  # fmt: skip
NEEDS_NETWORK = ["crawl"]
# The same commands on fewer steps: what they reach is no matter here.
SHORT_RUN = ["schedule.steps=4", "schedule.warmup_steps=1"]
SMALL_BATCH = {"albert-small": "batch.samples=8", "decoder-small": "batch.tokens=512"}
SHORT_MIX = ["schedule.steps=2", "schedule.warmup_steps=1", "batch.samples=32", "mix.seeds=[0]",
             "model.size=tiny", "evaluation.examples=4", "mix.specialists=0"]  # fmt: skip
SHORT_TASK = ["fine_tuning.seeds=[0]", "fine_tuning.learning_rates=[1e-3]",
              "fine_tuning.epochs=1", "data.train_examples=100"]  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A working folder in which the demo has run."""
    try:
        build()
    except UserError as error:
        pytest.skip(str(error))
    place = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("GRISTMILL_DATA", str(data_dir))
        assert main(["demo", "out/demo"]) == 0
    return place


def test_the_demo_trains(demo: Path) -> None:
    run = run_manifest.read(demo / "out/demo/run")
    assert run.counts.steps == 400
    mined = (demo / "out/demo/mined/manifest.json").read_bytes()
    assert [source.manifest_sha256 for source in run.sources] == [hashlib.sha256(mined).hexdigest()]
    first, *_, last = (
        json.loads(line)["loss"]
        for line in (demo / "out/demo/run/metrics.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "train"
    )
    # ln(4,000) + ln(2) is the loss of a network that knows nothing.
    assert abs(first - 8.99) < 0.1
    assert last < 7.3


def test_the_demo(demo: Path) -> None:
    manifest: Manifest = read_manifest(str(demo / "out/demo/mined"))
    counts = manifest.counts
    # 313 pages; one of them in a record of another type, two in damaged gzip members.
    assert (counts.records.read, counts.records.lost) == (310, 2)
    assert counts.records.length_corrected == 1
    assert {loss.reason for loss in manifest.losses} == {"damaged_member", "truncated_member"}
    ten = {"ar", "bn", "de", "en", "es", "fr", "hi", "ja", "ru", "sw"}
    assert ten <= set(counts.by_language)
    for language in ten:
        buckets = counts.by_language[language].buckets
        assert all(buckets[name] >= 3 for name in ("head", "middle", "tail")), (language, buckets)
    assert {"missing_url", "too_short", "emptied_by_dedup"} <= set(counts.pages.dropped)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands(
    command: list[str], demo: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(demo)
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    if command[0] in NEEDS_NETWORK:
        # The same command on a list of files on this machine.
        make(demo / "lists")
        names = sorted(path.name for path in (demo / "lists").glob("*.gz"))
        (demo / "lists" / "wet.paths").write_text("\n".join(names))
        command = [command[0], "lists/wet.paths", *command[2:]]
    if "data_manifests" in " ".join(command):
        command = [word.replace("data_manifests", str(REPOSITORY / "data_manifests"))
                   for word in command]  # fmt: skip
    if "wet/*.gz" in command:
        command = [word.replace("wet/*.gz", "lists/*.gz") for word in command]
    command = [
        str(data_dir / word.removeprefix("../shared/data/"))
        if word.startswith("../shared/data") else word
        for word in command
    ]  # fmt: skip
    short = []
    if command[0] == "train":
        short = [*SHORT_RUN, SMALL_BATCH[command[1]]]
    elif command[0] == "mix":
        short = SHORT_MIX
    elif command[0] == "evaluate" and "held-out" not in command:
        short = SHORT_TASK
    assert main([*command, *(word for setting in short for word in ("--set", setting))]) == 0


def test_the_readme_shows_every_verb_and_recipe() -> None:
    verbs = {"inspect", "crawl", "models", "mine", "train", "plan", "mix", "swarm", "evaluate",
             "export"}  # fmt: skip
    assert {command[0] for command in COMMANDS} == verbs
    for stage in get_args(recipe_file.Stage):
        for name in recipe_file.shipped(stage):
            assert re.search(rf"^\|.*`{name}`.* \|", README, re.MULTILINE), name
    for section, model in load_recipe("default"):
        if section in ("name", "run", "input"):
            continue
        for field in type(model).model_fields:
            if field not in ("profile", "directory", "model", "min_chars", "ranges"):
                assert re.search(rf"[`.]{field}`", README), f"{section}.{field} is not explained"


def test_snippets(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb
    import pandas

    monkeypatch.chdir(demo)
    pages = read_manifest("out/demo/mined").counts.pages.written
    (by_pandas,) = (line for line in CODE if line.startswith("pandas."))
    (by_duckdb,) = (line for line in CODE if line.startswith("duckdb."))
    assert len(eval(by_pandas, {"pandas": pandas})) == pages
    assert len(eval(by_duckdb, {"duckdb": duckdb}).fetchall()) == pages


def test_datasets_snippet(demo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets comes with the extra 'train'")
    monkeypatch.chdir(demo)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (line,) = (line for line in CODE if line.startswith("datasets."))
    loaded = eval(line, {"datasets": datasets})
    assert loaded["train"].num_rows == read_manifest("out/demo/mined").counts.pages.written
