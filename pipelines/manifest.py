"""The manifest of a mined crawl: what came in, what went out, and why the rest did not.

`manifest.json` is the only truth about an output folder: a file that it does not list is no part
of the crawl. It holds no times and no paths of this machine, so the same work gives the same
bytes. Readers of other stages take its path as their input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from models import files
from models.errors import UserError

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class InputEntry(_Model):
    """One WET file. name: the path below the folder that all inputs share; the Parquet column
    `warc_file` has it. failed: why it could not be read at all, or "" """

    name: str
    bytes: int
    xxh3: str
    shard: int
    failed: str = ""


class ModelEntry(_Model):
    """One model in use."""

    name: str
    sha256: str


class OutputEntry(_Model):
    """One Parquet file. path: relative to the manifest. text_bytes: UTF-8 bytes of `text`."""

    path: str
    language: str
    bucket: str
    rows: int
    chars: int
    text_bytes: int
    bytes: int
    xxh3: str

    @field_validator("path")
    @classmethod
    def _confined(cls, path: str) -> str:
        if path.startswith("/") or "\\" in path or "://" in path or ".." in path.split("/"):
            raise ValueError(f"'{path}' leads out of the manifest's folder")
        return path


class LossEntry(_Model):
    """Bytes of a WET file, as stored, that could not be read."""

    name: str
    offset: int
    bytes: int
    reason: str


class RecordCounts(_Model):
    """WARC records. read: pages delivered. lost: pages known to be lost in damage.
    length_corrected: delivered although Content-Length was wrong."""

    read: int
    not_pages: int
    lost: int
    length_corrected: int


class PageCounts(_Model):
    """read = written + the sum of dropped."""

    read: int
    written: int
    dropped: dict[str, int]


class ParagraphCounts(_Model):
    """read = kept + the sum of dropped; `page_*`: went with their page."""

    read: int
    kept: int
    dropped: dict[str, int]


class KeyCounts(_Model):
    """Paragraph keys compared by dedup, once for each dedup group. repeated: on two pages or
    more, or in the index."""

    distinct: int
    repeated: int


class LanguageCounts(_Model):
    """One language of the output."""

    pages: int
    chars: int
    buckets: dict[str, int]


class Counts(_Model):
    """The funnel."""

    records: RecordCounts
    pages: PageCounts
    paragraphs: ParagraphCounts
    keys: KeyCounts
    by_language: dict[str, LanguageCounts]


class Manifest(_Model):
    """See the module. index_in, index_out: XXH3 of the listings (`index.json`) of the dedup
    indexes that were read and written."""

    schema_version: int
    tool_version: str
    recipe: dict[str, Any]
    recipe_digest: str
    inputs: tuple[InputEntry, ...]
    models: tuple[ModelEntry, ...]
    cutoffs: dict[str, tuple[float, float]]
    counts: Counts
    losses: tuple[LossEntry, ...]
    outputs: tuple[OutputEntry, ...]
    drops: OutputEntry | None = None
    index_in: str | None = None
    index_out: str | None = None

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    def faults(self) -> list[str]:
        """Sums that do not add up; empty for every manifest that a finished run wrote."""
        counts = self.counts
        pages, paragraphs = counts.pages, counts.paragraphs
        languages = counts.by_language.values()
        claims = {
            "pages.read = records.read": (pages.read, counts.records.read),
            "pages.read = written + dropped": (
                pages.read,
                pages.written + sum(pages.dropped.values()),
            ),
            "paragraphs.read = kept + dropped": (
                paragraphs.read,
                paragraphs.kept + sum(paragraphs.dropped.values()),
            ),
            "pages.written = rows of all outputs": (
                pages.written,
                sum(output.rows for output in self.outputs),
            ),
            "pages.written = pages of all languages": (
                pages.written,
                sum(language.pages for language in languages),
            ),
            "pages of all languages = pages of all buckets": (
                sum(language.pages for language in languages),
                sum(sum(language.buckets.values()) for language in languages),
            ),
        }
        return [f"{claim}: {a:,} is not {b:,}" for claim, (a, b) in claims.items() if a != b]


def read_manifest(path: str) -> Manifest:
    """Read a manifest, or the one in folder `path`. Raises UserError."""
    name = path if path.endswith(".json") else files.join(path, MANIFEST_FILE)
    try:
        return Manifest.model_validate_json(files.read_bytes(name))
    except OSError as error:
        raise UserError(f"no manifest at '{name}' ({error.__class__.__name__})") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"'{name}' is no mining manifest: {place}: {first['msg']}") from None


def damaged_outputs(manifest: Manifest, folder: str) -> list[str]:
    """Files of the manifest that are missing or differ from their digest; one line each."""
    wrong = []
    for output in [*manifest.outputs, *([manifest.drops] if manifest.drops else [])]:
        try:
            if files.xxh3_file(files.join(folder, output.path)) != output.xxh3:
                wrong.append(f"'{output.path}' differs from its digest")
        except OSError as error:
            wrong.append(f"'{output.path}' cannot be read: {error.strerror or error}")
    return wrong


def total(counters: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sum of counters by key, keys sorted, zeros left out."""
    sums: Counter[str] = Counter()
    for counter in counters:
        sums.update(counter)
    return {key: sums[key] for key in sorted(sums) if sums[key]}


def by_language(outputs: Sequence[OutputEntry]) -> dict[str, LanguageCounts]:
    """Pages, characters and buckets of each language."""
    found: dict[str, LanguageCounts] = {}
    for language in sorted({output.language for output in outputs}):
        of_language = [output for output in outputs if output.language == language]
        found[language] = LanguageCounts(
            pages=sum(output.rows for output in of_language),
            chars=sum(output.chars for output in of_language),
            buckets=total({output.bucket: output.rows} for output in of_language),
        )
    return found


if __name__ == "__main__":
    print(json.dumps(Manifest.model_json_schema(), indent=1))
