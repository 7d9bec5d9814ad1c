"""Folders of finished mixes in which nothing was trained: numbers like those of a real one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from training.doremi import DomainWeights
from training.mix import identity, results
from training.mix.recipe import MixRecipe
from training.mix.results import DomainEntry, MixManifest, RoundEntry, RunEntry, round_entry
from training.run_manifest import SourceEntry

CHARS = {"am": 310_000, "ar": 4_200_000, "bn": 1_900_000, "ja/日本語ウィキペディア": 6_400_000,
         "my": 240_000, "ru": 9_800_000, "sw": 700_000}  # fmt: skip
ALONE = (2.9, 3.1, 2.4, 3.6, 2.2, 2.8, 3.0)


def fake_mix(
    folder: Path,
    *,
    method: str = "doremi",
    chars: dict[str, int] | None = None,
    seeds: tuple[int, ...] = (0, 1, 2),
    rounds: int = 2,
    steps: int = 1000,
    specialists: bool = True,
    warnings: tuple[str, ...] = (),
    name: str = "fake",
    law: dict[str, Any] | None = None,
) -> MixManifest:
    """Write the folder of a mix of the domains `chars`; gives its manifest."""
    sizes = CHARS if chars is None else chars
    names, k = tuple(sizes), len(sizes)
    proportional = {one: size / sum(sizes.values()) for one, size in sizes.items()}
    uniform = dict.fromkeys(names, 1 / k)
    reference, entries = proportional, []
    for number in range(1, rounds + 1) if method == "doremi" else ():
        means = {
            seed: _proxy(folder, number, seed, names, steps, list(proportional.values()))
            for seed in seeds
        }
        entries.append(round_entry(number, reference, means))
        reference = entries[-1].mean
    found = entries[-1].weights if entries else {}
    if method == "regress":
        law = _law(names) if law is None else law
        found = {str(seed): results.law_weights(law, "best") for seed in seeds}
    runs = [
        _run(folder, label, seed, weights, names)
        for label in ("proportional", "uniform", method)
        for seed in seeds
        for weights in [{"proportional": proportional, "uniform": uniform}.get(label)
                        or found[str(seed)]]
    ]  # fmt: skip
    alone = [
        _run(folder, f"specialist-{place}", seeds[0],
             {other: float(other == one) for other in names}, names)
        for place, one in enumerate(names if specialists else ())
    ]  # fmt: skip
    manifest = MixManifest(
        schema_version=results.SCHEMA_VERSION,
        tool_version="0.1.0",
        name=name,
        method=method,
        recipe=identity.published(_recipe(method, seeds, rounds, name)),
        recipe_digest="0123456789abcdef0123456789abcdef",
        tokenizer_sha256="ab" * 32,
        sources=(SourceEntry(manifest_sha256="cd" * 32, recipe_digest="ef" * 16),),
        domains=_domains(sizes, proportional, entries, law),
        rounds=tuple(entries),
        stopped="max_rounds = '2' reached" if method == "doremi" else None,
        runs=tuple(runs),
        specialists=tuple(alone),
        law=law,
        warnings=warnings,
    )
    results.write(folder, manifest)
    return manifest


def _recipe(method: str, seeds: tuple[int, ...], rounds: int, name: str) -> MixRecipe:
    return MixRecipe.model_validate({
        "name": name if name.isascii() and name.isalnum() else "fake",
        "mix": {"method": method, "seeds": seeds}, "doremi": {"max_rounds": rounds},
    })  # fmt: skip


def _domains(
    sizes: dict[str, int], proportional: dict[str, float], rounds: list[RoundEntry],
    law: dict[str, Any] | None,
) -> tuple[DomainEntry, ...]:  # fmt: skip
    spread: dict[str, float] | None = None
    if law is not None:
        weights, spread = results.law_weights(law, "best"), results.law_weights(law, "spread")
    else:
        weights, seeds = rounds[-1].mean, list(rounds[-1].weights.values())
        if len(seeds) > 1:
            spread = {
                one: float(np.std([found[one] for found in seeds], ddof=1)) for one in weights
            }
    return tuple(
        DomainEntry(
            name=one, chars=size, proportional=proportional[one], reference=proportional[one],
            weight=weights[one], spread=None if spread is None else spread[one],
            epochs=weights[one] * 8e6 / size,
        )
        for one, size in sizes.items()
    )  # fmt: skip


def _proxy(
    folder: Path, number: int, seed: int, names: tuple[str, ...], steps: int, shares: list[float]
) -> dict[str, float]:
    """alpha.jsonl of a proxy whose excess is largest where there is least text, with noise."""
    random = np.random.default_rng([number, seed])
    weights = DomainWeights(len(names))
    lines: list[dict[str, Any]] = [{"domains": list(names)}]
    scarce = 0.6 * (1 - np.array(shares)) ** 4
    learned = np.full(len(names), 1 / len(names))
    for step in range(1, steps + 1):
        learned = 0.9 * learned + 0.1 * weights.alpha
        excess = np.maximum(0, 0.1 + scarce - 2 * learned + random.normal(0, 0.3, len(names)))
        alpha = weights.update(excess)
        lines.append({"step": step, "alpha": alpha.tolist(), "excess": excess.tolist(),
                      "tokens": [512] * len(names)})  # fmt: skip
    run = folder / "runs" / f"proxy-{number}" / f"seed-{seed}"
    run.mkdir(parents=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (run / "alpha.jsonl").write_text(text, encoding="utf-8")
    return dict(zip(names, weights.mean.tolist(), strict=True))


def _run(
    folder: Path, label: str, seed: int, weights: dict[str, float], names: tuple[str, ...]
) -> RunEntry:
    """A run whose loss in a domain falls with the domain's weight."""
    place = f"runs/{label}/seed-{seed}"
    text = f"{label} {seed}"
    (folder / place).mkdir(parents=True)
    (folder / place / "manifest.json").write_text(text)
    noise = np.random.default_rng(list(text.encode())).normal(0, 0.01, len(names))
    losses = {
        name: float(ALONE[place % len(ALONE)] + 0.35 * -np.log(weights[name] + 0.02) + one)
        for place, (name, one) in enumerate(zip(names, noise, strict=True))
    }
    return RunEntry(
        label=label, seed=seed, run=place,
        manifest_sha256=hashlib.sha256(text.encode()).hexdigest(), size="tiny", steps=1000,
        tokens=8_192_000, weights=weights, losses=losses,
        standard_errors=dict.fromkeys(names, 0.02),
    )  # fmt: skip


def _law(names: tuple[str, ...]) -> dict[str, Any]:
    random = np.random.default_rng(5)
    best = random.dirichlet(np.full(len(names), 4.0))
    observed = random.normal(3.6, 0.15, 64)
    return {
        "domains": list(names), "best": best.tolist(), "spread": (best / 6).tolist(),
        "regressor": "exponential", "target": "mean",
        "scores": {"exponential": 0.93, "quadratic": 0.88, "lightgbm": 0.71, "linear": 0.64},
        "predicted": 3.31, "predicted_spread": 0.02, "doubts": [],
        "observed": observed.tolist(),
        "fitted": (observed + random.normal(0, 0.04, 64)).tolist(),
    }  # fmt: skip
