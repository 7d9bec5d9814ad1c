"""Peers side by side: the same shards, the same language model, one process each.

    python -m scripts.bench_peers [--input 'DIR/*.warc.wet.gz'] [--rounds 3]

The function is datatrove's: WET in, one copy of each paragraph kept over all shards, language
identified on each page, Parquet out; no page filter, no language model, nothing dropped for its
language. Each peer has a virtual environment of its own below `out/bench/peers`, made once by pip
from the package registry (650 MB in all). One that cannot be installed or run says why in its row.

CPU seconds are those of the process and of all that it waited for, user and system. In a round all
take turns, so that a busy machine is busy for all; the least of the rounds counts. What a run on
a single page costs (imports, models) stands apart as "start-up": MB/s without it is what a crawl
of many shards comes near to. Peak memory is that of the process itself; what it starts is small.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from models.errors import UserError

TARGET_MB_PER_S = 6.0
_WATCH_S = 0.05
_REPOSITORY = Path(__file__).resolve().parent.parent
_RECIPE = """\
name = "peers"

[pages]
min_chars = 0
max_unreadable = 1.0

[language]
threshold = 0.0
"""
_PAGE = "One page, a line long: what is paid before the first shard is paid for this one too.\n"


class Peer(NamedTuple):
    """pip: the arguments of each `pip install`; program: runs in the environment they make."""

    name: str
    version: str
    pip: tuple[tuple[str, ...], ...]
    program: str
    differs: str


GRISTMILL = Peer(
    name="Gristmill",
    version=metadata.version("gristmill"),
    pip=(),
    program="",
    differs="reads the shards twice; Parquet by language, with the place in the WET file and a "
    "manifest; zstd level 3",
)
PEERS = (
    Peer(
        name="datatrove",
        version="0.10.1",
        # What its extras `io` and `processing` hold and these steps load: no datasets, no spaCy.
        pip=(
            (
                "datatrove==0.10.1",
                "faust-cchardet",
                "fasteners",
                "fasttext-numpy2-wheel",
                "orjson",
                "pyarrow",
                "python-magic",
                "regex",
                "tokenizers",
                "warcio",
                "xxhash<4",
                "zstandard",
            ),
        ),
        program="peer_datatrove.py",
        differs="reads the shards twice; its key also drops accents and vowel signs; lines that "
        "are empty under it all stay; pages that libmagic takes for no text go; snappy",
    ),
    Peer(
        name="dolma",
        version="1.2.1",
        # Its own list of dependencies cannot be installed together; these are the ones it loads.
        pip=(
            ("--no-deps", "dolma==1.2.1", "fasttext-wheel==0.9.2"),
            (
                "anyascii",
                "charset-normalizer",
                "fastwarc",
                "msgspec",
                "necessary>=0.4.3",
                "nltk",
                "numpy<2",
                "omegaconf",
                "platformdirs",
                "pyyaml",
                "python-dotenv",
                "requests",
                "rich",
                "smart-open==7.1.0",
                "tokenizers<=0.19.1",
                "tqdm",
                "uniseg",
                "url-normalize",
                "w3lib",
                "zstandard",
            ),
        ),
        program="peer_dolma.py",
        differs="has no WET reader, so FastWARC makes its JSON lines first (cost included); "
        "paragraphs compared as they are, by a Bloom filter; language of the lower-cased page "
        "before dedup; JSON lines, not Parquet",
    ),
)


class Usage(NamedTuple):
    """What one run took: CPU with all children, resident memory of the process itself."""

    cpu_s: float
    peak_rss_bytes: int


class Result(NamedTuple):
    """One row: the best of the rounds, and what came out; failed: why there is none."""

    usage: Usage = Usage(0.0, 0)
    startup: Usage = Usage(0.0, 0)
    pages: int = 0
    paragraphs: int = 0
    failed: str = ""


class RunFailed(Exception):
    """A program ended with an error; its message is one line."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints one table. Exit code 1 when it is Gristmill that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--input", default="../shared/data/wet_docs/*.warc.wet.gz")
    parser.add_argument("--model", default="../shared/data/models/lid.176.ftz")
    parser.add_argument("--work", default="out/bench/peers", help="folder for all that it makes")
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args(arguments)
    work, model = Path(parsed.work).resolve(), Path(parsed.model).resolve()
    if not model.is_file():
        raise UserError(f"no language model at '{parsed.model}': give a fastText model by --model")
    shards = lay_out(parsed.input, work)
    results = {GRISTMILL: Result()} | {peer: _installed(peer, work) for peer in PEERS}
    for number in range(parsed.rounds):
        for peer, best in results.items():
            if best.failed:
                continue
            print(f"round {number + 1} of {parsed.rounds}: {peer.name}", file=sys.stderr)
            try:
                one_page = run(peer, work / "one_page", model, work)
                found = run(peer, shards, model, work)
            except RunFailed as error:
                results[peer] = Result(failed=str(error))
                continue
            results[peer] = Result(_best(best.usage, found), _best(best.startup, one_page))
    for peer, result in results.items():
        if not result.failed:
            pages, paragraphs = count(texts(work / peer.name / "run" / "out"))
            results[peer] = result._replace(pages=pages, paragraphs=paragraphs)
    wet_bytes = sum(map(_uncompressed_bytes, shards.iterdir()))
    print("\n".join(table(results, wet_bytes)))
    return 1 if results[GRISTMILL].failed else 0


