"""A port that somebody has is told in one line."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from models.errors import UserError
from training.swarm import ports

HERE = "127.0.0.1"


@pytest.fixture
def held() -> Iterator[int]:
    """A port that another program listens at, and would share, as p2pd does."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((HERE, 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_ENDS_S", 0.0)


def test_in_use(held: int) -> None:
    assert not ports.is_free(HERE, held)
    with pytest.raises(UserError) as raised:
        ports.check(HERE, held)
    assert str(raised.value) == (
        f"peer.port = '{held}' is in use at '127.0.0.1': end what listens there, or give another "
        "one with --set peer.port=N (0: any free one)"
    )


def test_free(held: int) -> None:
    ports.check(HERE, 0)
    with socket.create_server((HERE, 0)) as there:
        port = there.getsockname()[1]
    ports.check(HERE, port)
    assert ports.is_free(HERE, port)  # trying it did not take it


def test_a_killed_process_may_take_a_moment_to_end(
    held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(ports, "_ENDS_S", 60.0)
    monkeypatch.setattr(ports, "_RETRY_S", 0.0)
    monkeypatch.setattr(ports, "is_free", lambda host, port: next(answers))
    ports.check(HERE, held)
    assert next(answers, None) is None


def test_no_address_of_this_machine() -> None:
    with pytest.raises(UserError) as raised:
        ports.check("192.0.2.77", 9000)  # of the range for documentation
    assert str(raised.value).startswith("peer.host = '192.0.2.77', peer.port = '9000' cannot be")
    assert "\n" not in str(raised.value)
