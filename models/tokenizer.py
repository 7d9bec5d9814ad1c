"""The tokenizer of the models that are trained: Unigram pieces in a `tokenizers` file.

A text is normalised by a profile (`models/normalisers.toml`), cut into words (white space, each
digit and each punctuation mark on its own) and each word into the most probable pieces (Kudo
2018, "Subword Regularization"). One kind of tokenizer serves ALBERT and decoders: `[CLS]` opens a
text, `[SEP]` ends it. Characters outside the alphabet become `[UNK]`, a run of them one; there
are no byte pieces.

The pieces are chosen by SentencePiece's trainer, from the counts of the words: the trainer of
`tokenizers` sums in the order of a hash map, so that the same text gives other scores in each
process, whatever its number of threads.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import Unigram

from models import files
from models.errors import UserError
from models.normalisers import DEFAULT_PROFILE, normaliser, profile_of

__all__ = [
    "CLS_ID",
    "MASK_ID",
    "PAD_ID",
    "SEP_ID",
    "SMALLEST_VOCABULARY",
    "SPECIAL_TOKENS",
    "UNK_ID",
    "VOCABULARY_SIZE",
    "check_output",
    "load_tokenizer",
    "profile_of",
    "save_tokenizer",
    "tokenizer_digest",
    "tokenizer_file",
    "train_tokenizer",
    "word_starts",
]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_TOKENS))
VOCABULARY_SIZE = 32000
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 1
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MANIFEST_FILE = "manifest.json"
_KIND = "tokenizer-unigram"
SPACE = "▁"
_JOINERS = "\u200c\u200d"

_MODEL_MAX_LENGTH = 512
# Words are cut at so many characters for the trainer, which takes lines of 4,192 bytes.
_WORD_CHARS = 1000
_BOUNDARY = "\ufdd0"  # a code point that is no character
_ALPHABET_SHARE = 1 / 8
_RICH_COVERAGE = 0.9995
# Scripts whose words have no space between them: how Unicode's names of their letters begin.
_UNSPACED_SCRIPTS = (
    "CJK UNIFIED", "CJK COMPATIBILITY IDEOGRAPH", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER",
    "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE", "TAI ", "NEW TAI LUE", "YI ",
)  # fmt: skip


def train_tokenizer(
    texts: Iterable[str],
    *,
    profile: str = DEFAULT_PROFILE,
    vocab_size: int = VOCABULARY_SIZE,
    at_most: bool = False,
    character_coverage: float | None = None,
    verbose: bool = False,
) -> Tokenizer:
    """Train a Unigram tokenizer of `vocab_size` pieces, the five special ones among them.

    The same texts give the same bytes, in whatever order they come. Memory grows with the
    different words of the texts, not with their length. The alphabet is the most frequent
    characters, `character_coverage` of the text, and every mark, joiner, digit and ASCII
    character. None: all characters where they take an eighth of the vocabulary or less, else
    0.9995 (what SentencePiece's manual advises for small and for rich scripts).
    `at_most`: a text that does not give `vocab_size` pieces gives fewer instead of an error.
    Raises UserError when there is no text, when it has more characters than the vocabulary has
    room for, or gives fewer pieces.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size is '{vocab_size}'; it must be at least {SMALLEST_VOCABULARY}, "
            f"usual is {VOCABULARY_SIZE}"
        )
    if character_coverage is not None and not 0.9 <= character_coverage <= 1:
        raise UserError(f"character_coverage is '{character_coverage}'; it must be 0.9 to 1.0")
    tokenizer = _empty(profile)
    words = _words(texts, tokenizer)
    if not words:
        raise UserError(
            "no text to train the tokenizer on: nothing but white space came in; give more text"
        )
    pieces = _train(words, vocab_size, at_most, character_coverage, verbose)
    vocabulary = [(token, 0.0) for token in SPECIAL_TOKENS] + pieces
    tokenizer.model = Unigram(vocabulary, unk_id=UNK_ID, byte_fallback=False)
    specials = [
        AddedToken(token, special=True, normalized=False, lstrip=token == "[MASK]")
        for token in SPECIAL_TOKENS
    ]
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS_ID), ("[SEP]", SEP_ID)],
    )
    return tokenizer


