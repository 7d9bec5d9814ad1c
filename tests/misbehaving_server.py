"""A web server on 127.0.0.1 that misbehaves on demand and writes down what it was asked.

Each path has a script: one `Reply` a request, the last one for ever after.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Reply:
    """One answer. Without arguments: the whole body with an ETag, Range and If-Range honoured."""

    body: bytes = b""
    status: int | None = None
    """Answer with this status and no file."""
    headers: dict[str, str] = field(default_factory=dict)
    cut_after_bytes: int | None = None
    """Close the connection after so many bytes of the body."""
    declared_bytes: int | None = None
    """A false Content-Length; -1: none at all."""
    chunked: bool = False
    etag: str | None = ""
    """"": made from the body; None: no ETag."""
    honours_range: bool = True
    honours_if_range: bool = True
    drip: tuple[int, float] | None = None
    """Send so many bytes, wait so many seconds, and so on."""
    silent_s: float = 0.0
    """Say nothing for so long before the answer."""


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    path: str
    headers: dict[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")

    @property
    def if_range(self) -> str | None:
        return self.headers.get("if-range")


class MisbehavingServer:
    """Holds the scripts and the log of one running server."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.requests: list[Request] = []
        self._scripts: dict[str, list[Reply]] = {}
        self._lock = threading.Lock()
        self.closing = threading.Event()

    def script(self, path: str, *replies: Reply) -> str:
        """Set what `path` answers; its URL."""
        with self._lock:
            self._scripts[path] = list(replies)
        return self.base + path

    @property
    def ranges(self) -> list[str | None]:
        """The Range header of each request so far."""
        return [request.range for request in self.requests]

    def next_reply(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append(request)
            script = self._scripts.get(request.path)
            if not script:
                return Reply(status=404)
            return script.pop(0) if len(script) > 1 else script[0]

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end of the test."""
        self.closing.wait(seconds)


@contextmanager
def misbehaving_server() -> Iterator[MisbehavingServer]:
    """Run a server on a free port of 127.0.0.1 for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                _answer(self, state)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = MisbehavingServer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(handler: BaseHTTPRequestHandler, state: MisbehavingServer) -> None:
    headers = {key.lower(): value for key, value in handler.headers.items()}
    reply = state.next_reply(Request(handler.path, headers))
    handler.close_connection = True
    if reply.silent_s:
        state.pause(reply.silent_s)
    if reply.status is not None:
        handler.send_response(reply.status)
        for name, value in {"Content-Length": "0", **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        return
    etag = reply.etag
    if etag == "":
        etag = f'"{hashlib.sha256(reply.body).hexdigest()[:16]}"'
    start, asked = 0, headers.get("range")
    if asked and reply.honours_range:
        fresh = headers.get("if-range") in (None, etag, reply.headers.get("Last-Modified"))
        if fresh or not reply.honours_if_range:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
    total = len(reply.body)
    if start >= total > 0:
        handler.send_response(416)
        handler.send_header("Content-Range", f"bytes */{total}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return
    body = reply.body[start:]
    handler.send_response(206 if start else 200)
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
    if etag is not None:
        handler.send_header("ETag", etag)
    if reply.chunked:
        handler.send_header("Transfer-Encoding", "chunked")
    elif reply.declared_bytes != -1:
        declared = len(body) if reply.declared_bytes is None else reply.declared_bytes
        handler.send_header("Content-Length", str(declared))
    for name, value in reply.headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    _send_body(handler, state, reply, body)


def _send_body(
    handler: BaseHTTPRequestHandler, state: MisbehavingServer, reply: Reply, body: bytes
) -> None:
    sent = body if reply.cut_after_bytes is None else body[: reply.cut_after_bytes]
    step, wait_s = reply.drip or (max(1, len(sent)), 0.0)
    for offset in range(0, len(sent), step):
        piece = sent[offset : offset + step]
        if reply.chunked:
            piece = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
        handler.wfile.write(piece)
        handler.wfile.flush()
        state.pause(wait_s)
    if reply.chunked and reply.cut_after_bytes is None:
        handler.wfile.write(b"0\r\n\r\n")
