"""Mutations of the text of one record, before it is packed: its headers, line ends and body."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.pipelines.wet_files import record

TextMutation = Callable[[random.Random, bytes], bytes]


def _split(raw: bytes) -> tuple[list[bytes], bytes, bytes]:
    """Header lines, the line end, and what stands behind the blank line."""
    eol = b"\r\n" if b"\r\n" in raw[:40] else b"\n"
    head, _, rest = raw.partition(eol * 2)
    return head.split(eol), eol, rest


def _with_lines(change: Callable[[random.Random, list[bytes]], list[bytes]]) -> TextMutation:
    def mutate(rng: random.Random, raw: bytes) -> bytes:
        lines, eol, rest = _split(raw)
        return eol.join(change(rng, lines)) + eol * 2 + rest

    return mutate


def _length(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    stated = [line for line in lines if line.lower().startswith(b"content-length:")]
    digits = stated[0].partition(b":")[2].strip() if stated else b""
    right = int(digits) if digits.isdigit() and len(digits) < 15 else 10
    value = rng.choice(
        (right - 1, right + 1, right - rng.randrange(60), right + rng.randrange(3000), 0, -5,
         2**31, 2**63, 10**17, 10**30, "", "abc", f"+{right}", f"0x{right:x}", f"{right}.0",
         f"{right} ", f"000{right}", f"{right},{right}", "\u0663\u0664", f"{right}\t;")
    )  # fmt: skip
    new = f"Content-Length: {value}".encode()
    others = [line for line in lines if line not in stated]
    case = rng.randrange(5)
    if case == 0:
        return others
    if case == 1:
        return [*lines, new]
    if case == 2:
        return [*others[:1], new, *others[1:], *stated]
    return [*others, new]


def _one_line(change: Callable[[random.Random, bytes], list[bytes]]) -> TextMutation:
    def mutate(rng: random.Random, lines: list[bytes]) -> list[bytes]:
        index = rng.randrange(1, len(lines)) if len(lines) > 1 else 0
        return lines[:index] + change(rng, lines[index]) + lines[index + 1 :]

    return _with_lines(mutate)


def _spacing(rng: random.Random, line: bytes) -> list[bytes]:
    name, _, value = line.partition(b": ")
    colon = rng.choice(
        (b":", b" : ", b":\t", b":  ", b" ", b"::", b"\t: ", b":\x0c", b": \xc2\xa0")
    )
    return [name + colon + value + rng.choice((b"", b" ", b"\t"))]


def _odd_bytes(rng: random.Random, line: bytes) -> list[bytes]:
    at = rng.randrange(len(line) + 1)
    odd = rng.choice(
        (b"\0", b"\xff\xe9", b"\xed\xa0\x80", b"\r", b"\x0b", b"\x0c", b"\x85", b"\x1c")
    )
    return [line[:at] + odd + line[at:]]


def _fold(rng: random.Random, line: bytes) -> list[bytes]:
    at = rng.randrange(len(line) + 1)
    return [line[:at], rng.choice((b" ", b"\t", b"   ")) + line[at:]]


def _version(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    new = rng.choice(
        (b"WARC/1.1", b"WARC/0.18", b"WARC/1.0 ", b"WARC/1.0\t", b"warc/1.0", b"WARC/", b"WARC/1",
         b"WARC/1.0 x", b"WARC/1.0\r", b"WARC/12345.0", b"", b"HTTP/1.1 200 OK", b" WARC/1.0",
         b"\xef\xbb\xbfWARC/1.0", b"WARC/1.0\r\nWARC/1.0", b"WARC/1.0\n", b"XWARC/1.0",
         b"\0WARC/1.0")
    )  # fmt: skip
    return [new, *lines[1:]]


def _kind(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    kinds = (b"response", b"CONVERSION", b"", b"conversion;x", b"unknown", b" conversion ")
    return [
        b"WARC-Type: " + rng.choice(kinds) if line.startswith(b"WARC-Type") else line
        for line in lines
    ]


def _shuffle(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    return [*lines[:1], *rng.sample(lines[1:], len(lines) - 1)]


def _case(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    change = rng.choice((bytes.upper, bytes.lower, bytes.swapcase))
    pairs = [line.partition(b":") for line in lines[1:]]
    return [*lines[:1], *[change(name) + colon + value for name, colon, value in pairs]]


def _many(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    count = rng.choice((10, 100, 5000 if rng.random() < 0.2 else 200))
    return [*lines[:1], *[b"X-%d: yes, and more" % i for i in range(count)], *lines[1:]]


def _separator(rng: random.Random, raw: bytes) -> bytes:
    lines, eol, rest = _split(raw)
    blank = rng.choice((eol, b"", b"\n\n", b"\r\r", b"\r\n \r\n", eol * 3, b"\n\r\n", eol * 2))
    end = rng.choice(
        (b"", eol, b"\n\n", b"\r\r", eol * 3, b"\r\n" * 3000, b" \r\n\r\n", b"\0\r\n\r\n")
    )
    return eol.join(lines) + blank + rest.removesuffix(eol * 2) + end


def _line_ends(rng: random.Random, raw: bytes) -> bytes:
    lines, _, rest = _split(raw)
    ends = rng.choice(((b"\n",), (b"\r\n",), (b"\r",), (b"\r\n", b"\n"), (b"\r\n", b"\n", b"\r")))
    mixed = b"".join(line + rng.choice(ends) for line in [*lines, b""])
    return mixed + (rest.replace(b"\n", rng.choice(ends)) if rng.random() < 0.5 else rest)


def _body_inserts(rng: random.Random, raw: bytes) -> bytes:
    lines, eol, rest = _split(raw)
    at = rng.randrange(len(rest) + 1)
    new = rng.choice(
        (b"\r\nWARC/1.0\r\n", b"\n\nWARC/1.0\nWARC-Type: conversion\n", b"\r\n\r\n", b"\0",
         record(b"inserted", "http://inserted.example/"), b"WARC/1.1\r\nContent-Length: 3\r\n\r\n")
    )  # fmt: skip
    return eol.join(lines) + eol * 2 + rest[:at] + new + rest[at:]


def _body_changed(rng: random.Random, raw: bytes) -> bytes:
    """Another byte in the body: the length stays right, the digest does not."""
    at = raw.find(b"\n\r\n" if b"\r\n" in raw[:40] else b"\n\n") + 3
    end = len(raw.rstrip(b"\r\n"))
    if not 2 < at < end:
        return raw
    at = rng.randrange(at, end)
    return raw[:at] + bytes([raw[at] ^ rng.choice((1, 0x20, 0x80))]) + raw[at + 1 :]


def _encoding(rng: random.Random, raw: bytes) -> bytes:
    match rng.randrange(4):
        case 0:
            return raw.decode("latin-1").encode("utf-16")
        case 1:
            return raw.decode("latin-1").encode("utf-8")
        case 2:
            return b"\xef\xbb\xbf" + raw
    return raw.replace(b"e", b"\0").replace(b"a", b"\xe9")


def _cut_text(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return raw[:at] if rng.random() < 0.7 else raw[at:]


TEXT_MUTATIONS: list[tuple[str, TextMutation]] = [
    ("length", _with_lines(_length)),
    ("length", _with_lines(_length)),
    ("length", _with_lines(_length)),
    ("header missing", _one_line(lambda _, line: [])),
    ("header doubled", _one_line(lambda rng, line: [line, line + rng.choice((b"", b"0"))])),
    ("header order", _with_lines(_shuffle)),
    ("header case", _with_lines(_case)),
    ("header folded", _one_line(_fold)),
    ("header without colon", _one_line(lambda _, line: [line.replace(b":", b""), line])),
    ("header spacing", _one_line(_spacing)),
    ("header bytes", _one_line(_odd_bytes)),
    ("header giant", _one_line(lambda rng, line: [line + b"x" * rng.choice((900, 5000, 70_000))])),
    ("headers, many", _with_lines(_many)),
    ("version line", _with_lines(_version)),
    ("type", _with_lines(_kind)),
    ("separators", _separator),
    ("line ends", _line_ends),
    ("text in a body", _body_inserts),
    ("body changed", _body_changed),
    ("encoding", _encoding),
    ("record cut", _cut_text),
]
