"""Fertility of a tokenizer: how many tokens it makes of a language's words and characters.

Words are divided by white space, in the text as it is read; scripts that put no space between
words are measured by characters alone (Rust et al. 2021, "How Good is Your Tokenizer?").
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from models import languages
from models.tokenizer import UNK_ID

_UNSPACED_SCRIPTS = frozenset(
    {"Hani", "Hans", "Hant", "Jpan", "Thai", "Laoo", "Khmr", "Mymr", "Tibt", "Yiii", "Java"}
)
_BATCH_PAGES = 64


@dataclass(frozen=True, slots=True)
class Fertility:
    """What came out of `pages` pages. words: divided by white space; 0 in an unspaced script.
    unknown: tokens [UNK]; a run of unknown characters is one."""

    pages: int
    chars: int
    words: int
    tokens: int
    unknown: int

    @property
    def tokens_per_word(self) -> float | None:
        """None where there are no words to count."""
        return self.tokens / self.words if self.words else None

    @property
    def tokens_per_char(self) -> float:
        """0 when there was no text."""
        return self.tokens / self.chars if self.chars else 0.0

    @property
    def chars_per_token(self) -> float:
        """0 when there was no text."""
        return self.chars / self.tokens if self.tokens else 0.0

    @property
    def unknown_share(self) -> float:
        """Of the tokens; 0 when there was no text."""
        return self.unknown / self.tokens if self.tokens else 0.0

    def figures(self) -> dict[str, int | float | None]:
        """The counts and the shares, for a manifest."""
        per_word = self.tokens_per_word
        return {
            "pages": self.pages,
            "chars": self.chars,
            "words": self.words,
            "tokens": self.tokens,
            "unknown": self.unknown,
            "tokens_per_word": None if per_word is None else round(per_word, 4),
            "tokens_per_char": round(self.tokens_per_char, 4),
            "chars_per_token": round(self.chars_per_token, 4),
            "unknown_share": round(self.unknown_share, 6),
        }


def is_unspaced(language: str) -> bool:
    """Whether the usual script of `language` puts no space between words."""
    known = languages.table().get(language)
    return known is not None and known.script in _UNSPACED_SCRIPTS


def measure(
    tokenizer: Tokenizer, pages: Iterable[str], language: str, *, max_chars: int
) -> Fertility:
    """The fertility of `tokenizer` on the first `pages`, as many as have `max_chars` characters."""
    unspaced = is_unspaced(language)
    count = chars = words = tokens = unknown = 0
    limited = _limited(pages, max_chars)
    while batch := list(itertools.islice(limited, _BATCH_PAGES)):
        count += len(batch)
        chars += sum(map(len, batch))
        words += 0 if unspaced else sum(len(page.split()) for page in batch)
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            ids = encoding.ids
            tokens += len(ids)
            unknown += ids.count(UNK_ID)
    return Fertility(count, chars, words, tokens, unknown)


def table(rows: Mapping[str, Fertility]) -> str:
    """The figures of each language as lines of text, most tokens first."""
    lines = [
        f"{'language':10} {'pages':>7} {'tokens/word':>11} {'tokens/char':>11} "
        f"{'chars/token':>11} {'unknown':>8}"
    ]
    for language, row in sorted(rows.items(), key=lambda item: (-item[1].tokens, item[0])):
        if not row.tokens:
            lines.append(f"{language:10} {row.pages:7,} no text to measure")
            continue
        per_word = "-" if row.tokens_per_word is None else f"{row.tokens_per_word:.2f}"
        lines.append(
            f"{language:10} {row.pages:7,} {per_word:>11} {row.tokens_per_char:11.3f} "
            f"{row.chars_per_token:11.2f} {row.unknown_share:8.3%}"
        )
    return "\n".join(lines)


def _limited(pages: Iterable[str], max_chars: int) -> Iterator[str]:
    left = max_chars
    for page in pages:
        if left <= 0:
            return
        left -= len(page)
        yield page
