"""What mining costs beside the bare kernels it is made of, in one run on the same text.

    python -m scripts.bench_mine [--input 'DIR/*.warc.wet.gz'] [--rounds 5]

Prints CPU seconds for each GB (1e9 bytes) of uncompressed WET, by pass and by kernel, and their
ratio. One worker, everything in one process; each figure is the best of the rounds, in which
mining and kernels take turns, so what a process does once (imports, character tables) is left out.
Peak memory by pass is that of one more run, in a process of its own. The language models are
trained once, on `wiki/` of the shared data.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fasttext
import kenlm
import pyarrow as pa
import pyarrow.parquet as pq
from fastwarc.warc import ArchiveIterator, WarcRecordType

from models.errors import UserError
from models.languages import check_codes
from models.lm_text import LmProfile, normalise_page_for_lm
from models.ngram import MODEL_SUFFIX, TOKENIZER_SUFFIX
from models.ngram_training import train_ngram
from models.tokenizer import load_tokenizer, train_sentencepiece
from pipelines.hashing import BATCH_CHARS
from pipelines.pages import read_page
from pipelines.paragraphs import paragraph_hashes
from pipelines.plan import make_plan
from pipelines.recipe import MineRecipe, load_recipe
from pipelines.run import mine
from pipelines.timings import TIMINGS_FILE
from pipelines.wet import WetReader
from scripts.build_kenlm import build

_TRAINING_CHARS = 1_500_000
_VOCABULARY = 8000


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--input", default="../shared/data/wet_docs/*.warc.wet.gz")
    parser.add_argument("--wiki", default="../shared/data/wiki", help="prose for language models")
    parser.add_argument("--work", default="out/bench", help="folder for models and results")
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args(arguments)
    work = Path(parsed.work)
    train_models(Path(parsed.wiki), work / "models")
    recipe = load_recipe("default", _settings(parsed.input, work))
    passes: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for number in range(parsed.rounds):
        print(f"round {number + 1} of {parsed.rounds}", file=sys.stderr)
        shutil.rmtree(work / "mined", ignore_errors=True)
        begin = time.process_time()
        manifest = mine(recipe)
        whole = time.process_time() - begin
        timings = json.loads((work / "mined" / TIMINGS_FILE).read_text())
        found = {name: figures["cpu_s"] for name, figures in timings.items()}
        found["Beam, plan, manifest"] = whole - sum(found.values())
        _keep_best(passes, found)
        wet_bytes, measured = measure_kernels(recipe, work / "mined")
        _keep_best(kernels, measured)
    print_table(passes, measure_memory(parsed.input, work), kernels, wet_bytes)
    pages = manifest.counts.pages
    print(f"\n{wet_bytes:,} bytes of WET, {pages.read:,} pages read, {pages.written:,} written")
    return 0


def _settings(pattern: str, work: Path) -> list[str]:
    return [
        f"input.paths={json.dumps(pattern)}",
        f"output.directory={work / 'mined'}",
        f"quality.models={work / 'models'}",
        "language.threshold=0",  # so that the kernels see just the pages that mining saw
    ]


def measure_memory(pattern: str, work: Path) -> dict[str, int]:
    """Peak resident bytes of each pass, in a fresh process."""
    shutil.rmtree(work / "mined", ignore_errors=True)
    words = [sys.executable, "-m", "scripts.cli", "mine", "default"]
    for setting in _settings(pattern, work):
        words += ["--set", setting]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    timings = json.loads((work / "mined" / TIMINGS_FILE).read_text())
    return {name: figures["peak_rss_bytes"] for name, figures in timings.items()}


def _keep_best(best: dict[str, float], found: dict[str, float]) -> None:
    for name, value in found.items():
        best[name] = min(value, best.get(name, value))


def train_models(wiki: Path, folder: Path) -> None:
    """A small model for each language of `wiki`, unless it is there."""
    texts = sorted(wiki.glob("*.txt"))
    if not texts:
        raise UserError(f"no prose at '{wiki}': give a folder of LANGUAGE.txt files with --wiki")
    build()
    for text in texts:
        (language,) = check_codes([text.stem])
        tokenizer = folder / f"{language}{TOKENIZER_SUFFIX}"
        ngram = folder / f"{language}{MODEL_SUFFIX}"
        if tokenizer.exists() and ngram.exists():
            continue
        print(f"language model: {language}", file=sys.stderr)
        lines = text.read_text(encoding="utf-8")[:_TRAINING_CHARS].splitlines()
        try:
            train_sentencepiece(lines, tokenizer, vocab_size=_VOCABULARY)
        except UserError:
            train_sentencepiece(lines, tokenizer, vocab_size="auto")
        train_ngram(lines, tokenizer, ngram)


def measure_kernels(recipe: MineRecipe, mined: Path) -> tuple[int, dict[str, float]]:
    """Uncompressed bytes of the input, and CPU seconds of each kernel on what mining gives it."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.process_time()
        result = work(*arguments)
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - begin
        return result

    plan = make_plan(recipe)
    paths = [file.url for file in plan.inputs]
    timed("FastWARC read", lambda: [_fastwarc_bytes(path) for path in paths])
    wet_bytes = sum(_uncompressed_bytes(path) for path in paths)
    for path in paths:
        data = memoryview(Path(path).read_bytes())
        pages = [read_page(record, recipe.pages) for record in WetReader(data)]
        texts = ["\n".join(page.lines) for page in pages if not page.dropped]
        for first, last in _batches(texts):
            batch = texts[first:last]
            timed("normalise + SHA-1", paragraph_hashes, batch, recipe.paragraphs.profile)
    # What language identification and scoring see: the text after dedup.
    tables = [
        pq.ParquetFile(mined / path, pre_buffer=False).read()
        for path in sorted(str(p.relative_to(mined)) for p in mined.rglob("*.parquet"))
    ]
    kept = pa.concat_tables(tables).sort_by(
        [("warc_file", "ascending"), ("warc_offset", "ascending")]
    )
    texts = kept["text"].to_pylist()
    languages = kept["language"].to_pylist()
    model = fasttext.load_model(plan.language_id.path)
    lines = [text.replace("\n", " ") + "\n" for text in texts]
    timed("fastText", lambda: [model.f.predict(line, 1, 0.0, "strict") for line in lines])
    for language, pair in plan.language_models.items():
        mine_texts = [t for t, code in zip(texts, languages, strict=True) if code == language]
        if not mine_texts:
            continue
        tokenizer = load_tokenizer(pair.tokenizer.path)
        ngram = kenlm.Model(pair.ngram.path)
        clean = timed("LM normalise", _normalise, mine_texts, recipe.quality.profile)
        paragraphs = [line for text in clean for line in text.split("\n") if line]
        pieces = timed("SentencePiece", _encode, tokenizer, paragraphs)
        timed("KenLM", _score, ngram, [" ".join(line) for line in pieces])
    timed("Parquet (zstd-3)", _write_parquet, kept, mined.parent / "kernel.parquet")
    return wet_bytes, seconds


