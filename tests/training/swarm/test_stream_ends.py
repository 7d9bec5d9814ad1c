"""How a call ends: hivemind's daemon resets what a handler leaves, over what was sent last.

So the side that answers waits until it is hung up on, and the one that asked hangs up when it has
all. Without that one round in 50 of four peers missed its last average.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.compression import serialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from training.swarm.averager import until_hung_up
from training.swarm.codecs import codec
from training.swarm.pacing import Pace
from training.swarm.reduction import ExactRunner, LinkUse
from training.swarm.state import PartialCopy, write_state
from training.swarm.state_transfer import Donor, receive, request
from training.swarm.types import State

A, B = (PeerID(bytes([0x12, 0x20, *[number] * 32])) for number in (1, 2))
_LONG_S = 10.0


class Line:
    """A call whose other end keeps it open; it knows when it was hung up."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages, self.hung_up = messages, False

    async def answers(self) -> AsyncIterator[Any]:
        try:
            for message in self._messages:
                yield message
            await asyncio.sleep(3600.0)
        finally:
            self.hung_up = True


def test_a_call_stays_open_until_it_is_hung_up() -> None:
    async def three() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def run() -> None:
        calls = until_hung_up(three())
        assert [await anext(calls) for _ in range(3)] == [0, 1, 2]
        ending = asyncio.ensure_future(anext(calls))
        await asyncio.sleep(0.05)
        assert not ending.done()
        ending.cancel()  # what hivemind does when the caller has gone
        with pytest.raises(asyncio.CancelledError):
            await ending

    asyncio.run(run())


def runner(line: Line, parts: int) -> Any:
    """A sender with `parts` parts of four numbers for B; what it registers is in `got`."""
    one: Any = object.__new__(ExactRunner)
    one.got = []
    one.reducer_timeout = 60.0
    one.ordered_peer_ids = (A, B)
    one.shapes = [[], [torch.Size([4])] * parts]
    one.wire_types = codec("none").wire_types
    one.links, one._paces = {B: LinkUse()}, {B: Pace()}
    one.tensor_part_container = SimpleNamespace(
        prefetch=4, register_processed_part=lambda *part: one.got.append(part[1])
    )

    async def call(_: Any) -> Any:
        return line.answers()

    one._get_peer_stub = lambda _: SimpleNamespace(rpc_aggregate_part=call)
    one._generate_input_for_peer = lambda _: None
    return one


def averages(count: int) -> list[averaging_pb2.AveragingData]:
    return [
        averaging_pb2.AveragingData(
            code=averaging_pb2.AVERAGED_PART,
            tensor_part=serialize_torch_tensor(torch.full((4,), float(number))),
        )
        for number in range(count)
    ]


def test_a_sender_hangs_up_when_it_has_all_averages() -> None:
    async def run() -> None:
        line = Line(averages(3))
        one = runner(line, 3)
        await asyncio.wait_for(one._exchange(B, 1), _LONG_S)
        assert one.got == [0, 1, 2]
        assert line.hung_up

    asyncio.run(run())


def test_a_sender_hangs_up_on_what_is_no_average() -> None:
    async def run() -> None:
        line = Line([*averages(1), averaging_pb2.AveragingData(code=averaging_pb2.INTERNAL_ERROR)])
        one = runner(line, 3)
        with pytest.raises(AllreduceException, match="INTERNAL_ERROR"):
            await asyncio.wait_for(one._exchange(B, 1), _LONG_S)
        assert one.got == [0]
        assert line.hung_up

    asyncio.run(run())


def test_a_download_ends_with_its_last_chunk(tmp_path: Path) -> None:
    state = State(3, {"weight": torch.arange(1000.0)}, {})
    digests = write_state(tmp_path / "state.safetensors", state)

    async def run() -> None:
        donor = Donor(at_once=1, limit_mbit=None)
        donor.offer(tmp_path / "state.safetensors", digests)
        copy = PartialCopy(tmp_path / "copies", digests.hash)
        line = Line([one async for one in donor.serve(request(digests.hash, copy))])
        await asyncio.wait_for(receive(line.answers(), copy, chunk_timeout_s=60.0), _LONG_S)
        assert copy.complete

    asyncio.run(run())
