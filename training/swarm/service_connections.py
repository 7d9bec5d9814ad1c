"""Connections to a public service: who sends no request is cut off, and nobody holds very many.

uvicorn answers 503 beyond so many connections, and h11 waits for ever for the rest of a request:
one caller with a few hundred half requests would shut out all others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 1000
_MOST_OF_ONE = 64  # many peers may share an address; each asks for a moment
_LOOK_S = 4.0


def limited(most_of_one: int = _MOST_OF_ONE, look_s: float = _LOOK_S) -> type[asyncio.Protocol]:
    """uvicorn's protocol for one server. most_of_one: connections of one address, 0 for no limit
    (behind a proxy, which all come through). look_s: without a request at two looks, one ends."""
    held: Counter[str] = Counter()

    class Limited(H11Protocol):
        """HTTP/1.1, with an end."""

        def connection_made(self, transport: Any) -> None:
            address = transport.get_extra_info("peername")
            self._who = str(address[0]) if address else ""
            held[self._who] += 1
            super().connection_made(transport)
            self._was_idle = False
            self._look = self.loop.call_later(look_s, self._look_again)
            if most_of_one and held[self._who] > most_of_one:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._look.cancel()
            held[self._who] -= 1
            if held[self._who] <= 0:
                del held[self._who]
            super().connection_lost(exc)

        def _look_again(self) -> None:
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and self._was_idle:
                self.transport.abort()
                return
            self._was_idle = is_idle
            self._look = self.loop.call_later(look_s, self._look_again)

    return Limited
