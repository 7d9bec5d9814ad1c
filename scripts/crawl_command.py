"""`gristmill crawl`: resolve a crawl, write its manifest, fetch its files."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from models.errors import Fault, UserError
from pipelines.crawl import CrawlManifest, resolve
from pipelines.crawl_download import download

CRAWL_FILE = "crawl.json"
_PROGRESS_S = 2.0


def crawl(arguments: argparse.Namespace) -> int:
    """Run the verb; exit code 1 when a file could not be fetched."""
    manifest = resolve(
        arguments.source,
        base_url=arguments.base_url,
        num_shards=arguments.num_shards,
        segments_per_shard=arguments.segments_per_shard,
        sample=arguments.sample,
        seed=arguments.seed,
    )
    folder = Path(arguments.output)
    failures = 0
    if arguments.download is not None:
        result = download(manifest, folder, count=arguments.download or None, progress=_Progress())
        manifest = result.manifest
        for path in result.cut:
            print(f"warning: '{path}' ends inside a gzip member", file=sys.stderr)
        for failure in result.failures:
            print(f"not fetched: '{failure.path}': {failure.reason}", file=sys.stderr)
        failures = len(result.failures)
        if failures:
            print("run the same command again to fetch what is missing", file=sys.stderr)
    if not manifest.files:
        raise Fault("no file could be fetched")
    target = folder / CRAWL_FILE
    try:
        manifest.write(target)
    except OSError as error:
        raise UserError(
            f"output '{folder}' cannot be written ({error.strerror or error}): "
            "give a folder that you may write to with --output"
        ) from None
    print(manifest.to_json() if arguments.json else _summary(manifest, target))
    return int(failures > 0)


def _summary(manifest: CrawlManifest, target: Path) -> str:
    known = sum(file.bytes or 0 for file in manifest.files)
    size = f", {known:,} bytes" if known else ""
    return (
        f"{manifest.name}: {len(manifest.files):,} WET files in {manifest.num_shards:,} shards"
        f"{size}\n{target}\nmine it:  gristmill mine default --input {target} --output out/mined"
    )


class _Progress:
    """One line on stderr every few seconds, and one for each file that is complete."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def __call__(
        self, number: int, count: int, received_bytes: int, total_bytes: int | None
    ) -> None:
        now = time.monotonic()
        if received_bytes != total_bytes and now - self._last_s < _PROGRESS_S:
            return
        self._last_s = now
        of = f" of {total_bytes / 1e6:,.1f}" if total_bytes else ""
        print(f"file {number}/{count}: {received_bytes / 1e6:,.1f}{of} MB", file=sys.stderr)
