"""Settings that contradict each other are told in one line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from models.errors import UserError
from training.swarm.gradients import Gradients
from training.swarm.settings import Collaboration


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"mode": "diloco"}, "needs diloco.local_batch"),
        (
            {"mode": "diloco", "diloco": {"local_batch": 4}, "target_batch": 8},
            "target_batch = '8' means nothing in mode = 'diloco'",
        ),
        ({"diloco": {"local_steps": 3}}, "means nothing in mode = 'sync'"),
        ({"labels_per_sample": [19.2, 0]}, "labels_per_sample = '[19.2, 0.0]' must be above 0"),
        ({"target_batch": 0}, "greater than or equal to 1"),
        ({"local_steps": 3}, "Extra inputs"),
    ],
)
def test_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as error:
        Collaboration(**values)
    assert told in str(error.value)


def test_defaults_of_the_paper() -> None:
    diloco = Collaboration(mode="diloco", diloco={"local_batch": 512}).diloco
    assert (diloco.local_steps, diloco.outer_learning_rate, diloco.outer_momentum) == (
        500,
        0.7,
        0.9,
    )


@pytest.mark.parametrize(("terms", "told"), [(1, "leave it out"), (3, "give 3 or none")])
def test_labels_per_sample_of_another_loss(terms: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Gradients([], terms, (19.2, 1.0))
