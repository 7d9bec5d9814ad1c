"""Whole proxy runs: alpha, gradients and traces against plain computations, stops and refusals."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.errors import Fault, UserError
from models.tokenizer import save_tokenizer, train_tokenizer
from tests.training import forked, step_examples
from tests.training.corpora import make_corpus, random_pages
from tests.training.proxy_runs import DOMAINS, make_place, rank_process, recipe, sets
from tests.training.tiny_runs import Place
from training import loop, microbatches, run_manifest
from training.batches import collate
from training.doremi import ProxySettings, read_trace, read_weights, train_proxy
from training.examples import IGNORED, Example
from training.metrics import Clock, Window
from training.objectives import Losses, Objective, document_mask
from training.prepare import prepare
from training.proxy import Proxy
from training.recipe import Run
from training.strategy import Parallel, Placement

ALONE = Placement(0, 1, torch.device("cpu"), "single")
SMOOTHING = 0.01


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Tests share the processor with each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("crawl"))


@pytest.fixture(scope="module")
def reference(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    loop.train(recipe(place, folder, "schedule.steps=6", "run.seed=7"), quiet=True)
    return folder


def settings(reference: Path, **fields: Any) -> ProxySettings:
    return ProxySettings(str(reference), **{"smoothing": SMOOTHING, **fields})


def proxy(place: Place, reference: Path, folder: Path, *fields: str, **more: Any) -> dict[str, Any]:
    return train_proxy(recipe(place, folder, *fields), settings(reference), quiet=True, **more)


@pytest.fixture(scope="module")
def finished(
    place: Place, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A proxy with dropout, whose recipe asks for other weights than a proxy's."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, proxy(
        place, reference, folder, "model.dropout=0.1", "data.weights={bn = 1, en = 7, hi = 2}"
    )


def result(folder: Path) -> dict[str, bytes]:
    names = ("alpha.jsonl", "weights.json", "manifest.json", "model/model.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_trace_is_the_algorithm(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    trace = read_trace(folder)
    assert trace.domains == DOMAINS
    assert trace.alpha.shape == trace.excess.shape == trace.tokens.shape == (8, 3)
    assert (trace.excess >= 0).all()
    assert trace.excess.max() > 1e-3
    alpha = np.full(3, 1 / 3)
    for found, excess in zip(trace.alpha, trace.excess, strict=True):
        alpha = alpha * np.exp(excess)
        alpha = (1 - SMOOTHING) * alpha / alpha.sum() + SMOOTHING / 3
        assert found.tolist() == pytest.approx(alpha.tolist(), abs=1e-8)
    weights = read_weights(folder)
    assert list(weights) == list(DOMAINS)
    assert list(weights.values()) == pytest.approx(trace.alpha.mean(axis=0).tolist(), abs=1e-8)
    assert summary["weights"] == weights
    assert summary["status"] == "finished"


def test_run_says_what_it_was(reference: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    manifest = run_manifest.read(folder)
    assert manifest.domains == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    assert manifest.recipe["data"]["weights"] == "uniform"
    entry = manifest.proxy
    assert entry is not None
    assert (entry.method, entry.excess, entry.step_size, entry.smoothing) == (
        "doremi", "excess", 1.0, SMOOTHING,
    )  # fmt: skip
    assert entry.reference_sha256 == run_manifest.files.sha256_file(reference / "manifest.json")
    assert entry.weights == read_weights(folder)
    assert run_manifest.read(reference).proxy is None
    trace = read_trace(folder)
    train = lines(folder, "train")
    assert [line["step"] for line in train] == list(range(1, 9))
    for line, alpha, excess, tokens in zip(
        train, trace.alpha, trace.excess, trace.tokens, strict=True
    ):
        assert line["proxy"] == {
            "alpha": pytest.approx(dict(zip(DOMAINS, alpha, strict=True)), abs=1e-6),
            "excess": pytest.approx(dict(zip(DOMAINS, excess, strict=True)), abs=1e-6),
        }
        assert {name for name, count in zip(DOMAINS, tokens, strict=True) if count} == set(
            line["domains"]
        )
    assert len(lines(folder, "evaluation")) == 2


# One step against plain computations.


def three_domains(number: int) -> list[Example]:
    """Unequal: 1 in 6 is of 'bn', 2 of 'en', 3 of 'hi'."""
    return [
        replace(one, domain=(0, 2, 1, 2, 1, 2)[one.index % 6])
        for one in step_examples.examples("decoder", 0, number)
    ]


def naive_token_losses(objective: Objective, example: Example) -> list[Tensor]:
    """Of each label of one example, in double precision."""
    batch = collate([example])
    network = objective.network
    output = network.model(
        input_ids=batch["input_ids"],
        attention_mask=document_mask(batch["position_ids"]),
        position_ids=batch["position_ids"],
        use_cache=False,
    )
    logs = network.lm_head(output.last_hidden_state)[0].log_softmax(dim=-1)
    assert logs.dtype == torch.float64
    labels = batch["labels"][0].tolist()
    return [-logs[place, label] for place, label in enumerate(labels) if label != IGNORED]


@pytest.mark.parametrize("excess", ["excess", "hardest", "easiest"])
@pytest.mark.parametrize("microbatch", [6, 2])
def test_gradient_is_that_of_a_plain_computation(
    place: Place, reference: Path, tmp_path: Path, microbatch: int, excess: Any
) -> None:
    given = recipe(place, tmp_path, "examples.sequence_length=32")
    learning = Proxy(settings(reference, excess=excess))
    learning.prepared(given, prepare(given))
    learning.begin(ALONE, 0, {})
    parallel = Parallel(step_examples.objective("decoder"), ALONE, Run())
    examples = three_domains(6)
    dealt = microbatches.deal(examples, microbatches.count(6, microbatch, 1), 0, 1)
    assert len(dealt) == 6 // microbatch
    window = Window(parallel.objective.terms, DOMAINS, ALONE.device)
    learning.gradients(parallel, dealt, [collate(part) for part in dealt], window, seed=1, step=0)
    learning.settle(1, taken=True)
    learning.close()

    exact = copy.deepcopy(parallel.objective).double()
    exact.zero_grad()
    frozen = copy.deepcopy(learning._reference).double()
    means: list[Any] = [0.0] * 3
    excesses, tokens = np.zeros(3), np.zeros(3)
    for example in examples:
        others = naive_token_losses(frozen, example)
        for own, other in zip(naive_token_losses(exact, example), others, strict=True):
            mine, its = float(own.detach()), float(other)
            excesses[example.domain] += {
                "excess": max(mine - its, 0.0), "hardest": mine, "easiest": -its
            }[excess]  # fmt: skip
            tokens[example.domain] += 1
            means[example.domain] = means[example.domain] + own
    assert len(set(tokens)) == 3
    excesses /= tokens
    alpha = np.exp(excesses) / np.exp(excesses).sum() * (1 - SMOOTHING) + SMOOTHING / 3
    sum(alpha[domain] * means[domain] / tokens[domain] for domain in range(3)).backward()

    trace = read_trace(tmp_path)
    assert trace.tokens[0].tolist() == tokens.tolist()
    assert trace.excess[0].tolist() == pytest.approx(excesses.tolist(), abs=1e-5)
    assert trace.alpha[0].tolist() == pytest.approx(alpha.tolist(), abs=1e-5)
    expected = step_examples.whole(exact, gradient=True)
    for name, gradient in step_examples.whole(parallel.objective, gradient=True).items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=0, atol=1e-5, msg=name)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.01


def test_a_domain_without_an_example_has_no_part(
    place: Place, reference: Path, tmp_path: Path
) -> None:
    given = recipe(place, tmp_path)
    learning = Proxy(settings(reference))
    learning.prepared(given, prepare(given))
    learning.begin(ALONE, 0, {})
    parallel = Parallel(step_examples.objective("decoder"), ALONE, Run())
    examples = [replace(one, domain=0) for one in three_domains(4)]
    window = Window(parallel.objective.terms, DOMAINS, ALONE.device)
    learning.gradients(parallel, [examples], [collate(examples)], window, seed=1, step=0)
    learning.settle(1, taken=True)
    learning.close()
    trace = read_trace(tmp_path)
    assert trace.tokens[0, 1:].tolist() == trace.excess[0, 1:].tolist() == [0, 0]
    assert trace.alpha[0, 1] == trace.alpha[0, 2]
    # All of the gradient is alpha_1[0] times that of the mean loss.
    plain = Parallel(step_examples.objective("decoder"), ALONE, Run())
    step_examples.gradients(plain, "decoder", examples, of=4, microbatch=4, step=0)
    expected = step_examples.whole(plain.objective, gradient=True)
    for name, gradient in step_examples.whole(parallel.objective, gradient=True).items():
        torch.testing.assert_close(
            gradient, expected[name] * float(trace.alpha[0, 0]), rtol=0, atol=1e-6, msg=name
        )


# How the work is cut changes nothing.


def same_curve(folder: Path, other: Path, within: float) -> None:
    found, expected = read_trace(folder), read_trace(other)
    assert found.tokens.tolist() == expected.tokens.tolist()
    for name in ("alpha", "excess"):
        values = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(*values, rtol=0, atol=within, err_msg=name)
    for one, right in zip(lines(folder, "train"), lines(other, "train"), strict=True):
        assert one["loss"] == pytest.approx(right["loss"], abs=within)


@pytest.fixture(scope="module")
def plain(place: Place, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The proxy of one process and one microbatch a step, without dropout, slowly learning."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    proxy(place, reference, folder, *SLOW)
    return folder


SLOW = (
    "optimiser.learning_rate=1e-3", "schedule.steps=5", "evaluation.every=100",
    "evaluation.examples=2",
)  # fmt: skip
"""So that what is lost to rounding does not grow, and little is computed."""


@pytest.mark.parametrize("fields", [
    ("batch.microbatch=3",),
    ("batch.microbatch=2", "run.activation_checkpointing=true"),
    ("run.activation_checkpointing=true",),
])  # fmt: skip
def test_microbatches_change_nothing(
    place: Place, reference: Path, plain: Path, tmp_path: Path, fields: tuple[str, ...]
) -> None:
    proxy(place, reference, tmp_path / "run", *SLOW, *fields)
    same_curve(tmp_path / "run", plain, 1e-6)


def test_both_passes_draw_the_same_dropout(
    place: Place, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Objective.forward
    seen: list[Tensor] = []

    def forward(self: Objective, batch: Any) -> Losses:
        losses = compute(self, batch)
        if self.training:
            seen.append(losses.sums.detach())
        return losses

    monkeypatch.setattr(Objective, "forward", forward)
    fields = ("model.dropout=0.3", "batch.microbatch=3", "schedule.steps=3")
    proxy(place, reference, tmp_path / "run", *fields)
    assert len(seen) == 3 * 2 * 3  # steps, passes, microbatches
    for step in range(0, 18, 6):
        for number in range(3):
            assert torch.equal(seen[step + number], seen[step + 3 + number])


@pytest.mark.parametrize("microbatch", [8, 3])
def test_bf16_follows_fp32(
    place: Place, reference: Path, plain: Path, tmp_path: Path, microbatch: int
) -> None:
    fields = (*SLOW, f"batch.microbatch={microbatch}", "run.precision=bf16")
    proxy(place, reference, tmp_path / "run", *fields)
    same_curve(tmp_path / "run", plain, 0.02)
    assert read_trace(tmp_path / "run").alpha.tolist() != read_trace(plain).alpha.tolist()


STRATEGIES = ("ddp", "ddp-microbatches", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def two_ranks(place: Place, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    cases = []
    for name in STRATEGIES:
        strategy, _, more = name.partition("-")
        microbatch = 4 if strategy == "ddp" and not more else 2
        fields = (*SLOW, f"run.strategy={strategy}", f"batch.microbatch={microbatch}")
        cases.append((sets(place, folder / name, *fields), str(reference)))
    results = str(folder / "results.json")
    forked.start_ranks(rank_process, (step_examples.free_ports(1)[0], cases, results), 2)
    return folder


@pytest.mark.parametrize("number", range(len(STRATEGIES)))
def test_two_ranks_are_one_process(two_ranks: Path, plain: Path, number: int) -> None:
    """In one process group for all these runs."""
    folder = two_ranks / STRATEGIES[number]
    summary = json.loads((two_ranks / "results.json").read_text())[number]
    assert (summary["status"], summary["ranks"]) == ("finished", 2)
    assert summary["strategy"] == STRATEGIES[number].partition("-")[0]
    assert summary["weights"] == pytest.approx(read_weights(plain), abs=1e-6)
    same_curve(folder, plain, 1e-6)


# Stops, faults, and what is refused.


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
