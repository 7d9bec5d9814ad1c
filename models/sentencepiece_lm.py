"""SentencePiece tokenizers for the n-gram models: training text and training.

A unigram tokenizer is trained on normalised paragraphs (`models/lm_text.py`), each text once.
The same lines with the same settings give the same bytes. SentencePiece has limits that it meets
by dropping text without a word: sentences over 4,192 bytes, its own boundary mark. Here long
paragraphs are cut at white space instead, and what is left out is counted.
"""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import xxhash

from models.errors import UserError
from models.files import read_bytes, sha256_file, write_atomic
from models.lm_text import LmProfile, normalise_for_lm

VOCABULARY_SIZES = (65536, 40000, 32000, 16000, 8000, 4000, 2000, 1000, 500, 250)
MIN_PARAGRAPH_CHARS = 30
# `nmt_nfkc` is what CCNet's tokenizers have. It turns U+200C into a space, which cuts Persian
# words in two, so the Unicode profile takes NFKC without those replacements.
NORMALIZATION_RULES: dict[str, str] = {"ccnet": "nmt_nfkc", "unicode": "nfkc"}
# 1,000 code points are at most 4,000 bytes of UTF-8: below SentencePiece's 4,192.
_SENTENCE_CHARS = 1000
# SentencePiece's own mark for an unknown character; it drops sentences that hold it.
_RESERVED_MARK = "▅"
# SentencePiece's complaint that the vocabulary has no room for the single characters.
_NEEDED = re.compile(r"(\d+) vs (\d+)")


class TrainingParagraphs:
    """The paragraphs of `lines` that a language model is trained on: normalised, each once.

    Iterate once. A line may hold several paragraphs, divided by line feeds. Duplicates are exact,
    by 128-bit hashes of the normalised text (about 100 bytes of memory for each paragraph kept).
    Afterwards `counts` has `read`, `too_short`, `duplicate`, `kept`, and
    `read = too_short + duplicate + kept`; `chars` is the length of the kept text.
    """

    def __init__(
        self,
        lines: Iterable[str],
        profile: LmProfile,
        min_chars: int = MIN_PARAGRAPH_CHARS,
    ) -> None:
        self._lines = lines
        self._profile = profile
        self._min_chars = max(1, min_chars)
        self.counts = {"read": 0, "too_short": 0, "duplicate": 0, "kept": 0}
        self.chars = 0

    def __iter__(self) -> Iterator[str]:
        counts = self.counts
        seen: set[bytes] = set()
        for line in self._lines:
            for paragraph in line.split("\n"):
                counts["read"] += 1
                text = normalise_for_lm(paragraph, self._profile).strip()
                if len(text) < self._min_chars:
                    counts["too_short"] += 1
                    continue
                key = xxhash.xxh3_128_digest(text.encode())
                if key in seen:
                    counts["duplicate"] += 1
                    continue
                seen.add(key)
                counts["kept"] += 1
                self.chars += len(text)
                yield text


def train_sentencepiece(
    lines: Iterable[str],
    output: str | os.PathLike[str],
    *,
    profile: LmProfile = "unicode",
    vocab_size: int | Literal["auto"] = 32000,
    character_coverage: float = 0.9995,
    min_chars: int = MIN_PARAGRAPH_CHARS,
    max_sentences: int = 2_000_000,
    seed: int = 0,
    threads: int = 1,
    verbose: bool = False,
) -> dict[str, Any]:
    """Train a unigram tokenizer on `lines` into the file `output` (`xx.sp.model`).

    `vocab_size` "auto": the largest of `VOCABULARY_SIZES` that the text allows. Of more than
    `max_sentences` paragraphs so many are drawn at random (reservoir sampling, by `seed`); all
    of them stand in memory. `threads` changes the order of floating-point sums and thereby the
    bytes, so it is 1 unless asked. `verbose` shows SentencePiece's own log on stderr.
    Returns what was done, as plain values. Raises UserError when the text is too small for the
    vocabulary, or its characters too many.
    """
    _check_settings(profile, vocab_size, character_coverage, max_sentences, threads)
    paragraphs = TrainingParagraphs(lines, profile, min_chars)
    drawn = _reservoir(paragraphs, max_sentences, seed)
    if not drawn:
        raise UserError(
            f"no text to train the tokenizer '{os.fspath(output)}' on: of "
            f"{paragraphs.counts['read']} paragraphs {paragraphs.counts['too_short']} have fewer "
            f"than {min_chars} characters after normalisation; give more text or a lower min_chars"
        )
    sentences = [part for paragraph in drawn for part in _sentences(paragraph)]
    options = {
        "model_type": "unigram",
        "character_coverage": character_coverage,
        "normalization_rule_name": NORMALIZATION_RULES[profile],
        "num_threads": threads,
        "minloglevel": 0 if verbose else 2,
    }
    wanted = VOCABULARY_SIZES if vocab_size == "auto" else (vocab_size,)
    size, model = _train_largest(sentences, wanted, options, paragraphs.chars)
    write_atomic(output, model)
    return {
        "kind": "sentencepiece-unigram",
        "profile": profile,
        "normalization_rule": NORMALIZATION_RULES[profile],
        "vocab_size": size,
        "character_coverage": character_coverage,
        "min_chars": min_chars,
        "seed": seed,
        "threads": threads,
        "paragraphs": dict(paragraphs.counts),
        "chars": paragraphs.chars,
        "paragraphs_trained_on": len(drawn),
        "sentencepiece": version("sentencepiece"),
        "sha256": sha256_file(output),
    }


