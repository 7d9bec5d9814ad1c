"""Files on a web server: a transfer may take as long as it goes on, and is begun anew when not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from models import remote


class _Stalling(BaseHTTPRequestHandler):
    """Stops in the middle of the first answer."""

    tries = 0
    end = threading.Event()

    def do_GET(self) -> None:
        type(self).tries += 1
        self.send_response(200)
        self.send_header("Content-Length", "8")
        self.end_headers()
        self.wfile.write(b"half")
        self.wfile.flush()
        if self.tries == 1:
            self.end.wait(20)
        else:
            self.wfile.write(b"half")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is shown."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stalling) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        _Stalling.end.set()
        listening.shutdown()
        thread.join()


def test_a_stalled_transfer_is_begun_anew(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_HTTP_STALL_S", 0.2)
    monkeypatch.setattr("time.sleep", lambda _: None)
    remote.download(f"{server}/file", str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"halfhalf"
    assert _Stalling.tries == 2


def test_a_slow_transfer_has_no_limit_in_all() -> None:
    for scheme in ("http", "https"):
        system, _ = remote.connect(f"{scheme}://127.0.0.1/file")
        limits = system.client_kwargs["timeout"]
        assert limits.total is None
        assert limits.sock_read == remote._HTTP_STALL_S
