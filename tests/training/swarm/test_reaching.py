"""Peers that started apart find each other when one calls the other."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from training.swarm import reaching
from training.swarm.identity import load_or_create
from training.swarm.transport import Taken, start_dht

pytestmark = [pytest.mark.peers, pytest.mark.slow]


def test_a_call_joins_two_networks() -> None:
    here = ("/ip4/127.0.0.1/tcp/0",)
    first, second = (start_dht(role="node", host_addresses=here) for _ in range(2))
    try:
        ways = [str(address) for address in first.get_visible_maddrs()]
        assert reaching.connected(second) == []
        until = time.time() + 60
        assert first.store("key", "before", expiration_time=until)
        assert second.get("key", latest=True) is None
        nobody = ways[0].rsplit("/tcp/", 1)[0] + f"/tcp/1/p2p/{second.peer_id}"
        assert reaching.call(second, [nobody]) == 0
        assert reaching.call(second, ways[:1]) == 1
        assert [one.rpartition("/")[2] for one in reaching.connected(second)] == [
            str(first.peer_id)
        ]  # fmt: skip
        found = second.get("key", latest=True)
        assert found is not None and found.value == "before"
        assert second.store("other", "after", expiration_time=until)
        found = first.get("other", latest=True)  # it knows the caller, too
        assert found is not None and found.value == "after"
        os.kill(second.pid, signal.SIGKILL)  # nobody waits for ever for a process that is gone
        began = time.monotonic()
        assert reaching.call(second, ways[:1]) == 0
        assert time.monotonic() - began < 60
    finally:
        for dht in (first, second):
            dht.shutdown_timeout = 1.0
            dht.shutdown()
            if dht.is_alive():
                dht.kill()


def test_a_copied_identity_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    load_or_create(key)
    here = ("/ip4/127.0.0.1/tcp/0",)
    first = start_dht(role="node", host_addresses=here, identity_path=key)
    try:
        ways = [str(address) for address in first.get_visible_maddrs()]
        copy = tmp_path / "copy.key"
        shutil.copy(key, copy)
        with pytest.raises(Taken) as raised:
            start_dht(ways[:1], role="node", host_addresses=here, identity_path=copy)
        assert str(raised.value).startswith(f"a peer with the identity in '{copy}' is in the run")
    finally:
        first.shutdown_timeout = 1.0
        first.shutdown()
