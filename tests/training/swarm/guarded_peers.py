"""Real peers with tokens, and strangers who stop at nothing, for test_strangers.

A member is set up as `training.swarm.peer` does it: authorizer, validator, guard, revocations from
the DHT. A stranger runs our own code with its scruples taken out: it believes every record, takes
every answer, lets everybody in, and knocks at the doors of the averager by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind import DHT
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time

from tests.training.swarm import real_peers
from tests.training.swarm.real_peers import RUN, SHAPES, Served
from training.swarm import (
    announcements,
    guard,
    reaching,
    revocation,
    rounds_told,
    state_transfer,
    tokens,
)
from training.swarm.averager import RoundAverager
from training.swarm.dht_access import PeerAuthorizer
from training.swarm.dht_records import RunRecords
from training.swarm.keys import Untrusted
from training.swarm.membership import membership
from training.swarm.token_client import TokenKeeper

POLL_S = 2.0
REFUSED = averaging_pb2.MessageCode.Name(averaging_pb2.PROTOCOL_VIOLATION)


class Shameless(PeerAuthorizer):
    """Takes every answer, whoever gives it."""

    def admits(self, shown: Any, peer_id: str) -> bool:
        return True


class Credulous(RunRecords):
    """Believes every record, and signs its own as members do."""

    def validate(self, record: DHTRecord) -> bool:
        return True


@dataclass(frozen=True)
class Knocks:
    """What a peer got at the averager of another: the codes of two calls, bytes of the state."""

    join: str
    aggregate: str
    state_bytes: int
    said: str

    @property
    def refused(self) -> bool:
        return (self.join, self.aggregate, self.state_bytes) == (REFUSED, REFUSED, 0)


async def _knock(self: Any, *, future: Any, target: str, wanted: str) -> None:
    """Call the averager of `target` by hand, without matchmaking or DHT."""
    stub = self.get_stub(self._p2p, PeerID.from_base58(target), namespace=self.prefix)

    async def one() -> AsyncIterator[averaging_pb2.AveragingData]:
        yield averaging_pb2.AveragingData(group_id=b"\1" * 20)

    async def first(call: Any) -> Any:
        stream = await asyncio.wait_for(call, 10.0)
        try:
            return await asyncio.wait_for(anext(stream), 10.0)
        finally:
            await stream.aclose()

    try:
        joined = await first(stub.rpc_join_group(averaging_pb2.JoinRequest(
            schema_hash=self.schema_hash, expiration=get_dht_time() + 30.0, client_mode=False,
            gather=b"", group_key=f"{self.prefix}.0b1",
        )))  # fmt: skip
        answered = await first(stub.rpc_aggregate_part(one()))
        got, said = 0, ""
        request = state_transfer._message({"hash": wanted, "from_chunk": 0})
        async for message in await asyncio.wait_for(stub.rpc_read_state(request), 10.0):
            got += len(message.tensor_part.buffer)
            said = said or message.metadata.decode()
        name = averaging_pb2.MessageCode.Name
        future.set_result(Knocks(name(joined.code), name(answered.code), got, said))
    except Exception as error:
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


class Guarded(Served):
    """A peer of a run with authorisation; options: the authority's `keys`, a `token`, a `key` file
    with its identity, whether it is a `stranger`."""

    def start(self, folder: str, first: list[str], options: dict[str, Any]) -> dict[str, Any]:
        import shutil

        import torch

        from training.swarm.transport import SwarmTransport, TransportSettings, start_dht

        torch.set_num_threads(1)
        path, self.first = Path(folder), first
        shutil.copy2(options["key"], path / "identity.key")
        self.member = membership(path, RUN, tuple(options["keys"]), authorised=True)
        self.show(options["token"])
        stranger, trust = options.get("stranger", False), self.member.trust
        assert trust is not None
        self.settings = TransportSettings(
            run=RUN, folder=path / "state", codec="none", role=options.get("role", "node"),
            matchmaking_s=1.0, sender_timeout_s=5.0, allreduce_timeout_s=20.0, exclusion_s=1.0,
            announcement_s=600.0,
            part_bytes=1 << 15,
        )  # fmt: skip
        how = self.member.dht_options()
        if stranger:
            how = {
                "validators": [Credulous(trust, self.member.identity, self.member.token)],
                "authorizer": Shameless(trust, self.member.token),
                "ensure_bootstrap_success": False,
            }
        self.dht: DHT = start_dht(
            first, role=self.settings.role, host_addresses=["/ip4/127.0.0.1/tcp/0"],
            identity_path=self.member.identity.path, **how,
        )  # fmt: skip
        self.guard = None if stranger else self.member.guard(self.dht)
        shapes = [torch.zeros(shape) for shape in SHAPES]
        self.transport = SwarmTransport(self.dht, self.settings, shapes, self.guard)
        if not stranger:
            sources = [revocation.dht_source(self.dht, RUN)]
            TokenKeeper(
                trust, self.member.token, self.member.identity, None, sources, poll_s=POLL_S
            ).start()
            self.member.show(self.dht, print)
        addresses = [str(address) for address in self.dht.get_visible_maddrs()]
        return {"peer_id": self.transport.peer_id, "addresses": addresses}

    def show(self, token: str) -> None:
        """Use `token` from now on, in all processes of this peer."""
        self.member.token.write(token)

    def enter(self, token: str) -> int:
        """With `token`, call the first peers of the DHT again; how many answered."""
        self.show(token)
        return reaching.call(self.dht, self.first)

    def renew(self, token: str) -> None:
        """A token from the authority; nobody hears of it yet."""
        self.show(token)

    def come_back(self) -> int:
        """What `training.swarm.peer` does after a renewal that followed a void token."""
        answered = reaching.call(self.dht, self.first)
        self.member.show(self.dht, print)
        return answered

    def token_of(self, peer_id: str) -> str:
        """The token that the DHT has of a peer."""
        found = self.dht.get(tokens.dht_key(RUN), latest=True)
        return str(found.value[peer_id].value)

    def claim(self, epoch: int, state_hash: str, token: str) -> None:
        """Put a token and an announcement into the DHT, wherever they are taken."""
        own, expires = self.transport.peer_id, get_dht_time() + 300.0
        self.dht.store(tokens.dht_key(RUN), token, subkey=own, expiration_time=expires)
        self.announce(epoch, state_hash)
        self.transport._last_store.result(timeout=20.0)

    def records(self) -> Mapping[str, Any]:
        """What the DHT gives of the run's records, by key: who has one there."""
        keys = {
            "announcements": announcements.dht_key(RUN), "tokens": tokens.dht_key(RUN),
            "receipts": rounds_told.dht_key(RUN), "revoked": revocation.dht_key(RUN),
        }  # fmt: skip
        found = {name: self.dht.get(key, latest=True) for name, key in keys.items()}
        return {
            name: [] if one is None else sorted(one.value) if isinstance(one.value, dict) else
            [one.value] for name, one in found.items()
        }  # fmt: skip

    def tell(self, result: Any) -> None:
        """Put a receipt of a round into the DHT."""
        rounds_told.Teller(self.dht, RUN, self.member.identity).tell(result, get_dht_time())

    def heard(self) -> list[str]:
        """Whose receipts this peer believes, as the coordinator reads them."""
        found = self.dht.get(rounds_told.dht_key(RUN), latest=True)
        records = {} if found is None else {str(k): v.value for k, v in found.value.items()}
        assert self.guard is not None
        told = rounds_told.heard(records, allowed=self.guard.allowed)
        return sorted(one.receipt.signer for one in told)

    def knock(self, target: str, wanted: str) -> Knocks:
        """What the averager of `target` says to this peer."""
        asked = self.transport._ask("knock", target=target, wanted=wanted)
        knocks: Knocks = asked.result(timeout=60.0)
        return knocks

    def fetch(self, wanted: str, donors: list[str], timeout_s: float) -> int:
        """The epoch of a downloaded state."""
        state = self.transport.download_state(
            expected_hash=wanted, donors=donors, timeout_s=timeout_s
        )
        return state.epoch

    def publish_revocations(self, sealed: bytes) -> bool:
        """What the coordinator does with a new list."""
        trust = self.member.trust
        assert trust is not None
        trust.offer(sealed)
        return revocation.publish(self.dht, trust)

    def why_not(self, peer_id: str) -> str:
        assert isinstance(self.guard, guard.TokenGuard)
        return self.guard.why_not(peer_id)

    def own_fault(self) -> str:
        """Why this peer's own token counts no more."""
        trust = self.member.trust
        assert trust is not None
        try:
            trust.check(self.member.token.text(), self.transport.peer_id)
        except Untrusted as error:
            return str(error)
        return ""


if __name__ == "__main__":
    # What goes to the test must be of the module that the test imports.
    from tests.training.swarm.guarded_peers import Guarded as ServedHere
    from tests.training.swarm.guarded_peers import _knock as knock

    RoundAverager._knock = knock  # type: ignore[attr-defined]
    real_peers.Served = ServedHere  # type: ignore[misc]
    real_peers.main()
