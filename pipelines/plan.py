"""The plan of one mining run: inputs, models and sizes, settled and checked before any work.

The plan is a JSON file in the staging folder. Beam moves its path, never its contents, so the
graph has the same size for four WET files and for ninety thousand.
"""

from __future__ import annotations

import functools
import json
import os
import posixpath
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from models import files
from models.errors import UserError
from models.language_id import LanguageIdentifier
from models.languages import check_codes
from models.ngram import find_language_models
from models.registry import load_registry
from pipelines.buckets import Cutoffs, read_cutoffs
from pipelines.crawl import CrawlManifest, shard_ranges
from pipelines.dedup import MAX_RANGES
from pipelines.index import check_index
from pipelines.recipe import MineRecipe

FORMAT = 1
"""Part of every staging name: raised when a change of code changes staging bytes."""
_KEYS_PER_STORED_BYTE = 0.03  # a gzip WET file of 70 MB holds about two million paragraphs
_KEYS_PER_RANGE = 4_000_000


class InputFile(BaseModel):
    """One WET file. group: the dedup group it belongs to."""

    model_config = ConfigDict(frozen=True)
    index: int
    name: str
    url: str
    bytes: int
    shard: int
    group: int


class ModelFile(BaseModel):
    """One model file in use. `name` shows in the manifest, `path` is on this machine."""

    model_config = ConfigDict(frozen=True)
    name: str
    path: str
    sha256: str


class LanguageModel(BaseModel):
    """The pair that scores one language."""

    model_config = ConfigDict(frozen=True)
    tokenizer: ModelFile
    ngram: ModelFile


class Plan(BaseModel):
    """All that the passes need."""

    model_config = ConfigDict(frozen=True)
    recipe: MineRecipe
    inputs: tuple[InputFile, ...]
    language_id: ModelFile
    language_models: dict[str, LanguageModel]
    cutoffs: dict[str, tuple[float, float]] | None
    ranges: int
    staging: str

    def digest(self) -> str:
        """XXH3 of recipe and models: what, with the inputs, settles every output byte."""
        settled = {
            "format": FORMAT,
            "recipe": self.recipe.digest(),
            "models": self.model_digests(),
            "cutoffs": self.cutoffs,
        }
        return files.xxh3_bytes(json.dumps(settled, sort_keys=True).encode())

    def model_digests(self) -> list[str]:
        """SHA-256 of every model in use, in a fixed order."""
        digests = [self.language_id.sha256]
        for language in sorted(self.language_models):
            model = self.language_models[language]
            digests += [model.tokenizer.sha256, model.ngram.sha256]
        return digests

    def write(self) -> str:
        """Write to the staging folder; gives the path."""
        text = self.model_dump_json()
        path = files.join(self.staging, f"plan-{files.xxh3_bytes(text.encode())[:16]}.json")
        files.write_atomic(path, text)
        return path


@functools.lru_cache(maxsize=2)
def read_plan(path: str) -> Plan:
    """The plan at `path`; one copy for each process."""
    return Plan.model_validate_json(files.read_bytes(path))


def make_plan(recipe: MineRecipe) -> Plan:
    """Resolve inputs and models of `recipe`, and check all of them.

    Raises UserError for a pattern without match, a missing or wrong model, an unusable index.
    """
    if not recipe.output.directory:
        raise UserError("no output folder: set output.directory, or give --output DIR")
    inputs = _inputs(recipe)
    stored_bytes = sum(file.bytes for file in inputs)
    check_index(recipe)
    identifier = load_registry().find(recipe.language.model)
    produced = LanguageIdentifier(os.fspath(identifier)).languages()
    check_codes((*recipe.language.allow, *recipe.language.deny), produced=produced)
    return Plan(
        recipe=recipe,
        inputs=inputs,
        language_id=_model_file(os.fspath(identifier)),
        language_models=_language_models(recipe),
        cutoffs=_cutoffs(recipe),
        ranges=recipe.dedup.ranges or _ranges(stored_bytes),
        staging=recipe.staging_directory(),
    )


