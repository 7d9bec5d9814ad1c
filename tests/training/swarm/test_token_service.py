"""The token service: tokens for those on the list, and everything else that may be sent to it."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from models.errors import UserError
from tests.training.swarm.authorities import RUN, START, Clock, authority, peer, trust
from tests.training.swarm.running_service import certificate
from training.swarm import keys, revocation, tokens
from training.swarm.authority import Authority
from training.swarm.identity import Identity
from training.swarm.service_limits import AuditLog, Buckets, Refused
from training.swarm.token_service import (
    RUN_KIND,
    ServiceSettings,
    TokenService,
    app,
    counted,
    listen,
)


class Service:
    """A service with one user, and a client of it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.clock, self.ticks = Clock(), Clock(0.0)
        self.made: Authority = authority(folder / "a", self.clock)
        self.credential = self.made.allow_add("asha")
        self.audit = folder / "audit.jsonl"
        self.settings = ServiceSettings(audit=self.audit, **settings)
        self.service = TokenService(self.made, self.settings, self.ticks)
        self.http = TestClient(app(self.service), raise_server_exceptions=False)

    def post(self, path: str, value: Any) -> Any:
        return self.http.post(path, content=keys.canonical(value))

    def asked(self, who: Identity | None = None, **changed: Any) -> dict[str, Any]:
        """A right request for a token, with some fields changed after it was signed."""
        who = who or peer(0)
        challenge = self.post("/challenge", {"peer": who.peer_id}).json()["challenge"]
        message = tokens.challenge_message(RUN, "asha", who.peer_id, challenge)
        return {
            "user": "asha",
            "credential": self.credential,
            "peer": who.peer_id,
            "public_key": keys.encode(who.public_key),
            "challenge": challenge,
            "signature": keys.encode(who.sign(tokens.CHALLENGE_KIND, message)),
            **changed,
        }

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """A service with the shipped limits."""
    return Service(tmp_path)


def test_a_user_of_the_list_gets_a_token(service: Service) -> None:
    answer = service.post("/token", service.asked())
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    peers, given = trust(service.made), answer.json()
    assert given.keys() == {"token", "revoked"}
    token = peers.check(given["token"], peer(0).peer_id)
    assert (token.user, token.issued, token.expires) == ("asha", START, START + 2700)
    assert peers.offer(given["revoked"])
    assert service.lines() == [
        {
            "time": START,
            "event": "token",
            "caller": "testclient",
            "user": "asha",
            "peer": peer(0).peer_id,
            "expires": START + 2700,
        }
    ]
    assert service.audit.stat().st_mode & 0o777 == 0o600
    assert service.credential not in service.audit.read_text()


def test_what_anybody_may_read(service: Service, tmp_path: Path) -> None:
    known = service.made.public_keys()
    described = keys.unseal(RUN_KIND, service.http.get("/run").content, known)
    assert described == {"run": RUN, "keys": list(known.values())}
    found = revocation.opened(service.http.get("/revoked").content, known)
    assert (found.run, found.serial) == (RUN, 2)
    service.made.revoke("asha")
    assert dict(revocation.opened(service.http.get("/revoked").content, known).users) == {
        "asha": START
    }
    (tmp_path / "run.json").write_text("the run file")
    own = ServiceSettings(audit=service.audit, run_file=tmp_path / "run.json")
    http = TestClient(app(TokenService(service.made, own)))
    assert http.get("/run").text == "the run file"
    (tmp_path / "run.json").unlink()
    assert (http.get("/run").status_code, http.get("/run").json()) == (
        503,
        {"error": "the run file cannot be read"},
    )


def _of_another(service: Service) -> dict[str, Any]:
    """The challenge and id of peer 0, signed by the key of peer 1."""
    good = service.asked()
    message = tokens.challenge_message(RUN, "asha", peer(0).peer_id, good["challenge"])
    return {
        **good,
        "public_key": keys.encode(peer(1).public_key),
        "signature": keys.encode(peer(1).sign(tokens.CHALLENGE_KIND, message)),
    }


def _other_kind(service: Service) -> dict[str, Any]:
    good = service.asked()
    message = tokens.challenge_message(RUN, "asha", peer(0).peer_id, good["challenge"])
    return {**good, "signature": keys.encode(peer(0).sign("dht record", message))}


def _late(service: Service) -> dict[str, Any]:
    good = service.asked()
    service.clock.now += 61
    return good


def _from_the_future(service: Service) -> dict[str, Any]:
    service.clock.now += 100
    good = service.asked()
    service.clock.now -= 100
    return good


