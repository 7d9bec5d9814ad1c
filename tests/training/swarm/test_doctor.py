"""The doctor, against a coordinator's service that is there, slow, wrong or absent."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import requests
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from training.swarm import doctor, join_routes
from training.swarm.doctor import Check
from training.swarm.join_routes import SPEED_BYTES

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@dataclass
class Service:
    """The routes of a coordinator, served; its clock is `ahead_s` ahead."""

    url: str
    ahead_s: float = 0.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    tokenizer = tmp_path_factory.mktemp("service") / "tokenizer.json"
    tokenizer.write_text('{"a": 1}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Service(f"http://127.0.0.1:{listener.getsockname()[1]}")
        routes = join_routes.routes(
            tokenizer, per_minute=100_000, clock=lambda: time.time() + found.ahead_s
        )
        server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield found
        server.should_exit = True
        thread.join(10)


@contextlib.contextmanager
def served_as(app: Starlette) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_the_tokenizer(service: Service) -> None:
    assert requests.get(f"{service.url}/tokenizer.json", timeout=10).json() == {"a": 1}


def test_this_machine_is_well() -> None:
    for check in (doctor.versions(), doctor.daemon()):
        assert check.state == "ok", check
    assert "hivemind 1.1.12" in doctor.versions().found


def test_other_versions() -> None:
    found = doctor.versions(lambda name: {"hivemind": "1.1.10"}.get(name, "9"))
    assert found.state == "failed"
    assert "pip install hivemind==1.1.12" in found.advice

    def nothing(name: str) -> str:
        if name == "starlette":
            raise metadata.PackageNotFoundError(name)
        return "1.1.12"

    found = doctor.versions(nothing)
    assert (found.state, found.advice) == ("failed", "pip install 'gristmill[swarm]'")
    assert found.found.startswith("starlette not installed")


def test_the_codec() -> None:
    assert doctor.codec("float16").state == "ok"
    found = doctor.codec("float8")
    assert found.state == "failed"
    assert "float8" in found.found


def test_shared_memory(tmp_path: Path) -> None:
    assert doctor.shared_memory(1, str(tmp_path)).state == "ok"
    assert doctor.shared_memory(1 << 60, str(tmp_path)).state == "failed"
    assert doctor.shared_memory(1, str(tmp_path / "none")).state == "skipped"
    assert doctor.shared_bytes(18_105_474) == 289_687_584


@pytest.mark.parametrize(
    ("ahead_s", "state", "words"),
    [(0.0, "ok", "coordinator's (±"), (-1.2, "warning", "1.2"), (5.0, "failed", "behind"),
     (-5.0, "failed", "ahead of")],
)  # fmt: skip
def test_the_clock(service: Service, ahead_s: float, state: str, words: str) -> None:
    service.ahead_s = ahead_s
    found = doctor.clock(service.url)
    service.ahead_s = 0.0
    assert found.state == state, found
    assert words in found.found


@given(
    ahead=st.floats(-100, 100),
    delays=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=6),
)
def test_the_offset_is_as_exact_as_it_says(ahead: float, delays: list[tuple[float, float]]) -> None:
    samples, now = [], 1000.0
    for there, back in delays:
        other = now + there - ahead
        samples.append((now, other, now + there + back))
        now += 10
    found, uncertain = doctor.clock_offset(samples)
    assert abs(found - ahead) <= uncertain + 1e-6
    assert uncertain <= min(there + back for there, back in delays) / 2 + 1e-6


def test_the_way_in(service: Service, nobody: str) -> None:
    good, bad = (f"/ip4/127.0.0.1/tcp/{url.rpartition(':')[2]}/p2p/{PEER}"
                 for url in (service.url, nobody))  # fmt: skip
    assert doctor.entrances([good]) == Check("way in", "ok", "1 of 1 addresses answer")
    assert doctor.entrances([good, bad]).state == "warning"
    found = doctor.entrances([bad])
    assert found.state == "failed"
    assert "refuses the connection" in found.found
    assert doctor.entrances([]).state == "failed"


def test_who_can_be_reached(service: Service) -> None:
    found = doctor.port("127.0.0.1", 0, service.url, "node")
    assert found.state == "ok", found
    assert "the coordinator connects to port" in found.found
    assert "--port" in found.found
    assert doctor.port("127.0.0.1", 0, service.url, "client").state == "skipped"
    assert doctor.port("127.0.0.1", 0, "", "node").state == "skipped"


def test_a_port_that_is_taken(service: Service) -> None:
    taken = int(service.url.rpartition(":")[2])
    found = doctor.port("127.0.0.1", taken, service.url, "node")
    assert (found.state, "--port N" in found.advice) == ("failed", True)


def test_who_cannot_be_reached(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(host: str, port: int) -> dict[str, str | bool]:
        return {"host": host, "reached": False, "greeting": "", "why": "no answer in 5 s"}

    monkeypatch.setattr(join_routes, "reached", refused)
    found = doctor.port("127.0.0.1", 0, service.url, "node")
    assert found.state == "warning"
    assert "no answer in 5 s" in found.found
    assert "--role client" in found.advice
    helper = doctor.port("127.0.0.1", 0, service.url, "auxiliary")
    assert helper.state == "warning"
    assert helper.advice.endswith("(--port, --announce)")


def test_another_machine_behind_the_port(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def another(host: str, port: int) -> dict[str, str | bool]:
        return {"host": host, "reached": True, "greeting": "SSH-2.0", "why": ""}

    monkeypatch.setattr(join_routes, "reached", another)
    found = doctor.port("127.0.0.1", 0, service.url, "node")
    assert (found.state, "another machine answers" in found.found) == ("warning", True)


def test_bandwidth(service: Service) -> None:
    def measured(mbit: float) -> Check:
        return doctor.bandwidth(service.url, up_mbit=mbit, down_mbit=mbit, size_bytes=1 << 18)

    assert measured(0.001).state == "ok"
    found = measured(1e9)
    assert found.state == "warning"
    assert "--up " in found.advice


def test_nobody_there(nobody: str) -> None:
    for check in (
        doctor.clock(nobody),
        doctor.port("127.0.0.1", 0, nobody, "node"),
        doctor.bandwidth(nobody, up_mbit=1, down_mbit=1),
    ):
        assert check.state == "failed"
        assert f"'{nobody}' does not answer" in check.found
    assert doctor.clock("").state == doctor.bandwidth("", up_mbit=1, down_mbit=1).state == "skipped"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/speed", b"", 400),
        ("GET", "/speed?bytes=0", b"", 400),
        ("GET", "/speed?bytes=x", b"", 400),
        ("GET", f"/speed?bytes={SPEED_BYTES + 1}", b"", 400),
        ("GET", "/speed?bytes=3", b"", 200),
        ("POST", "/speed", bytes(SPEED_BYTES + 1), 413),
        ("POST", "/speed", bytes(SPEED_BYTES), 200),
        ("POST", "/reach", b"", 400),
        ("POST", "/reach", b'{"port": 22}', 400),
        ("POST", "/reach", b'{"port": "8080"}', 400),
        ("POST", "/reach", b"x" * 300, 413),
        ("POST", "/time", b"", 405),
    ],
)
def test_what_the_service_takes(
    service: Service, method: str, path: str, body: bytes, status: int
) -> None:
    answer = requests.request(method, service.url + path, data=body, timeout=30)
    assert answer.status_code == status, answer.text[:200]
    if status in (400, 413):
        assert answer.json()["error"]
    if path == "/speed?bytes=3":
        assert answer.content == bytes(3)


def test_too_many_calls(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    (tmp_path / "tokenizer.json").write_text("{}")
    routes = join_routes.routes(tmp_path / "tokenizer.json", per_minute=1)
    client = TestClient(Starlette(routes=routes))
    codes = [client.get("/tokenizer.json").status_code for _ in range(22)]
    assert codes == [200] * 20 + [429] * 2


def test_lines() -> None:
    one = Check("clock", "failed", "5 s", "turn NTP on")
    assert one.line() == "FAILED  clock: 5 s\n        turn NTP on"
    assert json.dumps(one.to_json())
    assert doctor.worst([Check("a", "ok", ""), one]) == "failed"
    assert doctor.worst([Check("a", "skipped", ""), Check("b", "ok", "")]) == "ok"


@pytest.mark.parametrize(
    ("status", "body", "state", "part"),
    [
        (429, {"error": "others are measuring: wait 5 s"}, "skipped", "others are measuring"),
        (403, {"error": "loopback"}, "failed", "refuses (HTTP 403): loopback"),
        (500, ["x"], "failed", "refuses (HTTP 500)"),
        (200, ["x"], "failed", "does not answer: TypeError"),
    ],
)
def test_a_service_that_refuses_is_quoted(status: int, body: object, state: str, part: str) -> None:
    async def answer(request: object) -> JSONResponse:
        return JSONResponse(body, status)

    with served_as(Starlette(routes=[
        Route("/{path:path}", answer, methods=["GET", "POST"])
    ])) as url:  # fmt: skip
        found = [
            doctor.clock(url), doctor.port("127.0.0.1", 0, url, "node"),
            doctor.bandwidth(url, up_mbit=1, down_mbit=1),
        ]  # fmt: skip
    assert [one.state for one in found] == [state] * 3
    assert all(part in one.found for one in found)
