"""What a run is: all that its loss depends on, by value or by digest.

A checkpoint goes on only under the identity that it was saved under. What learns in another way
than by the plain loss (`training.learning`) adds to it, under `proxy`. How the work is done (ranks,
strategy, device, microbatches, compilation, log, checkpoints, evaluation, readers) does not belong
to it: see `TrainRecipe.published`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import files
from models.errors import UserError
from models.tokenizer import tokenizer_digest
from pipelines.manifest import read_manifest
from training.recipe import TrainRecipe

if TYPE_CHECKING:
    from training.domains import Corpus

_ABSENT = "not set"
_WEIGHTS_PATTERN = "*.safetensors"


def identity(recipe: TrainRecipe, corpus: Corpus, weights: Sequence[float]) -> dict[str, Any]:
    """The identity of a run, as JSON can hold it. Raises UserError, OSError.

    weights: of `corpus.domains`, in their order.
    """
    settings = recipe.published()
    del settings["name"]
    return {
        "recipe_digest": recipe.digest(),
        "recipe": settings,
        "tokenizer_sha256": tokenizer_digest(recipe.model.tokenizer),
        "sources": [
            {
                "manifest_sha256": source.digest,
                "recipe_digest": read_manifest(source.path).recipe_digest,
            }
            for source in corpus.sources
        ],
        "domains": {
            name: float(weight) for name, weight in zip(corpus.names, weights, strict=True)
        },
        "init_sha256": _init_digests(recipe.model.init),
    }


def check(saved: dict[str, Any], current: dict[str, Any], directory: str) -> None:
    """Raises UserError, which names the first difference, when a run is not the saved one."""
    found = _proxy_difference(saved, current) or _difference(saved, current)
    if found is not None:
        raise UserError(
            f"'{directory}' holds another run: {found}: set it back; or go on from that run's "
            f"weights (gristmill export '{directory}' --output MODEL, then here --set "
            "model.init=MODEL and another --output); or throw it away with --restart"
        )


def _proxy_difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    if ("proxy" in saved) != ("proxy" in current):
        return "a proxy's of DoReMi" if "proxy" in saved else "one that is no proxy"
    name, before, now = _first(saved.get("proxy", {}), current.get("proxy", {}))
    if name == "reference_sha256":
        return f"the reference's manifest has the SHA-256 '{now[:12]}…', there '{before[:12]}…'"
    return f"the proxy's {name} = '{now}' is '{before}' there" if name else None


def _difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    name, before, now = _first(_flat(saved["recipe"]), _flat(current["recipe"]))
    if name:
        return f"{name} = '{now}' is '{before}' there"
    if saved["tokenizer_sha256"] != current["tokenizer_sha256"]:
        return (
            f"model.tokenizer has the SHA-256 '{current['tokenizer_sha256'][:12]}…', "
            f"there '{saved['tokenizer_sha256'][:12]}…'"
        )
    if saved["sources"] != current["sources"]:
        return f"data.manifests have the SHA-256 {_digests(current)}, there {_digests(saved)}"
    name, before, now = _first(saved["domains"], current["domains"])
    if name:
        return f"the weight of domain '{name}' is '{now}', there '{before}'"
    if saved["init_sha256"] != current["init_sha256"]:
        return "model.init has other weights"
    return None if saved == current else "it was saved by another version of Gristmill"


def _first(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, str, str]:
    """The first name with another value, and both values; "" when there is none."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old != new:
            return name, _ABSENT if old is None else str(old), _ABSENT if new is None else str(new)
    return "", "", ""


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    """Fields by their names in a recipe, as `schedule.steps`."""
    return {
        f"{section}.{name}": value
        for section, fields in recipe.items()
        for name, value in fields.items()
    }


def _digests(of: dict[str, Any]) -> str:
    return ", ".join(f"'{source['manifest_sha256'][:12]}…'" for source in of["sources"])


def _init_digests(folder: str | None) -> dict[str, str] | None:
    """SHA-256 of the weights that training starts from, by file name."""
    if folder is None:
        return None
    return {
        path.name: files.sha256_file(path) for path in sorted(Path(folder).glob(_WEIGHTS_PATTERN))
    }
