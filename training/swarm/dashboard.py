"""The page on which everybody watches a run: read-only, from the file that the collector fills.

    GET /             the page, with its style and scripts beside it
    GET /status.json  now: epoch, progress, peers, alarms
    GET /board.json   leaderboard, checkpoints, alarms that are over
    GET /history.json?range=all|recent
    GET /events       server-sent events: "status" and "board" with the same JSON, "history" when
                      there is a new curve to fetch

It answers to nothing but GET and HEAD, listens on loopback unless told, and there answers to no
other host's name (DNS rebinding). Texts of peers leave as JSON and enter the page as text nodes;
a Content-Security-Policy allows nothing but the page's own files.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import Fault, UserError
from training.swarm.metrics_store import MetricsStore
from training.swarm.views import ACTIVE_S, Views

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/tables.js": ("tables.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_SPANS = ("all", "recent")
_REFRESH_S = 1.0
_HEARTBEAT_S = 15.0
_MOST_WATCHERS = 500
_START_S = 30.0
_LAST_PORT = 65535
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[_Scope], Awaitable[None]]


class Feed:
    """What all watchers get, read from the store once a second for all of them."""

    def __init__(self, views: Views, *, refresh_s: float = _REFRESH_S) -> None:
        self._views, self._refresh_s = views, refresh_s
        self._changed = asyncio.Condition()
        self._shown: dict[str, tuple[int, bytes]] = {}
        self._basis: Any = None
        self.closed = False
        self.watchers = 0

    def text(self, name: str) -> bytes:
        """The JSON of "status", "board", "all" or "recent"."""
        return self._shown[name][1]

    async def run(self) -> None:
        """Read and tell, until `close`."""
        complained = False
        while not self.closed:
            try:
                found = await asyncio.to_thread(self._read)
            except (sqlite3.Error, OSError, ValueError, KeyError, TypeError) as error:
                # A row that cannot be shown must not end the page for good; and the page shows by
                # itself for how long nothing new has come.
                if not complained:
                    print(f"warning: the run's metrics cannot be read: {error}", file=sys.stderr)
                complained = True
            else:
                complained = False
                await self._tell(found)
            await asyncio.sleep(self._refresh_s)
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        """Let every watcher go."""
        self.closed = True
        async with self._changed:
            self._changed.notify_all()

    async def events(self) -> AsyncIterator[bytes]:
        """One watcher's stream. A slow one misses what was overtaken, and nothing piles up."""
        self.watchers += 1
        seen: dict[str, int] = {}
        try:
            yield b"retry: 3000\n\n"
            while not self.closed:
                for name, (version, text) in list(self._shown.items()):
                    if seen.get(name) != version:
                        seen[name] = version
                        yield _event(name, version, text)
                try:
                    async with asyncio.timeout(_HEARTBEAT_S), self._changed:
                        await self._changed.wait_for(lambda: self.closed or self._news(seen))
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.watchers -= 1

    def _news(self, seen: dict[str, int]) -> bool:
        return any(seen.get(name) != version for name, (version, _) in self._shown.items())

    def _read(self) -> dict[str, bytes]:
        status = self._views.status(time.time())
        found = {"status": _json(status), "board": _json(self._views.board())}
        # The curve is read anew when an epoch ended, and once more when its receipts are in.
        basis = (status["last_epoch"], status["samples"], status["fraction"], found["board"])
        if basis != self._basis:
            found |= {span: _json(self._views.history(span)) for span in _SPANS}
            self._basis = basis
        return found

    async def _tell(self, found: dict[str, bytes]) -> None:
        async with self._changed:
            for name, text in found.items():
                version, before = self._shown.get(name, (0, b""))
                if text != before:
                    self._shown[name] = (version + 1, text)
            self._changed.notify_all()


