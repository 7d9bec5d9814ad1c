"""The authority of a run: a folder with its private keys and the signed log of who may take part.

    DIRECTORY/allowlist.jsonl   the log, and beside it .head (`training.swarm.allowlist`)
    DIRECTORY/keys/ID.pem       private keys, mode 0600

What the commands of the CLI do is here, one method each. Every change is a line of the log; a
token service on the same folder sees it at its next request.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import UserError
from training.swarm import allowlist, keys, revocation, tokens
from training.swarm.allowlist import Allowlist, Log
from training.swarm.keys import PublicKeys, SigningKey, Untrusted
from training.swarm.revocation import RevocationList
from training.swarm.tokens import Token

TOKEN_LIFE_S = 45 * 60
ROTATION_DELAY_S = 120
"""A new key signs tokens only after that, when all peers have polled the list that names it."""
_LOG = "allowlist.jsonl"
_KEYS = "keys"
_CREDENTIAL_BYTES = 24


@dataclass(frozen=True)
class User:
    """A line of the list of users. `added`: seconds since 1970."""

    name: str
    added: int


class Authority:
    """The authority in `folder`. Use `create` or `load`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        self._log = Log(folder / _LOG)
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._state = Allowlist()
        self._signers: dict[str, SigningKey] = {}

    @classmethod
    def create(cls, folder: Path, run: str, *, clock: Callable[[], float] = time.time) -> Authority:
        """A new authority for `run`, with its first key. Raises UserError."""
        tokens.check_run(run)
        if (folder / _LOG).exists():
            raise UserError(
                f"'{folder}' holds an authority already: name another folder, or use this one"
            )
        key = SigningKey.new()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            key.write(folder / _KEYS / f"{key.id}.pem")
        except OSError as error:
            raise UserError(f"'{folder}' cannot be written: {error.strerror}") from error
        now = clock()
        log = Log(folder / _LOG)
        log.append("begin", {"key": key.public}, {key.id: key}, run=run, now=now)
        return cls.load(folder, clock=clock)

    @classmethod
    def load(cls, folder: Path, *, clock: Callable[[], float] = time.time) -> Authority:
        """The authority in `folder`. Raises UserError when it is not there or was altered."""
        if not (folder / _LOG).exists():
            raise UserError(
                f"'{folder}' holds no authority: `gristmill swarm start` makes one in the folder "
                "of a new run"
            )
        authority = cls(folder, clock)
        state = authority.state
        if not authority._signers.keys() & state.keys.keys():
            raise UserError(
                f"'{folder / _KEYS}' has no private key that '{_LOG}' names: put it back from a "
                "backup"
            )
        return authority

    @property
    def state(self) -> Allowlist:
        """What the log says now; it is read again when it has changed. Raises UserError."""
        path = self.folder / _LOG
        with self._lock:
            try:
                status = path.stat()
            except OSError as error:
                raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
            seen = (status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._state = allowlist.read(path)
                self._signers = self._read_signers(self._state)
                self._seen = seen
            return self._state

    def _read_signers(self, state: Allowlist) -> dict[str, SigningKey]:
        found = {}
        for name in (*state.keys, *state.retired):
            path = self.folder / _KEYS / f"{name}.pem"
            if path.exists():
                key = SigningKey.read(path)
                if key.id != name:
                    raise UserError(f"'{path}' holds the key '{key.id}': put the right one back")
                found[name] = key
        return found

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.state.run

    def public_keys(self) -> PublicKeys:
        """The keys in force, by id: what the run file names."""
        return dict(self.state.keys)

    # What the commands do.

    def allow_add(self, user: str, *, renew: bool = False) -> str:
        """Put `user` on the list; the credential, which is told only now. Raises UserError.

        renew: a new credential for a user who is on it; the old one no longer counts, nor do
        the tokens that it brought.
        """
        tokens.check_user(user)
        known = user in self.state.users
        if known and not renew:
            raise UserError(
                f"the user '{user}' is on the allowlist of '{self.run}' already: a new credential "
                f"comes with `gristmill swarm allow renew '{user}'`"
            )
        if renew:
            self._expect_user(user)
            self._append("revoke-user", {"user": user})
        credential = secrets.token_urlsafe(_CREDENTIAL_BYTES)
        digest = allowlist.credential_digest(self.run, user, credential)
        self._append("add", {"user": user, "credential": digest})
        return credential

    def allow_remove(self, user: str) -> None:
        """Take `user` off the list; the user's tokens are void at once. Raises UserError."""
        self._expect_user(user)
        self._append("remove", {"user": user})

    def allow_list(self) -> list[User]:
        """The users on the list, by name."""
        return [User(name, added) for name, added in sorted(self.state.added.items())]

    def issue(self, user: str, peer: str, *, life_s: int = TOKEN_LIFE_S) -> str:
        """The text of a token for `user`'s peer: what the service gives, or an offline file.

        Raises UserError when the user is not on the list, or the peer was revoked.
        """
        self._expect_user(tokens.check_user(user))
        tokens.check_peer(peer)
        if not 0 < life_s <= tokens.LONGEST_LIFE_S:
            days = tokens.LONGEST_LIFE_S // 86400
            raise UserError(f"a token cannot last '{life_s}' s: it lasts 1 s to {days} days")
        state, now = self.state, self.clock()
        if peer in state.revoked_peers:
            raise UserError(
                f"the peer '{peer}' was revoked: `gristmill swarm allow restore '{peer}'` lets it "
                "in"
            )
        # A user who comes back in the second of the revocation gets a token of the next second.
        issued = max(int(now), state.void_before.get(user, -1) + 1)
        signer = self._signer(state, now)
        token = Token(state.run, user, peer, issued, issued + life_s, signer.id)
        return tokens.issue(token, signer)

    def revoke(self, name: str) -> str:
        """Void all tokens of a user, or of a peer for good; what was revoked: "user" or "peer".

        The user stays on the list and gets new tokens (`allow_remove` ends that); the peer gets
        none until `restore`. Raises UserError.
        """
        if name in self.state.users:
            self._append("revoke-user", {"user": name})
            return "user"
        try:
            tokens.check_peer(name)
        except UserError as error:
            raise UserError(
                f"'{name}' is neither a user of '{self.run}' nor a peer id: see "
                "`gristmill swarm allow list`"
            ) from error
        self._append("revoke-peer", {"peer": name})
        return "peer"

    def restore(self, peer: str) -> None:
        """Let a revoked peer in again. Raises UserError."""
        if peer not in self.state.revoked_peers:
            raise UserError(f"the peer '{peer}' is not revoked in '{self.run}'")
        self._append("restore-peer", {"peer": peer})

    def rotate(self) -> str:
        """A new key, which signs in two minutes; its id. The old ones count until `retire`."""
        key = SigningKey.new()
        try:
            key.write(self.folder / _KEYS / f"{key.id}.pem")
        except OSError as error:
            raise UserError(f"'{self.folder}' cannot be written: {error.strerror}") from error
        signs_from = int(self.clock()) + ROTATION_DELAY_S
        self._append("add-key", {"key": key.public, "signs_from": signs_from})
        return key.id

    def retire(self, key: str) -> None:
        """Void every token that the key of this id signed. Raises UserError.

        The private key stays in its file and signs the revocation list still, so that peers which
        know no other key hear of the new one: remove it once no such peer is left.
        """
        state = self.state
        if key not in state.keys:
            names = ", ".join(f"'{name}'" for name in state.keys)
            raise UserError(f"'{key}' is no key of '{self.run}' in force; those are {names}")
        if len(state.keys) == 1:
            raise UserError(f"'{key}' is the only key of '{self.run}': make another with rotate")
        self._append("retire-key", {"key": key})

    # What the authority signs.

    def revocations(self) -> bytes:
        """The sealed list for peers (`training.swarm.revocation`), signed now."""
        state = self.state
        found = RevocationList(
            run=state.run,
            serial=state.lines,
            issued=int(self.clock()),
            keys=state.keys,
            retired=state.retired,
            users=state.void_before,
            peers=tuple(sorted(state.revoked_peers)),
        )
        names = [*state.keys, *state.retired]
        signers = [self._signers[name] for name in names if name in self._signers]
        return keys.seal(revocation.KIND, found.body(), signers)

    def seal(self, kind: str, body: Mapping[str, Any]) -> bytes:
        """`body` sealed by every key in force whose private half is here (`keys.seal`)."""
        state = self.state
        return keys.seal(
            kind, body, [self._signers[name] for name in state.keys if name in self._signers]
        )

    def _signer(self, state: Allowlist, now: float) -> SigningKey:
        name = state.signer_id(now)
        if name not in self._signers:
            raise UserError(
                f"the private key '{name}' is not in '{self.folder / _KEYS}': put its file back "
                "from a backup"
            )
        return self._signers[name]

    def _expect_user(self, user: str) -> None:
        if user not in self.state.users:
            raise UserError(
                f"the user '{user}' is not on the allowlist of '{self.run}': "
                f"gristmill swarm allow add '{user}'"
            )

    def _append(self, action: str, fields: Mapping[str, Any]) -> None:
        run = self.state.run
        try:
            self._log.append(action, fields, self._signers, run=run, now=self.clock())
        except Untrusted as error:
            raise UserError(f"'{self.folder / _LOG}' does not take that: {error}") from error
