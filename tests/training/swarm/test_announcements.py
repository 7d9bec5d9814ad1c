"""Announcements through the DHT's values: back as they were, or not at all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.swarm import announcements
from training.swarm.transport import agreed_hash
from training.swarm.types import Announcement, PeerInfo

ONE = Announcement(
    PeerInfo("12D3KooWA", "anna", "node", "cuda"), 4, 96, 12.5, "a" * 64, 1.7e9, 2.5, 1 << 30
)


@pytest.mark.parametrize("loss", [2.5, None, math.inf])
def test_back_as_it_was(loss: float | None) -> None:
    told = replace(ONE, loss=loss)
    assert announcements.from_value(told.peer.peer_id, announcements.to_value(told)) == told


def test_a_loss_that_is_nan_comes_through() -> None:
    found = announcements.from_value("x", announcements.to_value(replace(ONE, loss=math.nan)))
    assert found is not None and found.loss is not None and math.isnan(found.loss)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", -1), ("epoch", True), ("epoch", 1.0), ("epoch", 1 << 60), ("samples", None),
        ("rate", math.inf), ("rate", 1), ("rate", -1.0), ("time", math.nan), ("role", "king"),
        ("name", 3), ("name", "x" * 201), ("state_hash", b""), ("loss", "low"), ("role", []),
        ("name", "a\x1b[2J"), ("device", "a\nb"), ("state_hash", "../x"), ("state_hash", "a" * 63),
    ],
)  # fmt: skip
def test_a_wrong_field_is_no_announcement(field: str, value: object) -> None:
    assert announcements.from_value("x", {**announcements.to_value(ONE), field: value}) is None


def test_one_that_left_is_no_announcement() -> None:
    assert announcements.from_value("x", announcements.LEFT) is None


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


@given(st.dictionaries(st.sampled_from(sorted(announcements.to_value(ONE))), plain) | plain)
def test_a_strangers_value_never_fails(value: Any) -> None:
    announcements.from_value("x", value)


def told(*pairs: tuple[int, str]) -> list[Announcement]:
    return [replace(ONE, epoch=epoch, state_hash=digest) for epoch, digest in pairs]


@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        ([], None),
        ([(3, "a")], "a"),
        ([(3, "")], None),
        ([(3, "a"), (4, "")], "a"),
        ([(3, "a"), (3, "b")], None),
        ([(3, "a"), (3, "a"), (4, "b")], "a"),
        ([(3, "a"), (3, "a"), (4, "b"), (4, "b")], "b"),
        ([(4, "a"), (4, "a"), (4, "b"), (4, "b"), (4, "b")], "b"),
        ([(3, "a"), (4, "a")], None),
    ],
)
def test_the_state_that_two_announce(heard: list[tuple[int, str]], expected: str | None) -> None:
    assert agreed_hash(told(*heard)) == expected
