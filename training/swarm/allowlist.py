"""Who may take part: an append-only log in which every line is signed and names the line before.

One JSON object a line: who was added with which credential, removed, revoked, and which keys of
the authority came and went. The state is what the lines say, from the first to the last, and
nobody can alter, drop or reorder a line in the middle unseen. A line that a crash cut short was
never said; the next one replaces it. Beside the log stands a note of its last line (`.head`): a
log that ends before it was cut, or is an old copy, in which removed users would be back.

A credential is a random secret of 192 bits which the user gets once; the log holds its SHA-256
only, so that the log may be shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import files
from models.errors import UserError
from training.swarm import keys
from training.swarm.keys import SigningKey, Untrusted

KIND = "allowlist entry"
_ENTRY = {"action", "number", "previous", "run", "signature", "signed_by", "time"}
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "begin": {"key": str},
    "add": {"user": str, "credential": str},
    "remove": {"user": str},
    "revoke-user": {"user": str},
    "revoke-peer": {"peer": str},
    "restore-peer": {"peer": str},
    "add-key": {"key": str, "signs_from": int},
    "retire-key": {"key": str},
}
_NO_LINE = "0" * 64
_HEAD = ".head"


@dataclass
class Allowlist:
    """What the log says, up to its last line.

    `users`: hash of the credential by user. `void_before`: tokens of a user issued up to then are
    void. `keys`: public keys in force by id, `signs_from` when each begins to sign new tokens.
    """

    run: str = ""
    lines: int = 0
    last_digest: str = _NO_LINE
    users: dict[str, str] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    void_before: dict[str, int] = field(default_factory=dict)
    revoked_peers: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    signs_from: dict[str, int] = field(default_factory=dict)
    retired: dict[str, str] = field(default_factory=dict)

    def signer_id(self, now: float) -> str:
        """The id of the key that signs at `now`: the newest that has begun to."""
        begun = [name for name in self.keys if self.signs_from[name] <= now] or list(self.keys)
        return max(begun, key=lambda name: (self.signs_from[name], name))

    def admits(self, user: str, credential: str) -> bool:
        """Whether `user` is on the list and this is the credential; in constant time."""
        known = self.users.get(user, "")
        shown = credential_digest(self.run, user, credential)
        return hmac.compare_digest(known or _NO_LINE, shown) and bool(known)

    def _apply(self, action: str, entry: Mapping[str, Any]) -> None:
        time_s = int(entry["time"])
        if action == "begin":
            self.run = entry["run"]
            self._add_key(entry["key"], 0)
        elif action == "add":
            self.users[entry["user"]] = entry["credential"]
            self.added[entry["user"]] = time_s
        elif action == "remove":
            self.users.pop(entry["user"], None)
            self.added.pop(entry["user"], None)
            self.void_before[entry["user"]] = time_s
        elif action == "revoke-user":
            self.void_before[entry["user"]] = time_s
        elif action == "revoke-peer":
            self.revoked_peers[entry["peer"]] = time_s
        elif action == "restore-peer":
            self.revoked_peers.pop(entry["peer"], None)
        elif action == "add-key":
            self._add_key(entry["key"], entry["signs_from"])
        else:
            self.retired[entry["key"]] = self.keys.pop(entry["key"])
            del self.signs_from[entry["key"]]

    def _add_key(self, public: str, signs_from: int) -> None:
        name = keys.key_id(public)
        self.keys[name] = public
        self.signs_from[name] = signs_from

    def take(self, line: bytes) -> None:
        """Go on by one line of the log. Raises Untrusted."""
        entry = keys.parsed(line)
        if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
            raise Untrusted("it is no entry")
        fields = _FIELDS.get(entry["action"])
        if fields is None or entry.keys() != _ENTRY | fields.keys():
            raise Untrusted("it has other fields than an entry has")
        kinds = {**dict.fromkeys(_ENTRY, str), "number": int, "time": int, **fields}
        if any(type(entry[name]) is not kind for name, kind in kinds.items()):
            raise Untrusted("a field of it is of another kind")
        first = self.lines == 0
        if first != (entry["action"] == "begin") or entry["number"] != self.lines:
            raise Untrusted("it stands at another place than it was signed for")
        if entry["previous"] != self.last_digest or (not first and entry["run"] != self.run):
            raise Untrusted("it does not follow the line before it")
        body = {name: value for name, value in entry.items() if name != "signature"}
        public = entry["key"] if first else self.keys.get(entry["signed_by"], "")
        if not keys.is_signed(KIND, body, entry["signature"], public):
            raise Untrusted("its signature is wrong")
        if entry["action"] == "retire-key" and self.keys.keys() <= {entry["key"]}:
            raise Untrusted("it retires the last key")
        if entry["action"] == "retire-key" and entry["key"] not in self.keys:
            raise Untrusted("it retires a key that is not in force")
        self._apply(entry["action"], entry)
        self.lines += 1
        self.last_digest = hashlib.sha256(line).hexdigest()


def credential_digest(run: str, user: str, credential: str) -> str:
    """What the log holds of a credential."""
    body = {"run": run, "user": user, "credential": credential}
    return hashlib.sha256(keys.signed_bytes("credential", body)).hexdigest()


def read(path: Path) -> Allowlist:
    """What the log `path` says. Raises UserError when a line of it cannot be believed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
    return _folded(path, data)[0]