def _inputs(recipe: MineRecipe) -> tuple[InputFile, ...]:
    if not recipe.input.paths:
        raise UserError("no input: set input.paths, or give --input PATH_OR_GLOB")
    found: list[tuple[str, int | None]] = []
    for pattern in recipe.input.paths:
        found += _expand(pattern)
    urls = [url for url, _ in found]
    repeated = {url for url in urls if urls.count(url) > 1} if len(set(urls)) < len(urls) else ()
    if repeated:
        raise UserError(f"input '{min(repeated)}' is given twice: remove it once from input.paths")
    shards = [index if shard is None else shard for index, (_, shard) in enumerate(found)]
    if recipe.input.num_shards is not None:
        for shard, (first, last) in enumerate(
            shard_ranges(len(found), recipe.input.num_shards, -1)
        ):
            shards[first:last] = [shard] * (last - first)
    shards_in_group = {
        "crawl": max(shards) + 1,
        "window": recipe.dedup.window_shards,
        "shard": 1,
    }[recipe.dedup.scope]
    return tuple(
        InputFile(
            index=index,
            name=name,
            url=url,
            bytes=_size(url),
            shard=shard,
            group=shard // shards_in_group,
        )
        for index, (name, url, shard) in enumerate(zip(_names(urls), urls, shards, strict=True))
    )


def _expand(pattern: str) -> list[tuple[str, int | None]]:
    """WET files of one entry of input.paths, each with its shard where a manifest says so."""
    if pattern.endswith(".json"):
        return [(file.url, file.shard) for file in CrawlManifest.read(pattern).files]
    try:
        system, path = files.filesystem(pattern)
        if any(c in pattern for c in "*?["):
            matches = sorted(system.glob(path))
            if files.is_local(pattern) and not pattern.startswith("/"):
                matches = [os.path.relpath(match) for match in matches]
        else:
            matches = [path] if system.exists(path) else []
    except (ImportError, ValueError) as error:
        raise UserError(f"input '{pattern}' cannot be opened: {error}") from None
    if not matches:
        raise UserError(f"input '{pattern}' matches no file: check the path in input.paths")
    if files.is_local(pattern):
        return [(match if "*" in pattern or "?" in pattern or "[" in pattern else pattern, None)
                for match in matches]  # fmt: skip
    return [(system.unstrip_protocol(match), None) for match in matches]


def _size(url: str) -> int:
    """Stored bytes, 0 when the file cannot be asked: the hash pass then names the failure."""
    try:
        return files.size_bytes(url)
    except OSError:
        return 0


def _names(urls: Sequence[str]) -> list[str]:
    """What tells the inputs apart: each path below the folder that all have in common."""
    parts = [url.replace(os.sep, "/").split("/") for url in urls]
    shared = 0
    for level in zip(*(path[:-1] for path in parts), strict=False):
        if len(set(level)) > 1:
            break
        shared += 1
    return ["/".join(path[shared:]) for path in parts]


def _model_file(path: str, name: str | None = None) -> ModelFile:
    return ModelFile(
        name=name or posixpath.basename(path), path=path, sha256=files.sha256_file(path)
    )


def _language_models(recipe: MineRecipe) -> dict[str, LanguageModel]:
    if recipe.quality.models is None:
        return {}
    found = find_language_models(recipe.quality.models, profile=recipe.quality.profile)
    return {
        language: LanguageModel(
            tokenizer=_model_file(os.fspath(pair.tokenizer)),
            ngram=_model_file(os.fspath(pair.model)),
        )
        for language, pair in sorted(found.items())
    }


def _cutoffs(recipe: MineRecipe) -> dict[str, tuple[float, float]] | None:
    if recipe.quality.cutoffs == "run":
        return None
    cutoffs: Cutoffs = read_cutoffs(recipe.quality.cutoffs, recipe.quality.percentiles)
    return dict(cutoffs)


def _ranges(stored_bytes: int) -> int:
    wanted = stored_bytes * _KEYS_PER_STORED_BYTE / _KEYS_PER_RANGE
    ranges = 1
    while ranges < wanted and ranges < MAX_RANGES:
        ranges *= 2
    return ranges
