"""Domains: the mined pages, divided by language, bucket, host group and source, and their weights.

Everything here comes from the manifests alone: starting costs the same for any size of corpus.
One case needs the shards: how many characters a host group has is in no manifest, and is counted
when weights are asked for that depend on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import numpy as np

from models import files
from models.errors import DamagedInput, UserError
from pipelines.manifest import MANIFEST_FILE, SCHEMA_VERSION, Manifest, read_manifest
from training.recipe import Data
from training.row_groups import RowGroups

REST = "other"
"""Host group of the pages that no pattern matches."""
HostPatterns = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One Parquet file of mined pages, as its manifest states it.

    bytes: of the file; text_bytes: of its text as UTF-8; source: index of its manifest.
    """

    url: str
    rows: int
    chars: int
    bytes: int
    text_bytes: int
    language: str
    bucket: str
    source: int


@dataclass(frozen=True, slots=True)
class Source:
    """One mined crawl. path: of its manifest; digest: SHA-256 of that file's bytes."""

    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class HostGroup:
    """The pages of one host group; `groups` has all of them, since the first match wins."""

    name: str
    groups: HostPatterns

    def holds(self, hosts: Sequence[str]) -> np.ndarray:
        """Which of `hosts` belong to this group: bool (hosts,)."""
        return np.fromiter(
            (group_of(host, self.groups) == self.name for host in hosts), bool, len(hosts)
        )


@dataclass(frozen=True, slots=True)
class Domain:
    """Pages that share one weight: all rows of `shards`, or those of one host group in them."""

    name: str
    shards: tuple[Shard, ...]
    hosts: HostGroup | None = None

    @property
    def rows(self) -> int:
        """Rows of the shards, those of other host groups included."""
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a run trains on."""

    domains: tuple[Domain, ...]
    sources: tuple[Source, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the domains, in order."""
        return tuple(domain.name for domain in self.domains)


@lru_cache(maxsize=1 << 16)
def group_of(host: str, groups: HostPatterns) -> str:
    """Name of the first group with a pattern that matches `host`, or 'other'."""
    for name, patterns in groups:
        if any(fnmatchcase(host, pattern) for pattern in patterns):
            return name
    return REST


def load_corpus(data: Data) -> Corpus:
    """Read the manifests, check that their shards are there, and divide them into domains.

    Domains are in the order of their names, which join source, language, bucket and host group
    (those that `data.by` names) with '/'; all pages are one domain, 'all', when it names none.
    Raises UserError.
    """
    _check_host_groups(data)
    if not data.manifests:
        raise UserError(
            "data.manifests is empty: name the folder of a crawl that `gristmill mine` wrote"
        )
    read = [_read_source(path) for path in data.manifests]
    sources = tuple(source for source, _ in read)
    for number, source in enumerate(sources):
        first = [one.digest for one in sources].index(source.digest)
        if first < number:
            raise UserError(
                f"data.manifests: '{data.manifests[number]}' is the same crawl as "
                f"'{data.manifests[first]}': name it once"
            )
    shards = [
        Shard(
            url=files.join(source.path.rsplit("/", 1)[0], output.path),
            rows=output.rows,
            chars=output.chars,
            bytes=output.bytes,
            text_bytes=output.text_bytes,
            language=output.language,
            bucket=output.bucket,
            source=number,
        )
        for number, (source, manifest) in enumerate(read)
        for output in manifest.outputs
        if output.rows
    ]
    chosen = _chosen(shards, data)
    _check_files(chosen)
    return Corpus(_divide(chosen, data, _source_names(data.manifests)), sources)


def mixture(
    corpus: Corpus, weights: Mapping[str, float] | str, *, setting: str = "data.weights"
) -> np.ndarray:
    """Shares of the examples by domain: float64 (domains,), sum 1.

    weights: 'proportional' (to characters), 'uniform', a mapping, or the path of a JSON file:
    {"weights": {domain: share}}, {domain: share}, or {"train_domain_weights": {domain: share}}
    as DoReMi's public code writes. Shares need not sum to 1. setting: what the user gave them as.
    Raises UserError.
    """
    if weights == "uniform":
        found = [1.0] * len(corpus.domains)
    elif weights == "proportional":
        found = characters(corpus)
    elif isinstance(weights, str):
        found = _in_order(corpus, _read_weights(weights, setting), f"weights file '{weights}'")
    else:
        found = _in_order(corpus, weights, setting)
    total = math.fsum(found)
    if not total:
        raise UserError(f"{setting} = '{weights}': all domains come to '0': give one more")
    return np.array(found) / total


def _check_host_groups(data: Data) -> None:
    if ("host" in data.by) != bool(data.host_groups):
        has, lacks = ("by = 'host'", "data.host_groups") if "host" in data.by else (
            "data.host_groups", "'host' in data.by")  # fmt: skip
        raise UserError(f"{has} without {lacks}: give both or none")
    if REST in data.host_groups:
        raise UserError(
            f"data.host_groups has a group '{REST}': that is the name of the rest, choose another"
        )
    for name, patterns in data.host_groups.items():
        if not patterns or not all(patterns):
            raise UserError(f"data.host_groups: '{name}' has no pattern: give it one or more")


def _read_source(path: str) -> tuple[Source, Manifest]:
    name = path if path.endswith(".json") else files.join(path, MANIFEST_FILE)
    manifest = read_manifest(name)
    if manifest.schema_version != SCHEMA_VERSION:
        raise UserError(
            f"'{name}' has schema version '{manifest.schema_version}', and this program reads "
            f"'{SCHEMA_VERSION}': mine it again, or use the Gristmill that wrote it"
        )
    if "/" not in name:
        name = f"./{name}"
    return Source(name, hashlib.sha256(files.read_bytes(name)).hexdigest()), manifest


