"""Character classes, and the table that maps a text one code point at a time.

The classes come from Python's own Unicode data, so a text folded by table and one folded
in plain Python agree by construction: no other library's Unicode version takes part.
A code point whose image depends on its neighbours (a combining mark, a capital sigma) is
marked in the table, and the caller treats a text that holds one in a second way.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CodeUnits = NDArray[np.uint16] | NDArray[np.uint32]
"""One array element for each code point: 16 bits where all of the text fits, else 32."""

Folded = NDArray[np.uint32]
"""One code point for each of the text's; 0 where it is to be deleted."""

CCNET_PUNCTUATION: Final = {
    "，": ",",
    "。": ".",
    "、": ",",
    "„": '"',
    "”": '"',
    "“": '"',
    "«": '"',
    "»": '"',
    "」": '"',
    "「": '"',
    "《": '"',
    "》": '"',
    "´": "'",
    "∶": ":",
    "：": ":",
    "？": "?",
    "！": "!",
    "（": "(",
    "）": ")",
    "；": ";",
    "–": "-",
    "—": " - ",
    "．": ". ",
    "～": "~",
    "’": "'",
    "…": "...",
    "━": "-",
    "〈": "<",
    "〉": ">",
    "【": "[",
    "】": "]",
    "％": "%",
    "►": "-",
}
"""The marks that CCNet names: deleted from a paragraph key, mapped for the language model.

CCNet also lists the full-width digit one, by mistake; digits become 0 first, so that entry
never acts and is left out.
"""

DEPENDS: Final = np.uint32(1 << 31)
"""Set in a table's value where the code point's image depends on its neighbours."""

_CODE_POINT: Final = np.uint32(0x1FFFFF)
_CODE_POINTS: Final = 0x110000

# Unicode has no letter case, digit, mark, punctuation, format character or decomposition
# outside these ranges: what is left are ideographs, private use and unassigned. The tests
# compare every code point with plain Python.
_RANGES: Final = (
    range(0xD800),
    range(0xE000, 0x20000),
    range(0x2F800, 0x2FA20),
    range(0xE0000, 0xE0200),
)

# Invisible, and without meaning for the word they stand in: soft hyphen, zero width space,
# word joiner and invisible operators, bidirectional controls, byte order mark. The other
# format characters (category Cf) stay: the zero width joiner and non-joiner change words in
# Indic scripts and Persian, the Mongolian vowel separator changes letters, the Arabic,
# Syriac and Kaithi signs are drawn, tags tell one flag from another.
_INVISIBLE: Final = frozenset(
    chr(c)
    for first, last in (
        (0xAD, 0xAD),
        (0x61C, 0x61C),
        (0x200B, 0x200B),
        (0x200E, 0x200F),
        (0x202A, 0x202E),
        (0x2060, 0x206F),
        (0xFEFF, 0xFEFF),
    )
    for c in range(first, last + 1)
)


def is_noise(character: str) -> bool:
    """Whether a character is a control other than white space, or an invisible format mark."""
    if character in _INVISIBLE:
        return True
    return unicodedata.category(character) == "Cc" and not character.isspace()


def is_accent_base(character: str) -> bool:
    """Whether a character is a Latin, Greek or Cyrillic letter, with or without accents."""
    # The lower case counts: a few capitals (U+2183) have names of another kind.
    base = unicodedata.normalize("NFD", character.lower())[0]
    scripts = ("LATIN ", "GREEK ", "CYRILLIC ", "FULLWIDTH LATIN ")
    return unicodedata.category(base)[0] == "L" and unicodedata.name(base, "").startswith(scripts)


def without_accent(character: str) -> str:
    """The bare letter of a Latin, Greek or Cyrillic one; any other character as it is."""
    return unicodedata.normalize("NFD", character)[0] if is_accent_base(character) else character


