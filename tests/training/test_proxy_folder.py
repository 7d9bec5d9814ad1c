"""The folder of a proxy run: stops, faults, what is refused and what is left alone."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.errors import Fault, UserError
from models.tokenizer import save_tokenizer, train_tokenizer
from tests.training.corpora import make_corpus, random_pages
from tests.training.proxy_runs import (
    lines,
    make_finished,
    make_place,
    make_reference,
    proxy,
    recipe,
    settings,
)
from tests.training.tiny_runs import Place
from training import loop, run_manifest
from training.doremi import read_trace, train_proxy
from training.metrics import Clock
from training.objectives import Losses, Objective
from training.strategy import Placement

ALONE = Placement(0, 1, torch.device("cpu"), "single")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Tests share the processor with each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("crawl"))


@pytest.fixture(scope="module")
def reference(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(place, tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture(scope="module")
def finished(
    place: Place, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    return make_finished(place, reference, tmp_path_factory.mktemp("finished") / "run")


def result(folder: Path) -> dict[str, bytes]:
    names = ("alpha.jsonl", "weights.json", "manifest.json", "model/model.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


def _at_step(number: int, act: Callable[[], None]) -> Callable[..., None]:
    """A `Clock.step` that acts in a step."""
    count, taken = Clock.step, 0

    def step(self: Clock, *arguments: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == number:
            act()
        count(self, *arguments)

    return step


def _die(*_: Any, **__: Any) -> None:
    raise RuntimeError("died")


def test_stopped_and_resumed_is_uninterrupted(
    place: Place,
    reference: Path,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = ("model.dropout=0.1", "checkpoint.every=4")
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "step", _at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        summary = proxy(place, reference, folder, *fields)
    assert (summary["status"], summary["step"], summary["weights"]) == ("stopped", 3, None)
    assert len(read_trace(folder).alpha) == 3
    assert not (folder / "weights.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "step", _at_step(4, _die))
        with pytest.raises(RuntimeError, match="died"):
            proxy(place, reference, folder, *fields)
    assert len(read_trace(folder).alpha) == 7  # and the checkpoint is of step 4
    with (folder / "alpha.jsonl").open("a") as file:
        file.write('{"step": 8, "al')
    with monkeypatch.context() as patch:
        patch.setattr(run_manifest, "write", _die)
        with pytest.raises(Fault, match="cannot finish"):  # between weights.json and manifest.json
            proxy(place, reference, folder, *fields)
    assert (folder / "weights.json").exists()
    assert proxy(place, reference, folder, *fields)["status"] == "finished"
    assert result(folder) == result(finished[0])


def test_finished_proxy_has_nothing_to_do(
    place: Place,
    reference: Path,
    finished: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(finished[0], tmp_path / "run"))
    before = result(folder)
    monkeypatch.setattr(loop, "build_network", None)
    for text in (before["weights.json"], b'{"weights": {"bn": 1}}'):  # the manifest has them
        (folder / "weights.json").write_bytes(text)
        again = proxy(place, reference, folder, "model.dropout=0.1")
        assert again["status"] == "already finished"
        assert again["weights"] == finished[1]["weights"]
    assert result(folder) == {**before, "weights.json": text}


def _spoil(patch: pytest.MonkeyPatch, steps: Sequence[int], *, tokens: bool) -> None:
    """Let the losses of some steps be infinite: what is learned alone, or the tokens' too."""
    compute, calls = Objective.forward, 0

    def forward(self: Objective, batch: Any) -> Losses:
        nonlocal calls
        losses = compute(self, batch)
        if not self.training:
            return losses
        calls += 1
        if calls not in steps:
            return losses
        spoilt = losses._replace(sums=losses.sums * torch.inf)
        assert losses.tokens is not None
        return spoilt._replace(tokens=losses.tokens * torch.inf) if tokens else spoilt

    patch.setattr(Objective, "forward", forward)


