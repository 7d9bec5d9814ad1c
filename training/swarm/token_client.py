"""A peer's side of the token service: fetch a token, keep it fresh, ask for revocations.

`TokenKeeper` renews the token file when a third of its life is left and polls the revocation list,
on two threads of one process; the peer's other processes read the files. A refusal (wrong
credential, taken off the list) is told at once; silence, 5xx and 429 are tried again with growing
waits, and the token at hand goes on until it expires.
"""

from __future__ import annotations

import ipaddress
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests

from models.errors import UserError
from models.http_get import DownloadFailed, MayPass, RetryPolicy, WillNotPass, body_blocks, retry
from training.swarm import keys, revocation, tokens
from training.swarm.identity import Identity
from training.swarm.keys import Untrusted
from training.swarm.revocation import Poller, Source, Trust
from training.swarm.tokens import Token, TokenFile

_ANSWER_BYTES = 1 << 20
_HEADERS = {
    "User-Agent": "gristmill",
    "Content-Type": "application/json",
    "Accept-Encoding": "identity",
}
_RENEW_AT = 1.0 / 3.0
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRY_AGAIN_S = 30.0
_Answer = TypeVar("_Answer")
POLICY = RetryPolicy(
    tries=8, connect_timeout_s=5.0, read_timeout_s=10.0, longest_wait_s=15.0, deadline_s=60.0
)
_POLL_POLICY = RetryPolicy(tries=1, connect_timeout_s=5.0, read_timeout_s=5.0, deadline_s=10.0)


@dataclass(frozen=True)
class Account:
    """How a user gets tokens. ca_file: certificates that HTTPS trusts, where not the system's."""

    url: str
    user: str
    credential: str
    ca_file: Path | None = None


