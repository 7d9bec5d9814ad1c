"""Tokens: the authority's word that a user's peer may take part in a run until a time.

A token is bound to the libp2p peer id, which the connection itself proves, so it is no secret: a
copy in other hands opens nothing. It is canonical JSON

    {"expires":S,"issued":S,"key":ID,"peer":ID,"run":NAME,"signature":...,"user":NAME}

signed with Ed25519 by the key of that id, times in seconds since 1970. Peers publish their tokens
in the DHT, at `dht_key`, each under its peer id.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import files
from models.errors import UserError
from training.swarm import identity, keys
from training.swarm.keys import PublicKeys, SigningKey, Untrusted

KIND = "token"
CHALLENGE_KIND = "challenge"
CLOCK_SKEW_S = 30
"""How far ahead the authority's clock may be; hivemind's peers differ by at most 3 s."""
LONGEST_LIFE_S = 400 * 24 * 3600
_MOST_CHARS = 2048
_RUN = re.compile(r"[\w.-]{1,100}")
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KEY_ID = re.compile(r"[0-9a-f]{32}")
_REMEMBERED = 4096


@dataclass(frozen=True)
class Token:
    """What a token says. `key` is the id of the key that signed it."""

    run: str
    user: str
    peer: str
    issued: int
    expires: int
    key: str


def dht_key(run: str) -> str:
    """Where the DHT holds the tokens of a run's peers, by peer id."""
    return f"{run}_tokens"


def issue(token: Token, signer: SigningKey) -> str:
    """The text of `token`, signed. Raises ValueError when it is not one that `read` would take."""
    body = asdict(token)
    text = keys.canonical({**body, "signature": signer.sign(KIND, body)}).decode()
    if read(text, {signer.id: signer.public}) != token:
        raise ValueError("another token was read")
    return text


def read(text: str, trusted: PublicKeys) -> Token:
    """The token in `text`, well formed and signed by one of `trusted`. Raises Untrusted.

    Whether it is of this run and peer, and in force, says `check`.
    """
    if len(text) > _MOST_CHARS:
        raise Untrusted(f"a token has at most {_MOST_CHARS} characters")
    body = keys.parsed(text)
    if not isinstance(body, dict) or not isinstance(body.get("signature"), str):
        raise Untrusted("it is no token")
    signature = body.pop("signature")
    token = _token(body)
    public = trusted.get(token.key)
    if public is None:
        raise Untrusted(f"the token is signed by the unknown key '{token.key}'")
    if not keys.is_signed(KIND, body, signature, public):
        raise Untrusted("the token's signature is wrong")
    return token


def _token(body: dict[str, Any]) -> Token:
    fields = Token.__dataclass_fields__
    if body.keys() != fields.keys():
        raise Untrusted(f"a token has the fields {', '.join(fields)}")
    numbers = (body["issued"], body["expires"])
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise Untrusted("the token's times are not whole seconds")
    if not all(isinstance(body[name], str) for name in ("run", "user", "peer", "key")):
        raise Untrusted("the token's names are not text")
    token = Token(**body)
    if not _RUN.fullmatch(token.run) or not _USER.fullmatch(token.user):
        raise Untrusted("the token's run or user is not a name")
    if not identity.is_peer_id(token.peer) or not _KEY_ID.fullmatch(token.key):
        raise Untrusted("the token's peer or key is not an id")
    if not token.issued < token.expires <= token.issued + LONGEST_LIFE_S:
        raise Untrusted("the token's times are not in order")
    return token


def check(token: Token, *, run: str, peer: str, now: float) -> None:
    """Raises Untrusted when `token` is not of `run` and `peer`, or not in force at `now`."""
    if token.run != run:
        raise Untrusted(f"the token is of the run '{token.run}', not of '{run}'")
    if token.peer != peer:
        raise Untrusted(f"the token is of the peer '{token.peer}', not of '{peer}'")
    if token.issued > now + CLOCK_SKEW_S:
        raise Untrusted(f"the token is valid only in {token.issued - now:.0f} s: check the clock")
    if token.expires <= now:
        raise Untrusted(f"the token expired {now - token.expires:.0f} s ago")


def challenge_message(run: str, user: str, peer: str, challenge: str) -> bytes:
    """What a peer signs to prove its id to the service."""
    return keys.canonical({"run": run, "user": user, "peer": peer, "challenge": challenge})


class Reader:
    """`read` that remembers what it has checked: the same few tokens come with every message."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Token] = OrderedDict()

    def read(self, text: str, trusted: PublicKeys) -> Token:
        """As `read`: a remembered token counts only while its key is in `trusted`."""
        for name, public in trusted.items():
            if (token := self._known.get((text, public))) is not None and token.key == name:
                return token
        token = read(text, trusted)
        self._known[text, trusted[token.key]] = token
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return token


def check_run(run: str) -> str:
    """`run`, when it is a name. Raises UserError."""
    if not _RUN.fullmatch(run):
        raise UserError(f"'{run}' is no name of a run: up to 100 letters, digits, '_', '.', '-'")
    return run


def check_user(user: str) -> str:
    """`user`, when it is a name. Raises UserError."""
    if not _USER.fullmatch(user):
        raise UserError(
            f"'{user}' is no name of a user: up to 64 of A-Z a-z 0-9 . _ @ -, "
            "the first a letter or digit"
        )
    return user


def check_peer(peer: str) -> str:
    """`peer`, when it is a peer id. Raises UserError."""
    if not identity.is_peer_id(peer):
        raise UserError(f"'{peer}' is no peer id: 46 characters that begin with 'Qm'")
    return peer


class TokenFile:
    """This peer's own token in a file: written by who renews it, read by all of its processes.

    An offline token, which the authority's `issue` wrote, is the same file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._text = ""

    def text(self) -> str:
        """The token as it stands now; empty where there is none."""
        try:
            status = self.path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._text = self.path.read_text(errors="replace").strip()
                self._seen = seen
        except OSError:
            self._seen, self._text = None, ""
        return self._text

    def write(self, text: str) -> None:
        """Put `text` in place of the token."""
        files.write_atomic(self.path, text + "\n")

    def check(self, *, run: str, peer: str, trusted: PublicKeys, now: float | None = None) -> Token:
        """The token, when it is in force. Raises UserError, which says what to do."""
        text = self.text()
        if not text:
            raise UserError(f"'{self.path}' holds no token: ask the run's authority for one")
        try:
            token = read(text, trusted)
            check(token, run=run, peer=peer, now=time.time() if now is None else now)
        except Untrusted as error:
            raise UserError(
                f"'{self.path}' cannot be used: {error}; ask the run's authority for another"
            ) from error
        return token
