"""A peer's side: against the real service over HTTP and HTTPS, and against bad ones."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from models.http_get import DownloadFailed, RetryPolicy
from tests.training.swarm.authorities import RUN, Clock, authority, peer, trust
from tests.training.swarm.running_service import certificate, running
from training.swarm import keys, tokens
from training.swarm.authority import Authority
from training.swarm.keys import Untrusted
from training.swarm.revocation import Poller, Trust
from training.swarm.token_client import (
    Account,
    TokenKeeper,
    check_url,
    fetch_run,
    fetch_token,
    http_source,
)
from training.swarm.token_service import RUN_KIND, ServiceSettings
from training.swarm.tokens import TokenFile

QUICK = RetryPolicy(
    tries=3,
    connect_timeout_s=2.0,
    read_timeout_s=2.0,
    first_wait_s=0.01,
    longest_wait_s=0.02,
    longest_retry_after_s=0.02,
    deadline_s=20.0,
)


@pytest.fixture
def made(tmp_path: Path) -> Authority:
    """An authority by the real clock."""
    return Authority.create(tmp_path / "a", RUN)


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    """A service on a free port."""
    return ServiceSettings(audit=tmp_path / "audit.jsonl", port=0)


def _trust(made: Authority, path: Path | None = None) -> Trust:
    return Trust(made.run, list(made.public_keys().values()), path)


def test_a_token_from_the_service(made: Authority, settings: ServiceSettings) -> None:
    credential, peers = made.allow_add("asha"), _trust(made)
    with running(made, settings) as url:
        text = fetch_token(Account(url + "/", "asha", credential), peer(0), peers, QUICK)
        assert peers.check(text, peer(0).peer_id).user == "asha"
        assert peers.newest() is not None
        sealed = fetch_run(url, policy=QUICK)
        assert keys.unseal(RUN_KIND, sealed, peers.current_keys())["run"] == RUN
        with pytest.raises(UserError, match=r"refuses: user or credential is wrong \(403\)"):
            fetch_token(Account(url, "asha", "x"), peer(0), peers, QUICK)
        other = Trust("other", list(made.public_keys().values()))
        with pytest.raises(UserError, match="the service of the run 'sahajbert', not of 'other'"):
            fetch_token(Account(url, "asha", credential), peer(0), other, QUICK)
        stranger = _trust(Authority.create(settings.audit.parent / "b", RUN))
        with pytest.raises(UserError, match=r"cannot be used: .* not signed by a key"):
            fetch_token(Account(url, "asha", credential), peer(0), stranger, QUICK)
    with pytest.raises(DownloadFailed, match="3 tries"):
        fetch_token(Account(url, "asha", credential), peer(0), peers, QUICK)


def test_over_https(made: Authority, settings: ServiceSettings, tmp_path: Path) -> None:
    credential, (cert, key) = made.allow_add("asha"), certificate(tmp_path)
    with running(made, replace(settings, certificate=cert, private_key=key)) as url:
        assert url.startswith("https://")
        good = Account(url, "asha", credential, ca_file=cert)
        text = fetch_token(good, peer(0), _trust(made), QUICK)
        assert _trust(made).check(text, peer(0).peer_id).peer == peer(0).peer_id
        assert http_source(url, cert)() is not None
        begun = time.monotonic()
        with pytest.raises(UserError, match=r"refuses: SSLError: .*CERTIFICATE_VERIFY_FAILED"):
            fetch_token(replace(good, ca_file=None), peer(0), _trust(made), QUICK)
        assert time.monotonic() - begun < 10


def test_many_peers_of_one_address(made: Authority, settings: ServiceSettings) -> None:
    credential, peers = made.allow_add("asha"), _trust(made)
    found: list[str] = []
    with running(made, settings) as url:

        def ask(number: int) -> None:
            found.append(fetch_token(Account(url, "asha", credential), peer(number % 2), peers))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 20
    lines = [json.loads(line)["event"] for line in settings.audit.read_text().splitlines()]
    assert lines == ["token"] * 20


def test_a_slow_sender_does_not_hold_the_service_up(
    made: Authority, settings: ServiceSettings
) -> None:
    made.allow_add("asha")
    with running(made, settings) as url:
        port = int(url.rsplit(":", 1)[1])
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for line in slow:
            line.sendall(b"POST /token HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        begun = time.monotonic()
        assert http_source(url)() is not None
        assert time.monotonic() - begun < 5
        for line in slow:
            line.close()


def test_half_requests_of_one_address_do_not_shut_out_the_others(
    made: Authority, settings: ServiceSettings
) -> None:
    with running(made, settings) as url:
        port = int(url.rsplit(":", 1)[1])
        slow = [
            socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
            for _ in range(1100)
        ]
        for line in slow:
            with contextlib.suppress(OSError):
                line.sendall(b"GET /revoked HTT")
        assert http_source(url)() is not None
        # Those that were let in are cut off, since no request comes.
        deadline = time.monotonic() + 60
        for line in slow:
            line.settimeout(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ConnectionError):
                assert line.recv(1) == b""
            line.close()
        assert http_source(url)() is not None


@pytest.mark.parametrize("url", ["", "ftp://x", "example.org", "https://", "http:///x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UserError, match=f"'{url}' is no address of a token service"):
        check_url(url)


def test_a_credential_does_not_travel_in_the_clear() -> None:
    for url in ("http://example.org:8470", "http://192.0.2.1", "http://[2001:db8::1]"):
        with pytest.raises(UserError, match="is not https: the credential would travel"):
            check_url(url)
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://x.org"):
        assert check_url(url + "/") == url


class _Said:
    """A server that gives prepared answers, and counts the requests."""

    def __init__(self, answers: Callable[[int], tuple[int, dict[str, str], bytes]]) -> None:
        self.requests = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                status, headers, body = answers(outer.requests)
                outer.requests += 1
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def said() -> Iterator[Callable[..., _Said]]:
    """Makes servers, and ends them."""
    servers: list[_Said] = []

    def make(answers: Callable[[int], tuple[int, dict[str, str], bytes]]) -> _Said:
        servers.append(_Said(answers))
        return servers[-1]

    yield make
    for one in servers:
        one.server.shutdown()
        one.server.server_close()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(
    said: Callable[..., _Said], tmp_path: Path, status: int
) -> None:
    server = said(lambda number: (status, {"Retry-After": "1"}, b'{"error":"busy"}'))
    with pytest.raises(DownloadFailed, match=rf"it answered busy \({status}\) \(3 tries\)"):
        fetch_token(Account(server.url, "a", "c"), peer(0), trust(authority(tmp_path / "a")), QUICK)
    assert server.requests == 3


BAD: list[tuple[str, int, bytes, str]] = [
    ("no JSON", 200, b"<html>", "its answer is not JSON"),
    ("no object", 200, b"[]", "its answer is not JSON"),
    ("empty", 200, b"", "its answer is not JSON"),
    ("another run", 200, b'{"run":"x","challenge":"y"}', "of the run 'x', not of 'sahajbert'"),
    ("no challenge", 200, b'{"run":"sahajbert"}', "it is no token service"),
    ("huge", 200, b" " * ((1 << 20) + 1), "more than 1048576 bytes"),
    ("refusal in HTML", 403, b"<html>", r"no reason given \(403\)"),
    ("refusal of lines", 403, b'{"error":"a\\nb"}', r"a b \(403\)"),
    ("redirect", 302, b"", r"no reason given \(302\)"),
]


@pytest.mark.parametrize(
    ("status", "body", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_bad_services_are_told_in_one_line(
    said: Callable[..., _Said], tmp_path: Path, status: int, body: bytes, says: str
) -> None:
    server = said(lambda number: (status, {"Location": "http://127.0.0.1:1/"}, body))
    with pytest.raises(UserError, match=says) as error:
        fetch_token(Account(server.url, "a", "c"), peer(0), trust(authority(tmp_path / "a")), QUICK)
    assert "\n" not in str(error.value) and server.requests == 1


def test_a_keeper_fetches_renews_and_learns_of_revocations(
    made: Authority, settings: ServiceSettings, tmp_path: Path
) -> None:
    account = Account("", "asha", made.allow_add("asha"))
    peers, own = _trust(made, tmp_path / "trust.json"), TokenFile(tmp_path / "token")
    renewed: list[tokens.Token] = []
    said: list[str] = []
    with running(made, replace(settings, token_life_s=3)) as url:
        keeper = TokenKeeper(
            peers,
            own,
            peer(0),
            replace(account, url=url),
            on_renewed=renewed.append,
            say=said.append,
            policy=QUICK,
            poll_s=0.2,
        )
        first = keeper.start()
        assert first.expires - first.issued == 3 and renewed == [first]
        deadline = time.monotonic() + 20
        while len(renewed) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(renewed) >= 3 and renewed[2].issued > first.issued
        # Never without a token in between: this one is in force.
        assert peers.check(own.text(), peer(0).peer_id).expires > first.expires
        made.allow_remove("asha")
        begun = time.monotonic()
        while True:
            try:
                peers.check(own.text(), peer(0).peer_id)
            except Untrusted:
                break
            assert time.monotonic() - begun < 10, "the revocation was not seen"
            time.sleep(0.05)
        while "user or credential is wrong" not in keeper.failure:
            assert time.monotonic() - begun < 20, f"no reason was told: '{keeper.failure}'"
            time.sleep(0.05)
        assert len(said) == 1 and said[0].startswith("warning: no new token for this peer: ")
        keeper.stop()
        assert not keeper._thread.is_alive() and not keeper.poller._thread.is_alive()


def test_a_token_that_follows_a_void_one_is_told_apart(
    made: Authority, settings: ServiceSettings, tmp_path: Path
) -> None:
    """Others have forgotten a peer whose token was void: it must call them, not only publish."""
    account = Account("", "asha", made.allow_add("asha"))
    peers, own = _trust(made, tmp_path / "trust.json"), TokenFile(tmp_path / "token")
    renewed: list[tokens.Token] = []
    regained: list[tokens.Token] = []
    with running(made, settings) as url:
        keeper = TokenKeeper(
            peers, own, peer(0), replace(account, url=url), on_renewed=renewed.append,
            on_regained=regained.append, policy=QUICK,
        )  # fmt: skip
        keeper._renew()
        assert (len(renewed), len(regained)) == (0, 1)
        keeper._renew()
        assert (len(renewed), len(regained)) == (1, 1)
        made.revoke("asha")  # and the keeper hears of it with its next token only
        keeper._renew()
        assert (len(renewed), len(regained)) == (1, 2)
        peers.check(own.text(), peer(0).peer_id)


def test_an_offline_token_needs_no_service(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha",))
    own = TokenFile(tmp_path / "token")
    keeper = TokenKeeper(trust(made), own, peer(0), None, [made.revocations], poll_s=0.05)
    with pytest.raises(UserError, match="holds no token"):
        keeper.start()
    own.write(made.issue("asha", peer(1).peer_id))
    with pytest.raises(UserError, match="cannot be used: the token is of the peer"):
        keeper.start()
    own.write(made.issue("asha", peer(0).peer_id, life_s=300))
    assert keeper.start().user == "asha"
    assert keeper.due_s() == 200.0
    keeper.stop()


def test_a_token_in_force_starts_a_peer_while_the_service_is_away(tmp_path: Path) -> None:
    made = Authority.create(tmp_path / "a", RUN)
    made.allow_add("asha")
    own = TokenFile(tmp_path / "token")
    own.write(made.issue("asha", peer(0).peer_id))
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    keeper = TokenKeeper(_trust(made), own, peer(0), Account(url, "asha", "x"), policy=QUICK)
    assert keeper.start().user == "asha"
    keeper.stop()
    own.path.unlink()
    with pytest.raises(DownloadFailed, match="3 tries"):
        TokenKeeper(_trust(made), own, peer(0), Account(url, "a", "x"), policy=QUICK).start()


def test_a_peer_polls_the_service(made: Authority, settings: ServiceSettings) -> None:
    made.allow_add("asha")
    peers = _trust(made)
    text = made.issue("asha", peer(0).peer_id)
    with running(made, settings) as url:
        poller = Poller(peers, [http_source(url)])
        assert poller.poll()
        peers.check(text, peer(0).peer_id)
        made.revoke("asha")
        assert poller.poll()
    with pytest.raises(Untrusted, match="'asha' was revoked"):
        peers.check(text, peer(0).peer_id)
    assert not poller.poll() and "could not download" in poller.failures[0]
