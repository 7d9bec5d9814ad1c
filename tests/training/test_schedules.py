"""Golden values at the edges; properties in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.recipe import Schedule
from training.schedules import learning_rate_factor

DECAYS = ("linear", "cosine", "constant", "exponential")


def factors(schedule: Schedule) -> list[float]:
    return [learning_rate_factor(schedule, step) for step in range(schedule.steps + 1)]


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.8681980515339464, 0.55, 0.2318019484660536, 0.1]),
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("exponential", [0.25, 0.5, 0.75, 1.0, 0.5623413251903491, 0.31622776601683794,
                         0.17782794100389226, 0.1]),
    ],
)  # fmt: skip
def test_golden_values(decay: str, expected: list[float]) -> None:
    schedule = Schedule(steps=7, warmup_steps=3, decay=decay, final_ratio=0.1)
    assert factors(schedule) == pytest.approx(expected, rel=1e-12)


def test_without_warmup_the_first_step_is_full() -> None:
    assert learning_rate_factor(Schedule(steps=1, warmup_steps=0), 0) == 1.0


def test_sahajberts_schedule() -> None:
    schedule = Schedule(steps=1_000_000, warmup_steps=5_000, decay="linear")
    assert learning_rate_factor(schedule, 0) == 1 / 5_001
    assert learning_rate_factor(schedule, 5_000) == 1.0
    assert learning_rate_factor(schedule, 125_000) == pytest.approx(875_000 / 995_000)
    assert learning_rate_factor(schedule, 1_000_000) == 0.0


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    steps = draw(st.integers(1, 60))
    return Schedule(
        steps=steps,
        warmup_steps=draw(st.integers(0, steps - 1)),
        decay=draw(st.sampled_from(DECAYS)),
        final_ratio=draw(st.floats(0.001, 1.0)),
    )


@given(schedules())
def test_up_then_down_within_bounds(schedule: Schedule) -> None:
    values = factors(schedule)
    top = schedule.warmup_steps
    assert values[top] == 1.0
    assert all(0 < value <= 1 for value in values)
    assert values[: top + 1] == sorted(values[: top + 1])
    # Rounding may lift a value that hardly falls by an ulp.
    pairs = zip(values[top:], values[top + 1 :], strict=False)
    assert all(later <= earlier + 1e-12 for earlier, later in pairs)
    end = 1.0 if schedule.decay == "constant" else schedule.final_ratio
    assert values[-1] == pytest.approx(end, abs=1e-12)


@given(schedules(), st.integers(0, 100))
def test_it_stays_at_its_end(schedule: Schedule, beyond: int) -> None:
    end = learning_rate_factor(schedule, schedule.steps)
    assert learning_rate_factor(schedule, schedule.steps + beyond) == end
