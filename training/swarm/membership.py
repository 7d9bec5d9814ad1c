"""What lets a peer into a run and keeps it in: its identity, its token, and whom it lets in.

Without authorisation only the identity is left, and everybody who knows an address takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import UserError
from training.swarm import guard, identity, revocation
from training.swarm.identity import Identity
from training.swarm.keys import Untrusted
from training.swarm.revocation import Trust
from training.swarm.token_client import Account, TokenKeeper, fetch_token
from training.swarm.tokens import TokenFile

IDENTITY_FILE = "identity.key"
TOKEN_FILE = "token"
TRUST_FILE = "trust.json"
_SHOW_S = 60.0
_TOLD_AFTER = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Membership:
    """A peer of `run` with its files in `folder`; trust: None without authorisation.

    account: where tokens come from; None for a token that is a file already.
    """

    run: str
    identity: Identity
    token: TokenFile
    trust: Trust | None
    account: Account | None

    def enter(self) -> None:
        """Have a token in force, fetched now where there is none; before any process starts.

        Raises UserError when there is none to be had, Fault when the service does not answer.
        """
        if self.trust is None:
            return
        peer_id = self.identity.peer_id
        try:
            self.trust.check(self.token.text(), peer_id)
            return
        except Untrusted as error:
            why = str(error)
        if self.account is not None:
            self.token.write(fetch_token(self.account, self.identity, self.trust))
            return
        self.token.check(run=self.run, peer=peer_id, trusted=self.trust.current_keys())
        raise UserError(
            f"the token of the peer '{peer_id}' lets nobody in: {why}: ask the run's authority for "
            "another, and give it with --token FILE"
        )

    def dht_options(self) -> dict[str, Any]:
        """What hivemind's DHT is started with."""
        if self.trust is None:
            return {}
        from training.swarm.dht_access import PeerAuthorizer  # noqa: PLC0415  # imports hivemind
        from training.swarm.dht_records import RunRecords  # noqa: PLC0415

        return {
            "validators": [RunRecords(self.trust, self.identity, self.token)],
            "authorizer": PeerAuthorizer(self.trust, self.token),
        }

    def guard(self, dht: Any) -> guard.Guard | None:
        """Whom the averager lets in; None lets everybody in."""
        if self.trust is None:
            return None
        return guard.TokenGuard(self.trust, guard.dht_fetch(dht, self.run), self.token)

    def keep(
        self, dht: Any, say: Say, *, call: Callable[[], None] = lambda: None
    ) -> TokenKeeper | None:
        """Show the token to the others, now and after each renewal, and poll revocations.

        call: calls other peers again, which have forgotten this one while its token was void: the
        DHT would keep the new token here alone. Start it after the peer's processes: it has
        threads. Raises UserError.
        """
        if self.trust is None:
            return None

        def renewed(_: object) -> None:
            self.show(dht, say)

        def regained(token: object) -> None:
            call()
            renewed(token)

        keeper = TokenKeeper(
            self.trust, self.token, self.identity, self.account,
            sources=[revocation.dht_source(dht, self.run), self.showing(dht, say)],
            on_renewed=renewed, on_regained=regained, say=say,
        )  # fmt: skip
        keeper.start()
        self.show(dht, say)
        return keeper

    def show(self, dht: Any, say: Say) -> bool:
        """Put the token into the DHT; whether it is stored there."""
        if self.trust is None:
            return True
        try:
            return guard.publish(dht, self.trust, self.token, self.identity.peer_id)
        except Untrusted as error:
            say(f"warning: this peer's token is void: {error}")
            return False

    def showing(
        self, dht: Any, say: Say, *, clock: Callable[[], float] = time.monotonic
    ) -> revocation.Source:
        """What the keeper's poller asks for a list, and which has none: once a minute it shows the
        token again, since the DHT keeps a record no longer than the peers that hold it."""
        shown_at, failed, told_void = clock(), 0, False

        def void(text: str) -> None:
            nonlocal told_void
            if not told_void:
                say(text)
            told_void = True

        def source() -> None:
            nonlocal shown_at, failed, told_void
            if clock() - shown_at < _SHOW_S:
                return
            shown_at = clock()
            stored = self.show(dht, void)
            told_void, failed = told_void and not stored, 0 if stored else failed + 1
            if failed == _TOLD_AFTER and not told_void:
                say("warning: this peer's token is not stored in the network: others refuse it")

        return source


def membership(
    folder: Path,
    run: str,
    authority: tuple[str, ...],
    *,
    authorised: bool,
    account: Account | None = None,
) -> Membership:
    """The membership whose files are in `folder`; a new identity where there is none.

    authority: public keys of the run file. Raises UserError.
    """
    own = identity.load_or_create(folder / IDENTITY_FILE)
    trust = Trust(run, list(authority), folder / TRUST_FILE) if authorised else None
    return Membership(run, own, TokenFile(folder / TOKEN_FILE), trust, account)
