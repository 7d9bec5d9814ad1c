"""Tokens: their one form, and the matrix of those that must be refused."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from tests.training.swarm.authorities import RUN, START, peer, signed
from training.swarm import keys, tokens
from training.swarm.keys import SigningKey, Untrusted
from training.swarm.tokens import Token, TokenFile

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
TRUSTED = {KEY.id: KEY.public}
GOLDEN_PEER = "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG"


def _fields(text: str) -> dict[str, Any]:
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def _resigned(**changed: Any) -> str:
    """A token with any fields at all, signed by the authority's own key."""
    body = {**asdict(Token(RUN, "asha", peer(0).peer_id, START, START + 600, KEY.id)), **changed}
    body = {name: value for name, value in body.items() if value is not ...}
    return keys.canonical({**body, "signature": KEY.sign(tokens.KIND, body)}).decode()


def test_a_token_is_this_text() -> None:
    token = Token("bengali", "asha", GOLDEN_PEER, START, START + 60, KEY.id)
    text = tokens.issue(token, KEY)
    body = (
        '"expires":1900000060,"issued":1900000000,"key":"' + KEY.id + '",'
        '"peer":"' + GOLDEN_PEER + '","run":"bengali"'
    )
    raw = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
    signature = raw.sign(b"gristmill swarm token v1\0{" + body.encode() + b',"user":"asha"}')
    assert text == "{" + body + f',"signature":"{keys.encode(signature)}","user":"asha"}}'
    assert tokens.read(text, TRUSTED) == token


@given(
    run=st.from_regex(r"[\w.-]{1,100}", fullmatch=True),
    user=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True),
    issued=st.integers(0, 1 << 40),
    life=st.integers(1, tokens.LONGEST_LIFE_S),
)
def test_every_token_is_read_back(run: str, user: str, issued: int, life: int) -> None:
    token = Token(run, user, GOLDEN_PEER, issued, issued + life, KEY.id)
    assert tokens.read(tokens.issue(token, KEY), TRUSTED) == token


@given(st.data())
def test_no_byte_of_a_token_may_differ(data: st.DataObject) -> None:
    text = signed(KEY)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda letter: letter != text[place]))
    with pytest.raises(Untrusted):
        tokens.read(text[:place] + other + text[place + 1 :], TRUSTED)


def _other_kind() -> str:
    body = asdict(Token(RUN, "asha", peer(0).peer_id, START, START + 600, KEY.id))
    return keys.canonical({**body, "signature": KEY.sign("run", body)}).decode()


def _unknown_key() -> str:
    return signed(SigningKey.new())


def _borrowed_key_id() -> str:
    rogue = SigningKey.new()
    body = asdict(Token(RUN, "asha", peer(0).peer_id, START, START + 600, KEY.id))
    return keys.canonical({**body, "signature": rogue.sign(tokens.KIND, body)}).decode()


MATRIX: list[tuple[str, Callable[[], str], str]] = [
    ("nothing", lambda: "", "canonical form"),
    ("no JSON", lambda: "hello", "canonical form"),
    ("no object", lambda: "[1]", "no token"),
    ("spaces", lambda: json.dumps(_fields(signed(KEY)), sort_keys=True), "canonical form"),
    ("a newline", lambda: signed(KEY) + "\n", "canonical form"),
    ("named twice", lambda: signed(KEY)[:-1] + ',"user":"asha"}', "canonical form"),
    ("too long", lambda: " " * 2049, "at most 2048"),
    ("nested", lambda: "[" * 2000, "canonical form"),
    ("no signature", lambda: _resigned().replace('"signature"', '"signatura"'), "no token"),
    ("a field more", lambda: _resigned(admin=True), "has the fields"),
    ("a field less", lambda: _resigned(user=...), "has the fields"),
    ("text for a time", lambda: _resigned(issued="1"), "whole seconds"),
    ("true for a time", lambda: _resigned(issued=True), "whole seconds"),
    ("time below zero", lambda: _resigned(issued=-5), "whole seconds"),
    ("number for a user", lambda: _resigned(user=5), "not text"),
    ("null for a peer", lambda: _resigned(peer=None), "not text"),
    ("list for a run", lambda: _resigned(run=[RUN]), "not text"),
    ("user with a slash", lambda: _resigned(user="a/../b"), "not a name"),
    ("user with a newline", lambda: _resigned(user="asha\n"), "not a name"),
    ("empty user", lambda: _resigned(user=""), "not a name"),
    ("a peer that is none", lambda: _resigned(peer="Qm"), "not an id"),
    ("a key that is none", lambda: _resigned(key="x"), "not an id"),
    ("ends before it begins", lambda: _resigned(expires=START), "not in order"),
    ("lasts for ever", lambda: _resigned(expires=START + (1 << 40)), "not in order"),
    ("unknown key", _unknown_key, "unknown key"),
    ("another's key id", _borrowed_key_id, "signature is wrong"),
    ("signed as another kind", _other_kind, "signature is wrong"),
    ("altered user", lambda: signed(KEY).replace("asha", "ashb"), "signature is wrong"),
    ("altered run", lambda: signed(KEY).replace(RUN, "sahajbart"), "signature is wrong"),
    (
        "altered expiry",
        lambda: signed(KEY).replace(str(START + 600), str(START + 900)),
        "signature is wrong",
    ),
    (
        "another's signature",
        lambda: keys.canonical(
            {**_fields(signed(KEY)), "signature": _fields(signed(KEY, user="b"))["signature"]}
        ).decode(),
        "signature is wrong",
    ),
]


