"""The process that averages with other peers: groups of one epoch, whole rounds, guarded doors.

A subclass of hivemind's DecentralizedAverager. It keeps hivemind's processes, matchmaking and
messages, and replaces what SWARM.md found wanting:
- groups form under the key of their epoch, so that peers of two epochs never meet;
- a round says which fraction was averaged, and its tensors are only used when it was all;
- every remote call and every member of a group passes the guard;
- a peer that failed a round is left out of groups for a while, so that the next one is smaller;
- states are downloaded in checked chunks (`state_transfer`) instead of a stream on trust.
It overrides private methods of hivemind 1.1.12: test_hivemind_contract names each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# hivemind reads from the annotation of an RPC that it streams, and knows it only by this name.
from typing import AsyncIterator  # noqa: UP035  # isort: skip

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.dht import DHT
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_dht_time

from training.swarm.codecs import Codec
from training.swarm.following import follow_parent
from training.swarm.pacing import part_bytes
from training.swarm.process_memory import give_back
from training.swarm.rates import links
from training.swarm.reduction import ExactRunner, Left, Limits, to_leave_out
from training.swarm.shares import Link, share_out
from training.swarm.state import Digests, PartialCopy
from training.swarm.state_transfer import Donor, DonorFailed, receive, refusal, request
from training.swarm.types import ROLES, Member, Role, RoundResult

if TYPE_CHECKING:
    from training.swarm.guard import Guard

log = logging.getLogger(__name__)

_EPOCH_BITS = 32
_MODES = {
    "node": AveragingMode.NODE,
    "client": AveragingMode.CLIENT,
    "auxiliary": AveragingMode.AUX,
}
_PREFETCH = 4
"""Parts under way at a time in each stream: with one, a slow line waits between two."""
_ASK_EVERY_S = 0.1
_GIVE_BACK_S = 60.0
"""Not after every round: the next one is 7 % slower (18 M parameters, loopback)."""
_HUNG_UP_S = 5.0
_VIOLATION_TIMES = 10
"""A peer that broke a rule is left out so many times longer than one that was slow."""


@dataclass(frozen=True)
class AveragerSettings:
    """What an averager needs to know; `training.swarm.transport` makes one."""

    prefix: str
    role: Role
    codec: Codec
    matchmaking_s: float
    sender_timeout_s: float
    allreduce_timeout_s: float
    exclusion_s: float
    weight_cap: float
    norm_cap: float | None
    part_bytes: int
    donors_at_once: int
    upload_limit_mbit: float | None


@dataclass(frozen=True)
class RoundReport:
    """A round with what the estimate of the link rates needs beside its result."""

    result: RoundResult
    links: tuple[Link, ...]
    shares: tuple[int, ...]
    waited_s: Mapping[str, float]
    reducing_s: float


@dataclass(frozen=True)
class Search:
    """What hivemind's matchmaking reads of its StepControl."""

    data_for_gather: bytes
    scheduled_time: float
    deadline: float

    def get_timeout(self) -> float:
        """Seconds that are left."""
        return float(max(0.0, self.deadline - get_dht_time()))


class EpochKeys(GroupKeyManager):  # type: ignore[misc]
    """Group keys that stay with their epoch, and leaders that are allowed and not left out."""

    def __init__(self, owner: RoundAverager, original: GroupKeyManager) -> None:
        super().__init__(original.dht, original.prefix, "", original.target_group_size)
        self._owner, self._asked = owner, -math.inf

    def enter(self, epoch: int) -> None:
        """Look for peers of `epoch` from now on."""
        self.group_bits = format(epoch, f"0{_EPOCH_BITS}b")

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        # A peer that finds nobody asks again at once: 1.5 Mbit/s each, measured without latency.
        await asyncio.sleep(self._asked + _ASK_EVERY_S - time.monotonic())
        self._asked = time.monotonic()
        found = await super().get_averagers(group_key, only_active)
        return [pair for pair in found if await self._owner.admits(pair[0])]

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        """hivemind would move on to the key of another bucket."""


