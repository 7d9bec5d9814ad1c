"""The stream of training examples beside the bare tokenizer on the same text, in one run.

    python -m scripts.bench_loader [--data MANIFEST ...] [--tokenizer DIR] [--json FILE]

By turns: some examples from the stream, then `encode_batch_fast` on exactly the pages (and in the
batches) that the stream has just tokenised, reading the ids. A figure is the median of the rounds;
`ratio` is stream / bare tokens per second of process CPU time on one thread, of wall time with the
tokenizer's own threads. A long run of one stream then shows whether memory grows. Tokens do
not count [CLS] and [SEP].
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from models.errors import UserError
from models.tokenizer import CLS_ID, SEP_ID, load_tokenizer, train_tokenizer
from training import domains
from training.examples import Cut, Example, ExampleBuilder, make_builder
from training.recipe import TrainRecipe
from training.sampler import ExampleStream
from training.tokenizer_sample import ParagraphSample

FAMILIES = {"causal": "decoder", "albert": "albert"}
WANTED_RATIO = 0.85
FLAT_BYTES = 32 << 20
"""What memory may grow by between the second and the last part of the long run."""
_TRAINING_CHARS = 2_000_000
_MEMORY_PARTS = 10


class Recording:
    """A builder that keeps the batches of pages it was given."""

    def __init__(self, builder: ExampleBuilder) -> None:
        self._builder = builder
        self.batches: list[list[str]] | None = None

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Pass `texts` on, and keep them when they are asked for."""
        if self.batches is not None:
            self.batches.append(list(texts))
        return self._builder.encode(texts)

    def cut(self, pages: Sequence[Any], start: int, key: int) -> Cut:
        """Pass on."""
        return self._builder.cut(pages, start, key)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints a table. Exit code 1 when a ratio or the memory misses its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", nargs="+", default=["out/docs"], help="mined crawls")
    parser.add_argument("--tokenizer", help="folder or tokenizer.json; none: a small one is made")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-tokens", type=int, default=500_000)
    parser.add_argument(
        "--warm-up-tokens", type=int, default=3_000_000, help="until as much is read as given out"
    )
    parser.add_argument("--memory-tokens", type=int, default=10_000_000, help="0: no long run")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, '-': to stdout")
    parsed = parser.parse_args(arguments)
    try:
        results = measure(parsed)
    except UserError as error:
        print(f"bench_loader: {error}", file=sys.stderr)
        return 2
    if parsed.json == "-":
        print(json.dumps(results, indent=2))
    else:
        print(table(results))
        if parsed.json:
            Path(parsed.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["good"] for row in results["rows"]) else 1


def measure(parsed: argparse.Namespace) -> dict[str, Any]:
    """All figures; see `table` for what they are. Raises UserError."""
    settings = {
        "data": {"manifests": parsed.data},
        "examples": {"sequence_length": parsed.sequence_length},
    }
    recipe = TrainRecipe.model_validate(settings)
    begin = time.perf_counter()
    corpus = domains.load_corpus(recipe.data)
    corpus_s = time.perf_counter() - begin
    weights = domains.mixture(corpus, "proportional")
    if parsed.tokenizer:
        tokenizer = load_tokenizer(parsed.tokenizer)
    else:
        print("training a small tokenizer", file=sys.stderr)
        sample = ParagraphSample(corpus, weights, data=recipe.data, chars=_TRAINING_CHARS)
        tokenizer = train_tokenizer(sample, vocab_size=16_000, at_most=True)
    rows = []
    for name in parsed.families:
        family = {"family": FAMILIES[name], "size": "tiny"}
        recorder = Recording(
            make_builder(TrainRecipe.model_validate(settings | {"model": family}), tokenizer)
        )
        for threads in (1, os.cpu_count() or 1):
            os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"
            begin = time.perf_counter()
            with ExampleStream(corpus, weights, recorder, data=recipe.data) as stream:
                stream.take(1)
                first_s = corpus_s + time.perf_counter() - begin
                row = {"family": name, "threads": threads, "first_example_s": first_s}
                row |= rounds(stream, recorder, tokenizer, parsed, threads)
                if threads == 1:
                    row |= long_run(stream, parsed.memory_tokens)
            row["good"] = (threads > 1 or row["ratio"] >= WANTED_RATIO) and (
                row.get("rss_growth_bytes", 0) <= FLAT_BYTES
            )
            rows.append(row)
            print(f"{name}, {threads} threads: done", file=sys.stderr)
    return {
        "data": parsed.data,
        "domains": len(corpus.domains),
        "sequence_length": parsed.sequence_length,
        "vocab_size": tokenizer.get_vocab_size(),
        "rows": rows,
    }


