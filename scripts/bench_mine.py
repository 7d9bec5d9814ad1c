"""What mining costs beside the bare kernels it is made of, in one run on the same text.

    python -m scripts.bench_mine [--recipe ccnet] [--input 'DIR/*.warc.wet.gz'] [--rounds 5]

Prints CPU seconds for each GB (1e9 bytes) of uncompressed WET, by pass and by kernel, and their
ratio. One worker, everything in one process; each figure is the best of the rounds, in which
mining and kernels take turns, so what a process does once (imports, character tables) is left out.
Peak memory by pass is that of one more run, in a process of its own.

`--recipe ccnet` is what CCNet does: its profiles and policy, windows of four shards, models of
eleven languages, trained on the shards themselves (for speed only: their perplexities say nothing).
`--recipe default` has models of the fourteen languages of `wiki/` of the shared data.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq

from models.errors import UserError
from models.languages import check_codes
from models.lm_text import LmProfile
from models.ngram import MODEL_SUFFIX, TOKENIZER_SUFFIX
from models.ngram_training import train_ngram
from models.sentencepiece_lm import train_sentencepiece
from pipelines.recipe import load_recipe
from pipelines.regroup import PAGES
from pipelines.run import mine
from pipelines.timings import TIMINGS_FILE
from scripts.bench_kernels import FASTTEXT, OURS, measure_kernels
from scripts.build_kenlm import build

_TRAINING_CHARS = 1_500_000
_VOCABULARY = 8000
_CCNET_LANGUAGES = ("en", "de", "fr", "es", "ru", "it", "pt", "ja", "zh", "pl", "nl")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--recipe", choices=["ccnet", "default"], default="ccnet")
    parser.add_argument("--input", default="../shared/data/wet_docs/*.warc.wet.gz")
    parser.add_argument("--wiki", default="../shared/data/wiki", help="prose for language models")
    parser.add_argument("--work", default="out/bench", help="folder for models and results")
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args(arguments)
    work = Path(parsed.work)
    if parsed.recipe == "ccnet":
        models = work / "ccnet-models"
        train_on_shards(parsed.input, work, models)
    else:
        models = work / "models"
        train_models(Path(parsed.wiki), models)
    settings = _settings(parsed.input, work, models)
    if parsed.recipe == "ccnet":
        settings.append("dedup.window_shards=4")
    recipe = load_recipe(parsed.recipe, settings)
    passes: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for number in range(parsed.rounds):
        print(f"round {number + 1} of {parsed.rounds}", file=sys.stderr)
        shutil.rmtree(work / "mined", ignore_errors=True)
        begin = time.process_time()
        manifest = mine(recipe)
        whole = time.process_time() - begin
        found = {name: figures["cpu_s"] for name, figures in _timings(work).items()}
        found["Beam, plan, manifest"] = whole - sum(found.values())
        _keep_best(passes, found)
        wet_bytes, measured = measure_kernels(recipe, work / "mined")
        _keep_best(kernels, measured)
    print_table(passes, measure_memory(parsed.recipe, settings, work), kernels, wet_bytes)
    pages = manifest.counts.pages
    print(f"\n{wet_bytes:,} bytes of WET, {pages.read:,} pages read, {pages.written:,} written")
    return 0


def _settings(pattern: str, work: Path, models: Path) -> list[str]:
    return [
        f"input.paths={json.dumps(pattern)}",
        f"output.directory={work / 'mined'}",
        f"quality.models={models}",
        # So that the kernels see in the output each page that mining identified.
        "language.keep_undetermined=true",
    ]


def _timings(work: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((work / "mined" / TIMINGS_FILE).read_text())
    return found


def measure_memory(recipe: str, settings: list[str], work: Path) -> dict[str, float]:
    """Peak resident bytes of each pass, in a fresh process."""
    shutil.rmtree(work / "mined", ignore_errors=True)
    words = [sys.executable, "-m", "scripts.cli", "mine", recipe]
    for setting in settings:
        words += ["--set", setting]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {name: figures["peak_rss_bytes"] for name, figures in _timings(work).items()}


def _keep_best(best: dict[str, float], found: dict[str, float]) -> None:
    for name, value in found.items():
        best[name] = min(value, best.get(name, value))


def train_models(wiki: Path, folder: Path) -> None:
    """A small model for each language of `wiki`, unless it is there."""
    texts = sorted(wiki.glob("*.txt"))
    if not texts:
        raise UserError(f"no prose at '{wiki}': give a folder of LANGUAGE.txt files with --wiki")
    for text in texts:
        (language,) = check_codes([text.stem])
        lines = text.read_text(encoding="utf-8")[:_TRAINING_CHARS].splitlines()
        _train(language, lines, folder, "unicode", _VOCABULARY)


def train_on_shards(pattern: str, work: Path, folder: Path) -> None:
    """A model for each of CCNet's languages here, of the mined text itself, unless it is there."""
    if all((folder / f"{language}{MODEL_SUFFIX}").exists() for language in _CCNET_LANGUAGES):
        return
    mined = work / "ccnet-text"
    settings = [f"input.paths={json.dumps(pattern)}", f"output.directory={mined}"]
    mine(load_recipe("ccnet", [*settings, "dedup.window_shards=4"]))
    for language in _CCNET_LANGUAGES:
        parts = sorted((mined / PAGES / f"language={language}").rglob("*.parquet"))
        tables = [pq.ParquetFile(part, pre_buffer=False).read(["text"]) for part in parts]
        lines = (
            line for table in tables for text in table["text"] for line in str(text).split("\n")
        )
        _train(language, lines, folder, "ccnet", None)
    shutil.rmtree(mined)


