"""What the coordinator's service offers to peers that want to join, beside tokens.

    GET  /tokenizer.json   the run's tokenizer; a joiner checks it against the run file's digest
    GET  /time             {time}: the coordinator's clock
    GET  /speed?bytes=N    N bytes, at most 8 MiB
    POST /speed            takes as many
    POST /reach {port}     whether that port of the caller's own address can be connected to

The last three are for `gristmill swarm doctor`. They cost bandwidth, so few are let through at a
time, and nobody can make the coordinator connect to another address than the caller's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from training.swarm.service_limits import Buckets, Refused, body, caller
from training.swarm.token_client import is_loopback

SPEED_BYTES = 8 << 20
GREETING_BYTES = 64
_SPEED_AT_ONCE = 2
_SPEED_S = 60.0
_REACH_S = 5.0
_REACH_AT_ONCE = 8
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
_PIECE = bytes(1 << 16)
_LOWEST_PORT = 1024
_NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def routes(
    tokenizer: Path, *, per_minute: float = 20.0, clock: Callable[[], float] = time.time
) -> list[Route]:
    """The routes. tokenizer: the file tokenizer.json. per_minute: /speed and /reach of one
    address."""
    calls = Buckets(per_minute, 20)
    speeds, reaches = asyncio.Semaphore(_SPEED_AT_ONCE), asyncio.Semaphore(_REACH_AT_ONCE)
    data = tokenizer.read_bytes()

    async def tokenizer_file(request: Request) -> Response:
        calls.take(caller(request))
        return Response(data, media_type="application/json", headers=_NO_STORE)

    async def clock_now(request: Request) -> Response:
        return JSONResponse({"time": clock()}, headers=_NO_STORE)

    async def give(request: Request) -> Response:
        calls.take(caller(request))
        text = request.query_params.get("bytes", "")
        if not text.isascii() or not text.isdecimal() or not _is_size(text):
            raise Refused(400, f"'bytes' is 1 to {SPEED_BYTES}")
        if speeds.locked():
            raise Refused(429, "others are measuring: wait 5 s", wait_s=5.0)

        async def pieces(left: int) -> AsyncIterator[bytes]:
            async with speeds, asyncio.timeout(_SPEED_S):
                while left:
                    yield _PIECE[:left]
                    left -= min(left, len(_PIECE))

        return StreamingResponse(
            pieces(int(text)),
            media_type="application/octet-stream",
            headers={**_NO_STORE, "Content-Length": text},
        )

    async def take(request: Request) -> Response:
        calls.take(caller(request))
        if speeds.locked():
            raise Refused(429, "others are measuring: wait 5 s", wait_s=5.0)
        async with speeds:
            found = await body(request, SPEED_BYTES, _SPEED_S)
        return JSONResponse({"bytes": len(found)}, headers=_NO_STORE)

    async def reach(request: Request) -> Response:
        calls.take(caller(request))
        try:
            port = json.loads(await body(request, 256, 5.0))["port"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(400, 'the body is not {"port": N}') from error
        if not isinstance(port, int) or not _LOWEST_PORT <= port < 65536:
            raise Refused(400, f"'port' is {_LOWEST_PORT} to 65535")
        host = request.client.host if request.client else ""
        if is_loopback(host) and any(name in request.headers for name in _FORWARDED):
            # A proxy that the service was not told of: the caller is not on this machine.
            raise Refused(403, "a proxy stands before this service: start it with --behind-proxy")
        async with reaches:
            return JSONResponse(await reached(host, port), headers=_NO_STORE)

    return [
        Route("/tokenizer.json", _answered(tokenizer_file), methods=["GET"]),
        Route("/time", _answered(clock_now), methods=["GET"]),
        Route("/speed", _answered(give), methods=["GET"]),
        Route("/speed", _answered(take), methods=["POST"]),
        Route("/reach", _answered(reach), methods=["POST"]),
    ]


def _is_size(text: str) -> bool:
    return len(text) <= len(str(SPEED_BYTES)) and 0 < int(text) <= SPEED_BYTES


def _answered(handle: Callable[[Request], Awaitable[Response]]) -> Any:
    """`handle`, whose refusals become answers in JSON."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handle(request)
        except Refused as error:
            wait = {"Retry-After": f"{math.ceil(error.wait_s)}"} if error.wait_s else {}
            headers = {**_NO_STORE, **wait}
            return JSONResponse({"error": str(error)}, error.status, headers=headers)

    return endpoint


async def reached(host: str, port: int) -> dict[str, str | bool]:
    """What comes of a connection to `port` of `host`: the greeting that stands there, or why not.

    Keys: host, reached, greeting, why.
    """
    found: dict[str, str | bool] = {"host": host, "reached": False, "greeting": "", "why": ""}
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return {**found, "why": "the caller's address is not known"}
    try:
        async with asyncio.timeout(_REACH_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                data = await _within(reader.read(GREETING_BYTES))
            finally:
                writer.close()
    except TimeoutError:
        return {**found, "why": f"no answer in {_REACH_S:.0f} s"}
    except OSError as error:
        return {**found, "why": error.strerror or str(error)}
    return {**found, "reached": True, "greeting": data.decode("ascii", errors="replace")}


async def _within(reading: Awaitable[bytes]) -> bytes:
    """What is read in a second: a peer that already runs there says nothing that we know."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            return await reading
    return b""
