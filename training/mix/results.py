"""The manifest of a mix: which mixture was found, how, and what each mixture's model lost.

`manifest.json` stands last in the folder of a mix, after `weights.json`, and holds no times and no
paths of this machine: the same mix gives the same bytes. The runs that it names have manifests of
their own, whose digests stand here: one chain from WET files to the comparison of mixtures.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from models import files
from models.errors import UserError
from training.domains import Corpus, characters
from training.mix.identity import published, recipe_digest
from training.mix.recipe import MixRecipe
from training.run_manifest import MANIFEST_FILE, RunManifest, SourceEntry

WEIGHTS_FILE = "weights.json"
SCHEMA_VERSION = 1
BASELINES = ("proportional", "uniform")
TERM = "next_token"
_ROUNDING = 1e-9
_OWN_FIELDS = {"rounds", "runs", "specialists"}
"""No other manifest of Gristmill has all of these."""


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"'{value}' is no finite number")
    return value


def _share(value: float) -> float:
    if not -_ROUNDING <= value <= 1 + _ROUNDING:
        raise ValueError(f"'{value}' is no share: it is not between 0 and 1")
    return value


Number = Annotated[float, AfterValidator(_finite)]
Share = Annotated[float, AfterValidator(_share)]
Weights = dict[str, Share]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DomainEntry(_Model):
    """One domain. reference: of the first round's alpha_ref; proportional for a law. weight: what
    was found. spread: sample standard deviation over seeds, or of the law's bootstrap. epochs: how
    often the main run reads the domain under `weight`."""

    name: str
    chars: int
    proportional: Share
    reference: Share
    weight: Share
    spread: Number | None
    epochs: Number | None


class RoundEntry(_Model):
    """One round of DoReMi. weights: mean of alpha over the steps, by seed. change: largest
    difference between `mean` and `reference`. spread: the largest sample standard deviation over
    seeds."""

    number: int
    reference: Weights
    weights: Annotated[dict[str, Weights], Field(min_length=1)]
    mean: Weights
    change: Number
    spread: Number | None


class RunEntry(_Model):
    """One training run. run: its folder, relative to the manifest. losses: held-out, next token,
    in nats, of the domains that have held-out examples."""

    label: str
    seed: int
    run: str
    manifest_sha256: str
    size: str
    steps: int
    tokens: int
    weights: Weights
    losses: dict[str, Number]
    standard_errors: dict[str, Number | None]


class LawEntry(_Model):
    """What `training.mixing_law` found, as it gives it. best, spread: by domain, in the order of
    `domains`. scores: rank correlations in cross-validation, null where there is none. observed,
    fitted: the target in each small run, and what the law says of it from the others.
    table_sha256: of the table of runs, the mix's own or the user's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    domains: tuple[str, ...]
    best: tuple[Share, ...]
    spread: tuple[Number, ...]
    target: str = ""
    regressor: str = ""
    scores: dict[str, float | None] = {}
    predicted: float | None = None
    predicted_spread: float | None = None
    observed: tuple[Number, ...] = ()
    fitted: tuple[Number, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    table_sha256: str | None = None

    @field_validator("scores", "predicted", "predicted_spread", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """JSON has no NaN: what could not be computed is null."""
        if isinstance(value, dict):
            return {name: cls._known(one) for name, one in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    @model_validator(mode="after")
    def _lengths(self) -> LawEntry:
        if not len(self.domains) == len(self.best) == len(self.spread):
            raise ValueError("law: best and spread need a number for each of its domains")
        if len(self.observed) != len(self.fitted):
            raise ValueError("law: observed and fitted need a number for each run")
        return self


class MixManifest(_Model):
    """See the module. recipe_digest: XXH3 of what can change the result. stopped: why the rounds
    ended. runs: all but the specialists, which are trained on one domain alone. law: as
    `training.mixing_law` gives it. warnings: what the guards said, and the law's doubts."""

    schema_version: int
    tool_version: str
    name: str
    method: Literal["doremi", "regress"]
    recipe: dict[str, Any]
    recipe_digest: str
    tokenizer_sha256: str
    sources: tuple[SourceEntry, ...]
    domains: Annotated[tuple[DomainEntry, ...], Field(min_length=1)]
    rounds: tuple[RoundEntry, ...]
    stopped: str | None
    runs: tuple[RunEntry, ...]
    specialists: tuple[RunEntry, ...]
    law: LawEntry | None
    warnings: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the domains, in the order of the corpus."""
        return tuple(domain.name for domain in self.domains)

    @property
    def weights(self) -> dict[str, float]:
        """The mixture that was found."""
        return {domain.name: domain.weight for domain in self.domains}

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    @model_validator(mode="after")
    def _same_domains(self) -> MixManifest:
        names = set(self.names)
        if len(names) < len(self.domains):
            raise ValueError("domains: a name stands twice")
        for entry in self.rounds:
            where = f"round {entry.number}"
            for weights in (entry.reference, entry.mean, *entry.weights.values()):
                _check_names(where, names, weights, all_of_them=True)
        if self.method == "doremi" and not self.rounds:
            raise ValueError("rounds: DoReMi has at least one")
        if (self.method == "regress") != (self.law is not None):
            raise ValueError(
                f"law: method '{self.method}' " + ("lacks it" if self.law is None else "has none")
            )
        if self.law is not None:
            _check_names("law", names, dict.fromkeys(self.law.domains), all_of_them=True)
        runs = (*self.runs, *self.specialists)
        twice = [
            key for key, count in Counter((r.label, r.seed) for r in runs).items() if count > 1
        ]
        if twice:
            raise ValueError(f"run '{twice[0][0]}' of seed {twice[0][1]} stands twice")
        for run in runs:
            where = f"run '{run.label}' of seed {run.seed}"
            _check_names(where, names, run.weights, all_of_them=True)
            _check_names(where, names, run.losses, all_of_them=False)
            _check_names(where, names, run.standard_errors, all_of_them=False)
        return self


def _check_names(
    where: str, names: set[str], found: Mapping[str, object], *, all_of_them: bool
) -> None:
    unknown = sorted(set(found) - names)
    if unknown:
        raise ValueError(f"{where}: '{unknown[0]}' is none of the domains")
    missing = sorted(names - set(found))
    if missing and all_of_them:
        raise ValueError(f"{where}: nothing for the domain '{missing[0]}'")


def held_out_losses(manifest: RunManifest) -> dict[str, float]:
    """Loss of the next token by domain, of those that have held-out examples."""
    assert manifest.held_out is not None
    return {
        name: entry.terms[TERM].loss
        for name, entry in manifest.held_out.domains.items()
        if entry.terms
    }


def round_entry(
    number: int, reference: Mapping[str, float], weights: Mapping[int, Mapping[str, float]]
) -> RoundEntry:
    """A round from its reference mixture and the mean alpha of each seed's proxy."""
    by_seed = {str(seed): dict(found) for seed, found in weights.items()}
    mean = {name: statistics.fmean(found[name] for found in by_seed.values()) for name in reference}
    spread = _spread(by_seed.values(), tuple(reference))
    return RoundEntry(
        number=number,
        reference=dict(reference),
        weights=by_seed,
        mean=mean,
        change=max(abs(mean[name] - reference[name]) for name in reference),
        spread=None if spread is None else max(spread.values()),
    )


def build(
    recipe: MixRecipe,
    corpus: Corpus,
    *,
    tokenizer_sha256: str,
    sources: Iterable[SourceEntry | Mapping[str, str]],
    epochs: Mapping[str, float],
    rounds: Sequence[RoundEntry],
    runs: Sequence[RunEntry],
    specialists: Sequence[RunEntry],
    law: Mapping[str, Any] | None,
    warnings: Sequence[str],
    stopped: str | None,
) -> MixManifest:
    """The manifest of a finished mix, from the last round or from the law."""
    sizes = characters(corpus)
    total = math.fsum(sizes)
    proportional = {name: size / total for name, size in zip(corpus.names, sizes, strict=True)}
    reference: Mapping[str, float] = proportional
    spread: Mapping[str, float] | None
    if recipe.mix.method == "doremi":
        reference, weights = rounds[0].reference, rounds[-1].mean
        spread = _spread(rounds[-1].weights.values(), corpus.names)
    else:
        assert law is not None
        weights, spread = law_weights(law, "best"), law_weights(law, "spread")
    return MixManifest(
        schema_version=SCHEMA_VERSION,
        tool_version=version("gristmill"),
        name=recipe.name,
        method=recipe.mix.method,
        recipe=published(recipe),
        recipe_digest=recipe_digest(recipe),
        tokenizer_sha256=tokenizer_sha256,
        sources=tuple(SourceEntry.model_validate(source) for source in sources),
        domains=tuple(
            DomainEntry(
                name=name,
                chars=round(size),
                proportional=proportional[name],
                reference=reference[name],
                weight=weights[name],
                spread=None if spread is None else spread[name],
                epochs=epochs.get(name),
            )
            for name, size in zip(corpus.names, sizes, strict=True)
        ),
        rounds=tuple(rounds),
        stopped=stopped,
        runs=tuple(runs),
        specialists=tuple(specialists),
        law=None if law is None else LawEntry.model_validate(law),
        warnings=tuple(warnings),
    )


def law_weights(law: Mapping[str, Any], field: str) -> dict[str, float]:
    """The law's `best` or `spread` by domain."""
    return {name: float(value) for name, value in zip(law["domains"], law[field], strict=True)}


def weights_text(manifest: MixManifest) -> str:
    """The text of weights.json: for `training.domains.mixture`, and under the names that DoReMi's
    public code reads."""
    spread = {domain.name: domain.spread for domain in manifest.domains}
    tree = {
        "weights": manifest.weights,
        "train_domain_weights": manifest.weights,
        "eval_domain_weights": manifest.weights,
        "spread": None if None in spread.values() else spread,
        "mix_manifest_recipe_digest": manifest.recipe_digest,
    }
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def write(directory: str | os.PathLike[str], manifest: MixManifest) -> None:
    """Write weights.json, then manifest.json. Raises OSError."""
    folder = files.local_path(directory)
    write_weights(folder, manifest)
    files.write_atomic(folder / MANIFEST_FILE, manifest.to_json())


def write_weights(folder: Path, manifest: MixManifest) -> None:
    """Write weights.json. Raises OSError."""
    files.write_atomic(folder / WEIGHTS_FILE, weights_text(manifest))


def is_manifest(path: Path) -> bool:
    """Whether the file at `path` can be the manifest of a mix, right or damaged, old or new."""
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and tree.keys() >= _OWN_FIELDS


def read(directory: str | os.PathLike[str]) -> MixManifest:
    """The manifest of a finished mix. Raises UserError."""
    place = files.local_path(directory) / MANIFEST_FILE
    try:
        text = place.read_bytes()
    except OSError as error:
        raise UserError(
            f"no manifest at '{place}' ({error.__class__.__name__}): the mix is not finished, "
            "`gristmill mix` goes on with it"
        ) from None
    _check_schema(place, text)
    try:
        return MixManifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = " ".join(first["msg"].split())
        raise UserError(
            f"'{place}' is no manifest of a mix: {where + ': ' if where else ''}{said}"
        ) from None


def _check_schema(place: Path, text: bytes) -> None:
    try:
        tree = json.loads(text)
    except ValueError:
        return  # the model says what is wrong
    found = tree.get("schema_version") if isinstance(tree, dict) else None
    if isinstance(found, int) and found != SCHEMA_VERSION:
        raise UserError(
            f"'{place}' has schema version '{found}', and this program reads '{SCHEMA_VERSION}': "
            "mix again, or use the Gristmill that wrote it"
        )


def _spread(
    weights: Iterable[Mapping[str, float]], names: Sequence[str]
) -> dict[str, float] | None:
    """Sample standard deviation of each domain's weight; None for a single seed."""
    found = list(weights)
    if len(found) < 2:
        return None
    return {name: statistics.stdev(one[name] for one in found) for name in names}


if __name__ == "__main__":
    print(json.dumps(MixManifest.model_json_schema(), indent=1))
