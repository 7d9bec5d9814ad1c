"""Asking a peer's DHT process whom it is connected to, and to call peers again.

hivemind forgets a peer that refused it or did not answer and never asks it again, and libp2p
forgets the address of one that was away for long: so peers are called again by their whole
addresses. Each call has an end, since the process that answers may be gone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

_log = logging.getLogger(__name__)
_CONNECT_S = 5.0
_ANSWER_S = 20.0


def connected(dht: Any) -> list[str]:
    """Addresses of the peers that the DHT is connected to; none when it does not answer."""
    return _asked(dht, _addresses) or []


def call(dht: Any, addresses: Sequence[str]) -> int:
    """Connect to the peers of `addresses` and greet them, so that each knows the other; how many
    answered."""
    return _asked(dht, functools.partial(_call, addresses=tuple(addresses))) or 0


def _asked(dht: Any, work: Any) -> Any:
    try:
        return dht.run_coroutine(work, return_future=True).result(timeout=_ANSWER_S)
    except (FutureTimeout, OSError, RuntimeError, EOFError):
        return None


async def _addresses(_: Any, node: Any) -> list[str]:
    return [
        f"{address}/p2p/{info.peer_id}"
        for info in await node.p2p.list_peers()
        for address in info.addrs
    ]  # fmt: skip


async def _call(_: Any, node: Any, addresses: Sequence[str]) -> int:
    node.blacklist.clear()
    found = await asyncio.gather(*(_greet(node, one) for one in addresses), return_exceptions=True)
    for one in found:
        if isinstance(one, Exception):
            _log.debug("a peer did not answer: %r", one)
    return sum(one is True for one in found)


async def _greet(node: Any, address: str) -> bool:
    from hivemind.p2p import PeerID  # noqa: PLC0415  # in the process of the DHT, which has it
    from hivemind.utils.multiaddr import Multiaddr  # noqa: PLC0415

    way, _, name = address.rpartition("/p2p/")
    peer_id = PeerID.from_base58(name)
    await asyncio.wait_for(node.p2p._client.connect(peer_id, [Multiaddr(way)]), _CONNECT_S)
    return await node.protocol.call_ping(peer_id) is not None
