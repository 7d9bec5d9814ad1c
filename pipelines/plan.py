"""The plan of one mining run: inputs, models and sizes, settled and checked before any work.

The plan is a JSON file in the staging folder. Beam moves its path, never its contents, so the
graph has the same size for four WET files and for ninety thousand.
"""

from __future__ import annotations

import functools
import json
import os
import posixpath
from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from models import files
from models.errors import UserError
from models.language_id import LanguageIdentifier
from models.languages import check_codes
from models.ngram import check_model, find_language_models
from models.registry import load_registry
from models.remote_models import fetch_folder, local_model
from models.sentencepiece_lm import load_sentencepiece
from pipelines.buckets import Cutoffs, read_cutoffs
from pipelines.crawl import CrawlManifest, shard_ranges
from pipelines.dedup import MAX_RANGES
from pipelines.index import check_index, index_keys, index_xxh3
from pipelines.recipe import CUTOFFS_OF_RUN, MineRecipe

FORMAT = 2
"""Part of every staging name: raised when a change of code changes staging bytes."""
KEYS_PER_STORED_BYTE = 0.03  # a gzip WET file of 70 MB holds about two million paragraphs
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
    """One model file in use. `name` shows in the manifest, `path` may be a URL for workers."""

    model_config = ConfigDict(frozen=True)
    name: str
    path: str
    sha256: str
    state: tuple[int, ...] = ()

    def local(self) -> str:
        """The path of the file on this machine, fetched if need be. Raises OSError, Fault."""
        return local_model(self.path, self.sha256)


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
    index_in_xxh3: str | None
    ranges: int
    staging: str

    def digest(self) -> str:
        """XXH3 of recipe, models and index: what, with the inputs, settles every output byte."""
        settled = {
            "format": FORMAT,
            "recipe": self.recipe.digest(),
            "models": self.model_digests(),
            "cutoffs": self.cutoffs,
            "index_in": self.index_in_xxh3,
        }
        return files.xxh3_bytes(json.dumps(settled, sort_keys=True).encode())

    def model_digests(self) -> dict[str, list[str]]:
        """SHA-256 of every model in use, by language; "" is language identification."""
        digests = {
            language: [model.tokenizer.sha256, model.ngram.sha256]
            for language, model in sorted(self.language_models.items())
        }
        return {"": [self.language_id.sha256]} | digests

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
        index_in_xxh3=index_xxh3(recipe.dedup.index_in),
        ranges=recipe.dedup.ranges or _ranges(_keys_to_judge(recipe, inputs)),
        staging=recipe.staging_directory(),
    )


def _inputs(recipe: MineRecipe) -> tuple[InputFile, ...]:
    if not recipe.input.paths:
        raise UserError("no input: set input.paths, or give --input PATH_OR_GLOB")
    urls: list[str] = []
    shards: list[int] = []
    shards_so_far = 0
    remote = [e for e in recipe.input.paths if not (files.is_local(e) or e.endswith(".json"))]
    sizes = files.sizes_bytes(remote)
    for entry in recipe.input.paths:
        found, count = _expand(entry, sizes)
        urls += [url for url, _ in found]
        shards += [
            shards_so_far + (number if shard is None else shard)
            for number, (_, shard) in enumerate(found)
        ]
        shards_so_far += len(found) if count is None else count
    places = Counter(os.path.realpath(url) if files.is_local(url) else url for url in urls)
    place, times = places.most_common(1)[0]
    if times > 1:
        raise UserError(f"input '{place}' is given twice: remove it once from input.paths")
    sizes |= files.sizes_bytes([url for url in urls if url not in sizes])
    if recipe.input.num_shards is not None:
        for shard, (start, stop) in enumerate(shard_ranges(len(urls), recipe.input.num_shards, -1)):
            shards[start:stop] = [shard] * (stop - start)
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
            bytes=sizes.get(url) or 0,  # of one that cannot be asked, the hash pass names the fault
            shard=shard,
            group=shard // shards_in_group,
        )
        for index, (name, url, shard) in enumerate(zip(_names(urls), urls, shards, strict=True))
    )