REFUSALS: list[tuple[str, Any, int, str]] = [
    ("wrong credential", {"credential": "x"}, 403, "user or credential is wrong"),
    ("empty credential", {"credential": ""}, 403, "user or credential is wrong"),
    ("another user", {"user": "bina"}, 403, "the signature is not by the key"),
    ("another peer", {"peer": peer(1).peer_id}, 403, "not one of ours for that peer"),
    ("no peer id", {"peer": "../../etc"}, 403, "not one of ours for that peer"),
    ("another's key", _of_another, 403, "the signature is not by the key"),
    ("another kind", _other_kind, 403, "the signature is not by the key"),
    ("no key", {"public_key": ""}, 403, "the signature is not by the key"),
    ("a broken key", {"public_key": "AAAA"}, 403, "the signature is not by the key"),
    ("no base64", {"public_key": "é"}, 400, "public_key or signature"),
    ("no signature", {"signature": ""}, 403, "the signature is not by the key"),
    ("no challenge", {"challenge": ""}, 400, "not one of ours"),
    ("a made-up challenge", {"challenge": keys.encode(b"\0" * 56)}, 403, "not one of ours"),
    ("a short challenge", {"challenge": "AAAA"}, 400, "not one of ours"),
    ("an old challenge", _late, 403, "older than 60 s"),
    ("a challenge to come", _from_the_future, 403, "older than 60 s"),
]


@pytest.mark.parametrize(
    ("change", "status", "says"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS]
)
def test_who_gets_no_token(service: Service, change: Any, status: int, says: str) -> None:
    asked = change(service) if callable(change) else service.asked(**change)
    answer = service.post("/token", asked)
    assert (answer.status_code, says in answer.json()["error"]) == (status, True), answer.text
    (line,) = service.lines()
    assert (line["event"], line["user"]) == ("refused", asked["user"])


def test_a_wrong_user_and_a_wrong_credential_look_the_same(service: Service) -> None:
    challenge = service.post("/challenge", {"peer": peer(0).peer_id}).json()["challenge"]
    message = tokens.challenge_message(RUN, "nobody", peer(0).peer_id, challenge)
    unknown = service.asked(
        user="nobody",
        challenge=challenge,
        signature=keys.encode(peer(0).sign(tokens.CHALLENGE_KIND, message)),
    )
    answers = [service.post("/token", asked) for asked in (unknown, service.asked(credential="x"))]
    assert answers[0].status_code == answers[1].status_code == 403
    assert answers[0].content == answers[1].content
    # The log of the authority tells them apart.
    assert [line["reason"] for line in service.lines()] == [
        "the user is unknown",
        "the credential is wrong",
    ]


def test_a_challenge_counts_once(service: Service) -> None:
    asked = service.asked()
    assert service.post("/token", asked).status_code == 200
    again = service.post("/token", asked)
    assert (again.status_code, again.json()) == (403, {"error": "the challenge was used already"})
    # A wrong credential spends it too: no guessing on one challenge.
    other = service.asked()
    assert service.post("/token", {**other, "credential": "x"}).status_code == 403
    assert service.post("/token", other).json() == {"error": "the challenge was used already"}
    assert len(service.service._used) == 2
    service.clock.now += 70
    assert service.post("/token", service.asked()).status_code == 200
    assert len(service.service._used) == 1


def test_removal_and_revocation_count_at_the_next_request(service: Service) -> None:
    service.made.revoke(peer(0).peer_id)
    answer = service.post("/token", service.asked())
    assert (answer.status_code, answer.json()["error"]) == (
        403,
        "the peer was revoked in this run",
    )
    # Another process on the same folder, as the command line is.
    Authority.load(service.made.folder, clock=service.clock).allow_remove("asha")
    assert service.post("/token", service.asked(peer(1))).status_code == 403
    assert [line["reason"] for line in service.lines()][-1] == "the user is unknown"


BODIES: list[tuple[str, bytes, int]] = [
    ("empty", b"", 400),
    ("no JSON", b"peer=x", 400),
    ("another form", b'{"peer": "x"}', 400),
    ("no object", b"[]", 400),
    ("no field", b"{}", 400),
    ("a field more", b'{"admin":"1","peer":"x"}', 400),
    ("a number", b'{"peer":1}', 400),
    ("null", b'{"peer":null}', 400),
    ("an object", b'{"peer":{"$ne":""}}', 400),
    ("no peer id", b'{"peer":"x"}', 400),
    ("long text", b'{"peer":"' + b"x" * 3000 + b'"}', 400),
    ("nested", b"[" * 8000, 400),
    ("no text", b"\xff\xfe\x00", 400),
    ("too large", b'{"peer":"' + b"x" * 9000 + b'"}', 413),
    ("far too large", b" " * 1_000_000, 413),
]


