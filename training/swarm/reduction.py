"""One all-reduce of one group, in which everybody ends with the same bits or nobody with any.

hivemind's runner sends each member the difference to its own part, encoded once per member, and
goes on without a sender that fails. Here a reducer
- sums the parts of all senders in float64, in the order of their peer ids, encodes the mean once,
  and everybody (itself too) uses the decoded value: equal bits, equal hashes of the state;
- refuses a part that is not finite, of a wrong shape or codec, with another weight than declared,
  or beyond the norm cap;
- stops for everybody when a sender is refused or falls silent, and says who it was. Every member
  needs every reducer, so no member can take such a round for a whole one.
Who failed is left out of the next groups. What a peer saw itself counts for more than what another
says, and that somebody left a round that was broken already is no fault.
All members send and receive at the same time, those without a share too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner
from hivemind.compression import deserialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import achain, aiter_with_timeout, amap_in_executor, anext, as_aiter

from training.swarm.codecs import Codec
from training.swarm.pacing import Pace


class SenderFault(AllreduceException):  # type: ignore[misc]
    """The member `peer_id` fell silent, or (`violation`) sent what no honest peer sends.

    left: it did not take part, because it does not average with somebody in the group.
    accuser: the member whose word this is; None for what this peer saw itself.
    """

    def __init__(
        self,
        peer_id: PeerID,
        reason: str,
        *,
        violation: bool = False,
        left: bool = False,
        accuser: PeerID | None = None,
    ) -> None:
        super().__init__(f"{peer_id} {reason}")
        self.peer_id = peer_id
        self.violation, self.left, self.accuser = violation, left, accuser

    def to_message(self) -> averaging_pb2.AveragingData:
        """What the other members are told."""
        code = averaging_pb2.CANCELLED
        if self.violation or self.left:
            codes = averaging_pb2.PROTOCOL_VIOLATION, averaging_pb2.BAD_GROUP_ID
            code = codes[self.left]
        return averaging_pb2.AveragingData(code=code, peer_id=self.peer_id.to_bytes())


class Left:
    """Stands for the runner of a peer that goes away from an assembled group: says so to all."""

    def __init__(self, peer_id: PeerID) -> None:
        self._fault = SenderFault(peer_id, "has left", left=True)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Answer a member."""
        yield self._fault.to_message()

    def finalize(self, *, cancel: bool = False) -> None:
        """There is nothing to end."""


def to_leave_out(faults: Sequence[SenderFault]) -> list[SenderFault]:
    """Of two members that accuse each other one only, the same at all that heard both."""
    accused = {(one.accuser, one.peer_id) for one in faults}
    return [
        one
        for one in faults
        if (one.peer_id, one.accuser) not in accused
        or one.accuser is None
        or one.peer_id.to_base58() > one.accuser.to_base58()
    ]


@dataclass(frozen=True)
class Averaged:
    """A finished part: what is sent to every member, and what it decodes to."""

    wire: runtime_pb2.Tensor
    value: torch.Tensor


@dataclass
class LinkUse:
    """Bytes to and from one member, and when the first and the last of them passed."""

    sent_bytes: int = 0
    received_bytes: int = 0
    first: float = field(default=math.inf)
    last: float = field(default=-math.inf)

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Add bytes that pass now."""
        now = time.monotonic()
        self.first, self.last = min(self.first, now), max(self.last, now)
        self.sent_bytes += sent
        self.received_bytes += received

    @property
    def rate(self) -> float:
        """Bytes/s both ways together; 0 when nothing, or all at one moment, passed."""
        seconds = self.last - self.first
        return (self.sent_bytes + self.received_bytes) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Limits:
    """What a reducer accepts of each sender."""

    weights: Mapping[PeerID, float]
    """Declared by all members before the round; the sum is above 0."""
    norm_cap: float | None
    """Largest Euclidean norm of a sender's tensors."""
    codec: Codec