Found = list[tuple[str, int | None]]


def _expand(entry: str, sizes: dict[str, int | None]) -> tuple[Found, int | None]:
    """WET files of one entry of input.paths; with shards, and their number, from a manifest.

    sizes: bytes of the remote files known so far; those that a listing tells are added.
    """
    if entry.endswith(".json"):
        manifest = CrawlManifest.read(entry)
        if not manifest.files:
            raise UserError(f"the crawl manifest '{entry}' lists no file: make it again")
        return [(file.url, file.shard) for file in manifest.files], manifest.num_shards
    try:
        matches = _local_matches(entry) if files.is_local(entry) else _remote_matches(entry, sizes)
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"input '{entry}' cannot be looked up: {error}") from None
    if not matches:
        raise UserError(f"input '{entry}' matches no file: check the path in input.paths")
    return [(match, None) for match in matches], None


def _local_matches(entry: str) -> list[str]:
    system, path = files.filesystem(entry)
    if entry and system.isfile(path):
        return [path]
    if system.isdir(path):
        raise UserError(_is_a_folder(entry))
    if not files.has_magic(entry):
        return []
    return sorted(match for match in system.glob(path) if system.isfile(match))


def _remote_matches(entry: str, sizes: dict[str, int | None]) -> list[str]:
    if entry in sizes:  # before any wildcard: a web address may hold a question mark
        return [entry]
    if files.has_magic(entry):
        found = files.glob_sizes_bytes(entry)
        sizes.update(found)
        return sorted(found)
    if files.exists(entry):
        raise UserError(_is_a_folder(entry))
    return []


def _is_a_folder(entry: str) -> str:
    return f"input '{entry}' is a folder: name the files in it, as '{entry}/*.gz'"


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
        name=name or posixpath.basename(path),
        path=path,
        state=file_state(path),
        sha256=files.sha256_file(path),
    )


def file_state(path: str) -> tuple[int, ...]:
    """Size, time of change and inode of a local file: what changes when it is replaced."""
    found = files.local_path(path).stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _language_models(recipe: MineRecipe) -> dict[str, LanguageModel]:
    folder = recipe.quality.models
    if folder is None:
        return {}
    local = folder if files.is_local(folder) else fetch_folder(folder)
    found = find_language_models(local, profile=recipe.quality.profile)
    if not found:
        raise UserError(
            f"quality.models = '{folder}' holds no model: it needs LANGUAGE.sp.model with "
            "LANGUAGE.arpa.bin (gristmill models train-ngram, or models fetch)"
        )
    for pair in found.values():
        load_sentencepiece(pair.tokenizer)
        check_model(pair.model)
    return {
        language: LanguageModel(
            # Where links lead: a folder of links to fetched models may be made anew meanwhile.
            tokenizer=_model_file(os.path.realpath(pair.tokenizer), pair.tokenizer.name),
            ngram=_model_file(os.path.realpath(pair.model), pair.model.name),
        )
        for language, pair in sorted(found.items())
    }


def _cutoffs(recipe: MineRecipe) -> dict[str, tuple[float, float]] | None:
    if recipe.quality.cutoffs == CUTOFFS_OF_RUN:
        return None
    cutoffs: Cutoffs = read_cutoffs(recipe.quality.cutoffs, recipe.quality.percentiles)
    return dict(cutoffs)


def _keys_to_judge(recipe: MineRecipe, inputs: Sequence[InputFile]) -> float:
    """About how many keys meet in the largest dedup group, with those of earlier crawls."""
    stored_bytes: Counter[int] = Counter()
    for file in inputs:
        stored_bytes[file.group] += file.bytes
    return max(stored_bytes.values()) * KEYS_PER_STORED_BYTE + index_keys(recipe.dedup.index_in)


def _ranges(keys: float) -> int:
    ranges = 1
    while ranges * _KEYS_PER_RANGE < keys and ranges < MAX_RANGES:
        ranges *= 2
    return ranges
