"""Who may call the DHT of a run: peers with a token, bound to their connection.

hivemind hands an authorizer the request alone, so its own scheme signs each request with a key
that the token names. Here the token names the libp2p peer id, which the connection proves, so
nothing is signed: the caller shows its token in the request's `auth` field, the servicer compares
the token's peer with the peer at the other end, and the same the other way round. For that,
`hivemind.dht.protocol.AuthRPCWrapper` is replaced by one that tells the authorizer who is at the
other end. Without it `PeerAuthorizer` refuses everything.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import hivemind.dht.protocol
from hivemind.proto import auth_pb2
from hivemind.utils.auth import AuthorizerBase, AuthRole, AuthRPCWrapper
from hivemind.utils.logging import get_logger

from training.swarm.keys import Untrusted
from training.swarm.revocation import Trust
from training.swarm.tokens import TokenFile

_log = get_logger(__name__)


class PeerAuthorizer(AuthorizerBase):  # type: ignore[misc]
    """The `authorizer` of a hivemind DHT: shows `own`, and lets in whom `trust` lets in."""

    def __init__(self, trust: Trust, own: TokenFile) -> None:
        self._trust = trust
        self._own = own
        bind()

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        """Show our token to the servicer."""
        request.auth.client_access_token.CopyFrom(self._shown())

    async def sign_response(self, response: Any, request: Any) -> None:
        """Show our token to the caller."""
        response.auth.service_access_token.CopyFrom(self._shown())

    async def validate_request(self, request: Any) -> bool:
        """No: without the peer at the other end nothing is proved (see `bind`)."""
        return False

    async def validate_response(self, response: Any, request: Any) -> bool:
        """No: without the peer at the other end nothing is proved (see `bind`)."""
        return False

    def admits(self, shown: Any, peer_id: str) -> bool:
        """Whether the access token `shown` lets in the peer at the other end."""
        try:
            self._trust.check(shown.signature.decode("ascii", errors="replace"), peer_id)
        except Untrusted as error:
            _log.debug("the DHT refuses the peer '%s': %s", peer_id, error)
            return False
        return True

    def _shown(self) -> Any:
        return auth_pb2.AccessToken(signature=self._own.text().encode())


class PeerBoundWrapper(AuthRPCWrapper):  # type: ignore[misc]
    """hivemind's wrapper of RPCs, which tells a `PeerAuthorizer` who is at the other end."""

    def __getattribute__(self, name: str) -> Any:
        authorizer = object.__getattribute__(self, "_authorizer")
        if not name.startswith("rpc_") or not isinstance(authorizer, PeerAuthorizer):
            return super().__getattribute__(name)
        stub = object.__getattribute__(self, "_stub")
        method: Callable[..., Awaitable[Any]] = getattr(stub, name)
        if object.__getattribute__(self, "_role") == AuthRole.SERVICER:
            return _served(method, authorizer)
        return _called(method, authorizer, stub._peer)


def _served(
    method: Callable[..., Awaitable[Any]], authorizer: PeerAuthorizer
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def serve(request: Any, context: Any, *args: Any, **options: Any) -> Any:
        if not authorizer.admits(request.auth.client_access_token, str(context.remote_id)):
            return None
        response = await method(request, context, *args, **options)
        await authorizer.sign_response(response, request)
        return response

    return serve


def _called(
    method: Callable[..., Awaitable[Any]], authorizer: PeerAuthorizer, peer: Any
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def call(request: Any, *args: Any, **options: Any) -> Any:
        await authorizer.sign_request(request, None)
        response = await method(request, *args, **options)
        return (
            response if authorizer.admits(response.auth.service_access_token, str(peer)) else None
        )

    return call


def bind() -> None:
    """Put `PeerBoundWrapper` in the place of hivemind's, in this process and its forks."""
    hivemind.dht.protocol.AuthRPCWrapper = PeerBoundWrapper
