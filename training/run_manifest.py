"""The manifest of a training run: what went in, what was done, what came out.

`manifest.json` stands last, in the run's folder, and holds no times and no paths of this machine:
the same run gives the same bytes. Its sources are the mining manifests' digests, and it has the
digests of the exported model: one chain from WET files to weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from models import files
from models.errors import UserError
from training import folders
from training.recipe import TrainRecipe

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceEntry(_Model):
    """One mined crawl: SHA-256 of its manifest.json, and the digest of the mining recipe."""

    manifest_sha256: str
    recipe_digest: str


class TokenizerEntry(_Model):
    """sha256: of tokenizer.json. profile: of its normaliser, where it names one."""

    sha256: str
    profile: str | None
    vocab_size: int


class Counts(_Model):
    """examples, tokens: that the steps saw (tokens: positions without padding). skipped_steps:
    gradients were not finite. pages: read by the stream, and left out, by reason. damaged: row
    groups that could not be read, by name."""

    steps: int
    examples: int
    tokens: int
    skipped_steps: int
    pages: dict[str, int]
    damaged: tuple[str, ...]


class TermEntry(_Model):
    """One term of the objective: mean over `labels`, in nats, with its standard error."""

    loss: float
    standard_error: float | None
    accuracy: float
    accuracy_standard_error: float | None
    labels: int


class HeldOutEntry(_Model):
    """Held-out losses of one domain, or of all together."""

    examples: int
    terms: dict[str, TermEntry]
    unigram_loss: float | None
    perplexity: float | None
    bits_per_byte: float | None


class HeldOut(_Model):
    """After the last step."""

    total: HeldOutEntry
    domains: dict[str, HeldOutEntry]


class ProxyEntry(_Model):
    """How a proxy weighed its domains (`training.doremi`). reference_sha256: of the manifest.json
    of the reference run. weights: mean over the steps, by domain."""

    method: str
    excess: str
    step_size: float
    smoothing: float
    reference_sha256: str
    weights: dict[str, float]


class FileEntry(_Model):
    """One file of the exported model. path: relative to the manifest."""

    path: str
    bytes: int
    sha256: str


class RunManifest(_Model):
    """See the module. recipe_digest: XXH3 of what can change the loss. init: SHA-256 of the
    weights that the run began with, by file. domains: shares of the examples. proxy: null for a
    run that is not a proxy. held_out: null for a run without held-out pages."""

    schema_version: int
    tool_version: str
    recipe: dict[str, Any]
    recipe_digest: str
    sources: tuple[SourceEntry, ...]
    tokenizer: TokenizerEntry
    init: dict[str, str] | None
    domains: dict[str, float]
    proxy: ProxyEntry | None = None
    counts: Counts
    held_out: HeldOut | None
    files: tuple[FileEntry, ...]

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def write(
    directory: str | os.PathLike[str],
    *,
    recipe: TrainRecipe,
    identity: Mapping[str, Any],
    profile: str | None,
    vocab_size: int,
    steps: int,
    counters: Mapping[str, int],
    pages: Mapping[str, int],
    damaged: Sequence[str],
    held_out: Mapping[str, Any],
    proxy_weights: Mapping[str, float] | None = None,
    model: str = "model",
) -> RunManifest:
    """Write `directory`/manifest.json, over the exported model in `directory`/`model`.

    identity: of `training.identity`. counters: examples, tokens, skipped_steps. pages, damaged:
    of all ranks' streams. held_out: `total` and `domains` as `DomainLoss.to_json` gives them, or
    empty. proxy_weights: what a proxy found, by domain. Raises OSError.
    """
    folder = files.local_path(directory)
    folders.sweep(folder)
    manifest = RunManifest(
        schema_version=SCHEMA_VERSION,
        tool_version=version("gristmill"),
        recipe=recipe.published(),
        recipe_digest=identity["recipe_digest"],
        sources=tuple(SourceEntry(**source) for source in identity["sources"]),
        tokenizer=TokenizerEntry(
            sha256=identity["tokenizer_sha256"], profile=profile, vocab_size=vocab_size
        ),
        init=identity["init_sha256"],
        domains=identity["domains"],
        proxy=None
        if proxy_weights is None
        else ProxyEntry(**identity["proxy"], weights=dict(proxy_weights)),
        counts=Counts(
            steps=steps,
            examples=counters["examples"],
            tokens=counters["tokens"],
            skipped_steps=counters["skipped_steps"],
            pages=dict(sorted(pages.items())),
            damaged=tuple(sorted(damaged)),
        ),
        held_out=HeldOut.model_validate(held_out) if held_out else None,
        files=tuple(
            FileEntry(
                path=str(path.relative_to(folder)),
                bytes=path.stat().st_size,
                sha256=files.sha256_file(path),
            )
            for path in sorted((folder / model).iterdir())
        ),
    )
    files.write_atomic(folder / MANIFEST_FILE, manifest.to_json())
    return manifest


def read(directory: str | os.PathLike[str]) -> RunManifest:
    """The manifest of a finished run. Raises UserError."""
    place = Path(directory) / MANIFEST_FILE
    try:
        return RunManifest.model_validate_json(place.read_bytes())
    except OSError as error:
        raise UserError(
            f"no manifest at '{place}' ({error.__class__.__name__}): the run is not finished"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"'{place}' is no manifest of a run: {where}: {first['msg']}") from None


if __name__ == "__main__":
    print(json.dumps(RunManifest.model_json_schema(), indent=1))
