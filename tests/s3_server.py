"""An S3 server on 127.0.0.1 (moto's) that fails on demand and writes down what it was asked.

Which requests fail is counted, not drawn: the n-th, 2n-th, ... of those that a `Trouble` is for.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

_CODES = {"500": ("500 Internal Server Error", "InternalError"),
          "503": ("503 Slow Down", "SlowDown"),
          "403": ("403 Forbidden", "AccessDenied")}  # fmt: skip


@dataclass
class Trouble:
    """What goes wrong with each `every`-th request of `methods` with `part` in its path.

    kind: "500", "503", "403": answered with this error, without effect. "reset": the connection is
    reset before an answer. "lost": done, but the connection is reset before the answer. "cut":
    the connection ends in the middle of the body. "short": half of the body, declared as all of
    it. "stall": silence in the middle of the body. "ignored": a success that did nothing.
    """

    kind: str
    methods: frozenset[str] = frozenset({"GET", "PUT", "HEAD", "POST", "DELETE"})
    every: int = 1
    at_most: int | None = None
    part: str = ""
    seen: int = 0
    done: int = 0

    def strikes(self, method: str, path: str) -> bool:
        if method not in self.methods or self.part not in path:
            return False
        self.seen += 1
        if self.seen % self.every or (self.at_most is not None and self.done >= self.at_most):
            return False
        self.done += 1
        return True


@dataclass(frozen=True)
class Request:
    """What a client asked for. path: with the bucket."""

    method: str
    path: str
    query: str
    range: str | None


@dataclass
class S3Server:
    """The log and the troubles of one running server."""

    endpoint: str
    requests: list[Request] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    stall_s: float = 30.0
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """What a client's environment must hold to come here."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def counts(self) -> dict[str, int]:
        """Requests so far by method."""
        with self.lock:
            return dict(Counter(request.method for request in self.requests))

    def clear(self) -> None:
        """Forget the log and the troubles."""
        with self.lock:
            self.requests.clear()
            self.troubles.clear()

    def next_trouble(self, request: Request) -> str | None:
        with self.lock:
            self.requests.append(request)
            struck = [
                one.kind for one in self.troubles if one.strikes(request.method, request.path)
            ]
            return struck[0] if struck else None


class _Handler(MotoRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:
        """Nothing on stderr."""


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server on a free port of 127.0.0.1 for the length of the block."""
    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"],
                          environ["QUERY_STRING"], environ.get("HTTP_RANGE"))  # fmt: skip
        return _answer(state, moto, state.next_trouble(request), environ, start_response)

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Handler)
    server.daemon_threads = True
    state = S3Server(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(
    state: S3Server, moto: Any, kind: str | None, environ: dict[str, Any], start_response: Any
) -> Iterable[bytes]:
    if kind in _CODES:
        status, code = _CODES[kind]
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{code}</Code><Message>{code} on demand</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
    if kind == "ignored":
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("200 OK", [("Content-Type", "application/xml")])
        return [b"<DeleteResult/>"]
    if kind == "reset":
        _reset(environ)
    if kind is None:
        return moto(environ, start_response)
    answers: list[tuple[str, list[tuple[str, str]]]] = []
    body = b"".join(moto(environ, lambda status, headers, *_: answers.append((status, headers))))
    (status, headers) = answers[-1]
    half = body[: len(body) // 2]
    if kind == "lost":
        _reset(environ)
    if kind == "short":
        headers = [(k, str(len(half)) if k.lower() == "content-length" else v) for k, v in headers
                   if not k.lower().startswith("x-amz-checksum")]  # fmt: skip
    start_response(status, headers)
    return [half] if kind == "short" else _interrupted(state, kind, environ, half, body)


def _interrupted(
    state: S3Server, kind: str, environ: dict[str, Any], half: bytes, body: bytes
) -> Iterator[bytes]:
    yield half
    if kind == "cut":
        _reset(environ, abruptly=False)
    state.closing.wait(state.stall_s)
    yield body[len(half) :]


def _reset(environ: dict[str, Any], *, abruptly: bool = True) -> None:
    connection = environ["werkzeug.socket"]
    if abruptly:
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError
