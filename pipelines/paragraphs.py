"""Paragraphs of a page, and the 64-bit keys under which exact duplicates meet.

A key is the first 8 bytes, little endian, of the SHA-1 of the normalised paragraph in
UTF-8, as in CCNet (Wenzek et al. 2020, section 3.1). Two profiles say what is normalised:

`ccnet`
    Exactly what CCNet's code does: strip, lower case, digits -> 0, the marks that it names
    and control characters deleted. Accents, other punctuation and inner spaces stay.
`unicode`
    The same key for the same text in any script, however it is encoded:
    1. punctuation (category P*), CCNet's marks, controls and invisible format characters go
       (`models.characters.is_noise`; the zero width joiner and non-joiner stay);
    2. NFC, so that composed and decomposed spellings meet;
    3. nonspacing marks go from Latin, Greek and Cyrillic letters (й = и, ё = е), and stay
       everywhere else, where they carry vowels and consonants;
    4. lower case, with one small sigma (ς = σ); every decimal digit -> 0;
    5. runs of white space -> one space, none at the ends.
    Normalising a key again changes nothing.

`normalise` is the definition. `paragraph_hashes` gives the same keys page by page, through
tables derived from the same Unicode data.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import compress
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.characters import (
    CCNET_PUNCTUATION,
    CharacterTable,
    Folded,
    decode,
    is_joined_or_mark,
    is_noise,
    remove_accents,
    without_accent,
)
from models.errors import UserError

Profile = Literal["ccnet", "unicode"]

_SHA1_BYTES = 20
_KEY_BYTES = 8
_BLOCK_CHARS = 32_768
_SPACES = re.compile(b"  +")


class PageParagraphs(NamedTuple):
    """Keys of the paragraphs of a sequence of pages.

    hashes: uint64, shape (paragraphs,), in page order.
    offsets: int64, shape (pages + 1,): page i holds hashes[offsets[i]:offsets[i + 1]].
    """

    hashes: NDArray[np.uint64]
    offsets: NDArray[np.int64]


def split_lines(text: str) -> list[str]:
    r"""Split at universal newlines (\n, \r\n, \r) and at nothing else; "" is one line."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.split("\n")


def page_lines(body_text: str) -> list[str]:
    """The lines of a page, each stripped of white space; a blank line is ""."""
    return list(map(str.strip, split_lines(body_text)))


def normalise(line: str, profile: Profile) -> str:
    """Normalise one paragraph: the text that its key is the hash of."""
    if profile == "ccnet":
        return "".join(map(_ccnet_character, line.strip().lower()))
    if profile == "unicode":
        kept = "".join(c for c in line if not _is_removed(c))
        bare = remove_accents(unicodedata.normalize("NFC", kept))
        return " ".join("".join(map(_unicode_character, bare)).split())
    raise _unknown_profile(profile)


def paragraph_hashes(texts: Sequence[str], profile: Profile) -> PageParagraphs:
    r"""Hash every paragraph of every page.

    texts: one for each page: its lines, stripped (`page_lines`), joined by "\n". A page
    gives text.count("\n") + 1 hashes, so an empty page gives one, that of "".
    """
    plain_keys, other_keys = _key_functions(profile)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([text.count("\n") + 1 for text in texts], out=offsets[1:])
    # Pages in ASCII need no table of code points, which saves most of their folding.
    is_plain = np.fromiter(map(str.isascii, texts), bool, len(texts))
    of_plain = np.repeat(is_plain, np.diff(offsets))
    hashes = np.empty(of_plain.size, np.uint64)
    hashes[of_plain] = _hashes(plain_keys, list(compress(texts, is_plain.tolist())))
    hashes[~of_plain] = _hashes(other_keys, list(compress(texts, (~is_plain).tolist())))
    return PageParagraphs(hashes, offsets)