def check_output(directory: str | os.PathLike[str]) -> None:
    """Raises UserError where the folder `directory` cannot become a tokenizer's: it is a file, or
    holds the manifest of something else, as a mined crawl, which would be lost."""
    place = files.join(directory, MANIFEST_FILE)
    try:
        kind = json.loads(files.read_bytes(place)).get("kind")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"'{os.fspath(directory)}' cannot be the tokenizer's folder ({error.strerror or error})"
            ": give another --output"
        ) from error
    except (ValueError, AttributeError):
        kind = None
    if kind != _KIND:
        raise UserError(
            f"'{os.fspath(directory)}' holds the {MANIFEST_FILE} of something else, not of a "
            "tokenizer: give another --output"
        )


def save_tokenizer(
    tokenizer: Tokenizer, directory: str | os.PathLike[str], manifest: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the folder `directory`, which `transformers.AutoTokenizer` opens, offline too.

    `tokenizer.json`, `tokenizer_config.json` and, last, `manifest.json`: what `manifest` says,
    with the profile, the vocabulary's size and the digest of `tokenizer.json`. Each file is written
    whole or not at all; without its manifest a folder is unfinished. Returns the manifest.
    Raises UserError for a folder of something else.
    """
    profile = profile_of(tokenizer)
    pad, unk, cls, sep, mask = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _MODEL_MAX_LENGTH,
        "pad_token": pad,
        "unk_token": unk,
        "cls_token": cls,
        "sep_token": sep,
        "mask_token": mask,
        "bos_token": cls,
        "eos_token": sep,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "normaliser_profile": profile,
    }
    check_output(directory)
    files.remove(files.join(directory, MANIFEST_FILE))
    place = files.join(directory, TOKENIZER_FILE)
    files.write_atomic(place, tokenizer.to_str(pretty=True))
    _write_json(files.join(directory, CONFIG_FILE), config)
    facts = {
        "kind": _KIND,
        "profile": profile,
        "vocab_size": tokenizer.get_vocab_size(),
        "sha256": files.sha256_file(place),
        **manifest,
    }
    _write_json(files.join(directory, MANIFEST_FILE), facts)
    return facts


def tokenizer_file(path: str | os.PathLike[str]) -> str:
    """The `tokenizer.json` that `path` is, or that the folder `path` has."""
    text = os.fspath(path)
    return text if text.endswith(".json") else files.join(text, TOKENIZER_FILE)


def tokenizer_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the `tokenizer.json` at `path` (64 hex digits). Raises UserError without one."""
    try:
        return files.sha256_file(tokenizer_file(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of the folder or `tokenizer.json` at `path`.

    It reads "[SEP]" in a text as text (`encode_special_tokens`): no page can end itself. That
    setting is no part of the file and is lost by pickling: let each process load for itself.
    Raises UserError when there is none, or one with other special tokens.
    """
    try:
        text = files.read_bytes(tokenizer_file(path)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(
            f"'{os.fspath(path)}' is not a tokenizer of the tokenizers library ({error}); "
            "train one: gristmill models train-tokenizer"
        ) from error
    found = tuple(tokenizer.id_to_token(number) for number in range(len(SPECIAL_TOKENS)))
    if found != SPECIAL_TOKENS:
        raise UserError(
            f"the tokenizer '{os.fspath(path)}' begins with {', '.join(map(repr, found))}, not "
            f"with {', '.join(SPECIAL_TOKENS)}; train one: gristmill models train-tokenizer"
        )
    tokenizer.encode_special_tokens = True
    return tokenizer


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Which pieces begin a word, for masking whole words: bool, (vocabulary,).

    True for a piece that begins with U+2581 (a space), that is one punctuation mark or digit, or
    that begins with a letter of a script without spaces (Han, Kana, Thai, ...): there each piece
    counts as a word. Special tokens are False.
    """
    size = tokenizer.get_vocab_size()
    pieces = [str(tokenizer.id_to_token(number)) for number in range(len(SPECIAL_TOKENS), size)]
    starts = np.zeros(size, dtype=np.bool_)
    starts[len(SPECIAL_TOKENS) :] = [_starts_word(piece) for piece in pieces]
    return starts


def _starts_word(piece: str) -> bool:
    if piece.startswith(SPACE):
        return True
    if len(piece) == 1 and len(_pre_tokenizer().pre_tokenize_str(f"a{piece}a")) > 1:
        return True  # cut off on both sides wherever it stands
    first = piece[0]
    return unicodedata.category(first)[0] == "L" and unicodedata.name(first, "").startswith(
        _UNSPACED_SCRIPTS
    )


@functools.cache
def _pre_tokenizer() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(behavior="isolated"),
        ]
    )


def _empty(profile: str) -> Tokenizer:
    tokenizer = Tokenizer(Unigram())
    tokenizer.normalizer = normaliser(profile)
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    return tokenizer


def _words(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[str]:
    """How often the words of `texts` occur, as the model is to see them."""
    normalise, cut = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in cut(normalise(text)))
    return words


def _rows(words: Counter[str]) -> Iterator[str]:
    """SentencePiece's lines of word and count, in an order that depends on the words alone.

    Its first candidates for pieces are what occurs in two different words, so that a frequent
    word which is part of no other could never be one piece. Here a word has a line for each
    doubling of its count, told apart by boundary signs, which no piece can hold; the counts of
    its lines sum to its own.
    """
    for word, count in sorted(words.items()):
        # A control that a profile lets through would end the line, or the word in it.
        clean = re.sub(r"[\0\t\r\n\ufdd0]", "", word)
        more = count.bit_length() - 1
        for start in range(0, len(clean), _WORD_CHARS):
            part = clean[start : start + _WORD_CHARS]
            yield f"{part}\t{count - more}"
            yield from (f"{part}{_BOUNDARY * number}\t1" for number in range(1, more + 1))


def _train(
    words: Counter[str],
    vocab_size: int,
    at_most: bool,
    character_coverage: float | None,
    verbose: bool,
) -> list[tuple[str, float]]:
    """`vocab_size` less the special tokens pieces with their log probabilities, best first."""
    import sentencepiece  # noqa: PLC0415  (training alone needs it)

    characters = {character for word in words for character in word}
    if character_coverage is None:
        few = len(characters) <= vocab_size * _ALPHABET_SHARE
        character_coverage = 1.0 if few else _RICH_COVERAGE
    model = io.BytesIO()
    others = len(SPECIAL_TOKENS) - 2  # SentencePiece counts its unknown piece and the boundary
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_rows(words),
            model_writer=model,
            input_format="tsv",
            model_type="unigram",
            vocab_size=vocab_size - others,
            hard_vocab_limit=not at_most,
            character_coverage=character_coverage,
            user_defined_symbols=[_BOUNDARY],
            required_chars="".join(sorted(filter(_is_required, characters))),
            # The words come normalised and cut: what SentencePiece would do to them is off.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_by_unicode_script=False,
            split_by_number=False,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=1,  # more threads add in another order, which changes the bytes
            minloglevel=0 if verbose else 2,
        )
    except RuntimeError as error:
        raise _unfit(str(error), vocab_size, others, words) from None
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.getvalue())
    pieces = [(processor.id_to_piece(n), n) for n in range(1, processor.get_piece_size())]
    return [(piece, float(processor.get_score(n))) for piece, n in pieces if piece != _BOUNDARY]