def _folded(path: Path, data: bytes) -> tuple[Allowlist, int]:
    """The state, and how many bytes of `data` are whole lines."""
    state = Allowlist()
    head_lines, head_digest = _head(path)
    whole = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            state.take(line)
        except (Untrusted, UserError) as error:
            raise UserError(
                f"'{path}' was altered: line {number} cannot be believed: {error}; "
                "put the file back from a backup"
            ) from error
        if state.lines == head_lines and state.last_digest != head_digest:
            raise UserError(f"'{path}' was replaced: line {number} is not the one that was there")
    if state.lines < head_lines:
        raise UserError(
            f"'{path}' was cut: it has {state.lines} lines and had {head_lines}, so whoever was "
            f"removed since would be back; put the newest back from a backup, or remove "
            f"'{path.name}{_HEAD}' to go on with this one"
        )
    return state, whole


def _head(path: Path) -> tuple[int, str]:
    """How many lines the log `path` has had, and the digest of the last of them."""
    note = path.with_name(path.name + _HEAD)
    try:
        found = keys.parsed(note.read_bytes())
        return int(found["lines"]), str(found["digest"])
    except FileNotFoundError:
        return 0, _NO_LINE
    except (OSError, Untrusted, KeyError, TypeError, ValueError) as error:
        raise UserError(f"'{note}' cannot be read: put it back from a backup") from error


class Log:
    """The log in the file `path`, for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def _locked(self) -> Iterator[tuple[int, Allowlist, int]]:
        flags = os.O_RDWR | os.O_CREAT
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise UserError(f"'{self.path}' cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            state, whole = _folded(self.path, self.path.read_bytes())
            yield descriptor, state, whole
        finally:
            os.close(descriptor)

    def append(
        self,
        action: str,
        fields: Mapping[str, Any],
        signers: Mapping[str, SigningKey],
        *,
        run: str,
        now: float,
    ) -> Allowlist:
        """Add a line, signed by the key in force; what the log says then.

        `signers`: the private keys at hand, by id. Raises UserError when the key in force is not
        among them, or when the log would not take the line.
        """
        with self._locked() as (descriptor, state, whole):
            signer_id = state.signer_id(now) if state.lines else next(iter(signers))
            signer = signers.get(signer_id)
            if signer is None:
                raise UserError(
                    f"the private key '{signer_id}' that signs '{self.path}' is not here: put its "
                    "file back from a backup"
                )
            body = {
                "action": action,
                "number": state.lines,
                "previous": state.last_digest,
                "run": run,
                "signed_by": signer.id,
                "time": int(now),
                **fields,
            }
            line = keys.canonical({**body, "signature": signer.sign(KIND, body)})
            state.take(line)
            os.ftruncate(descriptor, whole)
            os.lseek(descriptor, whole, os.SEEK_SET)
            data = line + b"\n"
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
            note = keys.canonical({"lines": state.lines, "digest": state.last_digest})
            files.write_atomic(self.path.with_name(self.path.name + _HEAD), note)
            return state
