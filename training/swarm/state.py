"""A peer's state as bytes: one canonical safetensors file, its hash, and checked partial copies.

Every peer of an epoch writes the same bytes for the same state: a JSON header with sorted keys,
then the tensors, wide types first and by name within a type (safetensors' own order). The hash
is a tree of two levels: SHA-256 of each MiB, then SHA-256 over the size and those digests. So a
joiner that knows the hash checks every chunk as it comes, notices a corrupt donor at the first
bad one, and goes on at the next donor with what it has. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models import files
from training.swarm.types import State

CHUNK_BYTES = 1 << 20
_DOMAIN = b"gristmill-swarm-state-1\n"
_DIGEST_BYTES = 32
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class NoState(Exception):
    """Nobody gave a state with the right hash in time; the message says what was tried."""


@dataclass(frozen=True)
class Digests:
    """The tree over one file: its size and the SHA-256 of each chunk, in order."""

    size_bytes: int
    chunks: tuple[bytes, ...]

    @property
    def hash(self) -> str:
        """The hash of the state, 64 hex digits."""
        root = hashlib.sha256(_DOMAIN + self.size_bytes.to_bytes(8, "little"))
        root.update(b"".join(self.chunks))
        return root.hexdigest()

    def chunk_bytes(self, number: int) -> int:
        """Length of chunk `number`: only the last one may be shorter."""
        return min(CHUNK_BYTES, self.size_bytes - number * CHUNK_BYTES)

    def matches(self, number: int, data: bytes) -> bool:
        """Whether `data` is chunk `number`."""
        return (
            number < len(self.chunks)
            and len(data) == self.chunk_bytes(number)
            and hashlib.sha256(data).digest() == self.chunks[number]
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message or a file."""
        return {"size": self.size_bytes, "digests": b"".join(self.chunks).hex()}

    @classmethod
    def from_json(cls, value: object) -> Digests | None:
        """What `to_json` gave; None for anything else."""
        if not isinstance(value, dict):
            return None
        size, text = value.get("size"), value.get("digests")
        if not isinstance(size, int) or isinstance(size, bool) or not isinstance(text, str):
            return None
        try:
            data = bytes.fromhex(text)
        except ValueError:
            return None
        if size <= 0 or len(data) != _DIGEST_BYTES * -(-size // CHUNK_BYTES):
            return None
        chunks = [data[at : at + _DIGEST_BYTES] for at in range(0, len(data), _DIGEST_BYTES)]
        return cls(size, tuple(chunks))


def state_hash(state: State) -> str:
    """The hash of `state`: 64 hex digits, the same at every peer with the same bits.

    Raises ValueError for a tensor of a type that safetensors cannot hold.
    """
    return _digests(_pieces(state)).hash


def write_state(path: Path, state: State) -> Digests:
    """Write `state` to `path` in one piece, and give its digests. Raises OSError, ValueError."""
    with files.atomic_path(path, durable=False) as temporary, temporary.open("wb") as file:

        def written() -> Iterator[memoryview]:
            for piece in _pieces(state):
                file.write(piece)
                yield piece

        return _digests(written())


def read_state(path: Path) -> State:
    """The state in the file `path`. Raises OSError; NoState when it holds none."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        return State(int(header["epoch"]), tensors, dict(header["metadata"]))
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise NoState(f"'{path}' holds no state of a swarm: {error}") from error


def _pieces(state: State) -> Iterator[memoryview]:
    """The bytes of the safetensors file of `state`, in order."""
    order = sorted(state.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    canonical = json.dumps(
        {"epoch": state.epoch, "metadata": state.metadata}, sort_keys=True, allow_nan=False
    )
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "state": canonical}}
    start = 0
    for name, tensor in order:
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"tensor '{name}' has the type {tensor.dtype}, which no file can hold")
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in order:
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield flat.numpy().data


def _digests(pieces: Iterable[memoryview]) -> Digests:
    chunks: list[bytes] = []
    current, filled, size = hashlib.sha256(), 0, 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + CHUNK_BYTES - filled]
            current.update(part)
            at, filled, size = at + len(part), filled + len(part), size + len(part)
            if filled == CHUNK_BYTES:
                chunks.append(current.digest())
                current, filled = hashlib.sha256(), 0
    if filled:
        chunks.append(current.digest())
    return Digests(size, tuple(chunks))


class PartialCopy:
    """A state that is being downloaded: checked chunks in `HASH.part`, digests in `HASH.index`.

    It survives the process: a later one with the same hash and folder goes on after the last
    chunk that is whole.
    """

    def __init__(self, folder: Path, wanted: str) -> None:
        self._wanted = wanted
        self._part = folder / f"{wanted}.part"
        self._index = folder / f"{wanted}.index"
        self.digests: Digests | None = None
        self.chunks = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in (*folder.glob("*.part"), *folder.glob("*.index")):
            if path.stem != wanted:
                path.unlink()  # of a state that the swarm has left behind
        if self._index.exists() and self._part.exists():
            self._resume()

    def _resume(self) -> None:
        try:
            digests = Digests.from_json(json.loads(self._index.read_bytes()))
        except (ValueError, RecursionError):
            return
        if digests is None or digests.hash != self._wanted:
            return
        self.digests = digests
        with self._part.open("r+b") as file:
            while digests.matches(self.chunks, file.read(CHUNK_BYTES)):
                self.chunks += 1
            file.truncate(min(self.chunks * CHUNK_BYTES, digests.size_bytes))

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self.digests is not None and self.chunks == len(self.digests.chunks)

    def accept_digests(self, digests: Digests | None) -> bool:
        """Take a donor's digests; False when they are not those of the wanted state."""
        if digests is None or digests.hash != self._wanted:
            return False
        if self.digests is None:
            self.digests = digests
            files.write_atomic(self._index, json.dumps(digests.to_json()), durable=False)
            self._part.write_bytes(b"")
        return True

    def accept_chunk(self, data: bytes) -> bool:
        """Append the next chunk; False, and nothing written, when it is not the right one."""
        if self.digests is None or not self.digests.matches(self.chunks, data):
            return False
        with self._part.open("ab") as file:
            file.write(data)
        self.chunks += 1
        return True

    def finish(self) -> Path:
        """Give the complete copy its name, `HASH.safetensors`."""
        target = self._part.with_suffix(".safetensors")
        self._part.replace(target)
        self._index.unlink(missing_ok=True)
        return target
