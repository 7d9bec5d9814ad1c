"""The stream of training examples beside the bare tokenizer on the same text, in one run.

    python -m scripts.bench_loader [--data MANIFEST ...] [--tokenizer DIR] [--json FILE]

A round: examples from the stream, collated to batches; then `encode_batch_fast` on exactly the
pages (and in the batches) that the stream tokenised in this round, reading the ids. A token is one
that the bare tokenizer makes of a page: no [CLS], [SEP] or [PAD] counts. The stream's time for a
token is that of its `encode`, by the tokens it read, plus all the rest, by the tokens it gave out;
`ahead` is read / given, near 1 in a steady state, which the warm-up goes on for. `ratio` = stream /
bare tokens per second, from the least time for a token of all rounds on each side: what others do
on the machine only adds to a time. CPU time of the process on one thread; wall time with the
tokenizer's own threads. A long run of one stream then shows whether memory grows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from models import files
from models.errors import UserError
from models.tokenizer import CLS_ID, SEP_ID, load_tokenizer, train_tokenizer
from training import domains
from training.batches import collate
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
_BATCH = 32
_STEADY = 0.1
"""In the warm-up's last round, tokens read and given out differ by so much at most."""


class Recording:
    """A builder that keeps the batches of pages it was given."""

    def __init__(self, builder: ExampleBuilder) -> None:
        self._builder = builder
        self.batches: list[list[str]] | None = None

        self.clock = time.process_time
        self.encode_s = 0.0
        """Time of tokenising, so far, by `clock`."""

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """Pass `texts` on, and keep them when they are asked for."""
        if self.batches is not None:
            self.batches.append(list(texts))
        begin = self.clock()
        found = self._builder.encode(texts)
        self.encode_s += self.clock() - begin
        return found

    def cut(self, pages: Sequence[Any], start: int, key: int, *, last: bool = False) -> Cut:
        """Pass on."""
        return self._builder.cut(pages, start, key, last=last)

    def build(self, plans: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Pass on."""
        return self._builder.build(plans)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints a table. Exit code 1 when a ratio or the memory misses its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", nargs="+", default=["out/docs"], help="mined crawls")
    parser.add_argument("--tokenizer", help="folder or tokenizer.json; none: a small one is made")
    parser.add_argument("--languages", nargs="+", default=[], help="none: all of the crawls")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[1, os.cpu_count() or 1],
        help="1: CPU time on one thread; another number: wall time with the tokenizer's threads",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-tokens", type=int, default=500_000)
    parser.add_argument(
        "--warm-up-tokens",
        type=int,
        default=10_000_000,
        help="most tokens before the rounds; it ends when as much is read as given out",
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
            files.write_atomic(parsed.json, json.dumps(results, indent=2) + "\n")
    return 0 if all(row["good"] for row in results["rows"]) else 1


def measure(parsed: argparse.Namespace) -> dict[str, Any]:
    """All figures; see `table` for what they are. Raises UserError."""
    settings = {
        "data": {"manifests": parsed.data, "languages": parsed.languages},
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
        for threads in sorted(set(parsed.threads)):
            os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"
            begin = time.perf_counter()
            with ExampleStream(corpus, weights, recorder, data=recipe.data) as stream:
                stream.take(1)
                first_s = corpus_s + time.perf_counter() - begin
                row = {"family": name, "threads": threads, "first_example_s": first_s}
                row["warm_up_tokens"] = warm_up(stream, recorder, tokenizer, parsed)
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
        "languages": parsed.languages,
        "sequence_length": parsed.sequence_length,
        "vocab_size": tokenizer.get_vocab_size(),
        "rows": rows,
    }


def warm_up(
    stream: ExampleStream, recorder: Recording, tokenizer: Tokenizer, parsed: argparse.Namespace
) -> int:
    """Go on until the stream reads as much as it gives out; the tokens that it took.

    At its start a stream opens a page for each lane and domain, and tokenises some ahead.
    """
    taken = 0
    while taken < parsed.warm_up_tokens:
        recorder.batches = []
        given = _take(stream, parsed.round_tokens)[1]
        batches, recorder.batches = recorder.batches, None
        taken += given
        if abs(_bare_tokens(tokenizer, batches) / given - 1) <= _STEADY:
            break
    return taken


def rounds(
    stream: ExampleStream,
    recorder: Recording,
    tokenizer: Tokenizer,
    parsed: argparse.Namespace,
    threads: int,
) -> dict[str, Any]:
    """Tokens/s of the stream and of the tokenizer alone, by turns."""
    clock = time.process_time if threads == 1 else time.perf_counter
    recorder.clock = clock
    costs: list[tuple[float, float, float]] = []
    read = given = positions = examples = 0
    for _ in range(parsed.rounds):
        recorder.batches, recorder.encode_s = [], 0.0
        begin = clock()
        count, tokens, filled = _take(stream, parsed.round_tokens)
        stream_s = clock() - begin
        batches, recorder.batches = recorder.batches, None
        begin = clock()
        bare = _bare_tokens(tokenizer, batches)
        bare_s = (clock() - begin) / bare
        encode_s = recorder.encode_s / bare
        costs.append((encode_s + (stream_s - recorder.encode_s) / tokens, bare_s, encode_s))
        read, given, positions, examples = (
            read + bare, given + tokens, positions + filled, examples + count,
        )  # fmt: skip
    stream_s, bare_s, encode_s = (min(one) for one in zip(*costs, strict=True))
    return {
        "stream_tokens_per_s": 1 / stream_s,
        "bare_tokens_per_s": 1 / bare_s,
        "ratio": bare_s / stream_s,
        "encode_ns_per_token": encode_s * 1e9,
        "ahead": read / given,
        "filled": positions / (examples * parsed.sequence_length),
    }


def _take(stream: ExampleStream, tokens: int) -> tuple[int, int, int]:
    """Batches of at least `tokens` text tokens: examples, text tokens, positions that are used."""
    examples = count = positions = 0
    while count < tokens:
        taken = stream.take(_BATCH)
        collate(taken)
        examples += len(taken)
        count += sum(map(_tokens, taken))
        positions += sum(len(example.arrays["input_ids"]) for example in taken)
    return examples, count, positions


def _bare_tokens(tokenizer: Tokenizer, batches: Sequence[list[str]]) -> int:
    count = 0
    for batch in batches:
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            count += len(encoding.ids)
    return count


def long_run(stream: ExampleStream, tokens: int) -> dict[str, Any]:
    """Resident memory after each tenth of `tokens`, and its growth from the second to the last."""
    if not tokens:
        return {}
    sizes = []
    for _ in range(_MEMORY_PARTS):
        count = 0
        while count < tokens / _MEMORY_PARTS:
            count += sum(map(_tokens, stream.take(_BATCH)))
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
