"""What a coordinator renews while it runs: its own token, the revocations and the run file.

`gristmill swarm allow` changes the authority's log in another process. So the log is looked at
often, and what follows from a change is told at once: a revoked peer is refused within a minute
also by those that hear of it from the DHT alone. After a rotation of keys the coordinator gives
itself a token of the new key, and the run file names the keys in force, signed by all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.errors import UserError
from training.swarm import guard, revocation, run_file
from training.swarm.authority import Authority
from training.swarm.keys import Untrusted
from training.swarm.membership import Membership
from training.swarm.run_file import RunFile

OWN_USER = "coordinator"
_OWN_TOKEN_S = 24 * 3600
_RENEW_S = 12 * 3600
_PUBLISH_S = 60.0
_LOOK_S = 2.0


def renew(authority: Authority, member: Membership) -> None:
    """The coordinator's own token, which it gives itself. Raises UserError."""
    if OWN_USER not in authority.state.users:
        authority.allow_add(OWN_USER)  # nobody needs that credential
    peer = member.identity.peer_id
    member.token.write(authority.issue(OWN_USER, peer, life_s=_OWN_TOKEN_S))


class Upkeep:
    """Call `look` often. `trouble` says what could not be done; None: nothing.

    make: the run file of now, signed by the keys in force. path: where it stands.
    """

    def __init__(
        self,
        authority: Authority,
        member: Membership,
        *,
        make: Callable[[], RunFile],
        path: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trouble: str | None = None
        self._authority, self._member, self._make, self._path = authority, member, make, path
        self._clock = clock
        self._renewed = clock()
        self._published = self._looked = -float("inf")
        self._lines = -1

    def look(self, dht: Any) -> None:
        """Tell what is new, and all of it once a minute. What fails is `trouble`, no end."""
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        try:
            lines = self._authority.state.lines
            if lines == self._lines and now - self._published < _PUBLISH_S:
                return
            self._write_run_file()
            if self._member.trust is not None:
                self._tell(dht, self._member.trust, now)
            self._published, self._lines, self.trouble = now, lines, None
        except (Untrusted, UserError, OSError) as error:
            self.trouble = f"Who may take part is not up to date: {error}"

    def _tell(self, dht: Any, trust: revocation.Trust, now: float) -> None:
        member = self._member
        peer_id = member.identity.peer_id
        trust.offer(self._authority.revocations())
        try:
            trust.check(member.token.text(), peer_id)
            void = False
        except Untrusted:
            void = True
        if void or now - self._renewed > _RENEW_S:
            renew(self._authority, member)
            self._renewed = now
        revocation.publish(dht, trust)
        guard.publish(dht, trust, member.token, peer_id)

    def _write_run_file(self) -> None:
        """Where the keys in force are others than it names."""
        keys = sorted(self._authority.public_keys().values())
        try:
            there = run_file.parse(self._path.read_bytes(), str(self._path))
            if sorted(there.authority) == keys:
                return
        except (OSError, UserError, Untrusted):
            pass
        self._make().write(self._path)
