"""Gradients of several peers add up to that of one big batch, as `training.microbatches` has it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.training import step_examples
from tests.training.swarm.toy_peers import Regression
from training.batches import collate
from training.recipe import Run
from training.strategy import Parallel, Placement
from training.swarm.epochs import Brought
from training.swarm.gradients import Gathered, Gradients

SHARES = ([0, 1, 2], [3], [4, 5, 6, 7])


def member(gathered: Gathered) -> Brought:
    return Brought("", float(gathered.samples), 0, gathered.samples, "", "node", 1, 1,
                   tuple(gathered.labels))  # fmt: skip


def averaged(gradients: Gradients, parts: list[Gathered]) -> list[torch.Tensor]:
    """What a transport gives: the mean weighted by samples."""
    total = sum(part.samples for part in parts)
    means = [gradients.means(part) for part in parts]
    return [
        sum(tensor * part.samples for tensor, part in zip(one, parts, strict=True)) / total
        for one in zip(*means, strict=True)
    ]


@pytest.mark.parametrize("family", ["albert", "decoder"])
def test_sum_over_peers_is_the_gradient_of_one_big_batch(family: str) -> None:
    parallel = Parallel(
        step_examples.objective(family), Placement(0, 1, torch.device("cpu"), "single"), Run()
    )
    examples = step_examples.examples(family, 0, 8)
    passed = step_examples.gradients(parallel, family, examples, of=8, microbatch=8, step=0)
    expected = [one.grad for one in parallel.objective.network.parameters()]

    objective = step_examples.objective(family)
    parameters = list(objective.network.parameters())
    gradients = Gradients(parameters, len(objective.terms))
    parts = []
    for share in SHARES:
        gathered = Gathered()
        for one in share:  # microbatches of one example
            found = gradients.of(objective(collate([examples[one]])))
            assert found is not None
            gathered.add(found)
        parts.append(gathered)
    whole = gradients.whole(averaged(gradients, parts), [member(part) for part in parts])
    for found, wanted in zip(whole, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    together = Gathered()
    for part in parts:
        together.add(part)
    assert together.samples == 8
    assert together.loss == pytest.approx(passed.window.means()["loss"], abs=2e-6)
    norm = torch.nn.utils.get_total_norm(expected)
    assert gradients.own_norm(together) == pytest.approx(float(norm), rel=1e-5)


def test_labels_per_sample_is_the_loss_by_expected_labels() -> None:
    network = Regression(2)
    parameters = list(network.parameters())
    losses = network(range(6))
    (losses.sums.sum(dim=1) / torch.tensor([12.0, 9.0])).sum().backward()
    gradients = Gradients(parameters, 2, (2.0, 1.5))
    parts = [gradients.of(network(range(4))), gradients.of(network(range(4, 6)))]
    assert len(gradients.means(parts[0])) == len(parameters)
    whole = gradients.whole(averaged(gradients, parts), [member(part) for part in parts])
    for found, parameter in zip(whole, parameters, strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-6)


def test_weight_that_the_round_capped_takes_its_labels_along() -> None:
    """Half the weight: as if half of the samples, and of the labels, had come."""
    network = Regression()
    gradients = Gradients(list(network.parameters()), 1)
    a, b = gradients.of(network([1, 2])), gradients.of(network([3, 4, 5, 6]))
    means = [
        (x * 2 + y * 2) / 4
        for x, y in zip(gradients.means(a), gradients.means(b), strict=True)
    ]  # fmt: skip
    capped = Brought("", 2.0, 0, 4, "", "node", 1, 1, tuple(b.labels))
    found = gradients.whole(means, [member(a), capped])
    labels = a.labels[0] + b.labels[0] / 2
    for one, x, y in zip(found, a.sums, b.sums, strict=True):
        torch.testing.assert_close(one, (x + y / 2) / labels, rtol=1e-5, atol=1e-7)


def test_microbatch_that_is_not_finite_counts_nothing() -> None:
    network = Regression()
    gradients = Gradients(list(network.parameters()), 1)
    losses = network([1, 2])
    assert gradients.of(losses._replace(sums=losses.sums * math.inf)) is None
    # A finite loss whose gradient is not: the root of 0.
    root: Any = (network.first.weight * 0).sum().sqrt()
    assert gradients.of(losses._replace(sums=losses.sums + root)) is None


def test_nobody_without_samples_changes_the_average() -> None:
    network = Regression(2)
    gradients = Gradients(list(network.parameters()), 2)
    a, none = gradients.of(network([1, 2])), Gathered()
    none.labels = [0.0, 0.0]
    alone = gradients.whole(averaged(gradients, [a]), [member(a)])
    both = gradients.whole(averaged(gradients, [a, none]), [member(a), member(none)])
    assert all(torch.equal(x, y) for x, y in zip(alone, both, strict=True))
    assert none.loss is None