@pytest.mark.parametrize("path", ["/challenge", "/token"])
@pytest.mark.parametrize(
    ("body", "status"), [row[1:] for row in BODIES], ids=[r[0] for r in BODIES]
)
def test_bad_bodies_get_an_answer(service: Service, path: str, body: bytes, status: int) -> None:
    answer = service.http.post(path, content=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert "Traceback" not in answer.text


def test_a_body_without_a_length_is_cut_off_where_the_limit_is(service: Service) -> None:
    sent = 0

    def blocks() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1000
            yield b" " * 1000

    assert service.http.post("/token", content=blocks()).status_code == 413


def test_other_paths_and_methods(service: Service) -> None:
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/token", 405),
        ("POST", "/run", 405),
        ("PUT", "/token", 405),
        ("GET", "/../keys", 404),
        ("DELETE", "/revoked", 405),
    ):
        answer = service.http.request(method, path)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_one_caller_has_so_many_calls(tmp_path: Path) -> None:
    service = Service(tmp_path, calls_per_minute=60.0, burst=3)
    status = [service.http.get("/revoked").status_code for _ in range(5)]
    assert status == [200, 200, 200, 429, 429]
    refused = service.http.get("/revoked")
    assert refused.headers["retry-after"] == "1"
    assert refused.json() == {"error": "too many calls: wait 1 s"}
    service.ticks.now += 1.0
    assert [service.http.get("/revoked").status_code for _ in range(2)] == [200, 429]
    # A flood is a line a minute.
    assert [line["event"] for line in service.lines()] == ["limited"]
    service.clock.now += 61
    service.http.get("/revoked")
    assert [line["refused_before"] for line in service.lines()] == [0, 3]


def test_all_callers_together_have_so_many_calls(tmp_path: Path) -> None:
    service = Service(tmp_path, all_calls_per_minute=60.0, all_burst=2)
    assert [service.http.get("/run").status_code for _ in range(3)] == [200, 200, 429]


def test_guessing_is_slowed_down(tmp_path: Path) -> None:
    service = Service(tmp_path, failures_per_minute=1.0, failures_burst=3)
    wrong = [service.post("/token", service.asked(credential="x")).status_code for _ in range(5)]
    assert wrong == [403, 403, 403, 429, 429]
    # Then even the right one waits.
    answer = service.post("/token", service.asked())
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) == 60
    service.ticks.now += 60
    assert service.post("/token", service.asked()).status_code == 200
    # Good tokens do not use the failures up.
    assert [service.post("/token", service.asked()).status_code for _ in range(5)] == [200] * 5


def test_no_token_without_its_line_in_the_log(service: Service) -> None:
    service.audit.unlink()
    service.audit.mkdir()
    answer = service.post("/token", service.asked())
    assert (answer.status_code, list(answer.json())) == (503, ["error"])


def test_a_damaged_allowlist_stops_the_service_without_a_traceback(service: Service) -> None:
    asked = service.asked()
    with (service.made.folder / "allowlist.jsonl").open("ab") as file:
        file.write(b"{}\n")
    for answer in (service.post("/token", asked), service.http.get("/revoked")):
        assert answer.status_code == 503
        assert answer.json() == {"error": "the service is out of order: its log says why"}


def test_other_routes_stand_beside_under_the_same_limits(tmp_path: Path) -> None:
    service = Service(tmp_path, calls_per_minute=60.0, burst=2)

    async def hello(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    async def broken(request: Any) -> PlainTextResponse:
        raise Refused(418, "no")

    routes = [
        Route("/hello", counted(service.service, hello)),
        Route("/broken", counted(service.service, broken)),
    ]
    http = TestClient(app(service.service, routes))
    assert http.get("/hello").text == "hello"
    assert (http.get("/broken").status_code, http.get("/run").status_code) == (418, 429)


def test_buckets_fill_and_forget() -> None:
    ticks = Clock(0.0)
    buckets = Buckets(60.0, 2, ticks)
    buckets.take("a")
    buckets.take("a")
    with pytest.raises(Refused) as refused:
        buckets.take("a")
    assert (refused.value.status, refused.value.wait_s) == (429, 1.0)
    buckets.take("b")
    ticks.now += 0.5
    assert buckets.wait_s("a") == 0.5
    ticks.now += 100
    assert buckets._now_left("a") == 2.0
    for number in range(10_050):
        buckets.count(str(number))
    assert len(buckets._left) == 10_000


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:3::9", "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("x" * 100, "x" * 64),
    ],
)
def test_whom_a_call_is_counted_for(host: str, expected: str) -> None:
    from starlette.requests import Request

    from training.swarm.service_limits import caller

    assert caller(Request({"type": "http", "client": (host, 1)})) == expected


def test_an_audit_log_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        AuditLog(tmp_path / "file" / "audit.jsonl")


def test_how_it_may_listen(tmp_path: Path) -> None:
    made = authority(tmp_path / "a")
    audit, (cert, key) = tmp_path / "audit", certificate(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"host": "0.0.0.0"}, "'0.0.0.0' is reached from outside, and credentials would travel"),
        ({"certificate": cert}, "HTTPS needs both files"),
        ({"certificate": cert, "private_key": tmp_path / "none"}, "cannot be used for HTTPS"),
        ({"certificate": cert, "private_key": certificate(other)[1]}, "cannot be used for HTTPS"),
        ({"certificate": key, "private_key": key}, "cannot be used for HTTPS"),
        ({"host": "203.0.113.1", "behind_proxy": True}, "cannot listen at '203.0.113.1:0'"),
    ]
    for settings, why in bad:
        with pytest.raises(UserError, match=why) as error:
            listen(made, ServiceSettings(**{"audit": audit, "port": 0, **settings}))
        assert "\n" not in str(error.value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"cannot listen at '127.0.0.1:{port}': Address already"
        ):
            listen(made, ServiceSettings(audit=audit, port=port))
