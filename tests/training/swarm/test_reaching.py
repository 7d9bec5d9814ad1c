"""Peers that started apart find each other when one calls the other."""

from __future__ import annotations

import os
import signal
import time

import pytest

from training.swarm import reaching
from training.swarm.transport import start_dht

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
