"""A real DHT with tokens: who joins, reads and writes; that a revoked peer is out; rotation.

The nodes share this process (each with a libp2p daemon of its own), so that they cost little.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import hivemind.dht.protocol
import pytest
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
from hivemind.proto import auth_pb2, dht_pb2
from hivemind.utils.auth import AuthRole, AuthRPCWrapper

from tests.training.swarm.authorities import RUN, authority, peer, trust
from training.swarm import revocation, tokens
from training.swarm.authority import Authority
from training.swarm.dht_access import PeerAuthorizer, PeerBoundWrapper
from training.swarm.dht_records import RunRecords
from training.swarm.identity import Identity
from training.swarm.revocation import Trust
from training.swarm.tokens import TokenFile


class Peer:
    """One node, with what it shows and trusts."""

    def __init__(self, made: Authority, who: Identity, folder: Path, text: str) -> None:
        self.who = who
        self.trust: Trust = trust(made, clock=time.time)  # type: ignore[arg-type]
        self.own = TokenFile(folder / who.peer_id)
        if text:
            self.own.write(text)
        self.node: Any = None

    async def start(self, stack: AsyncExitStack, address: str = "", **options: Any) -> "Peer":
        # Made apart from the node, so that a daemon whose node is refused ends too.
        p2p = await P2P.create(
            initial_peers=[address] if address else None,
            identity_path=str(self.who.path),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            dht_mode="client" if options.get("client_mode") else "server",
            use_relay=False,
            nat_port_map=False,
            startup_timeout=60.0,
            check_if_identity_free=False,
        )
        stack.push_async_callback(p2p.shutdown)
        self.node = await DHTNode.create(
            p2p,
            initial_peers=[address] if address else None,
            wait_timeout=5.0,
            cache_locally=False,
            record_validator=RunRecords(self.trust, self.who, self.own),
            authorizer=PeerAuthorizer(self.trust, self.own),
            **options,
        )
        stack.push_async_callback(self.node.shutdown)
        return self

    async def address(self) -> str:
        return str((await self.node.get_visible_maddrs())[0])

    async def announce(self, value: Any, life_s: float = 60.0) -> bool:
        key, expires = f"{RUN}_announcements", time.time() + life_s
        return bool(await self.node.store(key, value, expires, subkey=self.who.peer_id))

    async def read(self, key: str = f"{RUN}_announcements") -> dict[Any, Any]:
        found = await self.node.get(key, latest=True)
        return {} if found is None else {name: item.value for name, item in found.value.items()}


def _run(test: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await test(stack)

    asyncio.run(asyncio.wait_for(main(), 150))


def test_a_dht_of_token_holders(tmp_path: Path) -> None:
    made = Authority.create(tmp_path / "a", RUN)
    made.allow_add("asha")
    made.allow_add("bina")
    rogue = Authority.create(tmp_path / "rogue", RUN)
    rogue.allow_add("eve")
    a, b, c, d = (peer(number).peer_id for number in range(4))

    async def test(stack: AsyncExitStack) -> None:
        first = Peer(made, peer(0), tmp_path, made.issue("asha", a))
        await first.start(stack)
        address = await first.address()

        # Strangers do not get in: no token, a rogue authority's, an expired one, another's.
        expired = tokens.issue(
            tokens.Token(RUN, "asha", d, 1_600_000_000, 1_600_000_600, next(iter(made._signers))),
            next(iter(made._signers.values())),
        )
        for text in ("", rogue.issue("eve", d), expired, made.issue("asha", a)):
            with pytest.raises(RuntimeError, match="bootstrap failed"):
                await Peer(made, peer(3), tmp_path, text).start(stack, address)
        (tmp_path / d).unlink()

        second = await Peer(made, peer(1), tmp_path, made.issue("bina", b)).start(stack, address)
        client = await Peer(made, peer(2), tmp_path, made.issue("bina", c)).start(
            stack, address, client_mode=True
        )
        for who, value in ((first, 1), (second, 2), (client, 3)):
            assert await who.announce({"epoch": value})
        expected = {a: {"epoch": 1}, b: {"epoch": 2}, c: {"epoch": 3}}
        for who in (first, second, client):
            assert await who.read() == expected

        # Nobody writes in another's name, nor keeps a key without a writer.
        soon = time.time() + 60
        assert not await second.node.store(f"{RUN}_announcements", 9, soon, subkey=a)
        assert not await second.node.store("anything", 9, soon)
        assert await first.read() == expected

        # hivemind's matchmaking: the subkey is the peer id in bytes; then the group is left.
        group, raw = f"{RUN}.0b0101", second.node.peer_id.to_bytes()
        assert await second.node.store(group, True, soon, subkey=raw)
        assert await client.read(group) == {raw: True}
        assert await second.node.store(group, False, soon + 1, subkey=raw)
        assert await client.read(group) == {raw: False}

        # A stranger who insists sees nothing and leaves nothing.
        stranger = Peer(made, peer(3), tmp_path, rogue.issue("eve", d))
        await stranger.start(stack, address, ensure_bootstrap_success=False)
        assert await stranger.read() == {}
        await stranger.announce({"epoch": 666})
        assert await first.read() == expected == await client.read()

        # Tokens and the list travel in the DHT itself.
        token = second.own.text()
        assert await second.node.store(
            tokens.dht_key(RUN),
            token,
            float(tokens.read(token, made.public_keys()).expires),
            subkey=b,
        )
        assert await client.read(tokens.dht_key(RUN)) == {b: token}
        for caller in (second, client):
            assert await caller.node.protocol.call_ping(first.node.peer_id) == first.node.node_id
        assert await first.node.protocol.call_ping(second.node.peer_id) == second.node.node_id
        made.revoke("bina")
        made.allow_add("dipa")
        await_list = made.revocations().decode()
        assert await first.node.store(revocation.dht_key(RUN), await_list, time.time() + 500)
        found = await client.node.get(revocation.dht_key(RUN), latest=True)
        assert found.value == await_list

        # Once the first peer has the list, the revoked ones reach it no more.
        first.trust.offer(await_list)
        assert await client.node.protocol.call_ping(first.node.peer_id) is None
        assert await second.node.protocol.call_ping(first.node.peer_id) is None
        # And it believes no answer of theirs.
        assert await first.node.protocol.call_ping(second.node.peer_id) is None
        # What they wrote before expires by itself and silences nobody.
        assert (await first.read())[a] == {"epoch": 1}
        # With a new token, bina's peer is back.
        second.own.write(made.issue("bina", b))
        assert await second.node.protocol.call_ping(first.node.peer_id) == first.node.node_id

    _run(test)


def test_without_the_binding_everything_is_refused(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    own = TokenFile(tmp_path / "token")
    own.write(made.issue("asha", peer(0).peer_id))
    authorizer = PeerAuthorizer(trust(made), own)
    assert hivemind.dht.protocol.AuthRPCWrapper is PeerBoundWrapper

    class Stub:
        async def rpc_ping(self, request: Any, *_: Any, **__: Any) -> Any:
            return dht_pb2.PingResponse(available=True)

    async def ask(wrapper: type[AuthRPCWrapper], role: AuthRole) -> Any:
        return await wrapper(Stub(), role, authorizer).rpc_ping(dht_pb2.PingRequest(), None)

    for role in AuthRole:
        assert asyncio.run(ask(AuthRPCWrapper, role)) is None


def test_the_wrapper_leaves_other_authorizers_and_names_alone() -> None:
    class Stub:
        async def rpc_ping(self, request: Any) -> str:
            return f"pong {request}"

    wrapper = PeerBoundWrapper(Stub(), AuthRole.CLIENT, None)
    assert asyncio.run(wrapper.rpc_ping(5)) == "pong 5"
    assert wrapper._role == AuthRole.CLIENT


def test_the_peer_at_the_other_end_must_be_the_tokens(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    own = TokenFile(tmp_path / "token")
    own.write(made.issue("asha", peer(0).peer_id))
    authorizer = PeerAuthorizer(trust(made), own)
    request, response = dht_pb2.PingRequest(), dht_pb2.PingResponse()
    asyncio.run(authorizer.sign_request(request, None))
    asyncio.run(authorizer.sign_response(response, request))
    for shown in (request.auth.client_access_token, response.auth.service_access_token):
        assert authorizer.admits(shown, peer(0).peer_id)
        assert not authorizer.admits(shown, peer(1).peer_id)
    assert not authorizer.admits(auth_pb2.AccessToken(), peer(0).peer_id)
    assert not authorizer.admits(auth_pb2.AccessToken(signature=b"\xff"), peer(0).peer_id)
    assert not asyncio.run(authorizer.validate_request(request))
    assert not asyncio.run(authorizer.validate_response(response, request))
