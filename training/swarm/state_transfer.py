"""The two ends of a state download: a donor that serves chunks, a joiner that checks each.

Request: {"hash", "from_chunk"} as JSON. Answer: first {"size", "digests"} or {"refused": why},
then the chunks from `from_chunk` on. Messages are hivemind's DownloadData: JSON in `metadata`,
bytes in `tensor_part.buffer`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import aiter_with_timeout

from training.swarm.state import CHUNK_BYTES, Digests, PartialCopy

STALLED_S = 60.0
KEPT_STATES = 2
"""A joiner that began with the state of the last epoch can finish with it."""


class DonorFailed(Exception):
    """This donor gives the state no more; the message says why."""


class CorruptDonor(DonorFailed):
    """This donor sent what is not the state: it is not asked for it again."""


class Donor:
    """Serves the newest states of this peer, to a limited number of joiners at a time."""

    def __init__(self, *, at_once: int, limit_mbit: float | None) -> None:
        self._at_once, self._limit_mbit = at_once, limit_mbit
        self._states: dict[str, tuple[Path, Digests]] = {}
        self._progress: dict[object, float] = {}

    def offer(self, path: Path, digests: Digests) -> None:
        """Serve the file `path` from now on; the oldest is no longer served, and removed."""
        self._states.pop(digests.hash, None)
        self._states[digests.hash] = (path, digests)
        while len(self._states) > KEPT_STATES:
            oldest = next(iter(self._states))
            old_path, _ = self._states.pop(oldest)
            old_path.unlink(missing_ok=True)  # a joiner in the midst of it keeps it open

    async def serve(
        self, request: averaging_pb2.DownloadData
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Answer one request."""
        wanted = _json(request.metadata)
        name, start = wanted.get("hash"), wanted.get("from_chunk")
        if not isinstance(name, str) or not isinstance(start, int) or start < 0:
            yield refusal("the request is not valid")
        elif name not in self._states:
            yield refusal("it has no such state (any more)")
        elif self._busy() >= self._at_once:
            yield refusal(f"it serves {self._at_once} others")
        else:
            slot = object()
            try:
                async for message in self._chunks(*self._states[name], start):
                    self._progress[slot] = time.monotonic()
                    yield message
            finally:
                self._progress.pop(slot, None)

    def _busy(self) -> int:
        """How many are served now; a joiner that takes nothing any more is not."""
        since = time.monotonic() - STALLED_S
        return sum(last > since for last in self._progress.values())

    async def _chunks(
        self, path: Path, digests: Digests, start: int
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        loop = asyncio.get_running_loop()
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield _message(digests.to_json())
            for number in range(start, len(digests.chunks)):
                offset = number * CHUNK_BYTES
                data = await loop.run_in_executor(None, os.pread, descriptor, CHUNK_BYTES, offset)
                yield averaging_pb2.DownloadData(tensor_part=runtime_pb2.Tensor(buffer=data))
                if self._limit_mbit is not None:
                    await asyncio.sleep(len(data) * 8 / (self._limit_mbit * 1e6))
        finally:
            os.close(descriptor)


def refusal(reason: str) -> averaging_pb2.DownloadData:
    """The answer of a donor that gives nothing."""
    return _message({"refused": reason})


def request(wanted: str, copy: PartialCopy) -> averaging_pb2.DownloadData:
    """What a joiner asks for: the state `wanted` from where its `copy` ends."""
    return _message({"hash": wanted, "from_chunk": copy.chunks})


async def receive(
    stream: AsyncIterator[averaging_pb2.DownloadData], copy: PartialCopy, *, chunk_timeout_s: float
) -> None:
    """Append what a donor sends to `copy` until it is complete. Raises DonorFailed.

    What was right stays in `copy`, so that the next donor is asked for the rest only.
    """
    told = False
    try:
        async for message in aiter_with_timeout(stream, chunk_timeout_s):
            if not told:
                value = _json(message.metadata)
                if "refused" in value:
                    raise DonorFailed(str(value["refused"])[:200])
                if not copy.accept_digests(Digests.from_json(value)):
                    raise CorruptDonor("its digests are not those of the state")
                told = True
            elif not copy.accept_chunk(message.tensor_part.buffer):
                raise CorruptDonor(f"chunk {copy.chunks} is corrupt")
            if copy.complete:
                break
    except DonorFailed:
        raise
    except TimeoutError as error:
        raise DonorFailed(f"it sent nothing for {chunk_timeout_s:g} s") from error
    except Exception as error:
        raise DonorFailed(f"the connection broke: {error!r}") from error
    if not copy.complete:
        raise DonorFailed(f"it stopped after chunk {copy.chunks}")


def _message(value: dict[str, Any]) -> averaging_pb2.DownloadData:
    return averaging_pb2.DownloadData(metadata=json.dumps(value).encode())


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