def _is_required(character: str) -> bool:
    """Whether a word or a number would read as another one without it, or it is ASCII."""
    if (character.isascii() and character.isprintable()) or character in _JOINERS:
        return True
    return unicodedata.category(character) in {"Mn", "Mc", "Me", "Nd"}


def _unfit(reason: str, vocab_size: int, others: int, words: Counter[str]) -> UserError:
    """SentencePiece's complaint as what the user can do about it."""
    text = f"the text ({words.total():,} words, {len(words):,} different ones)"
    if needed := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
        least = int(needed[1]) + others
        return UserError(
            f"a vocabulary of '{vocab_size}' pieces is too small: {text} needs {least} for its "
            f"single characters; set vocab_size to at least {least}, or lower character_coverage"
        )
    if most := re.search(r"too high \(\d+\).*<= (\d+)", reason):
        largest = int(most[1]) + others
        return UserError(
            f"a vocabulary of '{vocab_size}' pieces is too large: {text} gives at most {largest}; "
            f"give more text, or set vocab_size to {largest} or less"
        )
    return UserError(f"no tokenizer can be trained on {text}: {reason}; give more text")


def _unreadable(path: str | os.PathLike[str], error: Exception) -> UserError:
    return UserError(
        f"the tokenizer '{os.fspath(path)}' cannot be read ({error}); give the folder or the "
        "tokenizer.json that 'gristmill models train-tokenizer' wrote"
    )


def _write_json(place: str, value: Any) -> None:
    files.write_atomic(place, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
