"""`gristmill models`: the registry on the command line, and training of the models of mining."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from models.errors import UserError
from models.languages import check_codes
from models.ngram import MODEL_SUFFIX, TOKENIZER_SUFFIX
from models.ngram_training import train_ngram
from models.registry import load_registry
from models.sentencepiece_lm import train_sentencepiece
from scripts.build_kenlm import build


def list_models(arguments: argparse.Namespace) -> int:
    """Print every registered model, and whether it is here."""
    registry = load_registry()
    rows = []
    for name in registry.names():
        entry = registry.entry(name)
        try:
            path = str(registry.find(name))
        except UserError:
            path = ""
        rows.append({"name": name, "kind": entry.kind, "licence": entry.licence, "path": path})
    if arguments.json:
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:{width}}  {row['kind']:13}  {row['path'] or 'not here'}")
    return 0


def fetch(arguments: argparse.Namespace) -> int:
    """Bring models into the cache; prints their paths."""
    registry = load_registry()
    for name in arguments.names:
        registry.entry(name)  # a wrong name is refused before anything is downloaded
    for name in arguments.names:
        print(registry.fetch(name, trust_first_use=arguments.trust_first_use, progress=_progress))
    return 0


def _progress(received_bytes: int, total_bytes: int | None) -> None:
    if sys.stderr.isatty():
        of = f" of {total_bytes / 1e6:.1f}" if total_bytes else ""
        print(f"\r{received_bytes / 1e6:.1f}{of} MB", end="", file=sys.stderr)
        if received_bytes == total_bytes:
            print(file=sys.stderr)


def verify(arguments: argparse.Namespace) -> int:
    """Check the digest of everything in the cache; exit code 1 when something is wrong."""
    statuses = load_registry().verify()
    for name, status in statuses:
        print(f"{name}: {status}")
    if not statuses:
        print("no model has been fetched yet")
    return int(any(status != "ok" for _, status in statuses))


def build_kenlm(arguments: argparse.Namespace) -> int:
    """Build KenLM's programs into the cache; prints their folder."""
    print(build())
    return 0


def train_sentencepiece_model(arguments: argparse.Namespace) -> int:
    """Train `{language}.sp.model` in the output folder; prints a report as JSON."""
    vocab_size = arguments.vocab_size
    if vocab_size != "auto":
        if not vocab_size.isdecimal() or int(vocab_size) < 1:
            raise UserError(f"--vocab-size '{vocab_size}' is neither a number of pieces nor 'auto'")
        vocab_size = int(vocab_size)
    (language,) = check_codes([arguments.language])
    report = train_sentencepiece(
        _lines(_files(arguments.texts)),
        Path(arguments.output) / f"{language}{TOKENIZER_SUFFIX}",
        profile=arguments.profile,
        vocab_size=vocab_size,
    )
    print(json.dumps(report, indent=1, ensure_ascii=False))
    return 0


def train_tokenizer(arguments: argparse.Namespace) -> int:
    """Train a tokenizer from mined crawls; prints its fertility by language, or JSON."""
    # Arrow and the training data are for this action alone.
    from scripts.tokenizer_command import train_tokenizer as run  # noqa: PLC0415

    return run(arguments)


def train_ngram_model(arguments: argparse.Namespace) -> int:
    """Train `{language}.arpa.bin` beside its tokenizer; prints the sidecar as JSON."""
    (language,) = check_codes([arguments.language])
    tokenizer = Path(arguments.output) / f"{language}{TOKENIZER_SUFFIX}"
    if not tokenizer.is_file():
        raise UserError(
            f"no tokenizer '{tokenizer}': train it first with: "
            f"gristmill models train-sentencepiece {' '.join(arguments.texts)} "
            f"--language {language} --output {arguments.output}"
        )
    texts = _files(arguments.texts)
    build()
    report = train_ngram(
        _lines(texts),
        tokenizer,
        Path(arguments.output) / f"{language}{MODEL_SUFFIX}",
        order=arguments.order,
        profile=arguments.profile,
    )
    print(json.dumps(report, indent=1, ensure_ascii=False))
    return 0


def _files(names: Sequence[str]) -> list[Path]:
    for name in names:
        if not Path(name).is_file():
            raise UserError(f"no text '{name}': give files of plain text, a paragraph a line")
    return [Path(name) for name in names]


def _lines(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": list_models,
    "fetch": fetch,
    "verify": verify,
    "build-kenlm": build_kenlm,
    "train-sentencepiece": train_sentencepiece_model,
    "train-tokenizer": train_tokenizer,
    "train-ngram": train_ngram_model,
}
