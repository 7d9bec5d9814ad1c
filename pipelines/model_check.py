"""Whether the models in use are still those that the run began with.

The plan holds the SHA-256 of each, which is part of every staging name. Hashing gigabytes again
in each worker would cost more than it gives, so a file is hashed again only where size, time of
change or inode differ from what the plan saw: after a replacement, or on another machine.
"""

from __future__ import annotations

import functools

from models import files
from models.errors import Fault
from pipelines.plan import ModelFile, Plan, file_state


def check_models(plan: Plan) -> None:
    """Raises Fault when a model file on this machine is not the planned one any more."""
    models = [plan.language_id]
    for pair in plan.language_models.values():
        models += [pair.tokenizer, pair.ngram]
    for model in models:
        if files.is_local(model.path):
            _check(model)


def _check(model: ModelFile) -> None:
    state = file_state(model.path)
    if state == model.state or _sha256(model.path, state) == model.sha256:
        return
    raise Fault(
        f"model '{model.path}' changed during the run, its SHA-256 is not {model.sha256} any "
        "more: put it back, or begin anew with --restart"
    )


@functools.lru_cache(maxsize=256)
def _sha256(path: str, state: tuple[int, ...]) -> str:
    """state: only part of the cache's key, so that a replaced file is read anew."""
    return files.sha256_file(path)
