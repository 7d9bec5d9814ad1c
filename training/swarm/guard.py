"""Who may average with us and download from us: asked by peer id, answered from memory.

hivemind's averager has no authorisation: it lets in whoever knows an address. So the transport
asks a guard, in every RPC and for every member of a group, about the peer id that the connection
has proved. `TokenGuard` knows the tokens that peers publish in the DHT; it reads them on a thread
of its own, in each process that asks. For an unknown peer it looks again, and the question waits up
to three seconds for that; of many such questions at once only a few wait, so that strangers cannot
hold up the averager.
"""

from __future__ import annotations

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
    """Decides about peers. It may take a few seconds: the transport asks on a thread pool."""

    def allowed(self, peer_id: str) -> bool:
        """Whether the peer of this libp2p id (base58) takes part now."""
        ...


class OpenGuard:
    """Lets everybody in: a run without authorisation."""

    def allowed(self, peer_id: str) -> bool:
        """Always."""
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
        self._waiters = threading.Semaphore(_MOST_WAITERS)
        self._rounds = 0
        self._ended = False
        self.failure = ""
        """Why the last look-up failed; empty when it did not."""

    def allowed(self, peer_id: str) -> bool:
        """Whether `peer_id` takes part now, after one more look-up of an unknown one."""
        if not self.why_not(peer_id):
            return True
        waiters = self._waiters
        if not waiters.acquire(blocking=False):
            return False
        try:
            return self._appears(peer_id)
        finally:
            waiters.release()

    def _appears(self, peer_id: str) -> bool:
        deadline = time.monotonic() + self._wait_s
        # The look-up under way may have begun before the peer published: the next one counts.
        last = self._rounds + 2
        while self._rounds < last and time.monotonic() < deadline:
            self._wanted.set()
            time.sleep(_LOOK_S)
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
