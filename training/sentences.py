"""Sentences of a page, by rules alone: the units of ALBERT's segment pairs.

Every line break ends a sentence (mined pages keep one paragraph a line). Inside a line, stops
without a need for space (danda, CJK, Arabic, Ethiopic, ...) end one where they stand; `.`, `!`,
`?` only before white space, not before a small letter, and a single dot neither after an initial
or an abbreviation nor after the number that begins a line. Marks of all scripts and the
abbreviations stand in `sentence_ends.toml`. What is still too long (Thai, verse without stops) is
cut at white space.

A wrong cut costs little here: it moves the border of a training segment. So there is no model and
no language argument: pages mix languages, and labels can be wrong.
"""

from __future__ import annotations

import functools
import re
import tomllib
import unicodedata
from pathlib import Path
from typing import NamedTuple

_DATA = Path(__file__).with_name("sentence_ends.toml")
_WORD_CHARS = 24
"""How far to look back for an abbreviation."""
_CJK = "\u2e80"
"""From here on scripts write no space behind a Latin `!` or `?`."""


class _Rules(NamedTuple):
    end: re.Pattern[str]
    """A stop with everything that stays with it: more stops, closing marks."""
    next_word: re.Pattern[str]
    """White space and opening marks, then (group 1) the word behind them."""
    stops: frozenset[str]
    doubled: frozenset[str]
    closers: frozenset[str]
    openers: str
    abbreviations: frozenset[str]
    before_numbers: frozenset[str]
    ordinal_nouns: frozenset[str]


@functools.cache
def _rules() -> _Rules:
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    stops, doubled = "".join(data["stops"].split()), data["doubled_stops"]
    every = re.escape(stops + data["spaced_stops"] + doubled)
    more = f"[{every}{re.escape(data['closers'])}]*"
    # Stops of the first kind come back behind a space too: the Tibetan pair of shads.
    end = re.compile(rf"[{every}]{more}(?:[ \u00a0]+[{re.escape(stops)}]{more})*")
    words = {
        table: frozenset(word for line in data[table].values() for word in line.split())
        for table in ("abbreviations", "before_numbers", "ordinal_nouns")
    }
    return _Rules(
        end,
        re.compile(rf"[\s{re.escape(data['openers'])}]*(\w*)"),
        frozenset(stops),
        frozenset(doubled),
        frozenset(data["closers"]),
        data["openers"],
        words["abbreviations"],
        words["before_numbers"],
        words["ordinal_nouns"],
    )


def sentences(text: str, max_chars: int = 500) -> list[str]:
    """The sentences of `text` in order, without white space at their ends, none empty.

    None is longer than `max_chars`. Joined, they hold every character of `text` but white space.
    """
    rules = _rules()
    pieces = []
    start, length = 0, len(text)
    for match in rules.end.finditer(text):
        stop = match.end()
        if stop == length or text[stop] == "\n":
            continue  # most stops: the line ends here anyway
        first = match.start()
        if (
            _ends(text, first, stop, rules)
            and text[_line_start(text, start, first) : first].strip()
        ):
            pieces.append(text[start:stop])
            start = stop
    pieces.append(text[start:])
    found = [part for line in "\n".join(pieces).splitlines() if (part := line.strip())]
    if found and len(max(found, key=len)) > max_chars:
        return [part for sentence in found for part in _parts(sentence, max_chars)]
    return found


def _line_start(text: str, start: int, stop: int) -> int:
    """Where the line that `stop` stands in begins; `start` when that is before."""
    return max(start, text.rfind("\n", start, stop) + 1)


def _ends(text: str, start: int, stop: int, rules: _Rules) -> bool:
    """Whether the stops at `start:stop`, with text behind them, end a sentence."""
    first, behind = text[start], text[stop]
    if first in rules.stops or (first in rules.doubled and text[start + 1] == first):
        # A quotation that goes on without a space is part of the sentence around it.
        return not (text[stop - 1] in rules.closers and behind.isalpha())
    if first in rules.doubled:
        return False
    if not behind.isspace():
        return first != "." and behind >= _CJK
    following = rules.next_word.match(text, stop)
    assert following is not None  # it matches the empty string
    word = following[1]
    # Georgian's only letters count as small ones, but have no capitals in text.
    if word and word[0].islower() and word[0].title() != word[0]:
        return False
    return first != "." or stop - start > 1 or not _dot_of_word(text, start, word, rules)


def _dot_of_word(text: str, dot: int, following: str, rules: _Rules) -> bool:
    """Whether the dot belongs to the word before it, not to the sentence."""
    words = text[max(0, dot - _WORD_CHARS) : dot].split()
    if not words or text[dot - 1].isspace():
        return False
    word = words[-1].lstrip(rules.openers)
    tail = word.rpartition(".")[2]
    if len(tail) == 1 and tail.isalpha():
        return True
    if tail.isdigit():
        return (
            following in rules.ordinal_nouns
            or not text[_line_start(text, 0, dot) : dot - len(tail)].strip()
        )
    low = word.lower()
    return low in rules.abbreviations or (low in rules.before_numbers and following[:1].isdecimal())


def _parts(sentence: str, max_chars: int) -> list[str]:
    """`sentence` cut at white space into parts of at most `max_chars`.

    A part without white space is cut between characters, before no combining mark if possible.
    """
    parts = []
    start = 0
    while len(sentence) - start > max_chars:
        limit = start + max_chars
        stop = next((i for i in range(limit, start, -1) if sentence[i].isspace()), 0)
        if not stop:
            stop = next(
                (
                    i
                    for i in range(limit, start + max_chars // 2, -1)
                    if not unicodedata.category(sentence[i]).startswith("M")
                ),
                limit,
            )
        parts.append(sentence[start:stop].strip())
        start = stop
        while sentence[start].isspace():
            start += 1
    parts.append(sentence[start:])
    return parts
