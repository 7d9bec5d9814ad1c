"""`gristmill demo`: the whole chain on the sample crawl, with models trained on the spot."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from models.ngram import MODEL_SUFFIX, TOKENIZER_SUFFIX
from models.ngram_training import train_ngram
from models.registry import load_registry
from models.sentencepiece_lm import train_sentencepiece
from pipelines.recipe import load_recipe
from pipelines.report import funnel
from pipelines.run import mine
from scripts.build_kenlm import build
from scripts.make_sample_crawl import make, reference_files

_MIN_PARAGRAPH_CHARS = 8
"""A sentence of Japanese may be this short."""


def demo(directory: str, *, workers: int) -> int:
    """Make the sample crawl, train its language models, mine it, print the funnel."""
    root = Path(directory)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {text}", file=sys.stderr, flush=True)

    say("language identification model")
    load_registry().fetch("lid.176.ftz")
    say("KenLM's programs (compiled once, about a minute)")
    build()
    shards = make(root / "crawl")
    say(f"sample crawl: {len(shards)} WET files in {root / 'crawl'}")
    for language, text in sorted(reference_files().items()):
        lines = text.read_text(encoding="utf-8").splitlines()
        tokenizer = root / "models" / f"{language}{TOKENIZER_SUFFIX}"
        train_sentencepiece(lines, tokenizer, vocab_size="auto", min_chars=_MIN_PARAGRAPH_CHARS)
        ngram = root / "models" / f"{language}{MODEL_SUFFIX}"
        train_ngram(lines, tokenizer, ngram, min_chars=_MIN_PARAGRAPH_CHARS)
        say(f"language model: {language}, from {len(lines)} paragraphs")
    mined = root / "mined"
    recipe = load_recipe(
        "sample",
        [
            f"input.paths={root / 'crawl' / '*.warc.wet.gz'}",
            f"output.directory={mined}",
            f"quality.models={root / 'models'}",
            f"run.workers={workers}",
        ],
    )
    manifest = mine(recipe)
    say("mined")
    print(funnel(manifest))
    print(f"\nlook at pages:  gristmill inspect {mined} --sample language=bn bucket=head -n 2")
    print(f"check it all:   gristmill inspect {mined} --verify")
    return 0