def _chosen(shards: Sequence[Shard], data: Data) -> list[Shard]:
    languages = {shard.language for shard in shards}
    buckets = {shard.bucket for shard in shards}
    for field, wanted, there in (
        ("languages", data.languages, languages),
        ("buckets", data.buckets, buckets),
    ):
        for value in wanted:
            if value not in there:
                raise UserError(
                    f"data.{field}: the crawl has no '{value}': it has {', '.join(sorted(there))}"
                )
    chosen = [
        shard
        for shard in shards
        if shard.language in (data.languages or languages)
        and shard.bucket in (data.buckets or buckets)
    ]
    if not shards:
        raise UserError(f"data.manifests: no page in '{', '.join(data.manifests)}'")
    if not chosen:
        raise UserError(
            f"no page is in data.languages = '{', '.join(data.languages)}' and "
            f"data.buckets = '{', '.join(data.buckets)}' at once: leave one of them out"
        )
    return chosen


def _check_files(shards: Sequence[Shard]) -> None:
    sizes = files.sizes_bytes([shard.url for shard in shards])
    for shard in shards:
        if shard.url not in sizes:
            wrong = "is missing"
        elif sizes[shard.url] not in (None, shard.bytes):
            wrong = f"has {sizes[shard.url]:,} bytes, not the {shard.bytes:,} of its manifest"
        else:
            continue
        raise UserError(
            f"shard '{shard.url}' {wrong}: copy the crawl again, or repeat `gristmill mine`"
        )


def _source_names(paths: Sequence[str]) -> list[str]:
    """The last part of each folder; as many parts as it takes to tell sources apart."""
    parts = [path.removesuffix(MANIFEST_FILE).rstrip("/").split("/") for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            break
    return names


def _divide(shards: Sequence[Shard], data: Data, source_names: Sequence[str]) -> tuple[Domain, ...]:
    groups = tuple(
        (name, tuple(pattern.lower() for pattern in patterns))
        for name, patterns in data.host_groups.items()
    )
    hosts = [HostGroup(name, groups) for name in (*data.host_groups, REST)] if groups else [None]
    found: dict[str, tuple[HostGroup | None, list[Shard]]] = {}
    for shard in shards:
        parts = {
            "source": source_names[shard.source],
            "language": shard.language,
            "bucket": shard.bucket,
        }
        for group in hosts:
            names = [parts[key] for key in parts if key in data.by]
            name = "/".join([*names, group.name] if group else names) or "all"
            found.setdefault(name, (group, []))[1].append(shard)
    return tuple(
        Domain(name, tuple(inside), group) for name, (group, inside) in sorted(found.items())
    )


def characters(corpus: Corpus) -> list[float]:
    """Characters of each domain; those of host groups are counted, each shard once."""
    by_host: dict[str, Counter[str]] = {}
    row_groups = RowGroups()
    found = []
    for domain in corpus.domains:
        if domain.hosts is None:
            found.append(float(sum(shard.chars for shard in domain.shards)))
            continue
        for shard in domain.shards:
            if shard.url not in by_host:
                by_host[shard.url] = _chars_by_group(shard, domain.hosts.groups, row_groups)
        found.append(float(sum(by_host[shard.url][domain.hosts.name] for shard in domain.shards)))
    return found


def _chars_by_group(shard: Shard, groups: HostPatterns, row_groups: RowGroups) -> Counter[str]:
    found: Counter[str] = Counter()
    for number in range(len(row_groups.row_counts(shard) or ())):
        # What is damaged is passed over here, and named by the stream.
        with contextlib.suppress(DamagedInput):
            table = row_groups.read(shard, number, ["host", "chars"])
            hosts, chars = table["host"].to_pylist(), table["chars"].to_pylist()
            for host, count in zip(hosts, chars, strict=True):
                found[group_of(host, groups)] += count
    return found


def _read_weights(path: str, setting: str) -> dict[str, Any]:
    try:
        tree = json.loads(files.read_bytes(path))
    except OSError as error:
        raise UserError(
            f"{setting} = '{path}' is not 'proportional', not 'uniform', and no file that can be "
            f"read ({error.strerror or error.__class__.__name__})"
        ) from None
    except ValueError as error:
        raise UserError(f"weights file '{path}' is no JSON: {error}") from None
    if isinstance(tree, dict):
        for key in ("weights", "train_domain_weights"):
            if isinstance(tree.get(key), dict):
                tree = tree[key]
                break
    if not isinstance(tree, dict):
        raise UserError(
            f"weights file '{path}' holds no weights: it needs {{\"weights\": {{domain: share}}}}"
        )
    return tree


def _in_order(corpus: Corpus, weights: Mapping[str, Any], where: str) -> list[float]:
    unknown = [name for name in weights if name not in corpus.names]
    if unknown:
        raise UserError(
            f"{where}: no domain '{unknown[0]}': the domains are {_listed(corpus.names)}"
        )
    missing = [name for name in corpus.names if name not in weights]
    if missing:
        raise UserError(
            f"{where}: no weight for {_listed(missing)}: give each domain one (0: never read)"
        )
    for name, value in weights.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise UserError(f"{where}: '{name}' = '{value}' is no weight: give a number from 0 up")
    return [float(weights[name]) for name in corpus.names]


def _listed(names: Iterable[str], most: int = 20) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more