@pytest.mark.parametrize("tokens", [False, True])
def test_skipped_step_moves_no_weight(
    place: Place, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    with monkeypatch.context() as patch:
        _spoil(patch, (1, 4), tokens=tokens)
        summary = proxy(place, reference, tmp_path / "run")
    assert (summary["status"], summary["skipped_steps"]) == ("finished", 2)
    trace = read_trace(tmp_path / "run")
    taken = [1, 2, 4, 5, 6, 7]
    assert np.isnan(trace.excess[[0, 3]]).all()
    assert not np.isnan(trace.excess[taken]).any()
    assert trace.alpha[0].tolist() == pytest.approx([1 / 3] * 3, abs=1e-9)
    assert trace.alpha[3].tolist() == trace.alpha[2].tolist() != trace.alpha[4].tolist()
    mean = trace.alpha[taken].mean(axis=0).tolist()
    assert list(summary["weights"].values()) == pytest.approx(mean, abs=1e-8)
    skipped = [line for line in lines(tmp_path / "run", "train") if line["step"] in (1, 4)]
    assert [list(line["proxy"]) for line in skipped] == [["alpha"], ["alpha"]]


def test_infinite_reference_skips_the_step(
    place: Place, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the proxy's own gradients would be good, and its weights have nothing to go by."""
    compute, calls = Objective.token_losses, 0

    def token_losses(self: Objective, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return compute(self, batch) * (torch.nan if calls == 2 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "token_losses", token_losses)
        summary = proxy(place, reference, tmp_path / "run")
    assert (summary["status"], summary["skipped_steps"]) == ("finished", 1)
    assert lines(tmp_path / "run", "skipped")[0]["step"] == 2
    assert np.isnan(read_trace(tmp_path / "run").excess[1]).all()


def _refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as error:
        work()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_proxy_is_refused(
    place: Place, reference: Path, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = finished
    before = result(folder)
    given = recipe(place, folder, "model.dropout=0.1")
    for fields, said in (
        ({"step_size": 0.5}, "the proxy's step_size = '0.5' is '1.0' there"),
        ({"smoothing": 0.001}, "the proxy's smoothing = '0.001' is '0.01' there"),
        ({"excess": "hardest"}, "the proxy's excess = 'hardest' is 'excess' there"),
    ):
        said_now = _refusal(lambda fields=fields: train_proxy(given, settings(reference, **fields)))
        assert said_now.startswith(f"'{folder}' holds another run: {said}: set it back")
    other = tmp_path / "reference"
    loop.train(recipe(place, other, "schedule.steps=3"), quiet=True)
    digests = [run_manifest.files.sha256_file(one / "manifest.json") for one in (other, reference)]
    assert (
        f"the reference's manifest has the SHA-256 '{digests[0][:12]}…', there '{digests[1][:12]}…'"
    ) in _refusal(lambda: train_proxy(given, settings(other)))
    assert "holds another run: a proxy's of DoReMi: " in _refusal(lambda: loop.train(given))
    run = recipe(place, other, "schedule.steps=3", "data.weights=uniform")
    loop.train(run, restart=True, quiet=True)
    assert "another run: one that is no proxy" in _refusal(
        lambda: train_proxy(run, settings(reference))
    )
    assert result(folder) == before


def test_restart_takes_away_what_a_proxy_wrote(
    place: Place, reference: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    proxy(place, reference, folder, "schedule.steps=3")
    proxy(place, reference, folder, "schedule.steps=4", restart=True)
    assert len(read_trace(folder).alpha) == 4
    loop.train(recipe(place, folder, "schedule.steps=3"), restart=True, quiet=True)
    assert not (folder / "alpha.jsonl").exists()
    assert not (folder / "weights.json").exists()
    before = (reference / "manifest.json").read_bytes()
    assert "--restart would throw away" in _refusal(
        lambda: proxy(place, reference, reference, restart=True)
    )
    assert (reference / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", ["weights.json", "alpha.jsonl"])
def test_files_of_somebody_else_stay(
    place: Place, reference: Path, tmp_path: Path, name: str, restart: bool
) -> None:
    (tmp_path / name).write_text('{"mine": 1}\n')
    assert f"holds '{name}', which no run of" in _refusal(
        lambda: proxy(place, reference, tmp_path, restart=restart)
    )
    assert (tmp_path / name).read_text() == '{"mine": 1}\n'
    if name == "weights.json":  # of no interest to a plain run
        given = recipe(place, tmp_path, "schedule.steps=3")
        loop.train(given, restart=restart, quiet=True)
        assert (tmp_path / name).read_text() == '{"mine": 1}\n'


def test_proxy_that_died_at_once_leaves_nothing_to_a_plain_run(
    place: Place, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "step", _at_step(2, _die))
        with pytest.raises(RuntimeError, match="died"):
            proxy(place, reference, folder)
    assert len(read_trace(folder).alpha) == 2
    loop.train(recipe(place, folder, "schedule.steps=3"), quiet=True)
    assert not (folder / "alpha.jsonl").exists()


def test_restart_keeps_the_weights_file_of_the_new_run(
    place: Place, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished[0], tmp_path / "run"))
    before = result(folder)
    given = recipe(place, folder, f"data.weights={folder / 'weights.json'}")
    said = _refusal(lambda: loop.train(given, restart=True, quiet=True))
    assert f"would throw away '{folder / 'weights.json'}', which the run needs" in said
    assert result(folder) == before


def test_what_a_proxy_cannot_be(place: Place, reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert _refusal(lambda: proxy(place, reference, out, "model.family=albert")) == (
        "model.family = 'albert': a proxy compares next-token losses, set 'decoder'"
    )
    assert _refusal(lambda: proxy(place, reference, out, "data.languages=['bn']")) == (
        "data.by = 'language' gives one domain, 'bn': there is nothing to weigh; divide the pages "
        "by more: language, bucket, host, source"
    )
    assert not out.exists()


def test_reference_that_does_not_fit(place: Place, reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    nowhere = tmp_path / "nowhere"
    assert _refusal(lambda: proxy(place, nowhere, out)) == (
        f"reference '{nowhere}': no manifest at '{nowhere}/manifest.json' (FileNotFoundError): the "
        "run is not finished: finish it with `gristmill train`, or name another one"
    )
    for field, before, now in (
        ("data.held_out", "0.1", "0.2"),
        ("examples.sequence_length", "32", "16"),
        ("examples.cross_document_attention", "False", "True"),
    ):
        said = _refusal(
            lambda field=field, now=now: proxy(place, reference, out, f"{field}={now.lower()}")
        )
        assert said == (
            f"reference '{reference}' was trained with {field} = '{before}', not '{now}': set "
            f"{field}={before.lower()}, or train another reference"
        )
    other = tmp_path / "tokenizer"
    save_tokenizer(train_tokenizer(["grain wheat flour"] * 5, vocab_size=20), other, {})
    assert f"reference '{reference}' has a tokenizer of the SHA-256 '" in _refusal(
        lambda: proxy(Place(place.manifest, str(other)), reference, out)
    )
    pages = {"bn": random_pages(20, seed=1), "hi": random_pages(20, seed=2)}
    crawl = make_corpus(tmp_path / "mined", pages)
    digests = [run_manifest.files.sha256_file(path) for path in (place.manifest, crawl)]
    assert _refusal(lambda: proxy(Place(crawl, place.tokenizer), reference, out)) == (
        f"reference '{reference}' was trained on the crawls with the SHA-256 "
        f"'{digests[0][:12]}…', data.manifests have '{digests[1][:12]}…': give both the same ones"
    )
    albert = tmp_path / "albert"
    loop.train(recipe(place, albert, "schedule.steps=3", "model.family=albert"), quiet=True)
    assert _refusal(lambda: proxy(place, albert, out)) == (
        f"reference '{albert}' is of model.family = 'albert': a proxy needs the token losses of a "
        "'decoder'"
    )
    assert not out.exists()


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_reference(place: Place, tmp_path: Path, damage: str) -> None:
    reference = tmp_path / "reference"
    loop.train(recipe(place, reference, "schedule.steps=3"), quiet=True)
    weights = reference / "model" / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        weights.unlink()
    assert _refusal(lambda: proxy(place, reference, tmp_path / "run")) == (
        f"reference '{reference}': 'model/model.safetensors' is missing or differs from its "
        "manifest: export the run's last checkpoint again, or train it again"
    )
