"""The reference of a proxy: a finished run, whose losses say how far each domain can be learned.

It must have read the same crawls with the same tokenizer, have kept the same pages out, and have
seen tokens in the same context; its size and its mixture are its own affair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from models import files
from models.errors import UserError
from training import run_manifest
from training.networks import build_network
from training.objectives import Objective
from training.prepare import Prepared
from training.recipe import TrainRecipe
from training.run_folder import MODEL_FOLDER
from training.run_manifest import MANIFEST_FILE, RunManifest

_EXAMPLES = ("sequence_length", "cross_document_attention")
"""Of a decoder's examples; the other fields are of ALBERT's."""


def checked_reference(folder: str, recipe: TrainRecipe, prepared: Prepared) -> str:
    """SHA-256 of the manifest of the reference in `folder`, which fits the run of `recipe`.

    Raises UserError, which names the first thing that does not.
    """
    try:
        manifest = run_manifest.read(folder)
    except UserError as error:
        raise UserError(
            f"reference '{folder}': {error}: finish it with `gristmill train`, or name another one"
        ) from None
    wrong = _difference(manifest, recipe, prepared)
    if wrong is not None:
        raise UserError(f"reference '{folder}' {wrong}")
    return files.sha256_file(Path(folder) / MANIFEST_FILE)


def load_reference(folder: str, vocab_size: int, device: torch.device) -> Objective:
    """The reference's network on `device`, in evaluation mode, its weights without gradient.

    Raises UserError when a file of it is not the one that its manifest says.
    """
    manifest = run_manifest.read(folder)
    for entry in manifest.files:
        path = Path(folder) / entry.path
        if not path.is_file() or files.sha256_file(path) != entry.sha256:
            raise UserError(
                f"reference '{folder}': '{entry.path}' is missing or differs from its manifest: "
                "export the run's last checkpoint again, or train it again"
            )
    try:
        recipe = TrainRecipe.model_validate(
            {
                "model": {
                    **manifest.recipe["model"],
                    "init": str(Path(folder) / MODEL_FOLDER),
                    "dropout": 0.0,
                },
                "examples": manifest.recipe["examples"],
            }
        )
    except ValidationError:
        raise UserError(
            f"reference '{folder}' was trained by another version of Gristmill: train it again"
        ) from None
    objective = Objective(build_network(recipe, vocab_size)).to(device).eval()
    return objective.requires_grad_(False)


def _difference(manifest: RunManifest, recipe: TrainRecipe, prepared: Prepared) -> str | None:
    there: dict[str, Any] = manifest.recipe
    family = _field(there, "model", "family")
    if family != "decoder":
        return f"is of model.family = '{family}': a proxy needs the token losses of a 'decoder'"
    own = prepared.identity
    if manifest.tokenizer.sha256 != own["tokenizer_sha256"]:
        return (
            f"has a tokenizer of the SHA-256 '{manifest.tokenizer.sha256[:12]}…', model.tokenizer "
            f"is '{own['tokenizer_sha256'][:12]}…': give both the same one"
        )
    current = recipe.published()
    for section, name in (("data", "held_out"), *(("examples", name) for name in _EXAMPLES)):
        before, now = _field(there, section, name), current[section][name]
        if before != now:
            return (
                f"was trained with {section}.{name} = '{before}', not '{now}': set "
                f"{section}.{name}={_written(before)}, or train another reference"
            )
    sources = sorted(source.manifest_sha256 for source in manifest.sources)
    wanted = sorted(source["manifest_sha256"] for source in own["sources"])
    if sources != wanted:
        return (
            f"was trained on the crawls with the SHA-256 {_listed(sources)}, data.manifests have "
            f"{_listed(wanted)}: give both the same ones"
        )
    return None


def _field(recipe: dict[str, Any], section: str, name: str) -> Any:
    return recipe.get(section, {}).get(name)


def _written(value: Any) -> str:
    """As a recipe writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(digests: list[str]) -> str:
    return ", ".join(f"'{digest[:12]}…'" for digest in digests)
