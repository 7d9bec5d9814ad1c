"""Checked array files: named NumPy arrays and a JSON header in one file that can be mapped.

Intermediate results (paragraph hashes, the dedup index) are read in slices by many workers.
Each block of an array has its own checksum, so that a slice is verified without reading the
rest; a cut or changed file is refused by name. Layout: the arrays, each 64-byte aligned; a JSON
footer; its length and XXH3 (8 + 8 bytes, little endian); the magic.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np
import xxhash

from models import files
from models.errors import DamagedInput

_MAGIC = b"GRISTARR"
_TAIL = struct.Struct("<QQ8s")
_ALIGNMENT = 64
_BLOCK_BYTES = 1 << 18


class ArrayFile:
    """One open array file. Use `open_arrays`."""

    def __init__(self, file: files.Ranged, name: str) -> None:
        self._file = file
        self._name = name
        end = file.size_bytes - _TAIL.size
        if end < 0:
            raise DamagedInput("damaged_array_file", f"'{name}' is cut")
        length, checksum, magic = _TAIL.unpack(file.read(end, file.size_bytes))
        if magic != _MAGIC or length > end:
            raise DamagedInput("damaged_array_file", f"'{name}' is cut")
        footer = file.read(end - length, end)
        if xxhash.xxh3_64_intdigest(footer) != checksum:
            raise DamagedInput("damaged_array_file", f"'{name}' has a damaged footer")
        parsed = json.loads(bytes(footer))
        self._arrays: dict[str, Any] = parsed["arrays"]
        self.header: dict[str, Any] = parsed["header"]

    def size(self, name: str) -> int:
        """Number of values in the array `name`."""
        return int(self._arrays[name]["size"])

    def verify(self) -> None:
        """Read all of it. Raises DamagedInput when a block differs from its checksum."""
        for name in self._arrays:
            self.read(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Values `start:stop` of the one-dimensional array `name`, as a copy.

        Raises DamagedInput when a block that holds them differs from its checksum.
        """
        entry = self._arrays[name]
        dtype = np.dtype(entry["dtype"])
        stop = entry["size"] if stop is None else stop
        if not 0 <= start <= stop <= entry["size"]:
            raise IndexError(f"{start}:{stop} of {entry['size']} values in '{name}'")
        if start == stop:
            return np.empty(0, dtype)
        base, end = entry["offset"], entry["offset"] + entry["size"] * dtype.itemsize
        first = start * dtype.itemsize // _BLOCK_BYTES
        last = -(-stop * dtype.itemsize // _BLOCK_BYTES)
        low = base + first * _BLOCK_BYTES
        raw = self._file.read(low, min(base + last * _BLOCK_BYTES, end))
        for block in range(first, last):
            data = raw[(block - first) * _BLOCK_BYTES : (block - first + 1) * _BLOCK_BYTES]
            if xxhash.xxh3_64_intdigest(data) != entry["blocks"][block]:
                raise DamagedInput(
                    "damaged_array_file", f"'{self._name}' differs from its checksum in '{name}'"
                )
        wanted = raw[base + start * dtype.itemsize - low : base + stop * dtype.itemsize - low]
        return np.frombuffer(wanted, dtype=dtype).copy()


@contextlib.contextmanager
def open_arrays(url: str | PathLike[str]) -> Iterator[ArrayFile]:
    """Open an array file; of a remote one, only what is asked for is fetched.

    Raises OSError, or DamagedInput when it is cut or damaged.
    """
    with files.ranged(url) as file:
        yield ArrayFile(file, str(url))


def write_arrays(
    url: str | PathLike[str],
    arrays: dict[str, np.ndarray],
    header: dict[str, Any],
    *,
    durable: bool = True,
) -> None:
    """Write one-dimensional `arrays` and a JSON `header` to `url`, all of it or nothing.

    durable: see `models.files.atomic_path`.
    """
    entries: dict[str, Any] = {}
    with files.atomic_path(url, durable=durable) as temporary, temporary.open("wb") as file:
        for name, array in arrays.items():
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            data = memoryview(array.tobytes())
            entries[name] = {
                "dtype": array.dtype.str,
                "size": int(array.size),
                "offset": file.tell(),
                "blocks": [
                    xxhash.xxh3_64_intdigest(data[low : low + _BLOCK_BYTES])
                    for low in range(0, len(data), _BLOCK_BYTES)
                ],
            }
            file.write(data)
        footer = json.dumps({"arrays": entries, "header": header}, sort_keys=True).encode()
        file.write(footer)
        file.write(_TAIL.pack(len(footer), xxhash.xxh3_64_intdigest(footer), _MAGIC))
