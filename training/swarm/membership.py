"""What lets a peer into a run and keeps it in: its identity, its token, and whom it lets in.

Without authorisation only the identity is left, and everybody who knows an address takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.swarm import guard, identity, revocation
from training.swarm.identity import Identity
from training.swarm.keys import Untrusted
from training.swarm.revocation import Trust
from training.swarm.token_client import Account, TokenKeeper, fetch_token
from training.swarm.tokens import TokenFile

IDENTITY_FILE = "identity.key"
TOKEN_FILE = "token"
TRUST_FILE = "trust.json"

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
        except Untrusted:
            if self.account is not None:
                self.token.write(fetch_token(self.account, self.identity, self.trust))
        self.token.check(run=self.run, peer=peer_id, trusted=self.trust.current_keys())

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

    def keep(self, dht: Any, say: Say) -> TokenKeeper | None:
        """Show the token to the others, now and after each renewal, and poll revocations.

        Start it after the peer's processes: it has threads. Raises UserError.
        """
        if self.trust is None:
            return None
        keeper = TokenKeeper(
            self.trust, self.token, self.identity, self.account,
            sources=[revocation.dht_source(dht, self.run)],
            on_renewed=lambda _: self.show(dht, say),
        )  # fmt: skip
        keeper.start()
        self.show(dht, say)
        return keeper

    def show(self, dht: Any, say: Say) -> None:
        """Put the token into the DHT."""
        if self.trust is None:
            return
        try:
            guard.publish(dht, self.trust, self.token, self.identity.peer_id)
        except Untrusted as error:
            say(f"warning: this peer's token is void: {error}")

    def rejoin(self, dht: Any, addresses: Sequence[str], say: Say) -> None:
        """Ask the peers of `addresses` again, which hivemind does not where one did not answer;
        and show them the token, which nobody else may have kept."""
        from training.swarm import dht_access  # noqa: PLC0415  # imports hivemind

        dht_access.rejoin(dht, addresses)
        self.show(dht, say)


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
