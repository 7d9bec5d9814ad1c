"""What a joiner's calls may not make the coordinator do."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from training.swarm import join_routes
from training.swarm.join_routes import SPEED_BYTES


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    async def reached(host: str, port: int) -> dict[str, str | bool]:
        return {"host": host, "reached": True, "greeting": f"{port}", "why": ""}

    monkeypatch.setattr(join_routes, "reached", reached)
    (tmp_path / "tokenizer.json").write_text("{}")
    routes = join_routes.routes(tmp_path / "tokenizer.json")
    return TestClient(Starlette(routes=routes), client=("127.0.0.1", 50000))


@pytest.mark.parametrize(
    "text", ["000000001000000000000", "0" * 5000 + "3", f"{SPEED_BYTES + 1}", "9" * 5000, "٣"]
)
def test_zeros_do_not_hide_a_size(service: TestClient, text: str) -> None:
    answer = service.get("/speed", params={"bytes": text})
    assert (answer.status_code, answer.json()["error"]) == (400, f"'bytes' is 1 to {SPEED_BYTES}")


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_a_proxy_nobody_told_of_cannot_reach_this_machine(service: TestClient, header: str) -> None:
    asked = {"port": 8080}
    assert service.post("/reach", json=asked).json()["greeting"] == "8080"
    refused = service.post("/reach", json=asked, headers={header: "for=203.0.113.7"})
    assert refused.status_code == 403
    assert "--behind-proxy" in refused.json()["error"]