def check_url(url: str) -> str:
    """`url` without a slash at its end. Raises UserError when a credential would not be safe."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"'{url}' is no address of a token service, as https://example.org:8470")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise UserError(
            f"'{url}' is not https: the credential would travel in the clear; ask the run's "
            "authority for its https address"
        )
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def fetch_token(
    account: Account, peer: Identity, trust: Trust, policy: RetryPolicy = POLICY
) -> str:
    """A token for `peer`, checked against `trust`, which also takes the list that came with it.

    Raises UserError when the service refuses, Fault (DownloadFailed) when it does not answer.
    """
    url = check_url(account.url)

    def attempt(line: _Line) -> dict[str, Any]:
        asked = {"peer": peer.peer_id}
        given = line.post(f"{url}/challenge", asked)
        challenge, run = given.get("challenge"), given.get("run")
        if run != trust.run:
            raise WillNotPass(f"it is the service of the run '{run}', not of '{trust.run}'")
        if not isinstance(challenge, str):
            raise WillNotPass("it is no token service")
        message = tokens.challenge_message(trust.run, account.user, peer.peer_id, challenge)
        asked |= {
            "user": account.user,
            "credential": account.credential,
            "public_key": keys.encode(peer.public_key),
            "challenge": challenge,
            "signature": keys.encode(peer.sign(tokens.CHALLENGE_KIND, message)),
        }
        return line.post(f"{url}/token", asked)

    answer = _retried(url, account.ca_file, policy, attempt)
    try:
        trust.offer(str(answer.get("revoked", "")))
        text = str(answer.get("token", ""))
        trust.check(text, peer.peer_id)
    except Untrusted as error:
        raise UserError(
            f"the token of '{url}' cannot be used: {error}; check this machine's clock, or ask for "
            "a new run file"
        ) from error
    return text


def http_source(url: str, ca_file: Path | None = None) -> Source:
    """The revocation list of the token service at `url`, asked for once at each poll."""
    address = check_url(url)
    return lambda: _retried(
        address, ca_file, _POLL_POLICY, lambda line: line.get(f"{address}/revoked")
    )


def fetch_run(url: str, ca_file: Path | None = None, policy: RetryPolicy = POLICY) -> bytes:
    """What GET /run gives: sealed, and not yet believed. Raises UserError, Fault."""
    address = check_url(url)
    return _retried(address, ca_file, policy, lambda line: line.get(f"{address}/run"))


def _retried(
    url: str, ca_file: Path | None, policy: RetryPolicy, attempt: Callable[[_Line], _Answer]
) -> _Answer:
    found: list[_Answer] = []
    with requests.Session() as session:
        line = _Line(session, ca_file, policy)
        deadline = policy.clock() + policy.deadline_s
        try:
            retry(url, policy, deadline, lambda: found.append(attempt(line)), lambda: 0)
        except DownloadFailed as error:
            if error.permanent:
                raise UserError(f"'{url}' refuses: {error.reason}") from error
            raise
    return found[-1]


class _Line:
    """Requests to one service. They raise MayPass, WillNotPass."""

    def __init__(self, session: requests.Session, ca_file: Path | None, policy: RetryPolicy):
        self._session = session
        self._verify = True if ca_file is None else str(ca_file)
        self._policy = policy

    def get(self, url: str) -> bytes:
        return self._exchange("GET", url, None)

    def post(self, url: str, asked: dict[str, str]) -> dict[str, Any]:
        return _object(self._exchange("POST", url, keys.canonical(asked)))

    def _exchange(self, method: str, url: str, sent: bytes | None) -> bytes:
        policy, data = self._policy, bytearray()
        try:
            with self._session.request(
                method,
                url,
                data=sent,
                headers=_HEADERS,
                timeout=(policy.connect_timeout_s, policy.read_timeout_s),
                verify=self._verify,
                allow_redirects=False,
                stream=True,
            ) as response:
                for block in body_blocks(response, policy, policy.clock() + policy.read_timeout_s):
                    data += block
                    if len(data) > _ANSWER_BYTES:
                        raise WillNotPass(f"its answer has more than {_ANSWER_BYTES} bytes")
                status, wait = response.status_code, response.headers.get("Retry-After", "")
        except (requests.RequestException, OSError) as error:
            said = f"{type(error).__name__}: {error}"[:300]
            lasting = "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(
                error, requests.exceptions.InvalidURL
            )
            raise (WillNotPass(said) if lasting else MayPass(said)) from error
        if status in _PASSING:
            known = wait.isascii() and wait.isdigit()
            raise MayPass(f"it answered {_said(status, bytes(data))}", float(wait) if known else 0)
        if status != 200:
            raise WillNotPass(_said(status, bytes(data)))
        return bytes(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise WillNotPass("it is no token service: its answer is not JSON")
    return value


def _said(status: int, data: bytes) -> str:
    try:
        said = str(_object(data).get("error", ""))
    except WillNotPass:
        said = ""
    return f"{said[:200] or 'no reason given'} ({status})".replace("\n", " ")


class TokenKeeper:
    """Keeps a peer's token and revocations fresh while it runs.

    account: None for an offline token, which is not renewed. sources: of revocation lists, beside
    the service of the account (see `revocation.dht_source`). on_renewed: called with each new token
    that took the place of one in force; on_regained: with one that came after a time without, in
    which others have refused this peer and forgotten it (None: `on_renewed`). say: told once when
    renewals begin to fail, and once when they work again.
    """

    def __init__(
        self,
        trust: Trust,
        own: TokenFile,
        peer: Identity,
        account: Account | None,
        sources: Sequence[Source] = (),
        *,
        on_renewed: Callable[[Token], None] | None = None,
        on_regained: Callable[[Token], None] | None = None,
        say: Callable[[str], None] = lambda _: None,
        policy: RetryPolicy = POLICY,
        poll_s: float = revocation.POLL_S,
    ) -> None:
        self._trust = trust
        self._own = own
        self._peer = peer
        self._account = account
        self._on_renewed, self._on_regained = on_renewed, on_regained or on_renewed
        self._say = say
        self._policy = policy
        self._ended = threading.Event()
        service = [http_source(account.url, account.ca_file)] if account is not None else []
        self.poller = Poller(trust, [*service, *sources], poll_s)
        self._thread = threading.Thread(target=self._run, name="token keeper", daemon=True)
        self.failure = ""
        """Why the last renewal failed; empty when it did not."""

    def start(self) -> Token:
        """A token in force, fetched now where there is none; then keep it fresh.

        Raises UserError when there is none to be had, Fault when the service does not answer.
        """
        token = self._current()
        if token is None and self._account is not None:
            token = self._renew()
        if token is None:
            token = self._own.check(
                run=self._trust.run,
                peer=self._peer.peer_id,
                trusted=self._trust.current_keys(),
                now=self._trust.clock(),
            )
        self.poller.start()
        if self._account is not None:
            self._thread.start()
        return token

    def stop(self) -> None:
        """End both threads; waits for at most a few seconds."""
        self._ended.set()
        self.poller.stop()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def due_s(self) -> float:
        """Seconds until the token should be renewed; 0.0 when it is due."""
        token = self._current()
        if token is None:
            return 0.0
        renew_at = token.expires - (token.expires - token.issued) * _RENEW_AT
        return max(0.0, renew_at - self._trust.clock())

    def _current(self) -> Token | None:
        text = self._own.text()
        try:
            return self._trust.check(text, self._peer.peer_id) if text else None
        except Untrusted:
            return None

    def _renew(self) -> Token | None:
        if self._account is None:
            return None
        text = fetch_token(self._account, self._peer, self._trust, self._policy)
        # By the list that came with it, too.
        tell = self._on_regained if self._current() is None else self._on_renewed
        self._own.write(text)
        token = self._trust.check(text, self._peer.peer_id)
        if tell is not None:
            tell(token)
        return token

    def _run(self) -> None:
        while not self._ended.wait(min(max(self.due_s(), 1.0), _TRY_AGAIN_S)):
            if self.due_s() > 0.0:
                continue
            try:
                self._renew()
                if self.failure:
                    self._say("this peer has a new token")
                self.failure = ""
            except Exception as error:  # it is told, and tried again: the token at hand goes on
                if not self.failure:
                    self._say(f"warning: no new token for this peer: {error}")
                self.failure = str(error) or type(error).__name__
                self._ended.wait(_TRY_AGAIN_S)
