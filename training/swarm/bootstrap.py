"""How a peer finds into the network: addresses of the run file, and those it has met before.

A run file names the coordinator; when that one is away, any peer that was met in an earlier
session will do. So each peer keeps the addresses of those it was connected to, newest first.
Whether an address answers is tried by a plain TCP connection first: hivemind itself only says,
after a minute, that nobody did.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from models import files
from models.errors import UserError

FILE = "addresses.json"
_KEPT = 64
_KEPT_S = 30 * 24 * 3600
_AT_ONCE = 16
_PEER_ID = re.compile(r"Qm[1-9A-HJ-NP-Za-km-z]{44}|1[1-9A-HJ-NP-Za-km-z]{40,60}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Address:
    """A libp2p multiaddress: /ip4/203.0.113.7/tcp/31337/p2p/Qm…"""

    text: str
    host: str
    port: int
    transport: str
    peer_id: str


def check_address(text: str, *, peer: bool = True) -> Address:
    """The address in `text`. Raises UserError, which shows what one looks like.

    peer: it must end with the peer's id, as one to connect to does.
    """
    parts = text.split("/") if isinstance(text, str) else []
    wanted = "/ip4/203.0.113.7/tcp/31337" + "/p2p/Qm…" * peer
    bad = UserError(f"'{text}' is no address of a peer: it looks like {wanted}")
    if len(parts) < 5 or parts[0] or (peer and len(parts) < 7):
        raise bad
    kind, host, transport, port = parts[1:5]
    peer_id = parts[-1] if parts[-2] in ("p2p", "ipfs") else ""
    if kind in ("ip4", "ip6"):
        try:
            right = ipaddress.ip_address(host).version == int(kind[2])
        except ValueError:
            right = False
    else:
        right = kind in ("dns", "dns4", "dns6") and bool(_HOST_NAME.fullmatch(host))
    right = right and transport in ("tcp", "udp") and port.isascii() and port.isdecimal()
    if not right or not 0 < int(port) < 65536 or (peer and not _PEER_ID.fullmatch(peer_id)):
        raise bad
    return Address(text, host, int(port), transport, peer_id)


class Known:
    """The addresses that this peer has met, in a file of its folder."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock

    def addresses(self) -> list[str]:
        """Those met in the last month, newest first; a file that is damaged counts as empty."""
        return [text for text, _ in self._entries()]

    def add(self, addresses: Iterable[str]) -> None:
        """Remember `addresses` as met now; the oldest of many go. Raises OSError."""
        now = self._clock()
        met = {text: now for text in addresses if _is_lasting(text)}
        entries = dict(self._entries()) | met
        newest = sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))[:_KEPT]
        files.write_atomic(self.path, json.dumps(newest, indent=1) + "\n", durable=False)

    def _entries(self) -> list[tuple[str, float]]:
        try:
            value = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return []
        if not isinstance(value, list):
            return []
        oldest = self._clock() - _KEPT_S
        found = []
        for entry in value:
            if (
                isinstance(entry, list)
                and len(entry) == 2
                and isinstance(entry[0], str)
                and isinstance(entry[1], int | float)
                and entry[1] >= oldest
                and _is_lasting(entry[0])
            ):
                found.append((entry[0], float(entry[1])))
        return found


def candidates(run: Sequence[str], known: Sequence[str], *, own_id: str = "") -> list[str]:
    """Addresses to enter by, the run's first, each once, without this peer's own."""
    found = dict.fromkeys([*run, *known])
    return [text for text in found if not own_id or check_address(text).peer_id != own_id]


@dataclass(frozen=True)
class Tried:
    """What came of an address. why: empty where it answers or cannot be tried (UDP)."""

    address: str
    why: str


def try_all(addresses: Sequence[str], timeout_s: float = 5.0) -> list[Tried]:
    """A TCP connection to each address, all at the same time."""
    if not addresses:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(addresses))) as pool:
        return list(pool.map(lambda text: Tried(text, _why_not(text, timeout_s)), addresses))


def entrance(
    addresses: Sequence[str],
    *,
    wait_s: float,
    timeout_s: float = 5.0,
    stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Addresses that answer; waits up to `wait_s` for the first. Raises UserError when none does.

    Without any address there is nothing to wait for: empty.
    """
    if not addresses:
        return []
    until_s = time.monotonic() + wait_s
    told = False
    while True:
        tried = try_all(addresses, timeout_s)
        good = [one.address for one in tried if not one.why]
        if good or stopped():
            return good
        if time.monotonic() >= until_s:
            reasons = "; ".join(f"'{one.address}' {one.why}" for one in tried[:3])
            raise UserError(
                f"no peer of the run answers: {reasons}: check this machine's network and that "
                "the coordinator runs, then run the same command again"
            )
        if not told:
            say(f"no peer answers yet ({tried[0].why}); waiting up to {wait_s:.0f} s")
            told = True
        time.sleep(min(2.0, max(0.0, until_s - time.monotonic())))


def _why_not(text: str, timeout_s: float) -> str:
    try:
        address = check_address(text)
    except UserError as error:
        return str(error)
    if address.transport != "tcp":
        return ""
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s):
            return ""
    except TimeoutError:
        return f"does not answer in {timeout_s:.0f} s (a firewall?)"
    except ConnectionRefusedError:
        return "refuses the connection (no peer runs there)"
    except OSError as error:
        return f"cannot be reached ({error.strerror or error})"


def _is_lasting(text: str) -> bool:
    try:
        return check_address(text).transport == "tcp"
    except UserError:
        return False
