"""The corpus that shows what DoReMi does: code, prose, noise that nobody can learn, a pattern that
anybody learns at once.

    python -m scripts.four_domains FOLDER [--prose FILE] [--seed 0]

A mined crawl whose languages are the four domains, and a tokenizer of one token a character: no
piece hides that the noise is incompressible (ln 96 = 4.564 nats a token). Seven tenths of the text
are noise and pattern, so the proportional mixture wastes seven tenths of a run.

- code: the sources of Python's standard library, without its tests.
- prose: English prose of the shared data; where that is not there, the help texts of Python's
  language reference (`pydoc_data.topics`), which every Python has.
- noise: independent draws from 95 printable ASCII characters and the line feed.
- trivial: sixteen different characters, again and again, each page from another one on.

All text is brought to these 96 characters: NFKD, tabs as four spaces, the rest left out.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram

from models.errors import UserError
from models.tokenizer import SPECIAL_TOKENS, UNK_ID, save_tokenizer
from scripts.page_crawl import Page, write_crawl

SHARES = {"code": 0.22, "prose": 0.08, "noise": 0.35, "trivial": 0.35}
"""Of the characters: the proportional mixture."""
CHARS = 5_000_000
"""Of the whole corpus. A run of 200 steps of 32 x 64 tokens reads 0.41 million: prose, 0.40 million
here, comes round once where a model learns nothing else."""
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
PERIOD = 16
_PAGE_CHARS = 4000
_NO_SOURCES = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data",
    "encodings",
}  # fmt: skip
"""Folders. `encodings` holds tables of characters, line after line nearly the same: no code."""
_SHARED_DATA = "../shared/data"


class Place(NamedTuple):
    """Where the corpus lies: paths of the crawl's manifest and of the tokenizer's folder."""

    manifest: str
    tokenizer: str


def make(folder: str | Path, *, prose: str | Path | None = None, seed: int = 0) -> Place:
    """Write the crawl and its tokenizer below `folder`.

    prose: a text file; none: `wiki/en.txt` of the shared data (`GRISTMILL_DATA`), or else Python's
    help texts. `seed` is that of noise, pattern and the choice of pages. Raises UserError where
    text is missing.
    """
    root = Path(folder)
    draw = np.random.default_rng(seed)
    texts = {
        "code": _shuffled(_code(), draw),
        "prose": _shuffled(_prose(prose), draw),
        "noise": _noise(draw),
        "trivial": _pattern(draw),
    }
    pages = {name: _pages(name, text) for name, text in texts.items()}
    manifest = write_crawl(
        root / "crawl", pages, name="four-domains", row_group_rows=32, shard_rows=512
    )
    save_tokenizer(character_tokenizer(), root / "tokenizer", {})
    return Place(manifest, str(root / "tokenizer"))


def character_tokenizer() -> Tokenizer:
    """One token for each of the 96 characters, after the special ones; nothing is normalised."""
    pieces = [(character, -math.log(len(ALPHABET))) for character in ALPHABET]
    tokenizer = Tokenizer(Unigram([(token, 0.0) for token in SPECIAL_TOKENS] + pieces, UNK_ID))
    # Without this, "[SEP]" in a source would be one piece: the special token.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def _pages(name: str, text: Iterator[str]) -> list[Page]:
    """The first characters of `text` that are the domain's share of the corpus, cut to pages."""
    wanted, found = round(SHARES[name] * CHARS), []
    for part in text:
        found.append(Page(part[:wanted]))
        wanted -= len(found[-1].text)
        if not wanted:
            return found
    raise UserError(
        f"domain '{name}' lacks {wanted:,} of {round(SHARES[name] * CHARS):,} characters: "
        "give a longer text"
    )


def _shuffled(parts: Iterable[str], draw: np.random.Generator) -> Iterator[str]:
    """Pages from all over a source, not from its beginning."""
    listed = list(parts)
    return (listed[number] for number in draw.permutation(len(listed)))


def _code() -> Iterator[str]:
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if not _NO_SOURCES & set(path.relative_to(root).parts):
            yield from _cut(path.read_text(encoding="utf-8", errors="ignore"))


def _prose(source: str | Path | None) -> Iterator[str]:
    if source is None:
        shared = Path(os.environ.get("GRISTMILL_DATA", _SHARED_DATA), "wiki", "en.txt")
        if not shared.exists():
            from pydoc_data import topics  # noqa: PLC0415  (half a megabyte)

            for _, text in sorted(topics.topics.items()):
                yield from _cut(text)
            return
        source = shared
    try:
        yield from _cut(Path(source).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prose '{source}' cannot be read ({error}): give a text file") from None


def _noise(draw: np.random.Generator) -> Iterator[str]:
    characters = np.array(list(ALPHABET))
    while True:
        yield "".join(characters[draw.integers(len(characters), size=_PAGE_CHARS)])


def _pattern(draw: np.random.Generator) -> Iterator[str]:
    characters = np.array(list(ALPHABET[1:]))
    period = "".join(draw.choice(characters, PERIOD, replace=False))
    while True:
        start = int(draw.integers(PERIOD))
        yield (period * (_PAGE_CHARS // PERIOD + 1))[start : start + _PAGE_CHARS]


def _cut(text: str) -> Iterator[str]:
    """`text` in the 96 characters, in pages of whole lines; a page ends where it is long enough."""
    plain = unicodedata.normalize("NFKD", text.expandtabs(4)).encode("ascii", "ignore").decode()
    lines: list[str] = []
    chars = 0
    for line in plain.splitlines():
        kept = "".join(character for character in line if character in ALPHABET)
        lines.append(kept)
        chars += len(kept) + 1
        if chars >= _PAGE_CHARS:
            yield "\n".join(lines)
            lines, chars = [], 0
    if any(lines):
        yield "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Write the corpus; print where it is. Exit code 2 where it cannot be made."""
    parser = argparse.ArgumentParser(
        prog="four_domains", description=(__doc__ or "").split("\n\n", 1)[0].replace("\n", " ")
    )
    parser.add_argument("folder", help="where the crawl and its tokenizer go")
    parser.add_argument("--prose", metavar="FILE", help="English text (the shared data's)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of noise and choice of pages"
    )
    parsed = parser.parse_args(arguments)
    try:
        place = make(parsed.folder, prose=parsed.prose, seed=parsed.seed)
    except UserError as error:
        print(f"four_domains: {error}", file=sys.stderr)
        return 2
    print(place.manifest, place.tokenizer, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