def _normalise(texts: list[str], profile: LmProfile) -> list[str]:
    return [normalise_page_for_lm(text, profile) for text in texts]


def _encode(tokenizer: Any, paragraphs: list[str]) -> list[list[str]]:
    encoded: list[list[str]] = tokenizer.encode(paragraphs, out_type=str, num_threads=1)
    return encoded


def _score(ngram: Any, lines: list[str]) -> float:
    return float(sum(ngram.score(line) for line in lines))


def _write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", compression_level=3)


def _fastwarc_bytes(path: str) -> int:
    records = ArchiveIterator(
        path, record_types=WarcRecordType.conversion, parse_http=False, fsspec_args=False
    )
    return sum(len(record.reader.read()) for record in records)


def _uncompressed_bytes(path: str) -> int:
    import gzip  # noqa: PLC0415

    with gzip.open(path) as file:
        size = 0
        while block := file.read(1 << 20):
            size += len(block)
        return size


def _batches(texts: list[str]) -> list[tuple[int, int]]:
    bounds, first, size = [], 0, 0
    for number, text in enumerate(texts, start=1):
        size += len(text)
        if size >= BATCH_CHARS or number == len(texts):
            bounds.append((first, number))
            first, size = number, 0
    return bounds


def print_table(
    passes: dict[str, float], memory: dict[str, int], kernels: dict[str, float], wet_bytes: int
) -> None:
    """CPU seconds for each GB, and their ratio."""
    gigabytes = wet_bytes / 1e9
    print(f"{'':24}{'CPU-s/GB':>10}{'peak RSS MiB':>14}")
    for name, seconds in passes.items():
        rss = f"{memory[name] / 2**20:14,.0f}" if name in memory else ""
        print(f"{name:24}{seconds / gigabytes:10.1f}{rss}")
    total, bare = sum(passes.values()), sum(kernels.values())
    print(f"{'mining, total':24}{total / gigabytes:10.1f}\n")
    for name, seconds in kernels.items():
        print(f"{name:24}{seconds / gigabytes:10.1f}")
    print(f"{'bare kernels, total':24}{bare / gigabytes:10.1f}")
    print(f"\nmining / bare kernels: {total / bare:.2f}")


if __name__ == "__main__":
    sys.exit(main())
