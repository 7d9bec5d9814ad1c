"""Canonical JSON, signatures under a domain, sealed documents, secrets on disk."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from training.swarm import keys
from training.swarm.keys import SigningKey, Untrusted

_INTEGERS = st.integers(-(1 << 53), 1 << 53)
_VALUES = st.recursive(
    st.none() | st.booleans() | _INTEGERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@given(_VALUES)
def test_what_is_written_is_read_back_the_same(value: Any) -> None:
    data = keys.canonical(value)
    assert keys.parsed(data) == value
    assert keys.canonical(keys.parsed(data)) == data
    assert json.loads(data) == value
    assert data.isascii()


@given(st.dictionaries(st.text(max_size=8), _INTEGERS, min_size=2))
def test_the_order_of_names_does_not_matter(value: dict[str, int]) -> None:
    backwards = dict(reversed(value.items()))
    assert keys.canonical(backwards) == keys.canonical(value)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:0123456789eE+-. nultrfas\\', max_size=40))
def test_whatever_is_read_is_the_one_form_of_itself(data: bytes | str) -> None:
    try:
        value = keys.parsed(data)
    except Untrusted:
        return
    raw = data.encode() if isinstance(data, str) else data
    assert keys.canonical(value) == raw


@given(st.binary(max_size=80))
def test_base64url_has_one_form(data: bytes) -> None:
    text = keys.encode(data)
    assert keys.decode(text) == data
    assert "=" not in text and "+" not in text and "/" not in text


@pytest.mark.parametrize(
    "data",
    [
        '{"b":1,"a":2}',
        '{"a": 1}',
        '{"a":1,"a":1}',
        '{"a":1.0}',
        '{"a":1e3}',
        '{"a":NaN}',
        '{"a":-0}',
        '{"a":"\\u0041"}',
        '{"a":"é"}',
        '{"a":9007199254740993}',
        '{"a":1}\n',
        "[" * 20 + "]" * 20,
        "[" * 100_000,
        "",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
    ],
)
def test_any_other_form_is_refused(data: bytes | str) -> None:
    with pytest.raises(Untrusted, match="canonical form"):
        keys.parsed(data)


@pytest.mark.parametrize("text", ["AA==", "AB", "A", "A\n", "+/+/", "AAA A", "é"])
def test_other_base64_is_refused(text: str) -> None:
    with pytest.raises(Untrusted):
        keys.decode(text)


def test_the_signature_is_that_of_rfc_8032_over_domain_and_json() -> None:
    # RFC 8032, 7.1, test 1: the secret key and its public key.
    secret = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))
    assert keys.decode(key.public.removeprefix("ed25519:")).hex() == public
    assert key.id == "21fe31dfa154a261626bf854046fd227"
    assert keys.signed_bytes("token", {"b": 1, "a": "x"}) == (
        b'gristmill swarm token v1\0{"a":"x","b":1}'
    )
    plain = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
    expected = plain.sign(b'gristmill swarm token v1\0{"a":"x","b":1}')
    assert keys.decode(key.sign("token", {"a": "x", "b": 1})) == expected


def test_a_signature_serves_for_one_kind_one_body_one_key() -> None:
    key, other = SigningKey.new(), SigningKey.new()
    signature = key.sign("token", {"a": 1})
    assert keys.is_signed("token", {"a": 1}, signature, key.public)
    assert not keys.is_signed("run", {"a": 1}, signature, key.public)
    assert not keys.is_signed("token", {"a": 2}, signature, key.public)
    assert not keys.is_signed("token", {"a": 1}, signature, other.public)
    assert not keys.is_signed("token", {"a": 1}, signature + "A", key.public)
    assert not keys.is_signed("token", {"a": 1}, signature, "ed25519:AAAA")
    assert not keys.is_signed("token", {"a": 1.5}, signature, key.public)


def test_a_sealed_document_opens_by_any_of_its_keys() -> None:
    old, new, stranger = SigningKey.new(), SigningKey.new(), SigningKey.new()
    sealed = keys.seal("run", {"name": "x"}, [old, new])
    for known in (old, new):
        assert keys.unseal("run", sealed, {known.id: known.public}) == {"name": "x"}
    with pytest.raises(Untrusted, match="the run is not signed by a key of the run's authority"):
        keys.unseal("run", sealed, {stranger.id: stranger.public})
    with pytest.raises(Untrusted, match="not signed"):
        keys.unseal("revocation list", sealed, {old.id: old.public})
    with pytest.raises(Untrusted, match="not signed"):
        keys.unseal("run", sealed.replace(b'"x"', b'"y"'), {old.id: old.public})
    # Under the id of a trusted key stands the signature of another.
    forged = keys.canonical(
        {"body": {"name": "x"}, "signatures": {old.id: stranger.sign("run", {"name": "x"})}}
    )
    with pytest.raises(Untrusted, match="not signed"):
        keys.unseal("run", forged, {old.id: old.public})


@pytest.mark.parametrize("data", [b"[]", b"{}", b'{"body":1,"signatures":{}}', b"1"])
def test_what_is_no_sealed_document_is_refused(data: bytes) -> None:
    with pytest.raises(Untrusted, match="no sealed run"):
        keys.unseal("run", data, {})


def test_a_sealed_document_of_megabytes_is_not_parsed() -> None:
    with pytest.raises(Untrusted, match="more than 1048576 bytes"):
        keys.unseal("run", b"[" * ((1 << 20) + 1), {})


def test_a_key_comes_back_from_its_file(tmp_path: Path) -> None:
    key = SigningKey.new()
    key.write(tmp_path / "k.pem")
    assert (tmp_path / "k.pem").stat().st_mode & 0o777 == 0o600
    read = SigningKey.read(tmp_path / "k.pem")
    assert (read.id, read.public) == (key.id, key.public)
    assert keys.is_signed("x", {}, read.sign("x", {}), key.public)


def test_a_secret_is_never_readable_by_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys.write_secret(tmp_path / "s", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_mistakes_with_key_files_are_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "k.pem"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        SigningKey.read(path)
    SigningKey.new().write(path)
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"others may read \(mode 0644\): chmod 600"):
        SigningKey.read(path)
    path.chmod(0o600)
    path.write_bytes(b"-----BEGIN nonsense")
    with pytest.raises(UserError, match="holds no private key"):
        SigningKey.read(path)


@pytest.mark.parametrize("public", ["", "ed25519:", "rsa:AAAA", "ed25519:" + "A" * 44, "A" * 43])
def test_what_is_no_public_key_is_told(public: str) -> None:
    with pytest.raises(UserError, match="is no public key of an authority"):
        keys.key_id(public)
