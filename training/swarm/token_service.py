"""The token service: gives tokens to the allowlisted users' peers over HTTP(S).

    POST /challenge  {peer}                       -> {challenge, run, seconds}
    POST /token      {user, credential, peer, public_key, challenge, signature}
                                                  -> {token, revoked}
    GET  /run        the sealed run file, or the run's name and keys
    GET  /revoked    the sealed revocation list

The signature, by the peer's identity key over the challenge, user and run, proves the peer id, so
that nobody gets a token for a peer of another. A challenge is its own time and MAC: none is kept
until it is used. Every decision is a line of the audit log; a token whose line cannot be written is
not given. Refusals do not say whether the user or the credential was wrong.

The service keeps nothing else: restart it freely. One process; tokens cost under a millisecond.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
import socket
import ssl
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from models.errors import UserError
from training.swarm import identity, keys, service_connections, tokens
from training.swarm.authority import TOKEN_LIFE_S, Authority
from training.swarm.keys import Untrusted
from training.swarm.service_limits import AuditLog, Buckets, Refused, body, caller
from training.swarm.token_client import is_loopback

CHALLENGE_S = 60
RUN_KIND = "run"
_BODY_BYTES = 8192
_BODY_S = 10.0
_MOST_CHARS = 2048
_SHARED_LIST_S = 5.0
_STAMP = struct.Struct(">Q16s")
_MAC_BYTES = 32
_log = logging.getLogger("uvicorn.error")
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True)
class ServiceSettings:
    """How the service listens. Times in seconds.

    host, port: where; port 0 takes a free one. certificate, private_key: PEM files for HTTPS.
    behind_proxy: something in front speaks HTTPS; `proxies` are its addresses, whose
    X-Forwarded-For is believed. token_life_s: of the tokens. audit: the log of decisions.
    run_file: the sealed run file for GET /run. calls_per_minute, burst: of one address; many
    peers may share one. failures_per_minute, failures_burst: refused tokens of one address.
    """

    audit: Path
    host: str = "127.0.0.1"
    port: int = 8470
    certificate: Path | None = None
    private_key: Path | None = None
    behind_proxy: bool = False
    proxies: tuple[str, ...] = ("127.0.0.1",)
    token_life_s: int = TOKEN_LIFE_S
    run_file: Path | None = None
    calls_per_minute: float = 120.0
    burst: int = 120
    failures_per_minute: float = 3.0
    failures_burst: int = 10
    all_calls_per_minute: float = 6000.0
    all_burst: int = 1000


class TokenService:
    """The decisions of the service, without HTTP."""

    def __init__(
        self,
        authority: Authority,
        settings: ServiceSettings,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._authority = authority
        self._settings = settings
        self._clock = authority.clock
        self._monotonic = monotonic
        self._secret = secrets.token_bytes(32)
        self._used: OrderedDict[str, float] = OrderedDict()
        self._list: tuple[float, int, bytes] = (float("-inf"), -1, b"")
        self.audit = AuditLog(settings.audit, authority.clock)
        self._calls = Buckets(settings.calls_per_minute, settings.burst, monotonic)
        self._all = Buckets(settings.all_calls_per_minute, settings.all_burst, monotonic)
        self._failures = Buckets(settings.failures_per_minute, settings.failures_burst, monotonic)

    def count(self, who: str) -> None:
        """Count a call of `who`. Raises Refused."""
        self._calls.take(who)
        self._all.take("")

    def challenge(self, peer: str) -> dict[str, Any]:
        """Something for `peer` to sign."""
        stamp = _STAMP.pack(int(self._clock()), secrets.token_bytes(16))
        return {
            "challenge": keys.encode(stamp + self._mac(stamp, peer)),
            "run": self._authority.run,
            "seconds": CHALLENGE_S,
        }

    def token(self, asked: dict[str, str], who: str) -> dict[str, str]:
        """A token for who asks so.

        Raises Refused; OSError, UserError when the audit log, allowlist or keys are out of order.
        """
        wait = self._failures.wait_s(who)
        if wait > 0.0:
            raise Refused(429, f"too many refusals: wait {wait:.0f} s", wait_s=wait)
        try:
            self._check(asked)
        except Refused as error:
            self._failures.count(who)
            named = {"user": asked["user"][:64], "peer": asked["peer"][:64]}
            self.audit.write("refused", who, **named, reason=error.reason)
            raise
        life_s = self._settings.token_life_s
        text = self._authority.issue(asked["user"], asked["peer"], life_s=life_s)
        expires = tokens.read(text, self._authority.public_keys()).expires
        named = {"user": asked["user"], "peer": asked["peer"]}
        self.audit.write("token", who, **named, expires=expires)
        return {"token": text, "revoked": self.revoked().decode()}

    def _check(self, asked: dict[str, str]) -> None:
        peer, user = asked["peer"], asked["user"]
        nonce = self._checked_challenge(asked["challenge"], peer)
        try:
            public_key, signature = (
                keys.decode(asked["public_key"]),
                keys.decode(asked["signature"]),
            )
        except Untrusted as error:
            raise Refused(400, f"public_key or signature: {error}") from error
        message = tokens.challenge_message(self._authority.run, user, peer, asked["challenge"])
        if identity.peer_id_of(public_key) != peer or not identity.is_signed(
            tokens.CHALLENGE_KIND, message, signature, public_key
        ):
            raise Refused(403, "the signature is not by the key of that peer id")
        # From here on the challenge is spent, whatever comes.
        self._spend(nonce)
        state = self._authority.state
        if not state.admits(user, asked["credential"]):
            known = "the credential is wrong" if user in state.users else "the user is unknown"
            raise Refused(403, "user or credential is wrong", reason=known)
        if peer in state.revoked_peers:
            raise Refused(403, "the peer was revoked in this run")

    def _checked_challenge(self, challenge: str, peer: str) -> str:
        try:
            data = keys.decode(challenge)
        except Untrusted:
            data = b""
        if len(data) != _STAMP.size + _MAC_BYTES:
            raise Refused(400, "the challenge is not one of ours")
        stamp, mac = data[: _STAMP.size], data[_STAMP.size :]
        if not hmac.compare_digest(mac, self._mac(stamp, peer)):
            raise Refused(403, "the challenge is not one of ours for that peer")
        made, _ = _STAMP.unpack(stamp)
        if not -1 <= self._clock() - made <= CHALLENGE_S:
            raise Refused(403, f"the challenge is older than {CHALLENGE_S} s")
        return challenge

    def _spend(self, challenge: str) -> None:
        now = self._clock()
        while self._used and next(iter(self._used.values())) < now - CHALLENGE_S - 1:
            self._used.popitem(last=False)
        if challenge in self._used:
            raise Refused(403, "the challenge was used already")
        self._used[challenge] = now

    def _mac(self, stamp: bytes, peer: str) -> bytes:
        return hmac.digest(self._secret, stamp + peer.encode(), hashlib.sha256)

    def revoked(self) -> bytes:
        """The sealed revocation list, signed anew after each change and every few seconds."""
        signed, serial, sealed = self._list
        now, lines = self._monotonic(), self._authority.state.lines
        if serial != lines or now > signed + _SHARED_LIST_S:
            sealed = self._authority.revocations()
            self._list = (now, lines, sealed)
        return sealed

    def run(self) -> bytes:
        """The sealed run file; without one, the run's name and public keys, sealed."""
        if self._settings.run_file is not None:
            try:
                return self._settings.run_file.read_bytes()
            except OSError as error:
                raise Refused(503, "the run file cannot be read", reason=str(error)) from error
        described = {
            "run": self._authority.run,
            "keys": list(self._authority.public_keys().values()),
        }
        return self._authority.seal(RUN_KIND, described)


