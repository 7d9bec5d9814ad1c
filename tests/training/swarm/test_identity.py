"""The identity of a peer on disk: hivemind's own file, its peer id, signatures by it."""

import hashlib
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from models.errors import UserError
from tests.training.swarm.authorities import peer
from training.swarm import identity


def test_the_peer_id_and_the_file_are_those_of_hivemind(tmp_path: Path) -> None:
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID

    ours = peer(0)
    assert PeerID.from_identity(ours.path.read_bytes()).to_base58() == ours.peer_id
    P2P.generate_identity(str(tmp_path / "theirs.key"))
    theirs = PeerID.from_identity((tmp_path / "theirs.key").read_bytes())
    loaded = identity.load(tmp_path / "theirs.key")
    assert loaded.peer_id == theirs.to_base58()
    assert identity.peer_id_bytes(loaded.peer_id) == theirs.to_bytes()
    assert identity.base58_of(theirs.to_bytes()) == loaded.peer_id


def test_a_restarted_peer_has_the_same_id_and_seed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "peer.key"
    first = identity.load_or_create(path)
    again = identity.load_or_create(path)
    assert again.peer_id == first.peer_id
    assert path.stat().st_mode & 0o777 == 0o600
    digest = hashlib.sha256(first.peer_id.encode()).digest()
    assert again.data_seed == int.from_bytes(digest, "big") >> 193
    assert identity.load_or_create(tmp_path / "other.key").peer_id != first.peer_id


def test_the_seed_is_fixed_for_ever() -> None:
    # sha256("abc") = ba7816bf 8f01cfea ..., of which 63 bits.
    assert identity.data_seed("abc") == 0xBA7816BF8F01CFEA >> 1


def test_a_signature_holds_for_one_message_kind_and_key() -> None:
    one, other = peer(0), peer(1)
    signature = one.sign("x", b"message")
    assert identity.is_signed("x", b"message", signature, one.public_key)
    assert not identity.is_signed("y", b"message", signature, one.public_key)
    assert not identity.is_signed("x", b"massage", signature, one.public_key)
    assert not identity.is_signed("x", b"message", signature, other.public_key)
    assert not identity.is_signed("x", b"message", signature[:-1], one.public_key)
    assert not identity.is_signed("x", b"message", b"", b"nonsense")


@pytest.mark.parametrize(
    "key", [rsa.generate_private_key(65537, 1024), ec.generate_private_key(ec.SECP256R1())]
)
def test_weak_and_other_keys_prove_nothing(key: rsa.RSAPrivateKey) -> None:
    public = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert not identity.is_signed("x", b"m", b"\0" * 128, public)
    assert identity._public(public) is None
    assert identity._public(public + b"\0" * 1024) is None


def test_peer_ids_are_told_from_other_text() -> None:
    good = peer(0).peer_id
    assert identity.is_peer_id(good)
    raw = base58.b58decode(good)
    wrong = [
        "",
        good[:-1],
        good + "1",
        good.replace("Q", "0", 1),
        " " + good[1:],
        "Qé" + good[2:],
        base58.b58encode(b"\x11\x20" + raw[2:]).decode(),
        base58.b58encode(raw[:-1]).decode(),
    ]
    assert [text for text in wrong if identity.is_peer_id(text)] == []


def test_bad_identity_files_are_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.key"
    good = peer(0).path.read_bytes()
    for damaged in (
        b"",
        b"\x08",
        good[:-1],
        good + b"\0",
        b"\x08\x01" + good[2:],
        b"\x08\0\x12\xff",
    ):
        path.write_bytes(damaged)
        path.chmod(0o600)
        with pytest.raises(UserError, match=r"holds no identity of a peer .* remove it to join"):
            identity.load_or_create(path)
    path.write_bytes(good)
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        identity.load(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be"):
        identity.load_or_create(tmp_path / "file" / "p.key")
