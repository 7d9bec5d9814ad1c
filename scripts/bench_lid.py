"""Language identification: fastText itself beside our computation of its answers.

    python -m scripts.bench_lid [--input 'DIR/*.warc.wet.gz' | --mined DIR] [--rounds 3]

The same pages in one process, by turns; each figure is the best of the rounds. `cold` begins
with nothing kept, `warm` with what the round before left. Pages are those of WET files, or
with --mined the `text` column of a mined run, which is what mining identifies. Also compares the
answers: labels must all be equal and scores within 2e-4.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from models.errors import UserError
from models.fasttext_classifier import FastTextClassifier
from models.fasttext_model import read_fasttext_model
from models.language_id import LanguageIdentifier
from models.word_vectors import KEPT_BYTES
from pipelines.wet import WetReader

TOLERANCE = 2e-4
_BATCH_PAGES = 200


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints one table. Exit code 1 when an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--input", default="../shared/data/wet_docs/*.warc.wet.gz")
    parser.add_argument("--mined", help="a mined run's output folder, in place of --input")
    parser.add_argument("--model", default="../shared/data/models/lid.176.ftz")
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args(arguments)
    pages = mined_pages(parsed.mined) if parsed.mined else wet_pages(parsed.input)
    lines = [" ".join(page.splitlines()) for page in pages]
    text_bytes = sum(len(line.encode()) for line in lines)
    words = {word for line in lines for word in line.split()}
    print(f"{len(lines):,} pages, {text_bytes:,} bytes, {len(words):,} distinct words")
    print(f"peak RSS before the models: {_peak_rss_bytes():,} bytes")

    begin = time.process_time()
    classifier = FastTextClassifier(read_fasttext_model(parsed.model))
    read_s = time.process_time() - begin
    best = {"fastText": float("inf"), "cold": float("inf"), "warm": float("inf")}

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.process_time()
        work()
        best[name] = min(best[name], time.process_time() - start)

    ours = LanguageIdentifier(parsed.model)
    theirs = LanguageIdentifier(parsed.model, engine="fasttext")
    theirs.identify(["the model is read"])
    for _ in range(parsed.rounds):
        fresh = FastTextClassifier(read_fasttext_model(parsed.model))
        timed("cold", lambda fresh=fresh: _all(fresh.best, lines))  # type: ignore[misc]
        timed("warm", lambda: _all(classifier.best, lines))
        print(f"peak RSS with ours: {_peak_rss_bytes():,} bytes")
        timed("fastText", lambda: _all(theirs.identify, lines))
    for name, seconds in best.items():
        ratio = best["fastText"] / seconds
        print(f"{name:10} {seconds / text_bytes * 1e9:8.1f} CPU-s/GB of text   {ratio:5.2f}x")
    print(f"model read in {read_s:.3f} CPU-s; kept: {classifier.kept_words:,} words in at most")
    print(f"{KEPT_BYTES:,} bytes; peak RSS with fastText: {_peak_rss_bytes():,} bytes")

    languages, scores = ours.identify(pages)
    expected, expected_scores = theirs.identify(pages)
    equal = sum(a == b for a, b in zip(languages, expected, strict=True))
    difference = float(np.abs(scores - expected_scores).max(initial=0.0))
    print(f"labels equal: {equal:,} of {len(pages):,}; scores differ by up to {difference:.1e}")
    return int(equal != len(pages) or difference > TOLERANCE)


def _all(work: Callable[[list[str]], object], lines: list[str]) -> None:
    """In batches of about the size that mining takes."""
    for first in range(0, len(lines), _BATCH_PAGES):
        work(lines[first : first + _BATCH_PAGES])


def wet_pages(pattern: str) -> list[str]:
    """The pages of the WET files that match `pattern`."""
    paths = sorted(Path(pattern).parent.glob(Path(pattern).name))
    if not paths:
        raise UserError(f"no WET file matches '{pattern}': give one with --input")
    pages = []
    for path in paths:
        reader = WetReader(memoryview(path.read_bytes()))
        pages += [record.body.decode("utf-8", "replace") for record in reader]
    return pages


def mined_pages(folder: str) -> list[str]:
    """The texts of the mined run in `folder`."""
    pages: list[str] = []
    for path in sorted(Path(folder).rglob("*.parquet")):
        table = pq.ParquetFile(path)
        if "text" in table.schema_arrow.names:
            pages += table.read(["text"])["text"].to_pylist()
    if not pages:
        raise UserError(f"no mined pages in '{folder}': give the output of gristmill mine")
    return pages


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
