"""What may keep this machine out of a swarm, checked before it joins, each with what to do.

Every check is a function that gives one `Check`; none raises for what it finds. What needs the
coordinator is skipped, and said so, where there is none to ask.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import requests

from models.errors import GristmillError
from training.swarm.bootstrap import try_all

HIVEMIND = "1.1.12"
CLOCK_S = 2.0
"""hivemind refuses a peer whose clock differs by 3 s from the one it enters by."""
_SPEED_BYTES = 4 << 20
_PIECE = bytes(1 << 16)
_TIMEOUT_S = 15.0
_SAMPLES = 5
_TOO_MANY = 429
_SHARED_COPIES = 4
"""Of weights, moments and gradients in shared memory: 20 M parameters took 4 times 4 bytes."""

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """What a check found, and what to do where it is not well."""

    name: str
    state: State
    found: str
    advice: str = ""

    def line(self) -> str:
        """For a person."""
        marks = {"ok": "ok     ", "warning": "warning", "failed": "FAILED ", "skipped": "skipped"}
        advice = f"\n        {self.advice}" if self.advice else ""
        return f"{marks[self.state]} {self.name}: {self.found}{advice}"

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)


def versions(installed: Callable[[str], str] = metadata.version) -> Check:
    """The packages whose versions decide whether peers understand each other."""
    found, missing = {}, []
    for name in ("hivemind", "torch", "numpy", "protobuf", "cryptography", "starlette"):
        try:
            found[name] = installed(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    text = f"Python {sys.version.split()[0]}, {text}"
    if missing:
        return Check(
            "versions", "failed", f"{', '.join(missing)} not installed; {text}",
            "pip install 'gristmill[swarm]'",
        )  # fmt: skip
    if found["hivemind"] != HIVEMIND:
        return Check(
            "versions", "failed", text,
            f"peers understand each other with hivemind {HIVEMIND} alone: "
            f"pip install hivemind=={HIVEMIND}",
        )  # fmt: skip
    return Check("versions", "ok", text)


def daemon() -> Check:
    """hivemind's network daemon p2pd: a program for one platform that comes with the package."""
    import importlib.util  # noqa: PLC0415

    spec = importlib.util.find_spec("hivemind")
    folders = list(spec.submodule_search_locations or []) if spec else []
    program = next((Path(one) / "hivemind_cli" / "p2pd" for one in folders), None)
    if program is None or not program.is_file():
        return Check("network daemon", "failed", "hivemind's p2pd is not there",
                     f"pip install --force-reinstall hivemind=={HIVEMIND}")  # fmt: skip
    if not os.access(program, os.X_OK):
        return Check("network daemon", "failed", f"'{program}' may not be run",
                     f"chmod +x '{program}'")  # fmt: skip
    return Check("network daemon", "ok", str(program))


def codec(name: str) -> Check:
    """Whether numbers survive the codec of the run: one broken in silence averages nothing."""
    from training.swarm.codec_check import self_test  # noqa: PLC0415  # takes seconds to import

    try:
        self_test(name)
    except GristmillError as error:
        return Check("codec", "failed", str(error), "pip install 'gristmill[swarm]' anew")
    return Check("codec", "ok", f"{name}: known numbers come back, alone and averaged")