@pytest.mark.parametrize(("make", "why"), [row[1:] for row in MATRIX], ids=[r[0] for r in MATRIX])
def test_bad_tokens_are_refused(make: Callable[[], str], why: str) -> None:
    assert tokens.read(signed(KEY), TRUSTED).user == "asha"
    with pytest.raises(Untrusted, match=why):
        tokens.read(make(), TRUSTED)


def test_a_token_counts_for_its_run_and_peer_in_its_time() -> None:
    token = tokens.read(signed(KEY), TRUSTED)
    good: dict[str, Any] = {"run": RUN, "peer": peer(0).peer_id, "now": START}
    for now in (START - 30, START, START + 599.9):
        tokens.check(token, **{**good, "now": now})
    bad: list[tuple[dict[str, Any], str]] = [
        ({"run": "other"}, "is of the run 'sahajbert', not of 'other'"),
        ({"peer": peer(1).peer_id}, "is of the peer"),
        ({"now": START - 31}, "valid only in 31 s: check the clock"),
        ({"now": START + 600}, "expired 0 s ago"),
        ({"now": START + 660}, "expired 60 s ago"),
    ]
    for changed, why in bad:
        with pytest.raises(Untrusted, match=why):
            tokens.check(token, **{**good, **changed})


def test_two_keys_are_accepted_during_a_rotation() -> None:
    new = SigningKey.new()
    both = {**TRUSTED, new.id: new.public}
    assert tokens.read(signed(KEY), both).key == KEY.id
    assert tokens.read(signed(new), both).key == new.id
    with pytest.raises(Untrusted, match="unknown key"):
        tokens.read(signed(KEY), {new.id: new.public})


def test_a_remembered_token_is_forgotten_with_its_key() -> None:
    reader, new = tokens.Reader(), SigningKey.new()
    text = signed(KEY)
    assert reader.read(text, TRUSTED) == reader.read(text, TRUSTED)
    with pytest.raises(Untrusted, match="unknown key"):
        reader.read(text, {new.id: new.public})
    assert reader.read(text, TRUSTED).user == "asha"


def test_a_token_that_nobody_would_take_is_not_issued() -> None:
    token = Token(RUN, "asha", peer(0).peer_id, START, START + 600, KEY.id)
    for changed in ({"user": "a b"}, {"peer": "x"}, {"expires": START}, {"key": "0" * 32}):
        with pytest.raises((Untrusted, ValueError)):
            tokens.issue(replace(token, **changed), KEY)  # type: ignore[arg-type]


def test_names_are_checked_in_one_line() -> None:
    assert tokens.check_user("a.b@c-d_e") == "a.b@c-d_e"
    with pytest.raises(UserError, match="'a b' is no name of a user"):
        tokens.check_user("a b")
    with pytest.raises(UserError, match="'a/b' is no name of a run"):
        tokens.check_run("a/b")
    with pytest.raises(UserError, match="'x' is no peer id"):
        tokens.check_peer("x")


def test_a_token_file_is_seen_when_it_changes(tmp_path: Path) -> None:
    own, reader = TokenFile(tmp_path / "token"), TokenFile(tmp_path / "token")
    checked: dict[str, Any] = {
        "run": RUN,
        "peer": peer(0).peer_id,
        "trusted": TRUSTED,
        "now": START,
    }
    assert reader.text() == ""
    with pytest.raises(UserError, match="holds no token: ask the run's authority"):
        reader.check(**checked)
    own.write(signed(KEY))
    assert reader.check(**checked).user == "asha"
    own.write(signed(KEY, user="bina"))
    assert reader.check(**checked).user == "bina"
    with pytest.raises(UserError, match=r"cannot be used: the token expired 400 s ago"):
        reader.check(**{**checked, "now": START + 1000})
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be used: it is not JSON"):
        reader.check(**checked)
    (tmp_path / "token").unlink()
    assert reader.text() == ""
