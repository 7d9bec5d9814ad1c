"""The sections of the report on losses and provenance."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from pipelines.manifest import Manifest
from pipelines.recipe import MineRecipe
from pipelines.report import size
from pipelines.report_parts import Column, Section, Table, counted, visible

_ROWS = 300
_MODELS = 9


def losses(manifest: Manifest) -> Section:
    """What could not be read of the inputs."""
    failed = [entry for entry in manifest.inputs if entry.failed]
    places_lost = manifest.losses
    if not failed and not places_lost:
        return Section("losses", "Losses", ("Every byte of every input was read.",))
    places, lost_bytes = Counter[str](), Counter[str]()
    for loss in places_lost:
        places[loss.reason] += 1
        lost_bytes[loss.reason] += loss.bytes
    tables = []
    if failed:
        tables.append(_listing(
            "Inputs that could not be read", (Column("file", "name"), Column("reason")),
            ((visible(entry.name), visible(entry.failed)) for entry in failed), len(failed),
        ))  # fmt: skip
    if places_lost:
        tables.append(Table(
            "Lost bytes by reason",
            (Column("reason", "name"), Column("places", "number"), Column("bytes", "number")),
            tuple((visible(reason), f"{count:,}", f"{lost_bytes[reason]:,}")
                  for reason, count in sorted(places.items(), key=lambda it: (-it[1], it[0]))),
        ))  # fmt: skip
        tables.append(_listing(
            "Places",
            (Column("file", "name"), Column("offset", "number"), Column("bytes", "number"),
             Column("reason")),
            ((visible(loss.name), f"{loss.offset:,}", f"{loss.bytes:,}", visible(loss.reason))
             for loss in places_lost), len(places_lost), folded=True,
        ))  # fmt: skip
    intro = (
        f"Not readable: {counted(len(failed), 'whole input')}; "
        f"{counted(len(places_lost), 'place')} in other inputs, "
        f"{size(sum(lost_bytes.values()))} as stored. "
        f"Pages known to be lost: {manifest.counts.records.lost:,}."
    )
    return Section("losses", "Losses", (intro,), tables=tuple(tables))


def provenance(manifest: Manifest) -> Section:
    """What the output was made from, and with what."""
    facts = [
        ("tool version", manifest.tool_version),
        ("recipe", str(manifest.recipe.get("name", ""))),
        ("recipe digest", manifest.recipe_digest),
        ("manifest schema", str(manifest.schema_version)),
        ("index read", manifest.index_in or "none"),
        ("index written", manifest.index_out or "none"),
    ]
    listed = [*manifest.outputs, *([manifest.drops] if manifest.drops else [])]
    code = Column("digest (XXH3)", "code")
    return Section(
        "provenance",
        "Provenance",
        (
            "Inputs, recipe and models settle every byte of the output. "
            "gristmill inspect --verify checks the files against these digests.",
        ),
        tables=(
            Table("Run", (Column("what", "name"), Column("value", "code")),
                  tuple((name, visible(value)) for name, value in facts)),
            Table(f"Models ({len(manifest.models):,})",
                  (Column("model", "name"), Column("SHA-256", "code")),
                  tuple((visible(model.name), model.sha256) for model in manifest.models),
                  folded=len(manifest.models) > _MODELS),
            Table("Recipe, every setting",
                  (Column("setting", "name"), Column("value", "code"), Column("meaning")),
                  tuple(setting_rows(MineRecipe, manifest.recipe)), folded=True),
            _listing(
                "Inputs",
                (Column("file", "name"), Column("bytes", "number"), Column("shard", "number"),
                 code),
                ((visible(entry.name), f"{entry.bytes:,}", f"{entry.shard:,}",
                  entry.xxh3 or "not read") for entry in manifest.inputs),
                len(manifest.inputs), folded=True,
            ),
            _listing(
                "Outputs",
                (Column("file", "name"), Column("rows", "number"), Column("bytes", "number"),
                 code),
                ((visible(output.path), f"{output.rows:,}", f"{output.bytes:,}", output.xxh3)
                 for output in listed),
                len(listed), folded=True,
            ),
        ),
    )  # fmt: skip


def _listing(
    caption: str,
    columns: tuple[Column, ...],
    rows: Iterator[tuple[str, ...]],
    count: int,
    *,
    folded: bool = False,
) -> Table:
    """A table of at most `_ROWS` of `count` rows, which says so."""
    shown = tuple(row for row, _ in zip(rows, range(_ROWS), strict=False))
    note = f"The first {_ROWS:,} of {count:,}; manifest.json lists all." if count > _ROWS else ""
    return Table(f"{caption} ({count:,})", columns, shown, folded, note)


def setting_rows(
    model: type[BaseModel], recipe: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Name, value and meaning of each setting of a `recipe`, of which `model` has the sections."""
    for name, value in recipe.items():
        if not isinstance(value, dict):
            yield visible(name), _setting_text(value), _description(model, name)
    for section, values in recipe.items():
        if isinstance(values, dict):
            field = model.model_fields.get(section)
            inner = field.annotation if field else None
            for name, value in values.items():
                words = _description(inner, name)
                yield visible(f"{section}.{name}"), _setting_text(value), words


def _setting_text(value: Any) -> str:
    return "not set" if value is None else visible(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )  # fmt: skip


def _description(model: Any, name: str) -> str:
    if isinstance(model, type) and issubclass(model, BaseModel) and name in model.model_fields:
        return model.model_fields[name].description or ""
    return ""
