"""`gristmill demo`: the whole chain on the sample crawl, with models trained on the spot.

Mining comes first; with the extra `train` installed, the mined pages then train a tokenizer and a
tiny network, which is evaluated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from models.ngram import MODEL_SUFFIX, TOKENIZER_SUFFIX
from models.ngram_training import train_ngram
from models.registry import load_registry
from models.sentencepiece_lm import train_sentencepiece
from pipelines.recipe import load_recipe as load_mine_recipe
from pipelines.report import funnel
from pipelines.run import mine
from scripts.build_kenlm import build
from scripts.make_sample_crawl import make, reference_files

_MIN_PARAGRAPH_CHARS = 8
"""A sentence of Japanese may be this short."""
_HELD_OUT = 0.1
"""Of 246 pages, so that most languages have some to be judged by."""
_VOCABULARY = 4000
_SAMPLE_CHARS = 5_000_000


def demo(directory: str, *, workers: int) -> int:
    """Make the sample crawl, mine it, train a model on it, print funnel and held-out losses."""
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
    recipe = load_mine_recipe(
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
    print(f"check it all:   gristmill inspect {mined} --verify\n", flush=True)
    if find_spec("torch") is None:
        say("no training: torch is not installed; pip install '.[train]' brings it")
        return 0
    return _train(root, mined, say)


def _train(root: Path, mined: Path, say: Callable[[str], None]) -> int:
    """Train a tokenizer and a tiny ALBERT on the mined pages; print its held-out losses."""
    from training.evaluate.checkpoint_folder import find_checkpoints  # noqa: PLC0415
    from training.evaluate.stand_alone import evaluate_held_out  # noqa: PLC0415
    from training.evaluate.tables import held_out_table  # noqa: PLC0415
    from training.loop import train  # noqa: PLC0415
    from training.recipe import Data, load_recipe  # noqa: PLC0415
    from training.tokenizer_sample import train_on_crawls  # noqa: PLC0415

    tokenizer, run = root / "tokenizer", root / "run"
    train_on_crawls(
        Data(manifests=(str(mined),), held_out=_HELD_OUT),
        str(tokenizer),
        profile="default",
        vocab_size=_VOCABULARY,
        character_coverage=None,
        sample_chars=_SAMPLE_CHARS,
    )
    say(f"tokenizer: {_VOCABULARY:,} pieces; training a tiny ALBERT")
    recipe = load_recipe(
        "demo",
        [
            f"data.manifests={mined}",
            f"data.held_out={_HELD_OUT}",
            f"model.tokenizer={tokenizer}",
            f"output.directory={run}",
        ],
    )
    if train(recipe)["status"] == "stopped":
        return 0
    say("trained; evaluating on the pages that were held out")
    (folder,) = find_checkpoints([str(run)])
    print(held_out_table(folder.name, evaluate_held_out(folder, [str(mined)]).losses))
    print(f"\nevaluate again: gristmill evaluate {run} held-out --data {mined}")
    return 0
