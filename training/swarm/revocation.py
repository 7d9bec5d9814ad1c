"""Whom a peer trusts at this minute: the authority's keys, and what it took back.

The authority publishes one sealed list: which keys sign now, which did once, whose tokens are
void. A peer polls it (`Poller`) every 20 s from the token service or the DHT and keeps the newest
in a file, and every process of the peer reads that file when it changes: a revoked peer is refused
within a minute. A list is signed by every key in force, and by retired ones whose private half is
still there, so that a peer which knows any of them learns the others: so keys are rotated while
the run goes on, and a peer that was away meanwhile comes back.

What it cannot do: a key that was stolen can sign a list too. Who has seen the list that retires it
no longer believes it; a peer that starts with an old run file still does, so give out a new one.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import files
from models.errors import UserError
from training.swarm import keys, tokens
from training.swarm.keys import PublicKeys, Untrusted
from training.swarm.tokens import Token

KIND = "revocation list"
POLL_S = 20.0
DHT_LIFE_S = 24 * 3600
"""How long a list stands in the DHT: its record expires so long after the list was signed.

Newer lists expire later, so none hides behind an older one; and while the coordinator is away,
whoever joins learns what was revoked for longer than a usual token lasts.
"""
_LOOK_S = 0.5

Source = Callable[[], str | bytes | None]
"""Fetches a sealed list: None when there is none. It may raise OSError, UserError, Fault."""


@dataclass(frozen=True)
class RevocationList:
    """What the authority says about its keys and about tokens that it takes back.

    `keys` sign now, `retired` did once: public keys by id. `users`: tokens of the user issued up
    to that second are void. `peers`: every token of these is void. `serial` grows with each change.
    """

    run: str
    serial: int
    issued: int
    keys: PublicKeys
    retired: PublicKeys
    users: Mapping[str, int]
    peers: tuple[str, ...]

    def body(self) -> dict[str, Any]:
        """As it is sealed."""
        return {
            "run": self.run,
            "serial": self.serial,
            "issued": self.issued,
            "keys": dict(self.keys),
            "retired": dict(self.retired),
            "users": dict(self.users),
            "peers": list(self.peers),
        }

    def voids(self, token: Token) -> str:
        """Why `token` is void by this list; empty when it is not."""
        if token.key not in self.keys:
            return f"its key '{token.key}' was retired"
        if token.peer in self.peers:
            return f"the peer '{token.peer}' was revoked"
        if token.issued <= self.users.get(token.user, -1):
            return f"the user '{token.user}' was revoked"
        return ""


def dht_key(run: str) -> str:
    """Where the DHT holds the newest list."""
    return f"{run}_revoked"


def opened(data: bytes | str, trusted: PublicKeys) -> RevocationList:
    """The sealed list in `data`. Raises Untrusted."""
    body = keys.unseal(KIND, data, trusted)
    if body.keys() != RevocationList.__dataclass_fields__.keys():
        raise Untrusted("the revocation list has other fields")
    found = RevocationList(**{**body, "peers": tuple(_typed(body["peers"], list))})
    numbers = [found.serial, found.issued, *_typed(found.users, dict).values()]
    names = [found.run, *found.peers]
    publics = {**_typed(found.keys, dict), **_typed(found.retired, dict)}
    if not all(type(number) is int for number in numbers) or not publics:
        raise Untrusted("the revocation list is not well formed")
    if not all(isinstance(name, str) for name in [*names, *publics.values()]):
        raise Untrusted("the revocation list is not well formed")
    try:
        right = all(keys.key_id(public) == name for name, public in publics.items())
    except UserError as error:
        raise Untrusted(str(error)) from error
    if not right:
        raise Untrusted("the revocation list names a key by another's id")
    return found


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise Untrusted("the revocation list is not well formed")
    return value


class Trust:
    """The keys and revocations that one peer goes by, kept in a file that its processes share.

    `initial`: the authority's public keys of the run file. `path`: the peer's own file, believed
    because only the peer itself writes it; None keeps everything in memory.
    """

    def __init__(
        self,
        run: str,
        initial: Sequence[str],
        path: Path | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        self.clock = clock
        self._initial = keys.by_id(initial)
        self._path = path
        self._list: RevocationList | None = None
        self._sealed = ""
        self._seen: tuple[int, int, int] | None = None
        self._looked = float("-inf")
        self._reader = tokens.Reader()

    def newest(self) -> RevocationList | None:
        """The newest list that was offered to any process of this peer; None before the first."""
        self._look()
        return self._list

    def sealed(self) -> str:
        """The newest list as it was signed, to pass it on; empty before the first."""
        self._look()
        return self._sealed

    def current_keys(self) -> PublicKeys:
        """The keys whose tokens count now."""
        found = self.newest()
        return self._initial if found is None else found.keys

    def known_keys(self) -> PublicKeys:
        """Those, and the ones that counted once: good enough to tell who wrote something."""
        found = self.newest()
        return self._initial if found is None else {**self._initial, **found.retired, **found.keys}

    def offer(self, sealed: bytes | str) -> bool:
        """Take a sealed list where it is newer than ours; whether it was. Raises Untrusted."""
        text = sealed if isinstance(sealed, str) else sealed.decode("ascii", errors="replace")
        self._look(now=True)
        found = opened(text, self.current_keys())
        if found.run != self.run:
            raise Untrusted(f"the revocation list is of the run '{found.run}'")
        if found.issued > self.clock() + tokens.CLOCK_SKEW_S:
            raise Untrusted("the revocation list is signed in the future: check the clock")
        ours = self._list
        if ours is not None and (found.serial, found.issued) <= (ours.serial, ours.issued):
            return False
        if self._path is not None:
            files.write_atomic(self._path, json.dumps({"sealed": text}) + "\n")
        self._list, self._sealed = found, text
        return True

    def check(self, text: str, peer: str) -> Token:
        """The token in `text`, when it lets `peer` take part now. Raises Untrusted."""
        found = self.newest()
        token = self._reader.read(text, self.current_keys())
        tokens.check(token, run=self.run, peer=peer, now=self.clock())
        if found is not None and (why := found.voids(token)):
            raise Untrusted(f"the token is void: {why}")
        return token

    def written_by(self, text: str, peer: str) -> Token:
        """The token in `text`, when it was ever given to `peer` in this run. Raises Untrusted."""
        token = self._reader.read(text, self.known_keys())
        if token.run != self.run or token.peer != peer:
            raise Untrusted(f"the token is not of the peer '{peer}' in the run '{self.run}'")
        return token

    def _look(self, *, now: bool = False) -> None:
        """Read the file again when another process has changed it."""
        if self._path is None or (not now and time.monotonic() < self._looked + _LOOK_S):
            return
        self._looked = time.monotonic()
        # A damaged file counts as none: the next list that is offered takes its place.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, Untrusted):
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._seen = seen
                self._take(str(json.loads(self._path.read_bytes())["sealed"]))

    def _take(self, text: str) -> None:
        # Our own file: its list was checked against the keys of its time when it was taken. Now it
        # need only be whole, that is, signed by a key that it names itself.
        inside = keys.parsed(text)["body"]["keys"]
        found = opened(text, inside)
        if found.run != self.run:
            raise Untrusted(f"it is of the run '{found.run}'")
        if not self._initial.keys() & {*found.keys, *found.retired}:
            raise Untrusted("the run file is newer: it names keys that the list does not know")
        if self._list is None or found.serial >= self._list.serial:
            self._list, self._sealed = found, text


class Poller:
    """Offers to `trust` what its sources have, every `interval_s`, on a thread of its own."""

    def __init__(self, trust: Trust, sources: Sequence[Source], interval_s: float = POLL_S) -> None:
        self._trust = trust
        self._sources = tuple(sources)
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="revocations", daemon=True)
        self.failures: dict[int, str] = {}
        """Why a source gave nothing at the last poll, by its number."""
        self.last_good: float | None = None
        """When a source last gave a list that holds, by the clock of `trust`."""

    def start(self) -> None:
        """Poll at once, then again and again."""
        self._thread.start()

    def stop(self) -> None:
        """End; waits for a poll that is under way for at most two seconds."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def poll(self) -> bool:
        """Ask every source once; whether any gave a list that holds."""
        good = False
        for number, source in enumerate(self._sources):
            try:
                sealed = source()
                if sealed is None:
                    self.failures[number] = "it has no list"
                    continue
                self._trust.offer(sealed)
            except Exception as error:  # a source may fail in any way; the next one may not
                self.failures[number] = f"{type(error).__name__}: {error}".replace("\n", " ")
                continue
            self.failures.pop(number, None)
            good = True
        if good:
            self.last_good = self._trust.clock()
        return good

    def _run(self) -> None:
        while True:
            self.poll()
            if self._ended.wait(self._interval_s):
                return


def dht_source(dht: Any, run: str, timeout_s: float = 10.0) -> Source:
    """The list that the coordinator put into the DHT."""

    def fetch() -> str | None:
        found = dht.get(dht_key(run), latest=True, return_future=True).result(timeout=timeout_s)
        return None if found is None or not isinstance(found.value, str) else found.value

    return fetch


def publish(dht: Any, trust: Trust) -> bool:
    """Put the newest list of `trust` into the DHT, for peers that do not reach the service."""
    found = trust.newest()
    if found is None:
        return False
    expires = float(found.issued + DHT_LIFE_S)
    return bool(dht.store(dht_key(trust.run), trust.sealed(), expiration_time=expires))