def remove_accents(text: str) -> str:
    """Remove nonspacing marks (Mn) from Latin, Greek and Cyrillic letters, and from no other.

    A mark belongs to the nearest character before it that is no such mark. `text` is in NFC.
    """
    kept = []
    on_accent_base = False
    for character in text:
        if unicodedata.category(character) != "Mn":
            on_accent_base = is_accent_base(character)
            kept.append(without_accent(character))
        elif not on_accent_base:
            kept.append(character)
    return "".join(kept)


@lru_cache(maxsize=1)
def _second_halves() -> frozenset[str]:
    """Characters that NFC can join to the one before them."""
    seconds = {chr(c) for c in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for character in _assigned_characters():
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            seconds.add(chr(int(parts[1], 16)))
    return frozenset(seconds)


def joins_or_changes(character: str) -> bool:
    """Whether NFC can change this character, or a mark's fate hangs on what stands before it."""
    return (
        unicodedata.category(character) == "Mn"
        or unicodedata.combining(character) != 0
        or not unicodedata.is_normalized("NFC", character)
        or character in _second_halves()
    )


def _assigned_characters() -> Iterator[str]:
    return (chr(c) for code_points in _RANGES for c in code_points)


def code_units(text: str) -> CodeUnits:
    """The code points of a text as an array. Raises UnicodeEncodeError on a lone surrogate."""
    units = text.encode("utf-16-le")
    if len(units) == 2 * len(text):
        return np.frombuffer(units, np.uint16)
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def decode(units: NDArray[Any]) -> str:
    """The text of an array of code points."""
    return str(units.astype(np.uint32, copy=False).data, "utf-32-le")


class CharacterTable:
    """Image of every code point: 4.4 MB, looked up at about 2 CPU-s for a GB of text."""

    def __init__(self, fold: Callable[[str], str], depends: Callable[[str], bool]) -> None:
        """Tabulate `fold` (to one character, or "" to delete) and mark where `depends` holds."""
        self._values = np.arange(_CODE_POINTS, dtype=np.uint32)
        for character in _assigned_characters():
            image = fold(character)
            value = np.uint32(ord(image) if image else 0)
            self._values[ord(character)] = value | DEPENDS if depends(character) else value

    def look_up(self, units: CodeUnits) -> Folded:
        """The image of each code point, with `DEPENDS` set where it stands in the table."""
        return self._values.take(units)

    def fold(self, text: str) -> Folded:
        """The image of each code point, whatever stands beside it."""
        return self.look_up(code_units(text)) & _CODE_POINT

    def without_deleted(self, text: str) -> str:
        """The text without the characters whose image is nothing."""
        units = code_units(text)
        kept = (self.look_up(units) & _CODE_POINT) != 0
        return text if kept.all() else decode(units[kept])

    def fold_or_none(self, text: str) -> Folded | None:
        """The image of each code point; None if one of them depends on its neighbours."""
        folded = self.look_up(code_units(text))
        return None if folded.size and folded.max() >= DEPENDS else folded


@lru_cache(maxsize=1)
def _mark_and_base_flags() -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    marks, bases = np.zeros((2, _CODE_POINTS), np.bool_)
    for character in _assigned_characters():
        marks[ord(character)] = unicodedata.category(character) == "Mn"
        bases[ord(character)] = is_accent_base(character)
    return marks, bases


def fold_composed(text: str, table: CharacterTable) -> Folded:
    """Fold a text in NFC and remove the accents of Latin, Greek and Cyrillic letters.

    Equals `table` after `remove_accents`, at array speed.
    """
    units = code_units(text)
    folded = table.look_up(units)
    marks, bases = _mark_and_base_flags()
    at = np.flatnonzero(folded >= DEPENDS)
    folded &= _CODE_POINT
    at = at[marks[units[at]]]
    if at.size:
        # All marks of a run belong to the character before the first one.
        starts = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        base_at = at[starts] - 1
        # A run at the start of the text has no base; index -1 would be the text's end.
        on_base = bases[units[base_at]] & (base_at >= 0)
        folded[at[np.repeat(on_base, np.diff(starts, append=at.size))]] = 0
    return folded
