"""Who may average with us, download from us and be believed: by peer id, from memory.

hivemind's averager has no authorisation: it lets in whoever knows an address. So the transport
asks a guard, in every RPC, for every member of a group and for every announcement that it reads,
about the peer id that the connection or the record has proved. `TokenGuard` knows the tokens that
peers publish in the DHT; it reads them on a thread of its own, in each process that asks.

`allowed` answers at once and wakes that thread for a peer that is unknown. Who can wait awaits
`admit`: a newcomer is let in as soon as its token is seen. Nothing here ever blocks an event loop,
and of many strangers at once only a few are waited for.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from training.swarm import tokens
from training.swarm.keys import Untrusted
from training.swarm.revocation import Trust
from training.swarm.tokens import TokenFile

REFRESH_S = 15.0
WAIT_S = 3.0
_MOST_WAITERS = 4
_LOOK_S = 0.05
_SHORTEST_PAUSE_S = 1.0
_MOST_TOKENS = 10_000

Fetch = Callable[[], Mapping[str, str]]
"""The tokens that peers have published, by peer id. It may raise anything; the next may succeed."""


class Guard(Protocol):
    """Decides about peers, at once: event loops ask, and readers of many records."""

    def allowed(self, peer_id: str) -> bool:
        """Whether the peer of this libp2p id (base58) takes part now."""
        ...


class OpenGuard:
    """Lets everybody in: a run without authorisation."""

    def allowed(self, peer_id: str) -> bool:
        """Always."""
        return True


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class TokenGuard:
    """Lets in the peers whose tokens hold now by `trust`.

    It may be made before a fork: each process that asks has its own thread and memory. `own`: this
    peer's token, which it need not find in the DHT.
    """

    def __init__(
        self,
        trust: Trust,
        fetch: Fetch,
        own: TokenFile | None = None,
        *,
        refresh_s: float = REFRESH_S,
        wait_s: float = WAIT_S,
    ) -> None:
        self._trust = trust
        self._fetch = fetch
        self._own = own
        self._refresh_s = refresh_s
        self._wait_s = wait_s
        self._process = 0
        self._begin()

    def _begin(self) -> None:
        self._texts: dict[str, str] = {}
        self._wanted = threading.Event()
        self._looked = threading.Event()
        self._waited = False
        self._waiters = 0
        self._rounds = 0
        self._ended = False
        self.failure = ""
        """Why the last look-up failed; empty when it did not."""

    def allowed(self, peer_id: str) -> bool:
        """Whether `peer_id` takes part now, by what is known; an unknown one is looked up.

        Only the first question in a process waits, for the first look-up, at most `wait_s`, and not
        in an event loop: who reads the announcements once, at its start, must see who is there.
        """
        if not self.why_not(peer_id):
            return True
        if not self._waited and not _in_event_loop():
            self._waited = True
            self._looked.wait(self._wait_s)
            if not self.why_not(peer_id):
                return True
        self._wanted.set()
        return False

    async def admit(self, peer_id: str) -> bool:
        """As `allowed`, after one more look-up of an unknown one. In one event loop a process."""
        if self.allowed(peer_id):
            return True
        if self._waiters >= _MOST_WAITERS:
            return False
        self._waiters += 1
        try:
            return await self._appears(peer_id)
        finally:
            self._waiters -= 1

    async def _appears(self, peer_id: str) -> bool:
        deadline = time.monotonic() + self._wait_s
        # The look-up under way may have begun before the peer published: the next one counts.
        last = self._rounds + 2
        while self._rounds < last and time.monotonic() < deadline:
            self._wanted.set()
            await asyncio.sleep(_LOOK_S)
            if not self.why_not(peer_id):
                return True
        return False

    def why_not(self, peer_id: str) -> str:
        """Why `peer_id` is refused, in words; empty when it is let in."""
        self._start()
        if self._own is not None and self._holds(self._own.text(), peer_id):
            return ""
        text = self._texts.get(peer_id)
        if text is None:
            return "it has published no token that holds"
        try:
            self._trust.check(text, peer_id)
        except Untrusted as error:
            return str(error)
        return ""

    def refresh(self) -> None:
        """Look up the tokens now, and wait for it. What the fetch raises is kept in `failure`."""
        self._start()
        try:
            found = dict(self._fetch())
        except Exception as error:  # the DHT may be away in any way: we go on with what we have
            self.failure = f"{type(error).__name__}: {error}".replace("\n", " ")
        else:
            self.failure = ""
            self._take(found)
        self._rounds += 1
        self._looked.set()

    def _take(self, found: Mapping[str, str]) -> None:
        """Keep what is new and holds; a token that no longer holds makes room."""
        merged = dict(self._texts)
        for peer_id, text in found.items():
            if merged.get(peer_id) == text or not self._holds(text, peer_id):
                continue
            if len(merged) < _MOST_TOKENS or peer_id in merged:
                merged[peer_id] = text
        self._texts = {
            peer_id: text for peer_id, text in merged.items() if self._holds(text, peer_id)
        }

    def _holds(self, text: str, peer_id: str) -> bool:
        try:
            self._trust.check(text, peer_id)
        except Untrusted:
            return False
        return True

    def stop(self) -> None:
        """End the thread of this process."""
        self._ended = True
        self._wanted.set()

    def _start(self) -> None:
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._begin()
        threading.Thread(target=self._run, name="token guard", daemon=True).start()

    def _run(self) -> None:
        while not self._ended:
            self.refresh()
            time.sleep(_SHORTEST_PAUSE_S)  # strangers cannot make us ask the DHT more often
            self._wanted.wait(max(0.0, self._refresh_s - _SHORTEST_PAUSE_S))
            self._wanted.clear()


def dht_fetch(dht: Any, run: str, timeout_s: float = 10.0) -> Fetch:
    """The tokens in a hivemind DHT; not to be called in the process of the DHT itself."""

    def fetch() -> dict[str, str]:
        key = tokens.dht_key(run)
        found = dht.get(key, latest=True, return_future=True).result(timeout=timeout_s)
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            peer_id: entry.value
            for peer_id, entry in found.value.items()
            if isinstance(peer_id, str) and isinstance(entry.value, str)
        }

    return fetch


def publish(dht: Any, trust: Trust, own: TokenFile, peer_id: str) -> bool:
    """Put this peer's token into the DHT, until it expires. Raises Untrusted when it is void."""
    text = own.text()
    token = trust.check(text, peer_id)
    key = tokens.dht_key(trust.run)
    return bool(dht.store(key, text, subkey=peer_id, expiration_time=float(token.expires)))
