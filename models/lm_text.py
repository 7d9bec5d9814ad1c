"""The text as the n-gram model's tokenizer and the model itself see it.

Two profiles:

`ccnet`
    Exactly CCNet's `text_normalizer.normalize` (Wenzek et al. 2020, section 3.3, and its
    code): strip, lower case, NFD, every nonspacing mark (Mn) deleted, digits -> 0, the marks
    that it names replaced by ASCII, controls deleted. Line breaks are controls, so a page
    becomes one line with its paragraphs glued; Indic vowel signs are lost. Use it with
    models that were trained on such text.
`unicode`
    Paragraph by paragraph: controls and invisible format characters deleted
    (`models.characters.is_noise`), white space -> plain spaces, lower case, accents removed
    from Latin, Greek and Cyrillic letters only, digits -> 0, the same marks replaced, NFC,
    strip. Marks of other scripts stay: हिन्दी stays हिन्दी. Runs of spaces are left to the
    tokenizer. Normalising again changes nothing.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Literal

from models.characters import (
    CCNET_PUNCTUATION,
    CharacterTable,
    Folded,
    decode,
    is_joined_or_mark,
    is_noise,
    without_accent,
)
from models.errors import UserError

LmProfile = Literal["ccnet", "unicode"]

_LONG_REPLACEMENTS = {
    mark: replacement for mark, replacement in CCNET_PUNCTUATION.items() if len(replacement) > 1
}


def normalise_for_lm(text: str, profile: LmProfile) -> str:
    """Normalise a text that is one unit for the model: one paragraph, or CCNet's page."""
    if profile == "ccnet":
        return _ccnet(text)
    if profile == "unicode":
        return _unicode(text.replace("\n", " "))
    raise _unknown_profile(profile)


def normalise_page_for_lm(text: str, profile: LmProfile) -> str:
    r"""Normalise a page whose paragraphs are separated by "\n".

    `unicode` keeps the line breaks: the result is what `normalise_for_lm` makes of each
    paragraph, joined again. `ccnet` scores a page as one line, so it deletes them.
    """
    if profile == "ccnet":
        return _ccnet(text)
    if profile == "unicode":
        return _unicode(text)
    raise _unknown_profile(profile)


def _unknown_profile(profile: str) -> UserError:
    return UserError(f'unknown language model profile "{profile}": choose "ccnet" or "unicode"')


def _ccnet(text: str) -> str:
    text = text.strip()
    table = _ccnet_table()
    if text.isascii():
        return table.fold_ascii(text).decode()
    folded = table.fold_or_none(text)
    if folded is None:
        folded = table.fold(unicodedata.normalize("NFD", text.lower()))
    return _text(folded)


def _unicode(text: str) -> str:
    table = _unicode_table()
    if text.isascii():
        return _trimmed(table.fold_ascii(text).decode())
    folded = table.fold_or_none(text)
    if folded is None:
        folded = table.fold_without_accents(text, _composed_lower_case)
    normalised = _text(folded)
    if "\u0338" in normalised:
        # Only this mark joins a replacement: a bracket that became < or >.
        normalised = unicodedata.normalize("NFC", normalised)
    return _trimmed(normalised)


def _trimmed(normalised: str) -> str:
    if " \n" in normalised or "\n " in normalised:
        normalised = "\n".join([line.strip(" ") for line in normalised.split("\n")])
    return normalised.strip(" ")


def _composed_lower_case(text: str) -> str:
    # Line by line, since NFC is slow only on a string that is not in NFC already.
    composed = "\n".join([unicodedata.normalize("NFC", line) for line in text.split("\n")])
    return composed.lower() if "Σ" in composed else composed


def _text(folded: Folded) -> str:
    text = decode(folded).replace("\0", "")
    for mark, replacement in _LONG_REPLACEMENTS.items():
        text = text.replace(mark, replacement)
    return text


@lru_cache(maxsize=1)
def _ccnet_table() -> CharacterTable:
    def bare(character: str) -> str:
        parts = unicodedata.normalize("NFD", character.lower())
        return "".join(part for part in parts if unicodedata.category(part) != "Mn")

    def fold(character: str) -> str:
        image = bare(character)
        return "" if unicodedata.category(character) == "Cc" else _without_ccnet_marks(image[:1])

    def depends(character: str) -> bool:
        # Capital sigma, what becomes several characters (Hangul), and what NFD may reorder.
        image = bare(character)
        return character == "Σ" or len(image) > 1 or any(map(unicodedata.combining, image))

    return CharacterTable(fold, depends)


@lru_cache(maxsize=1)
def _unicode_table() -> CharacterTable:
    def fold(character: str) -> str:
        if is_noise(character):
            return ""
        if character.isspace():
            return "\n" if character == "\n" else " "
        return _without_ccnet_marks(without_accent(character).lower())

    def depends(character: str) -> bool:
        return character == "Σ" or (is_joined_or_mark(character) and not is_noise(character))

    return CharacterTable(fold, depends)


def _without_ccnet_marks(character: str) -> str:
    if character.isdecimal():
        return "0"
    replacement = CCNET_PUNCTUATION.get(character, character)
    # A table holds one character; `_text` puts in the longer replacements.
    return replacement if len(replacement) == 1 else character
