"""Records of the DHT are signed by the peer they are about: nobody writes in another's name.

hivemind keeps matchmaking, announcements and all else in a DHT that any peer writes to. Here each
record has the id of its writer as its subkey (hivemind's own have: bytes; ours: base58), and ends
with the writer's token, public key and signature over key, subkey, value and expiry. Three kinds:

    {run}_tokens    subkey = peer id: the value is a token of that peer, and lasts no longer
    {run}_revoked   no subkey: a sealed list of the authority (`training.swarm.revocation`)
    any other key   subkey = peer id: signed by that peer, which holds a token of this run

A validator says who wrote a record, never whether that peer may still take part: hivemind drops a
whole dictionary for one bad entry, so an entry that was good must stay good until it expires, or
one revoked peer would silence all. Who may is asked where a peer calls (`dht_access`, `guard`),
and by whoever uses a record.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from training.swarm import identity, revocation, tokens
from training.swarm.identity import Identity
from training.swarm.keys import Untrusted
from training.swarm.revocation import Trust
from training.swarm.tokens import TokenFile

EXPIRY_GRACE_S = 300.0
"""How much longer than its writer's token a record may last: a token is renewed before its end."""
_MAGIC = b"GMr1"
_LENGTHS = struct.Struct(">IHH")
_EXPIRY = struct.Struct(">d")
_MOST_BYTES = 1 << 18
_REMEMBERED = 8192
_KIND = "dht record"


class RunRecords(RecordValidatorBase):  # type: ignore[misc]
    """The validator of one run. `own`, `writer`: this peer's; without them it only reads."""

    def __init__(
        self, trust: Trust, writer: Identity | None = None, own: TokenFile | None = None
    ) -> None:
        self._trust = trust
        self._writer = writer
        self._own = own
        self._tokens_key = _key(tokens.dht_key(trust.run))
        self._revoked_key = _key(revocation.dht_key(trust.run))
        self._good: OrderedDict[bytes, None] = OrderedDict()

    @property
    def priority(self) -> int:
        """Before any validator that reads the value."""
        return 10

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """One of a kind is enough."""
        return isinstance(other, RunRecords)

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value with our signature; as it is where the record is not ours to sign."""
        value = bytes(record.value)
        if record.key in (self._tokens_key, self._revoked_key):
            return value
        token = self._own.text() if self._own is not None else ""
        if self._writer is None or not token or _peer(record.subkey) != self._writer.peer_id:
            return value
        head = _LENGTHS.pack(len(value), len(token), len(self._writer.public_key))
        signature = self._writer.sign(_KIND, _message(record, value))
        return b"".join((_MAGIC, head, value, token.encode(), self._writer.public_key, signature))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value without the signature."""
        parts = _parts(record.value)
        return bytes(record.value) if parts is None else parts[0]

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is by whom it says."""
        if len(record.value) > _MOST_BYTES:
            return False
        name = _message(record, record.value)
        if name in self._good:
            self._good.move_to_end(name)
            return True
        try:
            good = self._is_good(record)
        except Untrusted:
            good = False
        if good:
            self._good[name] = None
            if len(self._good) > _REMEMBERED:
                self._good.popitem(last=False)
        return good

    def _is_good(self, record: DHTRecord) -> bool:
        if record.key == self._revoked_key:
            return self._is_list(record)
        peer = _peer(record.subkey)
        if peer is None:
            return False
        if record.key == self._tokens_key:
            text = _text(record.value)
            token = self._trust.written_by(text, peer)
            return bool(record.expiration_time <= token.expires)
        parts = _parts(record.value)
        if parts is None:
            return False
        value, text, public_key, signature = parts
        token = self._trust.written_by(text, peer)
        return (
            record.expiration_time <= token.expires + EXPIRY_GRACE_S
            and identity.peer_id_of(public_key) == peer
            and identity.is_signed(_KIND, _message(record, value), signature, public_key)
        )

    def _is_list(self, record: DHTRecord) -> bool:
        if record.subkey != MSGPackSerializer.dumps(None):
            return False
        found = revocation.opened(_text(record.value), self._trust.known_keys())
        longest = found.issued + revocation.DHT_LIFE_S
        return found.run == self._trust.run and record.expiration_time <= longest


def _key(name: str) -> bytes:
    return bytes(DHTID.generate(name).to_bytes())


def _loaded(data: bytes) -> Any:
    try:
        value = MSGPackSerializer.loads(data)
        same = MSGPackSerializer.dumps(value) == data
    except Exception as error:  # msgpack raises what its many faults call for
        raise Untrusted("it is not msgpack") from error
    if not same:
        raise Untrusted("it is not msgpack in its own form")
    return value


def _text(data: bytes) -> str:
    value = _loaded(data)
    if not isinstance(value, str):
        raise Untrusted("it is not text")
    return value


def _peer(subkey: bytes) -> str | None:
    """The peer id (base58) that a subkey names, as text or as hivemind's bytes."""
    try:
        value = _loaded(subkey)
    except Untrusted:
        return None
    if isinstance(value, bytes) and len(value) == 34:
        value = identity.base58_of(value)
    return value if isinstance(value, str) and identity.is_peer_id(value) else None


def _message(record: DHTRecord, value: bytes) -> bytes:
    """What is signed: the place, the value and the expiry, none of which can run into another."""
    digests = (hashlib.sha256(part).digest() for part in (record.key, record.subkey, value))
    return b"".join(digests) + _EXPIRY.pack(record.expiration_time)


def _parts(data: bytes) -> tuple[bytes, str, bytes, bytes] | None:
    """Value, token, public key and signature; None where `data` is not signed."""
    start = len(_MAGIC) + _LENGTHS.size
    if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
        return None
    value_end, token_end, key_end = _LENGTHS.unpack_from(data, len(_MAGIC))
    value_end += start
    token_end += value_end
    key_end += token_end
    if len(data) <= key_end:
        return None
    text = data[value_end:token_end].decode("ascii", errors="replace")
    return bytes(data[start:value_end]), text, bytes(data[token_end:key_end]), bytes(data[key_end:])