def app(service: TokenService, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """The service as an ASGI application, with other `routes` beside its own."""

    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _answer({"error": error.detail}, error.status_code, dict(error.headers or {}))

    own = service_routes(service)
    return Starlette(routes=[*own, *routes], exception_handlers={HTTPException: plain})


def service_routes(service: TokenService) -> list[BaseRoute]:
    """The routes of the service, for an application that serves others too."""

    async def challenge(request: Request) -> Response:
        asked = await _fields(request, ("peer",))
        if not identity.is_peer_id(asked["peer"]):
            raise Refused(400, "'peer' is no peer id")
        return _answer(service.challenge(asked["peer"]))

    async def token(request: Request) -> Response:
        names = ("user", "credential", "peer", "public_key", "challenge", "signature")
        asked = await _fields(request, names)
        return _answer(service.token(asked, caller(request)))

    async def run(request: Request) -> Response:
        return Response(service.run(), media_type="application/json", headers=_HEADERS)

    async def revoked(request: Request) -> Response:
        return Response(service.revoked(), media_type="application/json", headers=_HEADERS)

    return [
        Route("/challenge", counted(service, challenge), methods=["POST"]),
        Route("/token", counted(service, token), methods=["POST"]),
        Route("/run", counted(service, run), methods=["GET"]),
        Route("/revoked", counted(service, revoked), methods=["GET"]),
    ]


Handler = Callable[[Request], Awaitable[Response]]


def counted(service: TokenService, handle: Handler) -> Handler:
    """`handle` under the limits of `service`; what it refuses becomes an answer in JSON."""

    async def endpoint(request: Request) -> Response:
        try:
            try:
                service.count(caller(request))
                return await handle(request)
            except Refused as error:
                if error.status == 429:
                    service.audit.flood(caller(request))
                return _refusal(error)
        except (UserError, OSError) as error:
            _log.error("%s: %s", request.url.path, error)
            return _refusal(Refused(503, "the service is out of order: its log says why"))

    return endpoint


def _refusal(error: Refused) -> Response:
    headers = {"Retry-After": str(math.ceil(error.wait_s))} if error.wait_s else {}
    return _answer({"error": str(error)}, error.status, headers)


async def _fields(request: Request, names: tuple[str, ...]) -> dict[str, str]:
    """The fields of the JSON object that was sent, all of them text. Raises Refused."""
    data = await body(request, _BODY_BYTES, _BODY_S)
    try:
        found = keys.parsed(data)
    except Untrusted as error:
        raise Refused(400, "the body is not JSON in canonical form") from error
    wanted = ", ".join(names)
    if not isinstance(found, dict) or found.keys() != set(names):
        raise Refused(400, f"the body is not an object with the fields {wanted}")
    if not all(isinstance(value, str) and len(value) <= _MOST_CHARS for value in found.values()):
        raise Refused(400, f"each of {wanted} is text of at most {_MOST_CHARS} characters")
    return found


def _answer(
    value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return JSONResponse(value, status, headers={**_HEADERS, **(headers or {})})


def listen(
    authority: Authority, settings: ServiceSettings, routes: Sequence[BaseRoute] = ()
) -> tuple[uvicorn.Server, socket.socket]:
    """A server that is ready to `run(sockets=[...])`, and its socket. Raises UserError."""
    _check_tls(settings)
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise UserError(
            f"cannot listen at '{settings.host}:{settings.port}': {error.strerror}: choose another "
            "--set coordinator.host=... or coordinator.port=..."
        ) from error
    config = uvicorn.Config(
        app(TokenService(authority, settings), routes),
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
        proxy_headers=settings.behind_proxy,
        forwarded_allow_ips=list(settings.proxies),
        http=service_connections.limited(**({"most_of_one": 0} if settings.behind_proxy else {})),
        limit_concurrency=service_connections.MOST_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=5,
        server_header=False,
        access_log=False,
        log_level="warning",
        lifespan="off",
    )
    return uvicorn.Server(config), listener


def serve(
    authority: Authority, settings: ServiceSettings, routes: Sequence[BaseRoute] = ()
) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError."""
    server, listener = listen(authority, settings, routes)
    with listener:
        server.run(sockets=[listener])


def _check_tls(settings: ServiceSettings) -> None:
    certificate, private_key = settings.certificate, settings.private_key
    if (certificate is None) != (private_key is None):
        raise UserError("HTTPS needs both files: --certificate CERT.pem --private-key KEY.pem")
    if certificate is not None and private_key is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                certificate, private_key
            )
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"'{certificate}' with '{private_key}' cannot be used for HTTPS: {error}"
            ) from error
    elif not settings.behind_proxy and not is_loopback(settings.host):
        raise UserError(
            f"'{settings.host}' is reached from outside, and credentials would travel in the "
            "clear: give --certificate and --private-key, or --behind-proxy where something in "
            "front speaks HTTPS"
        )
