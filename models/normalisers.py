"""Normaliser profiles of the tokenizer: the table `normalisers.toml` as normalisers.

A profile has a name, which the tokenizer's folder states, and is also known again by its steps.
"""

from __future__ import annotations

import functools
import json
import tomllib
from importlib import resources
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers

from models.errors import UserError

DEFAULT_PROFILE = "default"
_OPERATIONS = {
    "nmt": normalizers.Nmt,
    "nfc": normalizers.NFC,
    "nfkc": normalizers.NFKC,
    "lowercase": normalizers.Lowercase,
    "strip": normalizers.Strip,
}


def profiles() -> dict[str, str]:
    """Every profile's name and what it is for."""
    return {name: profile["description"] for name, profile in _table()["profiles"].items()}


def normaliser(profile: str) -> Any:
    """The normaliser (`tokenizers.normalizers.Sequence`) of `profile`. Raises UserError."""
    table = _table()
    if profile not in table["profiles"]:
        raise UserError(
            f"no normaliser profile '{profile}': choose one of {', '.join(map(repr, profiles()))}"
        )
    steps = table["profiles"][profile]["steps"]
    return normalizers.Sequence([_step(step, table["replacements"]) for step in steps])


def profile_of(tokenizer: Tokenizer) -> str | None:
    """The profile whose steps `tokenizer` has, or None."""
    steps = json.loads(tokenizer.to_str())["normalizer"]
    return next((name for name, known in _serialised().items() if known == steps), None)


def _step(step: str | dict[str, str], replacements: dict[str, dict[str, str]]) -> Any:
    if isinstance(step, str) and step in _OPERATIONS:
        return _OPERATIONS[step]()
    replacement = replacements[step] if isinstance(step, str) else step
    return normalizers.Replace(Regex(replacement["find"]), replacement["put"])


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("models").joinpath("normalisers.toml").read_text("utf-8"))


@functools.cache
def _serialised() -> dict[str, Any]:
    return {name: json.loads(normaliser(name).__getstate__()) for name in profiles()}