def shared_memory(needed_bytes: int, folder: str = "/dev/shm") -> Check:
    """Room for what the processes of a peer share."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return Check("shared memory", "skipped", f"'{folder}' is not there")
    text = f"{_mb(free)} free in '{folder}', about {_mb(needed_bytes)} needed"
    if free < needed_bytes:
        return Check(
            "shared memory", "failed", text,
            "Docker: --shm-size; else remount it: mount -o remount,size=8G /dev/shm",
        )  # fmt: skip
    return Check("shared memory", "ok", text)


def shared_bytes(parameters: int) -> int:
    """What the processes of a peer with so many parameters share, about."""
    return 4 * parameters * _SHARED_COPIES


def clock(service: str, ca_file: Path | None = None) -> Check:
    """This machine's clock against the coordinator's."""
    if not service:
        return _no_service("clock")
    samples = []
    try:
        with _session(ca_file) as session:
            for _ in range(_SAMPLES):
                before = time.time()
                answer = session.get(f"{service}/time", timeout=_TIMEOUT_S)
                after = time.time()
                answer.raise_for_status()
                samples.append((before, float(answer.json()["time"]), after))
    except (requests.RequestException, ValueError, KeyError, TypeError) as error:
        return _no_answer("clock", service, error)
    ahead, uncertain = clock_offset(samples)
    text = f"{abs(ahead):.2f} s {'ahead of' if ahead >= 0 else 'behind'} the coordinator's"
    text += f" (± {uncertain:.2f} s)"
    if abs(ahead) > CLOCK_S:
        return Check(
            "clock", "failed", text,
            "peers 3 s apart are refused: turn NTP on (timedatectl set-ntp true)",
        )  # fmt: skip
    if abs(ahead) > CLOCK_S / 4:
        return Check("clock", "warning", text, "turn NTP on (timedatectl set-ntp true)")
    return Check("clock", "ok", text)


def clock_offset(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """How far this clock is ahead, and how exactly that is known, in seconds.

    samples: (own time before, the other's time, own time after). The quickest one tells.
    """
    before, other, after = min(samples, key=lambda sample: sample[2] - sample[0])
    return (before + after) / 2 - other, (after - before) / 2


def entrances(addresses: Sequence[str], timeout_s: float = 5.0) -> Check:
    """Whether a peer to enter by answers."""
    if not addresses:
        return Check("way in", "failed", "the run file names no peer to enter by",
                     "ask the authority for a run file with addresses")  # fmt: skip
    tried = try_all(addresses, timeout_s)
    good = [one for one in tried if not one.why]
    text = f"{len(good)} of {len(tried)} addresses answer"
    bad = "; ".join(f"'{one.address}' {one.why}" for one in tried if one.why)
    if good:
        return Check("way in", "warning" if bad else "ok", f"{text}{'; ' * bool(bad)}{bad}")
    return Check("way in", "failed", f"{text}; {bad}",
                 "check the network and its firewall (TCP, outgoing), and that the coordinator "
                 "runs")  # fmt: skip


def port(host: str, number: int, service: str, role: str, ca_file: Path | None = None) -> Check:
    """Whether others can connect to this machine: the coordinator tries it."""
    if role == "client":
        return Check("reachable", "skipped", "a client is not connected to")
    try:
        listener = socket.create_server(
            (host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        return Check("reachable", "failed", f"port {number} of '{host}': {error.strerror}",
                     "end the program that has it, or choose another: --port N")  # fmt: skip
    with listener:
        taken = listener.getsockname()[1]
        if not service:
            return Check("reachable", "skipped",
                         f"port {taken} is free; there is no coordinator to try it")  # fmt: skip
        greeting = secrets.token_hex(16)
        with _greeting(listener, greeting):
            try:
                with _session(ca_file) as session:
                    answer = session.post(
                        f"{service}/reach", data=json.dumps({"port": taken}), timeout=_TIMEOUT_S
                    )
                    answer.raise_for_status()
                    told = answer.json()
            except (requests.RequestException, ValueError) as error:
                return _no_answer("reachable", service, error)
    if not isinstance(told, dict):
        return _no_answer("reachable", service, TypeError())
    return _reached(told, greeting, taken, role, fixed=bool(number))


def _reached(
    told: Mapping[str, Any], greeting: str, number: int, role: str, *, fixed: bool
) -> Check:
    place = f"port {number} of {told.get('host')}"
    if told.get("reached") and told.get("greeting") == greeting:
        chosen = "" if fixed else "; give --port to have the same one each time"
        return Check("reachable", "ok", f"the coordinator connects to {place}{chosen}")
    why = "another machine answers there" if told.get("reached") else told.get("why", "")
    # A peer that nobody reaches reduces nothing, and an auxiliary one does nothing else.
    other = "" if role == "auxiliary" else ", or join with --role client"
    return Check("reachable", "warning", f"the coordinator cannot connect to {place}: {why}",
                 "forward the port in the router and open it in the firewall (--port, --announce)"
                 f"{other}")  # fmt: skip


def bandwidth(
    service: str,
    *,
    up_mbit: float,
    down_mbit: float,
    size_bytes: int = _SPEED_BYTES,
    ca_file: Path | None = None,
) -> Check:
    """Bandwidth to and from the coordinator, against what this peer declares."""
    if not service:
        return _no_service("bandwidth")
    try:
        with _session(ca_file) as session:
            session.get(f"{service}/time", timeout=_TIMEOUT_S).raise_for_status()  # connect
            down = _timed(lambda: _downloaded(session, service, size_bytes)) / 1e6
            up = _timed(lambda: _uploaded(session, service, size_bytes)) / 1e6
    except (requests.RequestException, ValueError, KeyError, TypeError) as error:
        return _no_answer("bandwidth", service, error)
    text = (
        f"{up:,.0f} Mbit/s up, {down:,.0f} Mbit/s down to the coordinator; declared are "
        f"{up_mbit:g} and {down_mbit:g}"
    )
    if up < up_mbit / 2 or down < down_mbit / 2:
        return Check(
            "bandwidth", "warning", text,
            f"declare what is there: --up {max(1, round(up))} --down {max(1, round(down))} "
            "(rounds are shared out by it until links are measured)",
        )  # fmt: skip
    return Check("bandwidth", "ok", text)


def worst(checks: Sequence[Check]) -> State:
    """The gravest state among `checks`."""
    order: tuple[State, ...] = ("failed", "warning", "ok", "skipped")
    return min((check.state for check in checks), key=order.index, default="skipped")


def _timed(transfer: Callable[[], int]) -> float:
    """Bits a second of `transfer`, which gives bytes: the median of three."""
    found = []
    for _ in range(3):
        before = time.monotonic()
        moved = transfer()
        found.append(8 * moved / max(time.monotonic() - before, 1e-6))
    return statistics.median(found)


def _downloaded(session: requests.Session, service: str, size_bytes: int) -> int:
    with session.get(
        f"{service}/speed", params={"bytes": size_bytes}, timeout=_TIMEOUT_S, stream=True
    ) as answer:
        answer.raise_for_status()
        return sum(len(piece) for piece in answer.iter_content(1 << 16))


def _uploaded(session: requests.Session, service: str, size_bytes: int) -> int:
    answer = session.post(f"{service}/speed", data=bytes(size_bytes), timeout=_TIMEOUT_S)
    answer.raise_for_status()
    return int(answer.json()["bytes"])


@contextlib.contextmanager
def _greeting(listener: socket.socket, greeting: str) -> Iterator[None]:
    """Greet whoever connects."""
    listener.settimeout(0.2)
    ended = threading.Event()

    def greet() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(greeting.encode())

    thread = threading.Thread(target=greet, name="greeting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _session(ca_file: Path | None) -> Iterator[requests.Session]:
    with requests.Session() as session:
        if ca_file is not None:
            session.verify = str(ca_file)
        yield session


def _no_service(name: str) -> Check:
    return Check(name, "skipped", "the run file names no coordinator's service to compare with")


def _no_answer(name: str, service: str, error: Exception) -> Check:
    answer = getattr(error, "response", None)
    if answer is not None and answer.status_code == _TOO_MANY:
        return Check(name, "skipped", f"'{service}' has no room now: {_said(answer)}",
                     "run the doctor again in a minute")  # fmt: skip
    if answer is not None:
        return Check(name, "failed", f"'{service}' refuses (HTTP {answer.status_code}): "
                     f"{_said(answer)}", "ask the run's authority")  # fmt: skip
    return Check(name, "failed", f"'{service}' does not answer: {type(error).__name__}",
                 "check the network, and that the coordinator runs")  # fmt: skip


def _said(answer: requests.Response) -> str:
    """Why a service refused, in its own words, as far as they are a line."""
    try:
        text = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = answer.reason or "no reason given"
    return text.splitlines()[0][:200] if text.strip() else "no reason given"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
