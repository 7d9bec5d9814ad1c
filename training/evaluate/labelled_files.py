"""Labelled text files: 'token TAB tag' lines with blank lines between sentences, and tab separated
tables with a header.

A line that cannot be used is left out, counted under a reason and named; it never stops the
reading. What is wrong with the whole file is the user's mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from models import files
from models.errors import UserError

OUTSIDE = "O"


@dataclass(frozen=True)
class Labelled:
    """One example: the words of a sentence and a tag for each, or one text and one label."""

    units: tuple[str, ...]
    labels: tuple[str, ...]
    line: int


@dataclass
class LabelledFile:
    """What a file held."""

    path: str
    examples: list[Labelled] = field(default_factory=list)
    damaged: list[tuple[int, str]] = field(default_factory=list)
    """Line numbers (from 1) and the reason why the line was left out."""
    broken_entities: int = 0
    """I- tags that continue nothing; they stay, and seqeval begins an entity there."""
    sha256: str = ""

    def damage_counts(self) -> dict[str, int]:
        """Lines left out, by reason."""
        return dict(sorted(Counter(reason for _, reason in self.damaged).items()))


def read_sentences(path: str, *, unprefixed_tags: Literal["refuse", "entity"]) -> LabelledFile:
    """Sentences of a 'token TAB tag' file.

    Raises UserError for a tag that is neither O, B-TYPE nor I-TYPE (see `unprefixed_tags`), a file
    that cannot be read, and one without a sentence.
    """
    found = LabelledFile(path)
    words: list[str] = []
    tags: list[str] = []
    first = 0

    def close() -> None:
        if words:
            whole = _prefixed(tags) if unprefixed_tags == "entity" else tags
            found.broken_entities += broken_entities(whole)
            found.examples.append(Labelled(tuple(words), tuple(whole), first))
        words.clear()
        tags.clear()

    for number, line in _lines(found):
        if not line.strip():
            close()
            continue
        fields = line.split("\t")
        reason = _sentence_damage(fields)
        if reason is not None:
            found.damaged.append((number, reason))
            continue
        word, tag = (one.strip() for one in fields)
        if unprefixed_tags == "refuse" or "-" in tag:
            _check_tag(tag, path, number)
        first = first if words else number
        words.append(word)
        tags.append(tag)
    close()
    return _not_empty(found, "sentence", "lines 'token TAB tag', a blank line between sentences")


def read_table(path: str, *, text_column: str, label_column: str) -> LabelledFile:
    """Examples of a tab separated file with a header. Quotation marks mean nothing.

    Raises UserError for a column that is not there, a file that cannot be read, and one without
    an example.
    """
    found = LabelledFile(path)
    header: list[str] | None = None
    for number, line in _lines(found):
        if not line.strip():
            continue
        fields = line.split("\t")
        if header is None:
            header = [name.strip() for name in fields]
            for column in (text_column, label_column):
                if column not in header:
                    raise UserError(
                        f"'{path}' has no column '{column}': its header has "
                        f"{', '.join(map(repr, header))}; set data.text_column and "
                        "data.label_column"
                    )
            places = header.index(text_column), header.index(label_column)
            continue
        if len(fields) != len(header):
            found.damaged.append((number, "wrong_number_of_fields"))
            continue
        text, label = (fields[place].strip() for place in places)
        if not text or not label:
            found.damaged.append((number, "no_label" if text else "no_text"))
            continue
        found.examples.append(Labelled((text,), (label,), number))
    return _not_empty(found, "example", "a header and tab separated lines")


def broken_entities(tags: list[str] | tuple[str, ...]) -> int:
    """I- tags whose forerunner is neither B- nor I- of the same type."""
    return sum(
        tag.startswith("I-") and (before == OUTSIDE or before[2:] != tag[2:])
        for before, tag in pairwise([OUTSIDE, *tags])
    )


def _lines(found: LabelledFile) -> Iterator[tuple[int, str]]:
    try:
        data = files.read_bytes(found.path)
        found.sha256 = files.sha256_file(found.path)
    except OSError as error:
        raise UserError(
            f"data file '{found.path}' cannot be read ({error.strerror or error}): "
            "give its folder by --data DIR or --set data.directory=DIR"
        ) from None
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            yield number, line.removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            found.damaged.append((number, "not_utf8"))


def _sentence_damage(fields: list[str]) -> str | None:
    if len(fields) != 2:
        return "wrong_number_of_fields"
    if not fields[0].strip():
        return "no_token"
    return None if fields[1].strip() else "no_tag"


def _check_tag(tag: str, path: str, number: int) -> None:
    if tag == OUTSIDE or (tag[:2] in {"B-", "I-"} and tag[2:]):
        return
    hint = "" if "-" in tag else "; data.unprefixed_tags = 'entity' takes such tags as entities"
    raise UserError(f"'{path}' line {number}: tag '{tag}' is not O, B-TYPE or I-TYPE{hint}")


def _prefixed(tags: list[str]) -> list[str]:
    """Tags without a prefix as entities: the first of a row of equal ones begins one."""
    return [
        tag if tag == OUTSIDE or "-" in tag else f"I-{tag}" if tag == before else f"B-{tag}"
        for before, tag in pairwise([OUTSIDE, *tags])
    ]


def _not_empty(found: LabelledFile, what: str, expected: str) -> LabelledFile:
    if found.examples:
        return found
    damage = found.damage_counts()
    why = f" ({len(found.damaged)} lines are damaged: {', '.join(damage)})" if damage else ""
    raise UserError(f"'{found.path}' holds no {what}{why}: expected {expected}")
