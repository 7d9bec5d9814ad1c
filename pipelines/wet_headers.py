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
DIGEST_NAME = b"WARC-Block-Digest"
BLANK = re.compile(rb"[\r\n]*")
BLANK_LINE = re.compile(rb"\r?\n")
_OTHER_TYPE = re.compile(
    rb"(?im)^warc-type[ \t]*:[ \t]*"
    rb"(?:warcinfo|response|resource|request|metadata|revisit|continuation)[ \t]*\r?$"
)
# More digits than a length can have are no length.
_MAX_LENGTH_DIGITS = 18
# The names that Common Crawl writes, as it spells them. `fields` has them in this spelling,
# whatever the file has, and other names in lower case.
KNOWN_NAMES = frozenset(
    {
        "Content-Length",
        "Content-Type",
        "WARC-Block-Digest",
        "WARC-Date",
        "WARC-Filename",
        "WARC-Identified-Content-Language",
        "WARC-Record-ID",
        "WARC-Refers-To",
        "WARC-Target-URI",
        "WARC-Type",
        "WARC-Warcinfo-ID",
    }
)
_SPELLING = {name.lower(): name for name in KNOWN_NAMES}
_SPACE = " \t\r\x0c"
_VALUE = rb"(\S(?:.*\S)?)\r\n"
# The header of a page just as Common Crawl writes it; `parse_headers` gives the same for it.
# Groups: URI, date, record ID, digest, language (None when absent), length.
USUAL_PAGE = re.compile(
    rb"WARC/1\.[01]\r\nWARC-Type: conversion\r\n"
    rb"(?:WARC-Target-URI: " + _VALUE + rb")?"
    rb"(?:WARC-Date: " + _VALUE + rb")?"
    rb"(?:WARC-Record-ID: " + _VALUE + rb")?"
    rb"(?:WARC-Refers-To: [^\n]*\n)?"
    rb"(?:WARC-Block-Digest: " + _VALUE + rb")?"
    rb"(?:WARC-Identified-Content-Language: " + _VALUE + rb")?"
    rb"(?:Content-Type: [^\n]*\n)?"
    rb"Content-Length: ([0-9]{1,%d})\r\n\r\n" % _MAX_LENGTH_DIGITS
)


def content_length(fields: dict[str, str]) -> int | None:
    """Content-Length in bytes; None when there is none or it is not a number."""
    stated = fields.get("Content-Length", "")
    is_length = stated.isascii() and stated.isdigit() and len(stated) <= _MAX_LENGTH_DIGITS
    return int(stated) if is_length else None


def field_name(name: str) -> str:
    """The spelling under which `fields` has the header `name`."""
    name = name.lower()
    return _SPELLING.get(name, name)


def digest_is_right(fields: dict[str, str], body: bytes) -> bool | None:
    """Whether the SHA-1 block digest (base 32 or 16) is that of `body`; None without one."""
    algorithm, _, value = fields.get("WARC-Block-Digest", "").partition(":")
    if algorithm.lower() != "sha1":
        return None
    digest = hashlib.sha1(body, usedforsecurity=False)
    found = digest.hexdigest() if len(value) == 40 else base64.b32encode(digest.digest()).decode()
    return found.lower() == value.lower()


def is_page(fields: dict[str, str]) -> bool:
    """Whether the record is a page: `conversion`, the only type of page that WET has."""
    return fields.get("WARC-Type", "").lower() == "conversion"


def may_be_page(header: bytes) -> bool:
    """Whether a header that may be cut or damaged does not name another type than conversion."""
    return _OTHER_TYPE.search(header) is None


def parse_headers(header: bytes) -> dict[str, str]:
    """The headers of a record by name (`field_name`); of a repeated one the first."""
    fields: dict[str, str] = {}
    folded = ""
    for line in header.decode("utf-8", "replace").split("\n")[1:]:
        name, colon, value = line.partition(":")
        if line[:1] in (" ", "\t"):
            if folded:
                fields[folded] = f"{fields[folded]} {line.strip(_SPACE)}".strip(_SPACE)
        elif colon:
            name = field_name(name.strip(_SPACE))
            folded = "" if name in fields else name
            fields.setdefault(name, value.strip(_SPACE))
    return fields
