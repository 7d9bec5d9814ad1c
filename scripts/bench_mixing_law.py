"""How well laws fitted to RegMix's 1M runs rank models of 1M, 60M and 1B parameters.

    python -m scripts.bench_mixing_law [--subsets 20] [--seed 0] [--json FILE]

RegMix (Liu et al. 2025, arXiv:2407.01492) published 512 small runs with 17 domains of the Pile and
test runs of three sizes. A law is fitted to 64, 128 or all of the 512, and its predictions for the
test runs' mixtures are compared with their losses: Spearman's rank correlation x 100. Which 64 runs
matters, so it is done for the first ones and for random subsets, and mean, standard deviation and
lowest are given. Penalties and numbers of trees come from cross-validation on the runs used; no
test run is seen before the end. 'auto' takes for each subset the regressor with the best
cross-validated correlation. For the mean over the 13 domains with a loss, a law of each domain
(what `training.mixing_law` does) stands beside one law of the mean itself.

The runs are looked for in $GRISTMILL_DATA/regmix, or ../shared/data/regmix.
Exit code 1 when the exponential law on 64 runs is below 98 on the 1B models' Pile-CC loss,
in the mean over the random subsets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import files
from training.mixing_law import REGMIX_SPLITS, RunTable, read_regmix, spearman
from training.mixing_regressors import REGRESSORS, fold_numbers, has_lightgbm

TARGET = "pile_cc"
RUNS = (64, 128, 512)
WANTED = 98.0
_FOLDS = 5
_SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

Predict = Callable[[np.ndarray], np.ndarray]
"""Loss (n,) of mixtures (n, k)."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints two tables."""
    parser = argparse.ArgumentParser(prog="bench_mixing_law", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--subsets", type=int, default=20, help="random ones, of 64 and of 128")
    parser.add_argument("--seed", type=int, default=0, help="of the subsets and the folds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    if options.subsets < 2:
        parser.error(f"--subsets '{options.subsets}': give 2 or more")
    folder = Path(os.environ.get("GRISTMILL_DATA", _SHARED)) / "regmix"
    if not folder.is_dir():
        print(f"skipped: no RegMix runs at '{folder}' (set GRISTMILL_DATA)")
        return 0
    train, *tests = (read_regmix(folder, split) for split in REGMIX_SPLITS)
    names = [name for name in REGRESSORS if name != "lightgbm" or has_lightgbm()]
    if "lightgbm" not in names:
        print("LightGBM is not installed: its rows are left out (pip install 'gristmill[mix]')")
    begin = time.process_time()
    rows = [
        row
        for runs in RUNS
        for row in measure(train, tests, names, runs, subsets=options.subsets, seed=options.seed)
    ]
    print(table(rows))
    print(f"\n{time.process_time() - begin:,.0f} s of CPU time")
    if options.json:
        files.write_atomic(options.json, json.dumps(rows, indent=1) + "\n")
    goal = next(row for row in rows if row["runs"] == RUNS[0] and _is_goal(row))
    return 0 if goal["mean"][-1] >= WANTED else 1


def measure(
    train: RunTable,
    tests: Sequence[RunTable],
    names: Sequence[str],
    runs: int,
    *,
    subsets: int,
    seed: int,
) -> list[dict[str, Any]]:
    """A row for each regressor and loss. first: (3,) on the first `runs` runs; mean, sd and lowest:
    (3,) over random subsets of as many (of all runs there is one)."""
    random = np.random.default_rng((seed, runs))
    everything = np.arange(len(train.mixtures))
    chosen = [everything[:runs]]
    if runs < len(everything):
        chosen += [random.permutation(everything)[:runs] for _ in range(subsets)]
    found: dict[tuple[str, str], list[list[float]]] = {}
    for number, one in enumerate(chosen):
        print(f"{runs} runs, subset {number + 1} of {len(chosen)}", file=sys.stderr)
        for key, predict in _laws(train, one, names, seed).items():
            losses = [_pile_cc(test) if key[0] == TARGET else test.losses.mean(1) for test in tests]
            scores = [
                100 * spearman(predict(test.mixtures), loss)
                for test, loss in zip(tests, losses, strict=True)
            ]
            found.setdefault(key, []).append(scores)
    return [
        {"loss": key[0], "regressor": key[1], "runs": runs} | _summary(np.array(scores))
        for key, scores in found.items()
    ]


def _summary(scores: np.ndarray) -> dict[str, Any]:
    """Of (subsets, 3): the first one alone, then the random ones."""
    drawn = scores[1:] if len(scores) > 1 else scores
    return {
        "first": scores[0].tolist(),
        "subsets": len(scores) - 1,
        "mean": drawn.mean(0).tolist(),
        "sd": drawn.std(0, ddof=1).tolist() if len(drawn) > 1 else None,
        "lowest": drawn.min(0).tolist(),
        "good": float((drawn[:, -1] >= WANTED).mean()),
    }


def _laws(
    train: RunTable, one: np.ndarray, names: Sequence[str], seed: int
) -> dict[tuple[str, str], Predict]:
    """By loss and row name, laws fitted to the runs `one`."""
    mixtures, losses = train.mixtures[one], train.losses[one]
    column, own = train.targets.index(TARGET), train.domains.index(TARGET)
    owns = [train.domains.index(target) for target in train.targets]
    laws: dict[tuple[str, str], Predict] = {}
    scores: dict[str, float] = {}
    fold = fold_numbers(len(one), _FOLDS, seed)
    for name in names:
        fit = REGRESSORS[name]
        parts = [fit(mixtures, losses[:, n], owns[n], seed) for n in range(len(owns))]
        laws[TARGET, name] = parts[column].predict
        laws["mean", name] = lambda given, parts=parts: np.mean(  # type: ignore[misc]
            [part.predict(given) for part in parts], axis=0
        )
        laws["mean", f"{name}, of the mean itself"] = fit(
            mixtures, losses.mean(1), None, seed
        ).predict
        held_out = np.empty(len(one))
        for number in range(_FOLDS):
            rest = fold != number
            model = fit(mixtures[rest], losses[rest, column], own, seed)
            held_out[~rest] = model.predict(mixtures[~rest])
        scores[name] = spearman(held_out, losses[:, column])
    best = max((name for name in names if name != "linear"), key=scores.__getitem__)
    laws[TARGET, "auto"] = laws[TARGET, best]
    return laws


def _pile_cc(test: RunTable) -> np.ndarray:
    return np.asarray(test.losses[:, test.targets.index(TARGET)])


def _is_goal(row: dict[str, Any]) -> bool:
    return bool(row["loss"] == TARGET and row["regressor"] == "exponential")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown: for each loss, 1M / 60M / 1B."""
    lines = []
    for loss, title in ((TARGET, "Pile-CC loss"), ("mean", "Mean of the 13 domains' losses")):
        lines += [
            f"\n{title}: Spearman x 100 on the test runs of 1M / 60M / 1B\n",
            "| runs | regressor | first runs | random subsets, mean ± sd | lowest | "
            f"1B >= {WANTED:g} |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row["loss"] == loss:
                lines.append(_line(row))
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    first = " / ".join(f"{value:.1f}" for value in row["first"])
    spread = lowest = good = ""
    if row["sd"] is not None:
        spread = " / ".join(
            f"{mean:.1f} ± {sd:.1f}" for mean, sd in zip(row["mean"], row["sd"], strict=True)
        )
        lowest = " / ".join(f"{value:.1f}" for value in row["lowest"])
        good = f"{row['good']:.0%} of {row['subsets']}"
    return f"| {row['runs']} | {row['regressor']} | {first} | {spread} | {lowest} | {good} |"


if __name__ == "__main__":
    sys.exit(main())