def lay_out(pattern: str, work: Path) -> Path:
    """Folders `input` of links to the files of `pattern`, and `one_page`; returns the first."""
    paths = sorted(glob.glob(pattern))  # noqa: PTH207 - a whole pattern
    if not paths:
        raise UserError(f"no file matches '{pattern}': give WET files with --input")
    names = [Path(path).name for path in paths]
    if len(set(names)) < len(names):
        raise UserError(f"'{pattern}' matches two files of one name: give files of different names")
    folder = _empty(work / "input")
    for path in paths:
        (folder / Path(path).name).symlink_to(Path(path).resolve())
    one_page = _empty(work / "one_page") / "page.warc.wet.gz"
    one_page.write_bytes(gzip.compress(one_page_wet()))
    return folder


def one_page_wet() -> bytes:
    """The smallest WET file that every reader takes."""
    body = _PAGE.encode()
    head = (
        "WARC/1.0\r\n"
        "WARC-Type: conversion\r\n"
        "WARC-Target-URI: https://example.org/\r\n"
        "WARC-Date: 2026-04-01T00:00:00Z\r\n"
        "WARC-Record-ID: <urn:uuid:00000000-0000-4000-8000-000000000000>\r\n"
        "Content-Type: text/plain\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body + b"\r\n\r\n"


def _installed(peer: Peer, work: Path) -> Result:
    """An empty result, once the peer's environment stands; or why it does not."""
    environment = work / peer.name / "env"
    ready = environment / "ready.json"
    wanted = json.dumps(peer.pip)
    if ready.exists() and ready.read_text() == wanted:
        return Result()
    print(f"installing {peer.name} {peer.version}", file=sys.stderr)
    shutil.rmtree(environment, ignore_errors=True)
    environment.parent.mkdir(parents=True, exist_ok=True)
    log = work / peer.name / "install.log"
    pip: list[str | Path] = [environment / "bin" / "python", "-m", "pip", "install"]
    begin = time.monotonic()
    try:
        execute([sys.executable, "-m", "venv", environment], log, os.environ)
        for packages in peer.pip:
            execute([*pip, *packages], log, os.environ)
    except RunFailed as error:
        return Result(failed=f"not installed: {error}")
    ready.write_text(wanted)
    size = sum(file.lstat().st_size for file in environment.rglob("*") if not file.is_dir())
    print(f"  {size / 1e6:,.0f} MB in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return Result()


def run(peer: Peer, shards: Path, model: Path, work: Path) -> Usage:
    """Mine all files of `shards` with one worker, into `work/NAME/run/out`."""
    place = _empty(work / peer.name / "run")
    settings = {
        "HF_HUB_OFFLINE": "1",
        "NLTK_DATA": str(work / "nltk"),
        "RUST_LOG": "error",
        "TQDM_DISABLE": "1",
    }
    if peer.pip:
        # dolma asks the network for this model when it is not there, and then does not use it.
        (work / "nltk" / "tokenizers" / "punkt").mkdir(parents=True, exist_ok=True)
        program = Path(__file__).parent / peer.program
        words: list[str | Path] = [work / peer.name / "env" / "bin" / "python", program]
        words += ["--shards", shards, "--model", model, "--work", place]
    else:
        recipe = place / "peers.toml"
        recipe.write_text(_RECIPE)
        words = [sys.executable, "-m", "scripts.cli", "mine", recipe, "--output", place / "out"]
        words += ["--input", shards / "*", "--set", f"language.model={model}", "--workers", "1"]
    return execute(words, work / peer.name / "run.log", os.environ | settings)


def execute(words: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> Usage:
    """Run a program to its end, its output into `log`; raises RunFailed with its last line."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=_REPOSITORY,
            env=environment,
        ) as process,
    ):
        ended, peaks = threading.Event(), [0]
        watch = threading.Thread(target=_watch_peak, args=(process.pid, ended, peaks))
        watch.start()
        try:
            # Not process.wait(): only this tells what the process and its children took.
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        finally:
            ended.set()
            watch.join()
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise RunFailed(f"exit {process.returncode}: {last[:200]} ({log})")
    return Usage(used.ru_utime + used.ru_stime, max(peaks))


def _watch_peak(pid: int, ended: threading.Event, peaks: list[int]) -> None:
    """Append the peak of a process, again and again.

    What `os.wait4` gives counts this process too, whose memory the other has until its program
    begins, and the peak that a program ends with can be lower than one before: Linux forgets
    pages that were given back in some ways (seen: 494 MB and later 375 MB of one run).
    """
    while not ended.wait(_WATCH_S):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            peaks += [
                int(line.split()[1]) * 1024
                for line in status.split("\n")
                if line.startswith("VmHWM:")
            ]


def texts(folder: Path) -> Iterator[str]:
    """The text of each page below `folder`, from Parquet files or zstd JSON lines."""
    # Here, not above: what this process has in memory is the floor of every peak that it measures.
    import pyarrow.parquet as pq  # noqa: PLC0415
    import zstandard  # noqa: PLC0415

    for path in sorted(folder.rglob("*.parquet")):
        yield from pq.ParquetFile(path).read(columns=["text"])["text"].to_pylist()
    for path in sorted(folder.rglob("*.zst")):
        with zstandard.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def count(pages: Iterator[str]) -> tuple[int, int]:
    """How many pages have text, and how many lines of them do."""
    paragraphs = [sum(bool(line.strip()) for line in text.split("\n")) for text in pages]
    return sum(map(bool, paragraphs)), sum(paragraphs)


def table(results: Mapping[Peer, Result], wet_bytes: int) -> list[str]:
    """The lines to print: one row each, what each does differently, and the ratios."""
    lines = [
        f"{'':18}{'CPU s':>8}{'start-up':>10}{'MB/s':>7}{'without':>9}{'peak RSS':>10}"
        f"{'pages':>9}{'paragraphs':>12}",
        f"{'':18}{'':8}{'CPU s':>10}{'':7}{'start-up':>9}{'MiB':>10}{'out':>9}{'out':>12}",
    ]
    speeds = {}
    for peer, result in results.items():
        name = f"{peer.name} {peer.version}"
        if result.failed:
            lines.append(f"{name:18}{result.failed}")
            continue
        whole, startup = result.usage.cpu_s, result.startup.cpu_s
        speeds[peer.name] = wet_bytes / 1e6 / (whole - startup)
        lines.append(
            f"{name:18}{whole:8.1f}{startup:10.1f}{wet_bytes / 1e6 / whole:7.2f}"
            f"{speeds[peer.name]:9.2f}{result.usage.peak_rss_bytes / 2**20:10,.0f}"
            f"{result.pages:9,}{result.paragraphs:12,}"
        )
    lines.append(f"\n{wet_bytes:,} bytes of WET; MB (1e6 bytes) of it for each CPU second")
    lines += [f"{peer.name}: {peer.differs}" for peer in results]
    ours = speeds.pop(GRISTMILL.name, None)
    if ours is not None:
        reached = "reached" if ours >= TARGET_MB_PER_S else "missed"
        lines.append(f"Gristmill at {TARGET_MB_PER_S:g} MB/s without start-up: {reached}")
        lines += [f"Gristmill / {name}: {ours / speed:.1f}" for name, speed in speeds.items()]
    return lines


def _best(best: Usage, found: Usage) -> Usage:
    """Least CPU time, highest peak. A time of 0 is none yet."""
    cpu_s = min(best.cpu_s, found.cpu_s) if best.cpu_s else found.cpu_s
    return Usage(cpu_s, max(best.peak_rss_bytes, found.peak_rss_bytes))


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _uncompressed_bytes(path: Path) -> int:
    with gzip.open(path) as file:
        size = 0
        while block := file.read(1 << 20):
            size += len(block)
        return size


if __name__ == "__main__":
    sys.exit(main())
