"""The bare kernels that mining is made of, on the text that mining gives them."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fasttext
import kenlm
import pyarrow as pa
import pyarrow.parquet as pq
from fastwarc.warc import ArchiveIterator, WarcRecordType

from models.language_id import LanguageIdentifier
from models.lm_text import LmProfile, normalise_page_for_lm
from models.sentencepiece_lm import load_sentencepiece
from pipelines.hashing import BATCH_CHARS
from pipelines.pages import read_page
from pipelines.paragraphs import paragraph_hashes
from pipelines.plan import make_plan
from pipelines.recipe import MineRecipe
from pipelines.wet import WetReader

FASTTEXT = "fastText"
OURS = "language id, word vectors"
"""The two ways to the same labels; a sum of kernels holds one of them."""
_READ_BLOCK_BYTES = 1 << 20
_LID_BATCH_PAGES = 500


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
    profile = recipe.language.profile
    joint = "" if profile == "ccnet" else " "
    model = fasttext.load_model(plan.language_id.path)
    lines = [text.replace("\n", joint) + "\n" for text in texts]
    timed(FASTTEXT, lambda: [model.f.predict(line, 1, 0.0, "strict") for line in lines])
    identifier = LanguageIdentifier(plan.language_id.path, profile)
    timed(
        OURS,
        lambda: [
            identifier.identify(texts[first : first + _LID_BATCH_PAGES])
            for first in range(0, len(texts), _LID_BATCH_PAGES)
        ],
    )
    for language, pair in plan.language_models.items():
        mine_texts = [t for t, code in zip(texts, languages, strict=True) if code == language]
        if not mine_texts:
            continue
        tokenizer = load_sentencepiece(pair.tokenizer.path)
        ngram = kenlm.Model(pair.ngram.path)
        clean = timed("LM normalise", _normalise, mine_texts, recipe.quality.profile)
        paragraphs = [line for text in clean for line in text.split("\n") if line]
        pieces = timed("SentencePiece", _encode, tokenizer, paragraphs)
        timed("KenLM", _score, ngram, [b" ".join(line) for line in pieces])
    timed("Parquet (zstd-3)", _write_parquet, kept, mined.parent / "kernel.parquet")
    return wet_bytes, seconds


def _normalise(texts: list[str], profile: LmProfile) -> list[str]:
    return [normalise_page_for_lm(text, profile) for text in texts]


def _encode(tokenizer: Any, paragraphs: list[str]) -> list[list[bytes]]:
    encoded: list[list[bytes]] = tokenizer.encode(paragraphs, return_type=bytes, num_threads=1)
    return encoded


def _score(ngram: Any, lines: list[bytes]) -> float:
    return float(sum(ngram.score(line) for line in lines))


def _write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", compression_level=3)


def _fastwarc_bytes(path: str) -> int:
    records = ArchiveIterator(
        path, record_types=WarcRecordType.conversion, parse_http=False, fsspec_args=False
    )
    return sum(len(record.reader.read()) for record in records)


def _uncompressed_bytes(path: str) -> int:
    with gzip.open(path) as file:
        size = 0
        while block := file.read(_READ_BLOCK_BYTES):
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
