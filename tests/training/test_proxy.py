"""Whole proxy runs: alpha, gradients and traces against plain computations."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training import forked, step_examples
from tests.training.proxy_runs import (
    DOMAINS,
    SMOOTHING,
    lines,
    make_finished,
    make_place,
    make_reference,
    proxy,
    rank_process,
    recipe,
    sets,
    settings,
)
from tests.training.tiny_runs import Place
from training import microbatches, run_manifest
from training.batches import collate
from training.doremi import read_trace, read_weights
from training.examples import IGNORED, Example
from training.metrics import Window
from training.objectives import Losses, Objective, document_mask
from training.prepare import prepare
from training.proxy import Proxy
from training.recipe import Run
from training.strategy import Parallel, Placement

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
