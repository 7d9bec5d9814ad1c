"""Ed25519 keys of a run's authority, the one form of JSON that is signed, and sealed documents.

What is signed is `domain, a zero byte, canonical JSON`: the domain says what kind of thing it is,
so that a signature under one kind never serves as another. Canonical JSON has sorted names, no
spaces, ASCII only, and no floats: one document has one form of bytes, and what is read is refused
in any other form.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from models import files
from models.errors import GristmillError, UserError

_DOMAIN = "gristmill swarm {} v1"
_PUBLIC_PREFIX = "ed25519:"
_PUBLIC_BYTES = 32
_MOST_INTEGER = 1 << 53
_MOST_DEPTH = 16
_SEALED_BYTES = 1 << 20

PublicKeys = Mapping[str, str]
"""Public keys as text (`ed25519:...`) by their ids."""


class Untrusted(GristmillError):
    """Something that was shown is not what its signer would have signed, or not meant for this."""


def canonical(value: Any) -> bytes:
    """The one form in which `value` is signed. Raises ValueError for what JSON cannot hold here."""
    _check(value, 0)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parsed(data: bytes | str) -> Any:
    """The value whose canonical form is `data`. Raises Untrusted for any other form."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    try:
        value = json.loads(raw.decode("ascii"))
        same = canonical(value) == raw
    except (ValueError, RecursionError) as error:
        raise Untrusted("it is not JSON in canonical form") from error
    if not same:
        raise Untrusted("it is not JSON in canonical form")
    return value


def _check(value: Any, depth: int) -> None:
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deep")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise ValueError(f"the name {name!r} is not text")
            _check(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > _MOST_INTEGER:
            raise ValueError(f"{value} is too large")
    elif not (value is None or isinstance(value, bool | str)):
        raise ValueError(f"{value!r} has no canonical form")


def signed_bytes(kind: str, body: Any) -> bytes:
    """What a signature of `body` as a `kind` is made over."""
    return _DOMAIN.format(kind).encode() + b"\0" + canonical(body)


def encode(data: bytes) -> str:
    """Base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    """The inverse of `encode`. Raises Untrusted for any other text."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error) as error:
        raise Untrusted("it is not base64url") from error
    if encode(data) != text:
        raise Untrusted("it is not base64url")
    return data


def key_id(public: str) -> str:
    """The short name of a public key: half of the SHA-256 of its bytes, as hex.

    Raises UserError when `public` is no Ed25519 public key.
    """
    return hashlib.sha256(_public_bytes(public)).hexdigest()[:32]


def by_id(publics: Iterable[str]) -> dict[str, str]:
    """`publics` by their ids. Raises UserError."""
    return {key_id(public): public for public in publics}


def _public_bytes(public: str) -> bytes:
    try:
        data = decode(public.removeprefix(_PUBLIC_PREFIX))
    except Untrusted:
        data = b""
    if not public.startswith(_PUBLIC_PREFIX) or len(data) != _PUBLIC_BYTES:
        raise UserError(
            f"'{public}' is no public key of an authority: it is '{_PUBLIC_PREFIX}' and 43 "
            "letters, as `gristmill swarm start` prints it"
        )
    return data


def is_signed(kind: str, body: Any, signature: str, public: str) -> bool:
    """Whether `signature` is that of `body` as a `kind` by the owner of `public`."""
    try:
        key = Ed25519PublicKey.from_public_bytes(_public_bytes(public))
        key.verify(decode(signature), signed_bytes(kind, body))
    except (InvalidSignature, Untrusted, UserError, ValueError):
        return False
    return True


class SigningKey:
    """A private key of an authority."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        raw = private.public_key().public_bytes_raw()
        self.public = _PUBLIC_PREFIX + encode(raw)
        self.id = key_id(self.public)

    @classmethod
    def new(cls) -> SigningKey:
        """A fresh one."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """The one that `write` wrote. Raises UserError."""
        data = read_secret(path)
        try:
            private = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError) as error:
            raise UserError(f"'{path}' holds no private key: put it back from a backup") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise UserError(f"'{path}' holds a key of another kind; an authority's is Ed25519")
        return cls(private)

    def write(self, path: Path) -> None:
        """Write the key as PKCS #8 PEM, readable by its owner only."""
        pem = self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        write_secret(path, pem)

    def sign(self, kind: str, body: Any) -> str:
        """The signature of `body` as a `kind`."""
        return encode(self._private.sign(signed_bytes(kind, body)))


def write_secret(path: Path, data: bytes) -> None:
    """Write `data` to `path`, all or nothing, with mode 0600 from its first byte on."""
    with files.atomic_path(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


def read_secret(path: Path) -> bytes:
    """The bytes of `path`. Raises UserError when others may read it, or nobody can."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise UserError(
            f"'{path}' is a secret that others may read (mode {mode:04o}): chmod 600 '{path}'"
        )
    return data


def seal(kind: str, body: Mapping[str, Any], signers: Iterable[SigningKey]) -> bytes:
    """`body` with a signature by each of `signers`, as canonical JSON."""
    signatures = {signer.id: signer.sign(kind, body) for signer in signers}
    return canonical({"body": body, "signatures": signatures})


def unseal(kind: str, data: bytes | str, trusted: PublicKeys) -> dict[str, Any]:
    """The body that `seal` sealed, signed by at least one of `trusted`. Raises Untrusted."""
    if len(data) > _SEALED_BYTES:
        raise Untrusted(f"a {kind} has more than {_SEALED_BYTES} bytes")
    document = parsed(data)
    if not isinstance(document, dict) or document.keys() != {"body", "signatures"}:
        raise Untrusted(f"it is no sealed {kind}")
    body, signatures = document["body"], document["signatures"]
    if not isinstance(body, dict) or not isinstance(signatures, dict):
        raise Untrusted(f"it is no sealed {kind}")
    for name, public in trusted.items():
        signature = signatures.get(name)
        if isinstance(signature, str) and is_signed(kind, body, signature, public):
            return body
    raise Untrusted(f"the {kind} is not signed by a key of the run's authority")
