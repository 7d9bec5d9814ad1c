"""The manifest of a run, and what makes two runs the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from models.tokenizer import save_tokenizer, tokenizer_digest, train_tokenizer
from pipelines.manifest import read_manifest
from scripts.cli import main
from tests.conftest import REPOSITORY
from tests.training.corpora import Page, make_corpus, random_pages
from training import identity, run_manifest
from training.domains import load_corpus, mixture
from training.recipe import TrainRecipe

SCHEMA = REPOSITORY / "data_manifests" / "run_manifest.schema.json"
HELD_OUT = {
    "examples": 3,
    "terms": {
        "next_token": {
            "loss": 1.5, "standard_error": 0.25, "accuracy": 0.5,
            "accuracy_standard_error": None, "labels": 40,
        }
    },
    "unigram_loss": 2.0,
    "perplexity": 4.5,
    "bits_per_byte": None,
}  # fmt: skip


def test_the_published_schema_is_the_model() -> None:
    """After a change: python -m training.run_manifest > data_manifests/run_manifest.schema.json"""
    assert json.loads(SCHEMA.read_text()) == run_manifest.RunManifest.model_json_schema()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A mined crawl and a tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    pages = {"bn": random_pages(20, seed=1), "hi": random_pages(10, seed=2)}
    manifest = make_corpus(folder / "mined", pages)
    texts = [page.text for listed in pages.values() for page in listed]
    save_tokenizer(train_tokenizer(texts, vocab_size=80), folder / "tokenizer", {})
    return manifest, str(folder / "tokenizer")


def recipe_of(manifest: str, tokenizer: str, **changes: dict[str, Any]) -> TrainRecipe:
    sections: dict[str, dict[str, Any]] = {
        "data": {"manifests": [manifest]},
        "model": {"tokenizer": tokenizer, "size": "tiny"},
        "schedule": {"steps": 10, "warmup_steps": 1},
        "output": {"directory": "somewhere"},
    }
    for section, fields in changes.items():
        sections[section] = sections.get(section, {}) | fields
    return TrainRecipe.model_validate(sections)


def identity_of(recipe: TrainRecipe) -> dict[str, Any]:
    corpus = load_corpus(recipe.data)
    found = identity.identity(recipe, corpus, list(mixture(corpus, recipe.data.weights)))
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    assert loaded == found  # as a checkpoint gives it back
    return loaded


def write(folder: Path, made: tuple[str, str]) -> run_manifest.RunManifest:
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_bytes(b"{}")
    recipe = recipe_of(*made, output={"directory": str(folder)})
    return run_manifest.write(
        folder, recipe=recipe, identity=identity_of(recipe), profile="bn", vocab_size=80, steps=10,
        counters={"examples": 320, "tokens": 4000, "skipped_steps": 1, "skipped_in_a_row": 0},
        pages={"read": 30, "held_out": 2, "damaged_row_group": 16}, damaged=["b.parquet:1", "a:0"],
        held_out={"total": HELD_OUT, "domains": {"bn": HELD_OUT}},
    )  # fmt: skip


def test_the_chain(made: tuple[str, str], tmp_path: Path) -> None:
    manifest, tokenizer = made
    written = write(tmp_path / "run", made)
    assert run_manifest.read(tmp_path / "run") == written
    (source,) = written.sources
    assert source.manifest_sha256 == hashlib.sha256(Path(manifest).read_bytes()).hexdigest()
    assert source.recipe_digest == read_manifest(manifest).recipe_digest
    assert written.tokenizer.sha256 == tokenizer_digest(tokenizer)
    assert [(entry.path, entry.bytes, entry.sha256) for entry in written.files] == [
        ("model/config.json", 2, hashlib.sha256(b"{}").hexdigest()),
        ("model/model.safetensors", 7, hashlib.sha256(b"weights").hexdigest()),
    ]
    assert sum(written.domains.values()) == pytest.approx(1)
    assert written.counts.pages == {"damaged_row_group": 16, "held_out": 2, "read": 30}
    assert written.counts.damaged == ("a:0", "b.parquet:1")
    assert written.held_out is not None
    assert written.held_out.domains["bn"].terms["next_token"].loss == 1.5


def test_the_same_run_gives_the_same_bytes_wherever_it_is(
    made: tuple[str, str], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, made)
    text = (tmp_path / "a/manifest.json").read_text()
    assert (tmp_path / "b/manifest.json").read_text() == text
    for place in (str(tmp_path), *made):
        assert place not in text


def test_manifest_of_a_run_before_there_were_proxies(
    made: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = write(tmp_path, made)
    assert written.proxy is None
    tree = json.loads((tmp_path / "manifest.json").read_text())
    assert tree.pop("proxy") is None
    (tmp_path / "manifest.json").write_text(json.dumps(tree))
    assert run_manifest.read(tmp_path) == written
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert written.recipe_digest in text
    assert "proxy" not in text


def test_inspect_shows_a_proxy(
    made: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = run_manifest.ProxyEntry(
        method="doremi", excess="hardest", step_size=0.5, smoothing=0.001,
        reference_sha256="ab" * 32, weights={"bn": 0.62505, "hi": 0.37495},
    )  # fmt: skip
    written = write(tmp_path, made).model_copy(update={"proxy": entry})
    (tmp_path / "manifest.json").write_text(written.to_json())
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, value in (
        ("proxy", "doremi, excess 'hardest', step size 0.5, smoothing 0.001"),
        ("its reference, SHA-256", "ab" * 32),
        ("domain", "weight that it found"),
        ("bn", "0.6250"),
        ("hi", "0.3750"),
    ):
        assert f"{name:<32}{value}" in lines


def test_inspect_shows_a_run(
    made: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step-00000004\n")
    assert main(["inspect", str(run)]) == 0
    assert capsys.readouterr().out == (
        "unfinished run; newest checkpoint: step-00000004; the same command goes on from it\n"
    )
    written = write(run, made)
    for target in (run, run / "manifest.json"):
        assert main(["inspect", str(target)]) == 0
        text = capsys.readouterr().out
        assert "10, 1 of them skipped" in text
        for digest in (written.recipe_digest, written.tokenizer.sha256,
                       written.sources[0].manifest_sha256, written.files[0].sha256):  # fmt: skip
            assert digest in text
        assert "next_token 1.500" in text
    assert main(["inspect", str(run), "--json"]) == 0
    assert capsys.readouterr().out.strip() == written.to_json().strip()
    assert main(["inspect", str(run), "--verify"]) == 2
    assert "is a training run" in capsys.readouterr().err


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest at .*: the run is not finished"):
        run_manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 1}')
    with pytest.raises(UserError, match=r"is no manifest of a run: tool_version: Field required"):
        run_manifest.read(tmp_path)


def test_how_the_work_is_done_does_not_matter(made: tuple[str, str]) -> None:
    base = identity_of(recipe_of(*made))
    for section, field, value in [
        ("run", "strategy", "zero3"), ("run", "device", "cpu"), ("run", "log_every", 3),
        ("run", "tensorboard", False), ("checkpoint", "every", 7), ("checkpoint", "keep", 5),
        ("evaluation", "every", 2), ("evaluation", "examples", 9), ("data", "readers", 2),
        ("data", "cache_bytes", 9),
        ("output", "directory", "elsewhere"), ("batch", "microbatch", 1), ("run", "compile", True),
        ("run", "activation_checkpointing", True), ("run", "max_skipped_steps", 9),
    ]:  # fmt: skip
        samples = {"samples": 32} if section == "batch" else {}
        other = identity_of(recipe_of(*made, **{section: {**samples, field: value}}))
        identity.check(base, other, "out")
        assert other == base


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": {"steps": 20}}, "schedule.steps = '20' is '10' there"),
        ({"run": {"seed": 1}}, "run.seed = '1' is '0' there"),
        ({"examples": {"masked": 0.2}}, "examples.masked = '0.2' is '0.15' there"),
        ({"batch": {"tokens": 64}}, "batch.samples = 'not set' is '32' there"),
        ({"data": {"weights": "uniform"}}, "data.weights = 'uniform' is 'proportional' there"),
        (
            {"data": {"weights": {"bn": 1, "hi": 3}}},
            "data.weights = '{'bn': 1.0, 'hi': 3.0}' is 'proportional' there",
        ),
    ],
)
def test_another_recipe_is_told_by_its_field(
    changes: dict[str, Any], said: str, made: tuple[str, str]
) -> None:
    if "batch" not in changes:
        changes = {**changes, "batch": {"samples": 32}}
    before = identity_of(recipe_of(*made, batch={"samples": 32}))
    with pytest.raises(UserError) as error:
        identity.check(before, identity_of(recipe_of(*made, **changes)), "out/run")
    assert str(error.value) == (
        f"'out/run' holds another run: {said}: set it back; or go on from that run's weights "
        "(gristmill export 'out/run' --output MODEL, then here --set model.init=MODEL and another "
        "--output); or throw it away with --restart"
    )


def test_other_files_are_told(made: tuple[str, str], tmp_path: Path) -> None:
    manifest, tokenizer = made
    before = identity_of(recipe_of(manifest, tokenizer))

    def said(now: dict[str, Any]) -> str:
        with pytest.raises(UserError) as error:
            identity.check(before, now, "out")
        return str(error.value)

    other = tmp_path / "tokenizer"
    save_tokenizer(train_tokenizer(["grain wheat flour"] * 5, vocab_size=20), other, {})
    assert "model.tokenizer has the SHA-256 '" in said(identity_of(recipe_of(manifest, str(other))))
    pages = {"bn": [*random_pages(20, seed=1), Page("one more.")], "hi": random_pages(10, seed=2)}
    grown = make_corpus(tmp_path / "mined", pages)
    now = identity_of(recipe_of(grown, tokenizer))
    digest = hashlib.sha256(Path(grown).read_bytes()).hexdigest()
    assert f"data.manifests have the SHA-256 '{digest[:12]}…', there '" in said(now)
    # A weights file of the same name with other numbers in it.
    assert "the weight of domain 'bn' is '0.5', there '0." in said(
        {**before, "domains": {"bn": 0.5, "hi": 0.5}}
    )
    (tmp_path / "init").mkdir()
    (tmp_path / "init/model.safetensors").write_bytes(b"x")
    started = identity_of(recipe_of(manifest, tokenizer, model={"init": str(tmp_path / "init")}))
    assert started["init_sha256"] == {"model.safetensors": hashlib.sha256(b"x").hexdigest()}
    assert "model.init has other weights" in said(started)
    assert "another version of Gristmill" in said({**before, "more": 1})
