"""Small JSON files with their own checksum: what one pass, or one run, leaves for the next.

A report or a marker is believed without doing the work again, so a changed digit in it would
become a wrong manifest. Layout: `{"value": VALUE, "xxh3": "32 hex digits"}`, the digest being
that of the bytes of VALUE.
"""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

from models import files
from models.errors import DamagedInput

_HEAD, _MIDDLE, _TAIL = b'{"value": ', b', "xxh3": "', b'"}\n'
_DIGEST_CHARS = 32


def write_sealed(url: str | PathLike[str], value: Any) -> None:
    """Write `value` (what JSON can hold) to `url`, all of it or nothing. Raises OSError."""
    text = json.dumps(value, sort_keys=True).encode()
    digest = files.xxh3_bytes(text).encode()
    files.write_atomic(url, _HEAD + text + _MIDDLE + digest + _TAIL, durable=False)


def read_sealed(url: str | PathLike[str]) -> Any:
    """The value in `url`. Raises OSError, or DamagedInput when a byte of the file is changed."""
    data = files.read_bytes(url)
    end = len(data) - len(_TAIL) - _DIGEST_CHARS - len(_MIDDLE)
    text = data[len(_HEAD) : max(end, 0)]
    if data != _HEAD + text + _MIDDLE + files.xxh3_bytes(text).encode() + _TAIL:
        raise DamagedInput("damaged_file", f"'{url}' is cut or differs from its checksum")
    return json.loads(text)
