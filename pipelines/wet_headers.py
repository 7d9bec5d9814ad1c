"""The header block of a WARC record: its grammar, and what its fields say."""

from __future__ import annotations

import base64
import hashlib
import re

# The first line of a record, of any version, and more bytes than one needs.
VERSION_LINE = re.compile(rb"WARC/\d{1,3}\.\d{1,3}[ \t]{0,8}\r?\n")
VERSION_LINE_BYTES = 32
# What follows it, up to a blank line or the first line of another record.
HEADER_LINES = re.compile(rb"(?:(?!\r?\n|WARC/\d{1,3}\.\d{1,3}[ \t]{0,8}\r?\n)[^\n]*\n)*+")
BLANK_LINE = re.compile(rb"\r?\n")
_OTHER_TYPE = re.compile(
    rb"(?im)^warc-type[ \t]*:[ \t]*"
    rb"(?:warcinfo|response|resource|request|metadata|revisit|continuation)[ \t]*\r?$"
)
# More digits than a length can have are no length.
_LENGTH = re.compile(r"[0-9]{1,18}")
_SPACE = " \t\r"


def content_length(fields: dict[str, str]) -> int | None:
    """Content-Length in bytes; None when there is none or it is not a number."""
    stated = fields.get("content-length", "")
    return int(stated) if _LENGTH.fullmatch(stated) else None


def digest_is_right(fields: dict[str, str], body: bytes) -> bool | None:
    """Whether the SHA-1 block digest (base 32 or 16) is that of `body`; None without one."""
    algorithm, _, value = fields.get("warc-block-digest", "").partition(":")
    if algorithm.lower() != "sha1":
        return None
    digest = hashlib.sha1(body, usedforsecurity=False)
    found = digest.hexdigest() if len(value) == 40 else base64.b32encode(digest.digest()).decode()
    return found.lower() == value.lower()


def may_be_page(header: bytes) -> bool:
    """Whether a header that may be cut or damaged does not name another type than conversion."""
    return _OTHER_TYPE.search(header) is None


def parse_headers(header: bytes) -> dict[str, str]:
    """The headers of a record by their names in lower case."""
    fields: dict[str, str] = {}
    folded = ""
    for line in header.decode("utf-8", "replace").split("\n")[1:]:
        name, colon, value = line.partition(":")
        if line[:1] in (" ", "\t"):
            if folded:
                fields[folded] = f"{fields[folded]} {line.strip(_SPACE)}".strip(_SPACE)
        elif colon:
            name = name.strip(_SPACE).lower()
            folded = "" if name in fields else name
            fields.setdefault(name, value.strip(_SPACE))
    return fields
