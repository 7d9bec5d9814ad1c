"""Addresses of peers: their form, those that were met, and which of them answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from training.swarm import bootstrap
from training.swarm.bootstrap import Known, check_address

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
OTHER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


def at(port: int, host: str = "127.0.0.1", peer: str = PEER) -> str:
    return f"/ip4/{host}/tcp/{port}/p2p/{peer}"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("text", "host", "port", "transport"),
    [
        (at(31337, "203.0.113.7"), "203.0.113.7", 31337, "tcp"),
        (f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}", "2001:db8::1", 1, "tcp"),
        (f"/dns4/swarm.example.org/tcp/443/p2p/{PEER}", "swarm.example.org", 443, "tcp"),
        (f"/ip4/203.0.113.7/udp/7/quic/p2p/{PEER}", "203.0.113.7", 7, "udp"),
    ],
)
def test_addresses(text: str, host: str, port: int, transport: str) -> None:
    found = check_address(text)
    assert (found.host, found.port, found.transport, found.peer_id) == (host, port, transport, PEER)


@pytest.mark.parametrize(
    "text",
    ["", "203.0.113.7:31337", at(0), at(65536), at(1, "1.2.3"), at(1, peer="Qm"), f"/p2p/{PEER}",
     f"/ip6/1.2.3.4/tcp/1/p2p/{PEER}", f"/dns4/a b/tcp/1/p2p/{PEER}", "/ip4/203.0.113.7/tcp/1",
     f"/ip4/1.2.3.4/sctp/1/p2p/{PEER}", f"x/ip4/1.2.3.4/tcp/1/p2p/{PEER}",
     f"/ip4/1.2.3.4/tcp/١/p2p/{PEER}"],
)  # fmt: skip
def test_no_addresses(text: str) -> None:
    with pytest.raises(UserError, match="is no address of a peer: it looks like /ip4/"):
        check_address(text)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_user_error(text: str) -> None:
    try:
        assert check_address(text).text == text
    except UserError as error:
        assert "is no address" in str(error)


def test_met_peers_are_kept_newest_first(tmp_path: Path) -> None:
    now = [1000.0]
    known = Known(tmp_path / "a.json", lambda: now[0])
    assert known.addresses() == []
    known.add([at(1), at(2)])
    now[0] += 10
    known.add([at(2), "nonsense", f"/ip4/1.2.3.4/udp/7/quic/p2p/{PEER}"])
    assert known.addresses() == [at(2), at(1)]
    now[0] += 31 * 24 * 3600
    assert known.addresses() == []
    known.add([at(3)])
    assert Known(tmp_path / "a.json", lambda: now[0]).addresses() == [at(3)]


def test_few_of_many_are_kept(tmp_path: Path) -> None:
    known = Known(tmp_path / "a.json")
    known.add([at(port) for port in range(1, 200)])
    assert len(known.addresses()) == 64


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[["x", 1]]', '[["/ip4", "y"]]', "null"])
def test_a_damaged_file_is_empty(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    known = Known(tmp_path / "a.json")
    assert known.addresses() == []
    known.add([at(5)])
    assert json.loads((tmp_path / "a.json").read_text())[0][0] == at(5)


def test_candidates_without_oneself() -> None:
    other = at(2, peer=OTHER)
    assert bootstrap.candidates([at(1), other], [other, at(3)], own_id=PEER) == [other]
    assert bootstrap.candidates([at(1)], [at(1), at(3)]) == [at(1), at(3)]


def test_who_answers(listener: int) -> None:
    closed = free_port()
    udp = f"/ip4/127.0.0.1/udp/{closed}/quic/p2p/{PEER}"
    found = bootstrap.try_all([at(closed), at(listener), udp, "nonsense"])
    assert [bool(one.why) for one in found] == [True, False, False, True]
    assert found[0].why == "refuses the connection (no peer runs there)"
    assert bootstrap.try_all([]) == []


def test_the_way_in(listener: int) -> None:
    closed = at(free_port())
    assert bootstrap.entrance([closed, at(listener)], wait_s=0) == [at(listener)]
    assert bootstrap.entrance([], wait_s=0) == []
    with pytest.raises(UserError, match=r"no peer of the run answers: .* refuses the connection"):
        bootstrap.entrance([closed], wait_s=0)


def test_it_waits_for_the_first_peer() -> None:
    port = free_port()
    opened: list[socket.socket] = []
    timer = threading.Timer(0.5, lambda: opened.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    said: list[str] = []
    try:
        assert bootstrap.entrance([at(port)], wait_s=30, say=said.append) == [at(port)]
    finally:
        timer.join()
        opened[0].close()
    assert said == ["no peer answers yet (refuses the connection (no peer runs there)); "
                    "waiting up to 30 s"]  # fmt: skip


def test_a_signal_ends_the_wait() -> None:
    began = time.monotonic()
    assert bootstrap.entrance([at(free_port())], wait_s=60, stopped=lambda: True) == []
    assert time.monotonic() - began < 30
