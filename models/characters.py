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
from typing import Final, NamedTuple

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

_DEPENDS: Final = np.uint32(1 << 31)  # in a table's value: the image hangs on the neighbours
_CODE_POINT: Final = np.uint32(0x1FFFFF)
_CODE_POINTS: Final = 0x110000
_REPLACED_ONE_BY_ONE: Final = 8  # kinds of characters; with more, NFC costs less

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
# word joiner and invisible operators, bidirectional controls, byte order mark, variation
# selectors (text or emoji, which glyph of an ideograph). The other format characters
# (category Cf) stay: the zero width joiner and non-joiner change words in Indic scripts and
# Persian, the Mongolian vowel separator changes letters, the Arabic, Syriac and Kaithi signs
# are drawn, tags tell one flag from another.
_INVISIBLE: Final = frozenset(
    chr(c)
    for first, last in (
        (0xAD, 0xAD),
        (0x61C, 0x61C),
        (0x200B, 0x200B),
        (0x200E, 0x200F),
        (0x202A, 0x202E),
        (0x2060, 0x206F),
        (0xFE00, 0xFE0F),
        (0xFEFF, 0xFEFF),
        (0xE0100, 0xE01EF),
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
    if unicodedata.category(character)[0] != "L":
        return False
    # The lower case counts: a few capitals (U+2183) have names of another kind.
    base = unicodedata.normalize("NFD", character.lower())[0]
    scripts = ("LATIN ", "GREEK ", "CYRILLIC ", "FULLWIDTH LATIN ")
    return unicodedata.name(base, "").startswith(scripts)


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


def code_units(text: str) -> CodeUnits:
    """The code points of a text as an array. Raises UnicodeEncodeError on a lone surrogate."""
    units = text.encode("utf-16-le")
    if len(units) == 2 * len(text):
        return np.frombuffer(units, np.uint16)
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def decode(units: CodeUnits) -> str:
    """The text of an array of code points."""
    return str(units.astype(np.uint32, copy=False).data, "utf-32-le")


class CharacterTable:
    """The image of every code point: 4.4 MB, made in about 0.3 s."""

    def __init__(self, fold: Callable[[str], str], depends: Callable[[str], bool]) -> None:
        """Tabulate `fold` (to one character, or "" to delete it; of ASCII, to one below U+0100).

        depends: whether a character's image can depend on the characters beside it; no ASCII can.
        """
        self._values = np.arange(_CODE_POINTS, dtype=np.uint32)
        for character in _characters():
            image = fold(character)
            value = np.uint32(ord(image) if image else 0)
            self._values[ord(character)] = value | _DEPENDS if depends(character) else value

        images = self._values[:128].tolist()
        self._ascii_images = bytes([*images, *range(128, 256)])
        self._ascii_deleted = bytes(c for c in range(128) if images[c] == 0)

    def fold_ascii(self, text: str) -> bytes:
        """The images of a text in ASCII, without what is deleted: `fold`, some ten times as fast.

        Raises UnicodeEncodeError for other text.
        """
        return text.encode("ascii").translate(self._ascii_images, self._ascii_deleted)

    def fold(self, text: str) -> Folded:
        """The image of each code point, whatever stands beside it."""
        return self._values.take(code_units(text)) & _CODE_POINT

    def fold_or_none(self, text: str) -> Folded | None:
        """The image of each code point; None if one of them depends on its neighbours."""
        folded = self._values.take(code_units(text))
        return None if folded.size and folded.max() >= _DEPENDS else folded

    def fold_without_accents(self, text: str, compose: Callable[[str], str]) -> Folded:
        """Delete what the table deletes, `compose`, `remove_accents`, then fold.

        compose: NFC, and what else has to see the text as a whole. It is called only if the
        text holds something that it could change. The table's `depends` is true for every
        character that is not deleted and `is_joined_or_mark`, and for a capital sigma if
        `compose` looks at it.
        """
        units = code_units(text)
        folded, marked = self._look_up(units)
        if marked.may_change() or not folded[marked.places - 1].all():
            # What is deleted must not part a mark from its letter, or a sigma from its word.
            units = units[folded != 0]
            folded, marked = self._look_up(units)
        if marked.may_change():
            units = code_units(_without_exclusions(units, marked))
            folded, marked = self._look_up(units)
        if marked.may_change():
            units = code_units(compose(decode(units)))
            folded, marked = self._look_up(units)
        folded &= _CODE_POINT
        folded[marked.accents(units)] = 0
        return folded

    def _look_up(self, units: CodeUnits) -> tuple[Folded, _Marked]:
        folded = self._values.take(units)
        return folded, _Marked.at(np.flatnonzero(folded >= _DEPENDS), units)


_MARK: Final = np.uint16(1)  # nonspacing mark, category Mn
_LETTER: Final = np.uint16(2)  # `is_accent_base`
_FIRST: Final = np.uint16(4)  # NFC can join it to the character after it
_SECOND: Final = np.uint16(8)  # NFC can join it to a character before it
_CHANGES: Final = np.uint16(16)  # NFC always replaces it; or a capital sigma
_CLASS_SHIFT: Final = np.uint16(8)


@lru_cache(maxsize=1)
def _traits() -> NDArray[np.uint16]:
    """For every code point: the bits above, and its canonical combining class over them."""
    traits = np.zeros(_CODE_POINTS, np.uint16)
    firsts, seconds = _joined_pairs()
    for character in _characters():
        traits[ord(character)] = (
            (unicodedata.category(character) == "Mn") * _MARK
            | is_accent_base(character) * _LETTER
            | (character in firsts) * _FIRST
            | (character in seconds) * _SECOND
            | (character == "Σ" or not unicodedata.is_normalized("NFC", character)) * _CHANGES
            | unicodedata.combining(character) << _CLASS_SHIFT
        )
    return traits


class _Marked(NamedTuple):
    """The places in a text whose characters depend on their neighbours."""

    places: NDArray[np.intp]
    here: NDArray[np.uint16]  # traits of the character in that place
    before: NDArray[np.uint16]  # and of the one before it (at place 0: of the last one)

    @classmethod
    def at(cls, places: NDArray[np.intp], units: CodeUnits) -> _Marked:
        traits = _traits()
        return cls(places, traits[units[places]], traits[units[places - 1]])

    def may_change(self) -> bool:
        """Whether NFC could change the text, or a capital sigma waits for its lower case.

        False is certain; true may be needless.
        """
        here, before = self.here, self.before
        if (here & _CHANGES).any():
            return True
        joins = (here & _SECOND) != 0
        if (joins & ((before & _FIRST) != 0)).any():
            return True
        class_here, class_before = here >> _CLASS_SHIFT, before >> _CLASS_SHIFT
        after_mark = (class_here != 0) & (class_before != 0)
        return bool((after_mark & (joins | (class_before > class_here))).any())

    def accents(self, units: CodeUnits) -> NDArray[np.intp]:
        """The places of the marks on Latin, Greek and Cyrillic letters."""
        is_mark = (self.here & _MARK) != 0
        if not (is_mark & ((self.before & _LETTER) != 0)).any():
            return self.places[:0]
        marks = self.places[is_mark]
        # All marks of a run belong to the character before its first one.
        run_starts = np.flatnonzero(np.diff(marks, prepend=-2) != 1)
        bases = marks[run_starts] - 1
        on_letter = (_traits()[units[bases]] & _LETTER) != 0
        on_letter &= bases >= 0  # a run at the very start has no letter; -1 reads the end
        run_lengths = np.diff(run_starts, append=marks.size)
        accents: NDArray[np.intp] = marks[np.repeat(on_letter, run_lengths)]
        return accents


def _without_exclusions(units: CodeUnits, marked: _Marked) -> str:
    """The text with the characters that NFC always takes apart, or replaces, replaced.

    Bengali's য়, ড় and ঢ় are such characters: on nearly every page, where this is several
    times as fast as NFC of the whole text.
    """
    text = decode(units)
    changing = set(units[marked.places[(marked.here & _CHANGES) != 0]].tolist())
    if len(changing) <= _REPLACED_ONE_BY_ONE:
        for character in map(chr, changing):
            text = text.replace(character, unicodedata.normalize("NFC", character))
    return text


def is_joined_or_mark(character: str) -> bool:
    """Whether a character is a mark, or NFC could join it to another or replace it."""
    return (
        unicodedata.category(character) == "Mn"
        or unicodedata.combining(character) != 0
        or not unicodedata.is_normalized("NFC", character)
        or character in _joined_pairs()[1]
    )


@lru_cache(maxsize=1)
def _joined_pairs() -> tuple[frozenset[str], frozenset[str]]:
    """The characters that stand first, and second, in the pairs that NFC makes one of."""
    # Hangul is composed by arithmetic: a leading consonant and a vowel, and the syllable
    # that they make with a final consonant (Unicode Standard, section 3.12).
    firsts = {chr(c) for c in (*range(0x1100, 0x1113), *range(0xAC00, 0xD7A4, 28))}
    seconds = {chr(c) for c in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for character in _characters():
        parts = unicodedata.decomposition(character).split()
        # A compatibility decomposition starts with its kind, "<font>". Some pairs, such as a
        # Bengali letter with a nukta, NFC takes apart and never joins.
        if len(parts) == 2 and unicodedata.is_normalized("NFC", character) and parts[0][0] != "<":
            firsts.add(chr(int(parts[0], 16)))
            seconds.add(chr(int(parts[1], 16)))
    return frozenset(firsts), frozenset(seconds)


def _characters() -> Iterator[str]:
    return (chr(code_point) for code_points in _RANGES for code_point in code_points)
