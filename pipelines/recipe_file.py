"""Recipes as TOML files: reading, `extends`, `--set`, and a mistake told in one line.

Each stage of the chain has its own model of a recipe (a `Section` of `Section`s) and its own
shipped recipes: mining's lie in `data_manifests/`, another stage's in a folder of its name there.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from models.errors import UserError

Stage = Literal["mine", "train", "mix", "evaluate", "swarm"]
_NOT_RECIPES = ("models.toml",)


class Section(BaseModel):
    """Base of every recipe and of its sections: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if (
            isinstance(value, bool)
            and cls.model_fields[str(info.field_name)].annotation is not bool
        ):
            raise ValueError(f"{info.field_name} = '{str(value).lower()}' is not true or false")
        return value


Recipe = TypeVar("Recipe", bound=Section)


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], pydantic.BeforeValidator(_as_tuple)]


def shipped(stage: Stage) -> list[str]:
    """Names of the recipes of `stage` that come with Gristmill."""
    return sorted(
        item.name.removesuffix(".toml")
        for item in _folder(stage).iterdir()
        if item.name.endswith(".toml") and item.name not in _NOT_RECIPES
    )


def load(model: type[Recipe], stage: Stage, name_or_path: str, overrides: Sequence[str]) -> Recipe:
    """Read a recipe by path or shipped name, apply `a.b=value` overrides, validate.

    Raises UserError with one line: the field, the value, what is valid.
    """
    return validated(model, _read_tree(stage, name_or_path, seen=()), name_or_path, overrides)


def validated(
    model: type[Recipe], tree: dict[str, Any], name: str, overrides: Sequence[str]
) -> Recipe:
    """The recipe that `tree` (settings by section) holds, with `a.b=value` overrides.

    Changes `tree`. Raises UserError with one line, under the recipe's `name`.
    """
    for override in overrides:
        _apply_override(tree, override)
    try:
        return model.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UserError(f"recipe '{name}': {_one_line(error, model)}") from None


def _folder(stage: Stage) -> Traversable:
    folder = resources.files("data_manifests")
    return folder if stage == "mine" else folder.joinpath(stage)


def _read_tree(stage: Stage, name_or_path: str, seen: tuple[str, ...]) -> dict[str, Any]:
    if name_or_path in seen:
        raise UserError(f"recipe '{name_or_path}' extends itself: remove its 'extends' line")
    path = Path(name_or_path)
    if path.suffix == ".toml" and path.is_file():
        text = path.read_bytes()
    elif name_or_path in shipped(stage):
        text = _folder(stage).joinpath(f"{name_or_path}.toml").read_bytes()
    else:
        by = f"recipe '{seen[-1]}' extends '{name_or_path}', but there is " if seen else ""
        raise UserError(
            f"{by}no recipe '{name_or_path}': give the path of a .toml file, "
            f"or one of {', '.join(map(repr, shipped(stage)))}"
        )
    try:
        tree = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"recipe '{name_or_path}' is not valid TOML: {error}") from None
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"recipe '{name_or_path}': extends = '{base}' must be one recipe's name")
    beside = path.parent / base
    if base not in shipped(stage) and beside.is_file():
        base = str(beside)
    return _merge(_read_tree(stage, base, (*seen, name_or_path)), tree)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both and old is not None else value
    return merged


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set '{override}' is not of the form section.field=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word or path is text
    *sections, field = key.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"--set '{override}': '{section}' is a value, not a section")
    tree[field] = value


def _one_line(error: pydantic.ValidationError, model: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        valid = _fields_at(model, first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), valid, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        return f"unknown key '{place}': {hint}valid here: {', '.join(valid)}"
    if first["type"] == "value_error":
        return str(first["msg"]).removeprefix("Value error, ")
    return f"{place} = '{first['input']}' is not valid: {first['msg']}"


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return sorted(model.model_fields)