def application(
    store: MetricsStore,
    *,
    any_host: bool = False,
    active_s: float = ACTIVE_S,
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The page as an ASGI application. any_host: answer under any name; else under loopback's.

    routes: of other services at the same address. Raises Fault where one takes a path of ours.
    """
    from starlette.applications import Starlette  # noqa: PLC0415
    from starlette.middleware import Middleware  # noqa: PLC0415
    from starlette.middleware.gzip import GZipMiddleware  # noqa: PLC0415
    from starlette.responses import PlainTextResponse, Response, StreamingResponse  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    feed = Feed(Views(store, active_s=active_s))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.feed = feed
        await feed._tell(await asyncio.to_thread(feed._read))
        task = asyncio.create_task(feed.run())
        yield
        await feed.close()
        task.cancel()

    def data(name: str) -> Response:
        return Response(
            feed.text(name), media_type="application/json", headers={"Cache-Control": "no-store"}
        )

    async def history(request: Request) -> Response:
        span = request.query_params.get("range", "all")
        if span not in _SPANS:
            return PlainTextResponse(f"range is one of {', '.join(_SPANS)}\n", status_code=400)
        return data(span)

    async def status(request: Request) -> Response:
        return data("status")

    async def board(request: Request) -> Response:
        return data("board")

    async def events(request: Request) -> Response:
        if feed.watchers >= _MOST_WATCHERS:
            return PlainTextResponse("too many watchers\n", 503, headers={"Retry-After": "60"})
        return StreamingResponse(
            feed.events(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    own = [
        *(Route(path, _file(*entry)) for path, entry in _FILES.items()),
        Route("/status.json", status),
        Route("/board.json", board),
        Route("/history.json", history),
        Route("/events", events),
    ]
    taken = {route.path for route in own} & {getattr(route, "path", None) for route in routes}
    if taken:
        raise Fault(f"two services answer to '{min(taken)}'")
    middleware = [
        Middleware(_Guarded, any_host=any_host),
        Middleware(GZipMiddleware, minimum_size=2000),
    ]
    return Starlette(routes=[*own, *routes], middleware=middleware, lifespan=lifespan)


class Dashboard:
    """The page of the store `path`, served by a thread of its own."""

    def __init__(
        self,
        path: str | Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        active_s: float = ACTIVE_S,
        any_host: bool | None = None,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        """port 0: any free one. any_host, routes: of `application`; any host when the address is
        not loopback's and nothing else is said. Raises UserError when the address cannot be had.
        """
        import uvicorn  # noqa: PLC0415

        self._store = MetricsStore(path, read_only=True)
        try:
            self._socket = _bind(host, port)
        except UserError:
            self._store.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/"
        if not is_loopback(host):
            print(
                f"warning: {self.url} is open to everyone who reaches this machine; it is "
                "read-only, but shows the names and devices of all peers",
                file=sys.stderr,
            )
        self._app = application(
            self._store,
            any_host=not is_loopback(host) if any_host is None else any_host,
            active_s=active_s,
            routes=routes,
        )
        config = uvicorn.Config(
            self._app, log_level="critical", access_log=False, server_header=False,
            timeout_graceful_shutdown=2, timeout_keep_alive=5,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)

    def start(self) -> Dashboard:
        """Serve from now on. Raises Fault when it does not begin."""
        self._thread.start()
        until = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > until or not self._thread.is_alive():
                self.stop()
                raise Fault(f"the dashboard did not start at {self.url}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Let the watchers go and free the port."""
        self._server.should_exit = True
        feed = getattr(self._app.state, "feed", None)
        if feed is not None:
            feed.closed = True
        if self._thread.is_alive():
            self._thread.join(10)
        self._socket.close()
        self._store.close()

    def wait(self) -> None:
        """Until it is stopped, from another thread or by Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def __enter__(self) -> Dashboard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Guarded:
    """Headers on every answer; no answer under a name that is not this machine's own."""

    def __init__(self, app: Any, any_host: bool) -> None:
        self._app, self._any_host = app, any_host

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: _Scope) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_RAW_HEADERS]
            await send(message)

        if self._any_host or _host_name(scope) in _LOOPBACK_NAMES:
            await self._app(scope, receive, guarded)
        else:
            from starlette.responses import PlainTextResponse  # noqa: PLC0415

            await PlainTextResponse("unknown host\n", 421)(scope, receive, guarded)


def _host_name(scope: _Scope) -> str:
    value = next((value for name, value in scope["headers"] if name == b"host"), b"")
    host: str = value.decode("latin-1")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    from starlette.responses import Response  # noqa: PLC0415

    data = resources.files("training.swarm").joinpath("page", name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(data, media_type=kind, headers={"Cache-Control": "no-cache"})

    return answer


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= _LAST_PORT:
        raise UserError(f"the dashboard's port '{port}' is none: give 0 (any free) to {_LAST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"the dashboard cannot listen on '{host}:{port}': {reason}: give another with "
            "--set coordinator.page_port=N (0: any free one)"
        ) from None
    return bound


def _event(name: str, version: int, text: bytes) -> bytes:
    """The new curve is fetched by who looks at it; only its number is told."""
    if name in _SPANS:
        return b"event: history\ndata: %s\n\n" % _json({"range": name, "version": version})
    return b"event: %s\ndata: %s\n\n" % (name.encode(), text)


def _json(value: Any) -> bytes:
    """What is no number in JSON becomes null: one such value must not take the page from all."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