class PartReducer:
    """Averages this peer's parts, one after another; a part is done when every sender gave it."""

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        senders: Sequence[PeerID],
        limits: Limits,
        encode: Callable[[int, torch.Tensor], runtime_pb2.Tensor],
        own: PeerID,
    ) -> None:
        self.num_parts = len(shapes)
        self._own = own
        self.finished = asyncio.Event()
        self.fault: SenderFault | None = None
        self.received = dict.fromkeys(senders, 0)
        self.waited_s = dict.fromkeys(senders, 0.0)
        """From when a part could begin to when each sender gave it, all parts together.

        A sender whose line is full of the answers to it is waited for, too.
        """
        self.reducing_s = 0.0
        """From the first piece to the last finished part."""
        self._since: float | None = None
        self._began: float | None = None
        self._shapes, self._limits, self._encode = tuple(shapes), limits, encode
        self._order = sorted(senders, key=PeerID.to_base58)
        self._squares = dict.fromkeys(senders, 0.0)
        self._parts: dict[PeerID, torch.Tensor] = {}
        self._done = 0
        self._turn: asyncio.Future[Averaged] = asyncio.get_running_loop().create_future()
        self._closing: set[asyncio.Task[None]] = set()
        if not shapes or not senders:
            self.finished.set()

    @property
    def fraction(self) -> float:
        """Which part of this reducer's work is done."""
        return self._done / self.num_parts if self.num_parts else 1.0

    async def add(self, sender: PeerID, number: int, part: torch.Tensor, weight: float) -> Averaged:
        """Take part `number` of `sender`; returns when all have given it. Raises SenderFault."""
        if self.fault is not None:
            raise self.fault
        self._check(sender, number, part, weight)
        now = time.monotonic()
        if self._since is None:
            self._since = self._began = now
        self.waited_s[sender] += now - self._since
        self.received[sender] += 1
        self._parts[sender] = part
        turn = self._turn
        if len(self._parts) == len(self._order):
            task = asyncio.create_task(self._close(number, self._parts, turn))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._parts = {}
        # Shielded: a member that goes away must not cancel what the others wait for.
        return await asyncio.shield(turn)

    def _check(self, sender: PeerID, number: int, part: torch.Tensor, weight: float) -> None:
        declared = self._limits.weights[sender]
        self._squares[sender] += float(part.double().square().sum())
        cap = self._limits.norm_cap
        reason = None
        if number != self._done or sender in self._parts:
            reason = f"sent part {number} out of turn"
        elif part.shape != self._shapes[number] or part.dtype != torch.float32:
            reason = f"sent a part of the shape {tuple(part.shape)} and type {part.dtype}"
        elif weight != declared:
            reason = f"declared the weight {declared:g} and sent {weight:g}"
        elif not math.isfinite(self._squares[sender]) or not bool(torch.isfinite(part).all()):
            reason = "sent a value that is not finite"
        elif cap is not None and self._squares[sender] > cap * cap:
            reason = f"sent tensors with a norm above {cap:g}"
        if reason is not None:
            raise SenderFault(sender, reason, violation=True)

    async def _close(
        self, number: int, parts: dict[PeerID, torch.Tensor], turn: asyncio.Future[Averaged]
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            averaged = await loop.run_in_executor(None, self._average, number, parts)
        except Exception as error:  # this reducer's own failure, and none of a sender
            reason = f"did not average part {number}: {error!r}"
            self.fail(SenderFault(self._own, reason))
            return
        if self.fault is not None:
            return
        self._done += 1
        self._since = time.monotonic()
        self.reducing_s = self._since - (self._began or self._since)
        self._turn = loop.create_future()
        if self._done == self.num_parts:
            self.finished.set()
        turn.set_result(averaged)

    def _average(self, number: int, parts: dict[PeerID, torch.Tensor]) -> Averaged:
        weights = self._limits.weights
        wire = self._encode(number, weighted_mean([(parts[p], weights[p]) for p in self._order]))
        return Averaged(wire, deserialize_torch_tensor(wire))

    def fail(self, fault: SenderFault) -> None:
        """Stop: whoever waits for a part, or asks for one, gets `fault`."""
        if self.finished.is_set():
            return
        self.fault = fault
        if not self._turn.done():
            self._turn.set_exception(fault)
            self._turn.exception()  # it is nobody's mistake when no one waits
        self.finished.set()

    def finalize(self) -> None:
        """Called by hivemind's runner at the end of the round."""
        self.finished.set()


def weighted_mean(parts: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """The mean of (tensor, weight) pairs: summed in float64 in the given order, rounded once."""
    total = torch.zeros(parts[0][0].shape, dtype=torch.float64)
    for tensor, weight in parts:
        total.add_(tensor.double(), alpha=weight)
    return (total / sum(weight for _, weight in parts)).to(parts[0][0].dtype)


class ExactRunner(AllReduceRunner):  # type: ignore[misc]
    """hivemind's butterfly all-reduce with the rules of this module; yields averages."""

    tensor_part_reducer: PartReducer

    def __init__(self, *, limits: Limits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tensor_part_container.return_deltas = False
        unused: Any = self.tensor_part_reducer  # hivemind's; it warns of what it did not receive
        unused.num_parts = 0
        unused.finalize()
        own = self.ordered_peer_ids.index(self.peer_id)
        infos = [info for _, info in self.tensor_part_container._input_parts_by_peer[own]]
        compression = limits.codec.compression
        self.tensor_part_reducer = PartReducer(
            [part.shape for part in self.parts_for_local_averaging],
            self.sender_peer_ids,
            limits,
            lambda number, mean: compression.compress(mean, infos[number]),
            self.peer_id,
        )
        self.shapes = [
            [part.shape for part, _ in parts]
            for parts in self.tensor_part_container._input_parts_by_peer
        ]
        self.wire_types = limits.codec.wire_types
        self.links = {peer: LinkUse() for peer in self.ordered_peer_ids if peer != self.peer_id}
        self._paces = {peer: Pace() for peer in self.links}
        self.faults: list[SenderFault] = []
        """Members that failed: seen here, or named by a reducer that stopped."""
        self._streams: set[PeerID] = set()
        self._open = 0

    @property
    def waited_s(self) -> dict[PeerID, float]:
        """Seconds that this reducer was ready and waited for each other sender's next part."""
        waited = self.tensor_part_reducer.waited_s
        return {peer: seconds for peer, seconds in waited.items() if peer != self.peer_id}

    @property
    def fraction(self) -> float:
        """Of this peer's numbers (of this reducer's parts, for an auxiliary), those averaged."""
        if self.peer_id not in self.sender_peer_ids:
            return self.tensor_part_reducer.fraction
        container = self.tensor_part_container
        return 1.0 - container.failed_size / container.total_size if container.total_size else 1.0

    def blame(self, fault: SenderFault) -> None:
        """Remember who failed; a sender from whom parts are missing ends this reducer's work.

        Once it has ended, the streams of all others break off: that is no fault of theirs.
        """
        reducer = self.tensor_part_reducer
        if reducer.fault is not None and not fault.violation:
            return
        if all(known.peer_id != fault.peer_id for known in self.faults):
            self.faults.append(fault)
        self.banned_senders.add(fault.peer_id)
        if fault.violation or reducer.received.get(fault.peer_id, math.inf) < reducer.num_parts:
            reducer.fail(fault)

    async def answered(self) -> None:
        """Wait until every sender that came has its averages, or has gone."""
        while self._open:
            await asyncio.sleep(0.02)

    async def _ban_sender(self, peer_id: PeerID) -> None:
        self.blame(SenderFault(peer_id, "sent nothing in time"))

    # This peer as a sender.

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        index = self.ordered_peer_ids.index(peer_id)
        try:
            if peer_id == self.peer_id:
                await self._average_own(index)
            else:
                await self._exchange(peer_id, index)
        except BaseException as error:
            self.tensor_part_container.register_failed_reducer(index)
            # Where the round was broken already, others have left it before they were asked.
            known = self.faults or self.tensor_part_reducer.fault
            if not known and not isinstance(error, SenderFault | asyncio.CancelledError):
                self.faults.append(SenderFault(peer_id, f"gave no average: {error!r}"))
            raise

    async def _average_own(self, index: int) -> None:
        for number, part in enumerate(self.parts_for_local_averaging):
            averaged = await self.tensor_part_reducer.add(self.peer_id, number, part, self.weight)
            self.tensor_part_container.register_processed_part(index, number, averaged.value)

    async def _exchange(self, peer_id: PeerID, index: int) -> None:
        stub = self._get_peer_stub(peer_id)
        call = stub.rpc_aggregate_part(self._generate_input_for_peer(index))
        stream = await asyncio.wait_for(call, self.reducer_timeout)
        number = 0

        def decode(message: averaging_pb2.AveragingData) -> torch.Tensor:
            self._check_answer(peer_id, message)
            self.links[peer_id].count(received=message.ByteSize())
            decoded: torch.Tensor = deserialize_torch_tensor(message.tensor_part)
            known = message.tensor_part.compression in self.wire_types
            if not known or decoded.dtype != torch.float32:
                raise AllreduceException("its average is in another codec or type")
            return decoded

        answers = amap_in_executor(
            decode,
            aiter_with_timeout(stream, self.reducer_timeout),
            max_prefetch=self.tensor_part_container.prefetch,
        )
        try:
            async for part in answers:
                if number >= len(self.shapes[index]) or part.shape != self.shapes[index][number]:
                    raise AllreduceException(f"part {number} has the shape {tuple(part.shape)}")
                if not bool(torch.isfinite(part).all()):
                    raise AllreduceException(f"the average of part {number} is not finite")
                self.tensor_part_container.register_processed_part(index, number, part)
                self._paces[peer_id].answered()
                number += 1
                if number == len(self.shapes[index]):
                    break
        finally:  # the reducer waits for it (`until_hung_up`)
            await answers.aclose()
            with contextlib.suppress(Exception):
                await stream.aclose()
        if number != len(self.shapes[index]):
            raise AllreduceException(f"{number} of {len(self.shapes[index])} parts came back")

    def _check_answer(self, peer_id: PeerID, message: averaging_pb2.AveragingData) -> None:
        if message.code == averaging_pb2.AVERAGED_PART:
            return
        if message.peer_id and PeerID(message.peer_id) in self.ordered_peer_ids:
            accused = PeerID(message.peer_id)
            left = message.code == averaging_pb2.BAD_GROUP_ID
            # It may be a lie, so whoever is accused is left out for a short while only.
            fault = SenderFault(
                accused,
                f"{'has left' if left else 'failed'}, as {peer_id} says",
                left=left,
                accuser=None if accused == peer_id else peer_id,
            )
            if all(known.peer_id != accused for known in self.faults):
                self.faults.append(fault)
            if left:  # nothing of it will come: all are told at once
                self.tensor_part_reducer.fail(fault)
            raise fault
        if message.code in (averaging_pb2.BAD_GROUP_ID, averaging_pb2.CANCELLED):
            raise SenderFault(peer_id, "has ended the round already")
        raise AllreduceException(f"it said {averaging_pb2.MessageCode.Name(message.code)}")

    async def _generate_input_for_peer(
        self, peer_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        peer_id = self.ordered_peer_ids[peer_index]
        link, pace = self.links[peer_id], self._paces[peer_id]
        async for message in super()._generate_input_for_peer(peer_index):
            await pace.room()
            size = message.ByteSize()
            pace.sent(size)
            link.count(sent=size)
            yield message

    # This peer as a reducer.

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A member sends its tensors for this peer's parts and gets the averages back."""
        sender = context.remote_id
        if sender not in self.sender_peer_ids or sender in self._streams:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        self._streams.add(sender)
        self._open += 1
        self.active_senders.add(sender)
        if len(self.active_senders) == len(self.sender_peer_ids):
            self.all_senders_started.set()
        try:
            request = await asyncio.wait_for(anext(stream), self.sender_timeout)
            if self.tensor_part_reducer.fault is not None:
                raise self.tensor_part_reducer.fault
            if (refusal := self._check_reasons_to_reject(request, context)) is not None:
                yield refusal
                return
            if request.code != averaging_pb2.PART_FOR_AVERAGING:
                raise SenderFault(sender, "sent no part", violation=True)
            parts = aiter_with_timeout(achain(as_aiter(request), stream), self.sender_timeout)
            async for message in self._answers(parts, sender):
                self.links[sender].count(sent=message.ByteSize())
                yield message
        except SenderFault as fault:
            self.blame(fault)
            yield fault.to_message()
        except Exception as error:
            self.blame(SenderFault(sender, f"did not send on: {error!r}"))
            yield averaging_pb2.AveragingData(
                code=averaging_pb2.CANCELLED, peer_id=sender.to_bytes()
            )
        finally:
            self._open -= 1
            # The stream broke before its parts were here (nothing happens after a whole one).
            if self.tensor_part_reducer.received[sender] < self.tensor_part_reducer.num_parts:
                self.blame(SenderFault(sender, "broke off"))

    async def _answers(
        self, parts: AsyncIterator[averaging_pb2.AveragingData], sender: PeerID
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        reducer, number = self.tensor_part_reducer, 0

        def decode(message: averaging_pb2.AveragingData) -> tuple[torch.Tensor, float]:
            if message.tensor_part.compression not in self.wire_types:
                raise SenderFault(sender, "sent a part in another codec", violation=True)
            self.links[sender].count(received=message.ByteSize())
            return deserialize_torch_tensor(message.tensor_part), message.weight

        async for part, weight in amap_in_executor(
            decode, parts, max_prefetch=self.tensor_part_container.prefetch
        ):
            averaged = await reducer.add(sender, number, part, weight)
            number += 1
            yield averaging_pb2.AveragingData(
                code=averaging_pb2.AVERAGED_PART, tensor_part=averaged.wire
            )
        if number != reducer.num_parts:
            raise SenderFault(sender, f"sent {number} of {reducer.num_parts} parts")
