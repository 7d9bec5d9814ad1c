"""A peer's identity: the libp2p key on its disk, which makes its peer id the same after a restart.

The file is the one hivemind hands to its daemon (`DHT(identity_path=...)`): a protobuf with an
RSA-2048 key. It is written here, with mode 0600 and atomically, so that it is there before any
hivemind process starts, and read here without hivemind, which takes seconds to import: the token
service checks identities with nothing but `cryptography`.

The peer id is the SHA-256 of the public key, so whoever shows a public key and a signature proves
a peer id (libp2p specs, peer-ids). The seed of a peer's data is the SHA-256 of its peer id: the
same after a restart, and another one at each peer.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from models.errors import UserError
from training.swarm import keys

_KEY_BITS = 2048
_KEY_BITS_ALLOWED = range(2048, 4097)
_MULTIHASH_SHA256 = b"\x12\x20"
_RSA_FIELD = b"\x08\x00"
_DATA_TAG = b"\x12"
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)
_PUBLIC_KEY_BYTES = 1024


class Identity:
    """The key of one peer, as it stands in `path`."""

    def __init__(self, path: Path, private: rsa.RSAPrivateKey) -> None:
        self.path = path
        self._private = private
        self.public_key = private.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.peer_id = peer_id_of(self.public_key)

    @cached_property
    def data_seed(self) -> int:
        """The seed of this peer's order of the data, of 63 bits."""
        return data_seed(self.peer_id)

    def sign(self, kind: str, message: bytes) -> bytes:
        """The signature of `message` as a `kind` (see `is_signed`); about a millisecond."""
        return self._private.sign(_framed(kind, message), _PADDING, hashes.SHA256())


def is_signed(kind: str, message: bytes, signature: bytes, public_key: bytes) -> bool:
    """Whether `signature` is that of `message` as a `kind` by the peer of `public_key` (DER)."""
    key = _public(public_key)
    if key is None:
        return False
    try:
        key.verify(signature, _framed(kind, message), _PADDING, hashes.SHA256())
    except InvalidSignature:
        return False
    return True


def _framed(kind: str, message: bytes) -> bytes:
    return f"gristmill peer {kind} v1".encode() + b"\0" + message


def _public(public_key: bytes) -> rsa.RSAPublicKey | None:
    if len(public_key) > _PUBLIC_KEY_BYTES:
        return None
    try:
        key = serialization.load_der_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm):
        return None
    allowed = isinstance(key, rsa.RSAPublicKey) and key.key_size in _KEY_BITS_ALLOWED
    return key if allowed and isinstance(key, rsa.RSAPublicKey) else None


def peer_id_of(public_key: bytes) -> str:
    """The peer id (base58) of a public key in DER."""
    digest = hashlib.sha256(_message(public_key)).digest()
    return base58_of(_MULTIHASH_SHA256 + digest)


def base58_of(peer_id: bytes) -> str:
    """The text of a peer id that is given as bytes."""
    return base58.b58encode(peer_id).decode()


def is_peer_id(text: str) -> bool:
    """Whether `text` is the id of a peer with an RSA key, in its one base58 form."""
    return peer_id_bytes(text) is not None


def peer_id_bytes(text: str) -> bytes | None:
    """The 34 bytes of a peer id in base58; None where it is none."""
    if len(text) != 46 or not text.isascii():
        return None
    try:
        data = base58.b58decode(text)
    except ValueError:
        return None
    whole = len(data) == 34 and data[:2] == _MULTIHASH_SHA256
    return data if whole and base58.b58encode(data).decode() == text else None


def data_seed(peer_id: str) -> int:
    """The first 63 bits of the SHA-256 of `peer_id`."""
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:8], "big") >> 1


def load_or_create(path: str | os.PathLike[str]) -> Identity:
    """The identity in the file `path`; a new one where there is no file. Raises UserError."""
    file = Path(path)
    if not file.exists():
        private = rsa.generate_private_key(public_exponent=65537, key_size=_KEY_BITS)
        der = private.private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        try:
            keys.write_secret(file, _message(der))
        except OSError as error:
            raise UserError(f"'{file}' cannot be written: {error.strerror}") from error
    return load(file)


def load(path: str | os.PathLike[str]) -> Identity:
    """The identity in the file `path`. Raises UserError."""
    file = Path(path)
    der = _data(keys.read_secret(file))
    try:
        private = serialization.load_der_private_key(der, password=None) if der else None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, rsa.RSAPrivateKey):
        raise UserError(
            f"'{file}' holds no identity of a peer (an RSA key of libp2p): put it back from a "
            "backup, or remove it to join as a new peer"
        )
    return Identity(file, private)


def _message(data: bytes) -> bytes:
    """libp2p's protobuf of an RSA key: field 1 is the kind (0), field 2 the bytes."""
    return _RSA_FIELD + _DATA_TAG + _varint(len(data)) + data


def _data(message: bytes) -> bytes:
    """The bytes of the RSA key in `message`; none where it is another thing."""
    start = len(_RSA_FIELD + _DATA_TAG)
    if message[:start] != _RSA_FIELD + _DATA_TAG:
        return b""
    length = shift = 0
    for position in range(start, min(start + 4, len(message))):
        length |= (message[position] & 0x7F) << shift
        shift += 7
        if message[position] < 0x80:
            data = message[position + 1 :]
            return data if len(data) == length else b""
    return b""


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