def _hashes(keys_of: _Keys, texts: list[str]) -> NDArray[np.uint64]:
    """The hash of each line of each text, uint64, shape (lines,)."""
    sha1 = hashlib.sha1
    digests = [b"".join([sha1(key).digest() for key in keys_of(block)]) for block in _blocks(texts)]
    by_paragraph = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, _SHA1_BYTES)
    return np.ascontiguousarray(by_paragraph[:, :_KEY_BYTES]).view("<u8").reshape(-1)


def _blocks(texts: list[str]) -> Iterator[str]:
    """Pages joined, so that array calls have enough to do and their arrays stay in cache."""
    block: list[str] = []
    chars = 0
    for text in texts:
        block.append(text)
        chars += len(text)
        if chars >= _BLOCK_CHARS:
            yield "\n".join(block)
            block, chars = [], 0
    if block:
        yield "\n".join(block)


_Keys = Callable[[str], list[bytes]]


def _key_functions(profile: Profile) -> tuple[_Keys, _Keys]:
    """What gives the keys of pages joined by line feeds: of pages in ASCII, and of any pages."""
    if profile == "ccnet":
        return _plain_ccnet_keys, _ccnet_keys
    if profile == "unicode":
        return _plain_unicode_keys, _unicode_keys
    raise _unknown_profile(profile)


def _unknown_profile(profile: str) -> UserError:
    return UserError(f'unknown paragraph profile "{profile}": choose "ccnet" or "unicode"')


def _ccnet_character(character: str) -> str:
    if character.isdecimal():
        return "0"
    if character in CCNET_PUNCTUATION or unicodedata.category(character) == "Cc":
        return ""
    return character


def _is_removed(character: str) -> bool:
    # U+1FFD is canonically equal to CCNet's U+00B4, so it has to share its fate.
    mark = unicodedata.normalize("NFD", character)[0]
    return mark in CCNET_PUNCTUATION or unicodedata.category(mark)[0] == "P" or is_noise(mark)


def _unicode_character(character: str) -> str:
    if character.isdecimal():
        return "0"
    return "σ" if character == "ς" else character.lower()


@lru_cache(maxsize=1)
def _ccnet_table() -> CharacterTable:
    def fold(character: str) -> str:
        # One page is folded at once, so line breaks stay. U+0130 is left to `depends`.
        return "\n" if character == "\n" else _ccnet_character(character.lower()[0])

    return CharacterTable(fold, lambda c: c in "Σİ")


@lru_cache(maxsize=1)
def _unicode_table() -> CharacterTable:
    def fold(character: str) -> str:
        if _is_removed(character):
            return ""
        if character.isspace():
            return "\n" if character == "\n" else " "
        return _unicode_character(without_accent(character))

    return CharacterTable(fold, lambda c: is_joined_or_mark(c) and not _is_removed(c))


def _plain_ccnet_keys(text: str) -> list[bytes]:
    return _ccnet_table().fold_ascii(text).split(b"\n")


def _plain_unicode_keys(text: str) -> list[bytes]:
    return _trimmed(_unicode_table().fold_ascii(text))


def _ccnet_keys(text: str) -> list[bytes]:
    table = _ccnet_table()
    folded = table.fold_or_none(text)
    if folded is None:
        folded = table.fold(text.lower() if "Σ" in text else text.replace("İ", "i\u0307"))
    return _utf8(folded).split(b"\n")


def _unicode_keys(text: str) -> list[bytes]:
    table = _unicode_table()
    folded = table.fold_or_none(text)
    if folded is None:
        folded = table.fold_without_accents(text, _composed)
    return _trimmed(_utf8(folded))


def _trimmed(keys: bytes) -> list[bytes]:
    return [key.strip() for key in _SPACES.sub(b" ", keys).split(b"\n")]


def _composed(text: str) -> str:
    # Line by line, since NFC is slow only on a string that is not in NFC already.
    return "\n".join([unicodedata.normalize("NFC", line) for line in text.split("\n")])


def _utf8(folded: Folded) -> bytes:
    return decode(folded).encode().translate(None, b"\0")