def _train(
    language: str, text: Iterable[str], folder: Path, profile: LmProfile, vocabulary: int | None
) -> None:
    """vocabulary: None, or where the text is too short for it, is as many as the text allows."""
    tokenizer, ngram = (
        folder / f"{language}{TOKENIZER_SUFFIX}",
        folder / f"{language}{MODEL_SUFFIX}",
    )
    if tokenizer.exists() and ngram.exists():
        return
    build()
    print(f"language model: {language}", file=sys.stderr)
    lines = list(text)
    try:
        train_sentencepiece(lines, tokenizer, profile=profile, vocab_size=vocabulary or "auto")
    except UserError:
        train_sentencepiece(lines, tokenizer, profile=profile, vocab_size="auto")
    train_ngram(lines, tokenizer, ngram, profile=profile)


def print_table(
    passes: dict[str, float],
    memory: dict[str, float],
    kernels: dict[str, float],
    wet_bytes: int,
) -> None:
    """CPU seconds for each GB, and their ratios."""
    gigabytes = wet_bytes / 1e9
    print(f"{'':26}{'CPU-s/GB':>10}{'peak RSS MiB':>14}")
    for name, seconds in passes.items():
        rss = f"{memory[name] / 2**20:14,.0f}" if name in memory else ""
        print(f"{name:26}{seconds / gigabytes:10.1f}{rss}")
    total, bare = sum(passes.values()), sum(kernels.values())
    print(f"{'mining, total':26}{total / gigabytes:10.1f}\n")
    for name, seconds in kernels.items():
        print(f"{name:26}{seconds / gigabytes:10.1f}")
    for name, other in ((FASTTEXT, OURS), (OURS, FASTTEXT)):
        of_libraries = bare - kernels[other]
        print(f"{'kernels with ' + name:40}{of_libraries / gigabytes:10.1f}", end="")
        print(f"   mining is {total / of_libraries:.2f} times that")
    print(f"language identification: {kernels[FASTTEXT] / kernels[OURS]:.2f} times as fast")


if __name__ == "__main__":
    sys.exit(main())
