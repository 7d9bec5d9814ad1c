"""What a mix asks of the mixing law: settings checked, small runs drawn, the law fitted.

The law itself is `training.mixing_law`, which is imported only where a law is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from models import files
from models.errors import UserError
from training import run_manifest
from training.mix.recipe import MixRecipe
from training.mix.results import held_out_losses
from training.mix.stages import MixRun, Weights

if TYPE_CHECKING:
    from training.mix.inputs import MixInputs
    from training.mixing_law import RunTable

TABLE_FILE = "runs.csv"
_AT_LIMIT = 1e-3


def checked_table(
    recipe: MixRecipe, names: Sequence[str], compared: Sequence[str]
) -> tuple[RunTable | None, str | None]:
    """The user's table of runs and its SHA-256, where there is one; checks the law's settings.

    compared: the domains with held-out pages, of `names`. Raises UserError.
    """
    from training import mixing_law  # noqa: PLC0415
    from training.mixing_regressors import has_lightgbm  # noqa: PLC0415

    regress = recipe.regress
    table, digest, targets = None, None, tuple(compared)
    if regress.table is not None:
        table = mixing_law.read_table(regress.table)
        digest, targets = files.sha256_file(Path(regress.table)), table.targets
        if set(table.domains) != set(names):
            other = sorted(set(table.domains) ^ set(names))[0]
            raise UserError(
                f"regress.table = '{regress.table}' has other domains than the data, as "
                f"'{other}': it needs {', '.join(map(repr, names))}"
            )
    elif regress.runs < mixing_law.parameters(len(names)):
        wanted = mixing_law.parameters(len(names))
        raise UserError(
            f"regress.runs = '{regress.runs}' are fewer than the {wanted} parameters of a law for "
            f"{len(names)} domains: give {wanted} or more, best "
            f"{mixing_law.RUNS_PER_PARAMETER * wanted} or more"
        )
    if regress.target not in ("mean", "worst", *targets):
        raise UserError(
            f"regress.target = '{regress.target}': choose mean, worst, {', '.join(targets)}"
        )
    if regress.regressor == "lightgbm" and not has_lightgbm():
        raise UserError(
            "regress.regressor = 'lightgbm' is not installed: pip install 'gristmill[mix]', or "
            "choose exponential, quadratic, linear"
        )
    runs = regress.runs if table is None else len(table.mixtures)
    if regress.folds > runs:
        raise UserError(
            f"regress.folds = '{regress.folds}' of {runs} runs: give {runs} or fewer, as 5"
        )
    return table, digest


def drawn_mixtures(recipe: MixRecipe, proportional: Weights) -> np.ndarray:
    """Mixtures of the small runs: (runs, domains)."""
    from training import mixing_law  # noqa: PLC0415

    return mixing_law.draw_mixtures(
        np.array(list(proportional.values())), recipe.regress.runs, seed=recipe.mix.seeds[0],
        concentration=recipe.regress.concentration,
    )  # fmt: skip


def weight_limits(
    recipe: MixRecipe, once: Mapping[str, float], tokens: int
) -> dict[str, float] | None:
    """Highest weight of each domain under regress.max_epochs; None: any weight is right.

    once: tokens of one pass over each domain. tokens: that a main run reads. Raises UserError.
    """
    most = recipe.regress.max_epochs
    if most is None:
        return None
    limits = {name: min(1.0, most * one / tokens) for name, one in once.items()}
    if math.fsum(limits.values()) < 1:
        there = math.fsum(once.values())
        raise UserError(
            f"regress.max_epochs = '{most:g}' leaves no mixture: the main run reads {tokens:,} "
            f"tokens, and all domains together have {there:,.0f}: give "
            f"{math.ceil(100 * tokens / there) / 100:.2f} or more, or a smaller mix.main_steps"
        )
    return limits


def fit_law(
    recipe: MixRecipe, inputs: MixInputs, small: Sequence[MixRun], directory: Path
) -> dict[str, Any]:
    """The law of the user's table or of the finished `small` runs, as JSON can hold it.

    Writes the table of the small runs. Raises UserError, OSError.
    """
    from training import mixing_law  # noqa: PLC0415

    regress = recipe.regress
    table, path = inputs.table, Path(regress.table or directory / TABLE_FILE)
    if table is None:
        table = _table_of(small, inputs)
        mixing_law.write_table(path, table)
    limits = inputs.limits
    law = mixing_law.fit(
        table, target=regress.target, regressor=regress.regressor, folds=regress.folds,
        bootstrap=regress.bootstrap, seed=recipe.mix.seeds[0],
        limits=None if limits is None else [limits[name] for name in table.domains],
    )  # fmt: skip
    found = law.to_json()
    held = [
        name
        for name, weight in zip(table.domains, law.best, strict=True)
        if limits is not None and limits[name] < 1 and weight >= limits[name] - _AT_LIMIT
    ]
    if held:
        found["notes"].append(f"regress.max_epochs holds down {', '.join(map(repr, held))}")
    return found | {"table_sha256": files.sha256_file(path)}


def _table_of(small: Sequence[MixRun], inputs: MixInputs) -> RunTable:
    from training import mixing_law  # noqa: PLC0415

    manifests = [run_manifest.read(run.folder) for run in small]
    losses = [held_out_losses(manifest) for manifest in manifests]
    return mixing_law.RunTable(
        domains=inputs.names,
        targets=inputs.compared,
        mixtures=np.array([[one.domains[name] for name in inputs.names] for one in manifests]),
        losses=np.array([[found[name] for name in inputs.compared] for found in losses]),
    )