class RoundAverager(DecentralizedAverager):  # type: ignore[misc]
    """One per peer; its process is a fork of the trainer and ends with it."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        dht: DHT,
        settings: AveragerSettings,
        guard: Guard | None,
    ) -> None:
        self.settings, self._guard = settings, guard
        self._donor = Donor(at_once=settings.donors_at_once, limit_mbit=settings.upload_limit_mbit)
        self._left_out: dict[PeerID, float] = {}
        self._serving, self._gave_back_at = 0, 0.0
        self._fetching = asyncio.Lock()
        super().__init__(
            tensors,
            dht,
            start=False,
            prefix=settings.prefix,
            min_matchmaking_time=settings.matchmaking_s,
            request_timeout=min(3.0, settings.matchmaking_s / 2),
            compression=settings.codec.compression,
            part_size_bytes=settings.part_bytes,
            sender_timeout=settings.sender_timeout_s,
            reducer_timeout=2 * settings.sender_timeout_s,
            client_mode=settings.role == "client",
            auxiliary=settings.role == "auxiliary",
            allow_state_sharing=False,
        )

    def run(self) -> None:
        """The body of the process."""
        follow_parent(self._parent_pid)
        super().run()

    def ask(self, method: str, **arguments: Any) -> MPFuture:
        """Run the coroutine `method` in the averager's process; its result is in the future."""
        future = MPFuture()
        self._outer_pipe.send((f"_{method}", [], {"future": future, **arguments}))
        return future

    async def admits(self, peer_id: PeerID) -> bool:
        """Whether the guard allows a peer, and no round just failed by it."""
        if self._left_out.get(peer_id, -math.inf) > time.monotonic():
            return False
        return await self._allowed(peer_id)

    async def _allowed(self, peer_id: PeerID) -> bool:
        if self._guard is None or peer_id == self.peer_id:
            return True
        name = peer_id.to_base58()
        try:
            # A guard that looks up tokens refuses a new peer at first, and can be waited for.
            admit = getattr(self._guard, "admit", None)
            allowed = self._guard.allowed(name) if admit is None else await admit(name)
        except Exception as error:
            log.warning("peer %s refused: the guard failed: %r", peer_id, error)
            return False
        if not allowed:
            log.info("peer %s refused: not authorised", peer_id)
        return bool(allowed)

    # Rounds.

    async def _round(
        self, *, future: MPFuture, epoch: int, gathered: dict[str, Any], timeout_s: float
    ) -> None:
        """Find a group of `epoch` and average in it: a RoundReport, or None without a group."""
        try:
            future.set_result(await self._find_and_average(epoch, gathered, timeout_s))
        except Exception as error:
            log.warning("epoch %d: the round failed: %r", epoch, error)
            future.set_result(None)

    async def _find_and_average(
        self, epoch: int, gathered: dict[str, Any], timeout_s: float
    ) -> RoundReport | None:
        keys = self._matchmaking.group_key_manager
        if not isinstance(keys, EpochKeys):
            keys = EpochKeys(self, keys)
            self._matchmaking.group_key_manager = keys
        keys.enter(epoch)
        now = get_dht_time()
        search = Search(
            data_for_gather=self.serializer.dumps(gathered),
            scheduled_time=now + self.settings.matchmaking_s,
            deadline=now + timeout_s,
        )
        self._pending_groups_registered.clear()
        try:
            group = await self._matchmaking.look_for_group(search)
            if group is None:
                return None
            with self._register_allreduce_group(group):
                try:
                    return await self._aggregate_with_group(group, epoch=epoch)
                finally:  # where it failed before the round, groupmates would wait for it
                    self._running_groups[group.group_id].cancel()
        finally:
            self._pending_groups_registered.set()
            if time.monotonic() - self._gave_back_at > _GIVE_BACK_S:
                self._gave_back_at = time.monotonic()
                give_back()

    async def _aggregate_with_group(
        self, group_info: GroupInfo, *, epoch: int
    ) -> RoundReport | None:
        started = time.monotonic()
        reason = await self._refusal(group_info)
        members: tuple[Member, ...] = ()
        if reason is None:
            try:
                members = read_members(self.serializer, group_info, self.settings)
                reason = self._mismatch(members, epoch)
            except Nonsense as error:
                reason = f"its {error}"
                self._exclude(error.peer_id, self.settings.exclusion_s)
        if reason is not None:
            log.warning("epoch %d: left a group: %s", epoch, reason)
            await self._go_away(group_info)
            return None
        roles: list[tuple[str, Role]] = [(m.peer_id, m.gathered["role"]) for m in members]
        group_links = tuple(links(roles, [m.gathered for m in members]))
        shares = share_out(group_links, self.total_size)
        runner, outputs = await self._run_allreduce_inplace_(
            self._averaged_tensors, group_info, members=members, shares=shares,
            part_bytes=part_bytes(group_links, self.settings.part_bytes),
        )  # fmt: skip
        self._exclude_failed(runner, epoch)
        fraction = runner.fraction if outputs is not None else 0.0
        complete = fraction == 1.0 and runner.tensor_part_reducer.fault is None
        if complete and outputs:
            for tensor, average in zip(self._averaged_tensors, outputs, strict=True):
                tensor.copy_(average)
        used = {peer.to_base58(): link for peer, link in runner.links.items()}
        result = RoundResult(
            epoch=epoch,
            group_id=group_info.group_id.hex(),
            members=members,
            fraction=fraction,
            seconds=time.monotonic() - started,
            sent_bytes=sum(link.sent_bytes for link in used.values()),
            rates={peer: link.rate for peer, link in used.items()},
            complete=complete,
        )
        waited = {peer.to_base58(): seconds for peer, seconds in runner.waited_s.items()}
        reducing_s = runner.tensor_part_reducer.reducing_s
        return RoundReport(result, group_links, shares, waited, reducing_s)

    async def _go_away(self, group: GroupInfo) -> None:
        """Tell the others that this peer is not in `group`, so that they need not wait for it."""
        self._running_groups[group.group_id].set_result(Left(self.peer_id))
        await asyncio.sleep(min(1.0, self.settings.matchmaking_s / 2))

    async def _refusal(self, group: GroupInfo) -> str | None:
        """Why this peer does not average in `group`."""
        if len(set(group.peer_ids)) != len(group.peer_ids):
            return "it names a peer twice"
        for peer in group.peer_ids:
            if peer != self.peer_id and not await self.admits(peer):
                return f"it has the member {peer}, who is not authorised or failed a round just now"
        return None

    def _mismatch(self, members: Sequence[Member], epoch: int) -> str | None:
        if any(member.gathered["epoch"] != epoch for member in members):
            return "it mixes epochs"
        if all(member.gathered["role"] == "client" for member in members):
            return "nobody in it can reduce"
        if not sum(member.weight for member in members) > 0:
            return "all weights are 0"
        return None

    async def _run_allreduce_inplace_(
        self,
        tensors: Sequence[torch.Tensor],
        group_info: GroupInfo,
        *,
        members: Sequence[Member],
        shares: Sequence[int],
        part_bytes: int,
    ) -> tuple[ExactRunner, list[torch.Tensor] | None]:
        """Run the round; the averages, or None when the time was over. `tensors` stay."""
        weights = {
            peer: member.weight for peer, member in zip(group_info.peer_ids, members, strict=True)
        }
        runner = ExactRunner(
            limits=Limits(weights, self.settings.norm_cap, self.settings.codec),
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_info.group_id,
            ordered_peer_ids=group_info.peer_ids,
            peer_fractions=tuple(shares),
            modes=tuple(_MODES[member.gathered["role"]] for member in members),
            weight=weights[self.peer_id],
            compression=self.settings.codec.compression,
            part_size_bytes=part_bytes,
            prefetch=_PREFETCH,
            sender_timeout=self.settings.sender_timeout_s,
            reducer_timeout=2 * self.settings.sender_timeout_s,
        )
        self._running_groups[group_info.group_id].set_result(runner)

        async def outputs() -> list[torch.Tensor]:
            return [tensor async for tensor in runner]

        try:
            found = await asyncio.wait_for(outputs(), self.settings.allreduce_timeout_s)
        except TimeoutError:
            log.warning("the all-reduce took more than %g s", self.settings.allreduce_timeout_s)
            return runner, None
        if self.settings.role == "auxiliary":
            # It has reduced all before it has sent all: what it counts would be too little.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(runner.answered(), self.settings.sender_timeout_s)
        return runner, found

    def _exclude_failed(self, runner: ExactRunner, epoch: int) -> None:
        for fault in to_leave_out(runner.faults):
            log.warning("epoch %d: %s", epoch, fault)
            seconds = self.settings.exclusion_s * (_VIOLATION_TIMES if fault.violation else 1)
            if fault.left:  # a group without it can come about meanwhile
                seconds = min(seconds, 2 * self.settings.matchmaking_s)
            self._exclude(fault.peer_id, seconds)

    def _exclude(self, peer_id: PeerID, seconds: float) -> None:
        """Be in no group with `peer_id` for a while."""
        if peer_id != self.peer_id:
            until = time.monotonic() + seconds
            self._left_out[peer_id] = max(self._left_out.get(peer_id, until), until)

    async def _leave_out(self, *, future: MPFuture, peer_id: str) -> None:
        # Not for longer: what it said came through the leader of a group, who may have changed it.
        self._exclude(PeerID.from_base58(peer_id), self.settings.exclusion_s)
        future.set_result(None)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """A peer asks to be led."""
        if not await self.admits(context.remote_id):
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for response in until_hung_up(super().rpc_join_group(request, context)):
            yield response

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A member of a group sends its part of our share."""
        if not await self._allowed(context.remote_id):
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        self._serving += 1
        try:
            async for message in until_hung_up(super().rpc_aggregate_part(stream, context)):
                yield message
        finally:
            self._serving -= 1

    # States.

    async def rpc_download_state(
        self, _request: averaging_pb2.DownloadRequest, _context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """hivemind's own download is answered with nothing: it knows no hash and no resume."""
        for message in list[averaging_pb2.DownloadData]():
            yield message

    async def rpc_read_state(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """A joiner asks for a state (`state_transfer`)."""
        if not await self._allowed(context.remote_id):
            yield refusal("it does not know this peer as authorised")
            return
        async for message in until_hung_up(self._donor.serve(request)):
            yield message

    async def _offer_state(self, *, future: MPFuture, path: str, digests: dict[str, Any]) -> None:
        known = Digests.from_json(digests)
        if known is not None:
            self._donor.offer(Path(path), known)
        future.set_result(None)

    async def _fetch_state(
        self,
        *,
        future: MPFuture,
        donor: str,
        wanted: str,
        folder: str,
        chunk_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """Download the state `wanted` from `donor`: its path as text, or DonorFailed."""
        try:
            async with self._fetching:  # two would append to the same file
                download = self._download(Path(folder), donor, wanted, chunk_timeout_s)
                future.set_result(str(await asyncio.wait_for(download, timeout_s)))
        except DonorFailed as error:
            future.set_exception(error)
        except TimeoutError:
            future.set_exception(DonorFailed(f"it was not done in {timeout_s:g} s"))
        except Exception as error:
            future.set_exception(DonorFailed(f"it could not be reached: {error!r}"))

    async def _download(
        self, folder: Path, donor: str, wanted: str, chunk_timeout_s: float
    ) -> Path:
        loop = asyncio.get_running_loop()
        copy = await loop.run_in_executor(None, PartialCopy, folder, wanted)  # it hashes it
        if copy.complete:
            return copy.finish()
        peer = PeerID.from_base58(donor)
        if not await self._allowed(peer):
            raise DonorFailed("it is not authorised")
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        call = stub.rpc_read_state(request(wanted, copy))
        stream = await asyncio.wait_for(call, chunk_timeout_s)
        try:
            await receive(stream, copy, chunk_timeout_s=chunk_timeout_s)
        finally:
            await stream.aclose()  # or the donor would wait for us, and its place be taken
        return copy.finish()

    # The end.

    async def _shutdown(self, timeout: float | None) -> None:
        """hivemind's own fails where a group has no runner yet."""
        if not self.client_mode:
            await self.remove_p2p_handlers(self._p2p, namespace=self.prefix)
        for future in list(self._running_groups.values()):
            if not future.cancel() and not future.cancelled() and future.exception() is None:
                future.result().finalize(cancel=True)

    async def _drain(self, *, future: MPFuture, timeout_s: float) -> None:
        """Wait until the members of the last round have their averages."""
        until = time.monotonic() + timeout_s
        while self._serving and time.monotonic() < until:
            await asyncio.sleep(0.05)
        future.set_result(self._serving)

    def stop(self, timeout_s: float) -> None:
        """End the process: by request, and by force after `timeout_s`."""
        if not self.is_alive():
            return
        self.shutdown_timeout = timeout_s
        with contextlib.suppress(OSError):
            self.shutdown()
        self.join(0.5)
        if self.is_alive():
            self.kill()


async def until_hung_up(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Give `messages` and keep the call open until the caller, who has them, ends it.

    hivemind's daemon resets a stream whose handler has ended, and the reset overtakes what was sent
    last: one round in 50 of four peers missed the last average.
    """
    async for message in messages:
        yield message
    await asyncio.sleep(_HUNG_UP_S)  # cancelled when the caller ends the call


class Nonsense(Exception):
    """A member gathered what no peer of this run gathers."""

    def __init__(self, peer_id: PeerID) -> None:
        super().__init__(f"member {peer_id} tells what no peer of this run tells")
        self.peer_id = peer_id


def read_members(
    serializer: Any, group: GroupInfo, settings: AveragerSettings
) -> tuple[Member, ...]:
    """The members with what they gathered. Raises Nonsense when it is not what it must be."""
    members = []
    for peer_id, data in zip(group.peer_ids, group.gathered, strict=True):
        try:
            value = serializer.loads(data)
        except Exception as error:  # msgpack raises many kinds for bytes of a stranger
            raise Nonsense(peer_id) from error
        if not _is_sound(value, settings.weight_cap):
            raise Nonsense(peer_id)
        members.append(Member(peer_id.to_base58(), value["weight"], value))
    return tuple(members)


def _is_sound(value: Any, weight_cap: float) -> bool:
    if not isinstance(value, dict):
        return False
    weight, role, epoch = value.get("weight"), value.get("role"), value.get("epoch")
    if not isinstance(weight, float) or not 0 <= weight <= weight_cap:
        return False
    if role not in ROLES or not isinstance(epoch, int):
        return False
    # Else its tensors would weigh more, or less, than what it is credited.
    return bool(weight == (0 if role == "auxiliary" else value.get("samples", weight)))
