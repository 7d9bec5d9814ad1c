"""`gristmill models train-tokenizer`: a tokenizer from mined crawls."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from models.errors import UserError
from models.tokenizer import SMALLEST_VOCABULARY
from training import fertility
from training.recipe import Data
from training.tokenizer_sample import train_on_crawls

_PROGRESS_EVERY_S = 2.0


def train_tokenizer(arguments: argparse.Namespace) -> int:
    """Sample, train, measure, save; prints the fertility by language, or the manifest as JSON."""
    _refuse_plain_text(arguments.manifests, arguments.output)
    if not 0 <= arguments.held_out < 1:
        raise UserError(f"--held-out '{arguments.held_out}' is no share: give 0 to below 1")
    data = Data(
        manifests=tuple(arguments.manifests),
        by=tuple(dict.fromkeys(arguments.by)),
        languages=tuple(arguments.languages),
        weights=_weights(arguments.weights),
        held_out=arguments.held_out,
        seed=arguments.seed,
    )
    manifest, measured = train_on_crawls(
        data,
        arguments.output,
        profile=arguments.profile,
        vocab_size=_vocab_size(arguments.vocab_size),
        character_coverage=arguments.character_coverage,
        sample_chars=arguments.sample_chars,
        progress=_progress(),
    )
    if arguments.json:
        print(json.dumps(manifest, ensure_ascii=False))
        return 0
    print(f"{manifest['vocab_size']:,} pieces, profile {manifest['profile']}: {arguments.output}")
    print(fertility.table(measured))
    return 0


def _refuse_plain_text(names: Sequence[str], output: str) -> None:
    for name in names:
        path = Path(name)
        if path.is_file() and path.suffix != ".json":
            raise UserError(
                f"'{name}' is no mined crawl: give a folder that 'gristmill mine' wrote; from "
                f"plain text, for an n-gram model: gristmill models train-sentencepiece {name} "
                f"--language CODE --output {output}"
            )


def _vocab_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < SMALLEST_VOCABULARY:
        raise UserError(
            f"--vocab-size '{text}' is neither 'auto' nor a number of {SMALLEST_VOCABULARY} or more"
        )
    return int(text)


def _weights(words: Sequence[str]) -> str | dict[str, float]:
    """A name or a file, or the mapping that `domain=share` words are."""
    if len(words) == 1 and ("=" not in words[0] or Path(words[0]).is_file()):
        return words[0]
    shares: dict[str, float] = {}
    for word in words:
        domain, equals, number = word.rpartition("=")
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not equals or not domain or not share >= 0 or domain in shares:
            raise UserError(
                f"--weights '{word}' is not DOMAIN=SHARE with a share of 0 or more, each domain "
                "once: give smoothed, proportional, uniform, a weights file, or one such word for "
                "each domain"
            )
        shares[domain] = share
    return shares


def _progress() -> Callable[[str], None]:
    """Prints to stderr when another step begins, and within a step every two seconds at most."""
    last_step, last_s = "", 0.0

    def show(text: str) -> None:
        nonlocal last_step, last_s
        step, now_s = text.split(" ", 1)[0], time.monotonic()
        if step != last_step or now_s - last_s >= _PROGRESS_EVERY_S:
            last_step, last_s = step, now_s
            print(text, file=sys.stderr, flush=True)

    return show
