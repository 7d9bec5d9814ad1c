"""What keeps a public service on its feet: limits on calls and bodies, and a log of decisions.

Each caller has a bucket of calls that fills at a steady rate; an IPv6 caller owns a /64, so that
is one caller. The buckets of callers not seen for longest are forgotten, so that memory is bounded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request

from models.errors import GristmillError, UserError

_MOST_CALLERS = 10_000
_SAME_LIMIT_S = 60.0


class Refused(GristmillError):
    """A call that gets the answer `status` and the message, and a pause to keep."""

    def __init__(self, status: int, message: str, *, reason: str = "", wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason or message
        self.wait_s = wait_s


class Buckets:
    """At most `burst` calls at once by one caller, and `per_minute` over time."""

    def __init__(
        self, per_minute: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_minute / 60.0
        self._burst = float(burst)
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """How long `caller` has to wait for its next call; 0.0 when it may call now."""
        return max(0.0, (1.0 - self._now_left(caller)) / self._per_s)

    def take(self, caller: str) -> None:
        """Count one call. Raises Refused (429) where none is left."""
        wait = self.wait_s(caller)
        if wait > 0.0:
            raise Refused(429, f"too many calls: wait {math.ceil(wait)} s", wait_s=wait)
        self.count(caller)

    def count(self, caller: str) -> None:
        """Count one call, whether or not one is left."""
        self._left[caller] = (max(0.0, self._now_left(caller) - 1.0), self._clock())
        self._left.move_to_end(caller)
        if len(self._left) > _MOST_CALLERS:
            self._left.popitem(last=False)

    def _now_left(self, caller: str) -> float:
        left, then = self._left.get(caller, (self._burst, self._clock()))
        return min(self._burst, left + (self._clock() - then) * self._per_s)


def caller(request: Request) -> str:
    """Whom a call is counted for: its IPv4 address or IPv6 /64."""
    host = request.client.host if request.client else "unknown"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


async def body(request: Request, most_bytes: int, within_s: float) -> bytes:
    """The body of `request`. Raises Refused when it is too large or too slow."""
    too_large = Refused(413, f"the body has more than {most_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length and not (length.isascii() and length.isdigit() and int(length[:12]) <= most_bytes):
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for block in request.stream():
                data += block
                if len(data) > most_bytes:
                    raise too_large
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {within_s:.0f} s") from error
    except ClientDisconnect as error:
        raise Refused(400, "the connection was cut") from error
    return bytes(data)


class AuditLog:
    """One JSON object a line for every decision, in a file only its owner reads.

    It holds names and reasons, never a credential or token. Refusals for too many calls come once
    a minute for each caller, with their number, so that a flood does not fill the disk.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._floods: OrderedDict[str, tuple[float, int]] = OrderedDict()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(self._opened())
        except OSError as error:
            raise UserError(f"'{path}' cannot be written: {error.strerror}") from error

    def _opened(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, caller: str, **fields: Any) -> None:
        """Add a line. Raises OSError. (Opened anew each time, so that logrotate may move it.)"""
        line = {"time": round(self._clock(), 3), "event": event, "caller": caller, **fields}
        descriptor = self._opened()
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def flood(self, caller: str) -> None:
        """Note a refusal for too many calls."""
        begun, number = self._floods.get(caller, (float("-inf"), 0))
        if self._clock() < begun + _SAME_LIMIT_S:
            self._floods[caller] = (begun, number + 1)
            return
        self.write("limited", caller, refused_before=number)
        self._floods[caller] = (self._clock(), 0)
        self._floods.move_to_end(caller)
        if len(self._floods) > _MOST_CALLERS:
            self._floods.popitem(last=False)