def load_sentencepiece(path: str | os.PathLike[str]) -> Any:
    """SentencePiece's processor for the file `path`. Raises UserError when it is not a model."""
    try:
        state = Path(path).stat()
    except (OSError, ValueError):
        state = None  # a URL, or a file that is not there: reading it will tell
    known = (state.st_ino, state.st_size, state.st_mtime_ns) if state is not None else None
    return _load(os.fspath(path), known)


@lru_cache(maxsize=64)
def _load(path: str, known: tuple[int, ...] | None) -> Any:
    """The processor for `path`; `known` is part of the key, so that a new file is read anew."""
    import sentencepiece  # noqa: PLC0415  (mining without a language model does not load it)

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(read_bytes(path))
    except OSError as error:
        raise UserError(
            f"the tokenizer '{path}' cannot be read ({error}); get one with: gristmill "
            "models fetch, or train one: gristmill models train-ngram"
        ) from error
    except RuntimeError as error:
        raise UserError(
            f"'{path}' is not a SentencePiece model; fetch or train it again"
        ) from error
    return processor


def _train_largest(
    sentences: list[str], sizes: Sequence[int], options: dict[str, Any], chars: int
) -> tuple[int, bytes]:
    """Train with the first of `sizes` (falling) that works; return it and the model.

    When one size is too large and the next too small, with the most that the text gives: a short
    text in a script of many characters needs that.
    """
    from sentencepiece import SentencePieceTrainer  # noqa: PLC0415

    fault = ""
    most: int | None = None
    waiting = list(sizes)
    while waiting:
        size = waiting.pop(0)
        if most is not None and size > most:
            continue
        # The model is collected in memory: a failed training leaves no empty file behind.
        written = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(sentences), model_writer=written, vocab_size=size, **options
            )
        except RuntimeError as error:
            fault = str(error)
            if limit := re.search(r"<= (\d+)", fault):
                most = int(limit[1])
            elif _NEEDED.search(fault) and most is not None and size < most:
                waiting = [most]
            continue
        return size, written.getvalue()
    raise _too_small(fault, size, len(sentences), chars)


def _too_small(reason: str, size: int, sentences: int, chars: int) -> UserError:
    text = f"the text ({sentences} sentences, {chars} characters after normalisation)"
    needed = _NEEDED.search(reason)
    most = re.search(r"<= (\d+)", reason)
    if needed:
        return UserError(
            f"a vocabulary of '{size}' pieces is too small: {text} needs {needed[2]} for its "
            "single characters; raise vocab_size to at least that, or lower character_coverage"
        )
    if most:
        return UserError(
            f"a vocabulary of '{size}' pieces is too large: {text} gives at most {most[1]}; "
            f"give more text, or a vocab_size of at most {most[1]}"
        )
    return UserError(f"SentencePiece cannot be trained on {text}: {reason}; give more text")


def _check_settings(
    profile: str,
    vocab_size: int | Literal["auto"],
    character_coverage: float,
    max_sentences: int,
    threads: int,
) -> None:
    if profile not in NORMALIZATION_RULES:
        raise UserError(f"unknown LM profile '{profile}'; valid: 'unicode', 'ccnet'")
    if vocab_size != "auto" and vocab_size < 1:
        raise UserError(f"vocab_size is '{vocab_size}'; it must be at least 1, or 'auto'")
    if not 0.9 <= character_coverage <= 1:
        raise UserError(f"character_coverage is '{character_coverage}'; it must be 0.9 to 1.0")
    if max_sentences < 1 or threads < 1:
        raise UserError(
            f"max_sentences is '{max_sentences}' and threads '{threads}'; both must be at least 1"
        )


def _reservoir(items: Iterable[str], size: int, seed: int) -> list[str]:
    """`size` of `items`, drawn evenly (Vitter 1985, algorithm R), or all in order if fewer."""
    generator = random.Random(seed)
    drawn: list[str] = []
    for index, item in enumerate(items):
        if index < size:
            drawn.append(item)
        elif (place := generator.randrange(index + 1)) < size:
            drawn[place] = item
    return drawn


def _sentences(paragraph: str) -> Iterator[str]:
    """`paragraph` in parts short enough for SentencePiece, cut at spaces where there are any."""
    text = paragraph.replace(_RESERVED_MARK, " ").replace("\0", " ")
    while len(text) > _SENTENCE_CHARS:
        cut = text.rfind(" ", 1, _SENTENCE_CHARS)
        cut = cut if cut > 0 else _SENTENCE_CHARS
        yield text[:cut]
        text = text[cut:].lstrip(" ")
    if text and not text.isspace():
        yield text