def rounds(
    stream: ExampleStream,
    recorder: Recording,
    tokenizer: Tokenizer,
    parsed: argparse.Namespace,
    threads: int,
) -> dict[str, Any]:
    """Tokens/s of the stream and of the tokenizer alone.

    At its start the stream tokenises pages ahead, for each lane and domain; the warm-up is long
    enough that this is over. `ahead` tells: tokens read in the rounds / tokens given out.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    rates: list[tuple[float, float]] = []
    filled = [0, 0]
    read = given = 0
    _stream_rate(stream, parsed.warm_up_tokens, clock)
    for _ in range(parsed.rounds):
        recorder.batches = []
        rate, examples = _stream_rate(stream, parsed.round_tokens, clock)
        batches, recorder.batches = recorder.batches, None
        begin = clock()
        bare = 0
        for batch in batches:
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                bare += len(encoding.ids)
        bare_rate = bare / (clock() - begin)
        rates.append((rate, bare_rate))
        read += bare
        given += sum(map(_tokens, examples))
        filled[0] += sum(len(example.arrays["input_ids"]) for example in examples)
        filled[1] += len(examples) * parsed.sequence_length
    return {
        "stream_tokens_per_s": statistics.median(rate for rate, _ in rates),
        "bare_tokens_per_s": statistics.median(rate for _, rate in rates),
        "ratio": statistics.median(rate / bare for rate, bare in rates),
        "ahead": read / given,
        "filled": filled[0] / filled[1],
    }


def _stream_rate(
    stream: ExampleStream, tokens: int, clock: Callable[[], float]
) -> tuple[float, list[Example]]:
    examples: list[Example] = []
    count = 0
    begin = clock()
    while count < tokens:
        taken = stream.take(32)
        count += sum(map(_tokens, taken))
        examples += taken
    return count / (clock() - begin), examples


def long_run(stream: ExampleStream, tokens: int) -> dict[str, Any]:
    """Resident memory after each tenth of `tokens`, and its growth from the second to the last."""
    if not tokens:
        return {}
    sizes = []
    for _ in range(_MEMORY_PARTS):
        count = 0
        while count < tokens / _MEMORY_PARTS:
            count += sum(map(_tokens, stream.take(32)))
        sizes.append(_rss_bytes())
    return {"rss_bytes": sizes, "rss_growth_bytes": sizes[-1] - sizes[1]}


def _tokens(example: Example) -> int:
    """Tokens of the text: those that are no [CLS] and no [SEP]."""
    ids = example.arrays["input_ids"]
    return len(ids) - int(np.count_nonzero((ids == CLS_ID) | (ids == SEP_ID)))


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def table(results: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"{', '.join(results['data'])}: {results['domains']} domains, vocabulary "
        f"{results['vocab_size']:,}, sequences of {results['sequence_length']} tokens",
        f"{'family':8}{'threads':>8}{'stream tok/s':>14}{'bare tok/s':>12}{'ratio':>7}{'ahead':>7}"
        f"{'filled':>8}{'first, s':>10}{'RSS, MB':>9}{'growth, MB':>12}",
    ]
    for row in results["rows"]:
        line = (
            f"{row['family']:8}{row['threads']:>8}{row['stream_tokens_per_s']:>14,.0f}"
            f"{row['bare_tokens_per_s']:>12,.0f}{row['ratio']:>7.2f}{row['ahead']:>7.2f}{row['filled']:>8.1%}"
            f"{row['first_example_s']:>10.2f}"
        )
        if "rss_bytes" in row:
            line += f"{row['rss_bytes'][-1] / 1e6:>9,.0f}{row['rss_growth_bytes'] / 1e6:>12,.1f}"
        lines.append(line + ("" if row["good"] else "  misses its goal"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
