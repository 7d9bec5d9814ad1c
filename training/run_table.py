"""The table a mixing law is fitted to: finished runs, the mixture of each and what it lost where.

As CSV a column is `mixture/<domain>` or `loss/<target>`, a row is a run; other columns are for
people. RegMix's published runs (Liu et al. 2025, arXiv:2407.01492) come as two files for each
split, which `read_regmix` joins by their index.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models import files
from models.errors import UserError

_MIXTURE, _LOSS = "mixture/", "loss/"
_REGMIX_MIXTURE, _REGMIX_LOSS = "train_the_pile_", ("metric/the_pile_", "_val_loss")
REGMIX_SPLITS = ("train_1m", "test_1m", "test_60m", "test_1B")
_ROUNDED = 0.02
"""A mixture sums to 1 within so much: RegMix's files give three digits."""


@dataclass(frozen=True)
class RunTable:
    """Finished runs.

    domains: (k,) what is mixed; targets: (m,) what has a held-out loss; mixtures: (n, k), rows
    that sum to 1 (they are made to, when they do within 2 %); losses: (n, m). Raises UserError.
    """

    domains: tuple[str, ...]
    targets: tuple[str, ...]
    mixtures: np.ndarray
    losses: np.ndarray

    def __post_init__(self) -> None:
        mixtures = np.asarray(self.mixtures, np.float64)
        losses = np.asarray(self.losses, np.float64)
        runs = len(mixtures)
        wanted = (runs, len(self.domains)), (runs, len(self.targets))
        if (mixtures.shape, losses.shape) != wanted or not self.domains or not self.targets:
            raise UserError(
                f"a table of runs has {runs} mixtures of shape '{mixtures.shape}' and losses of "
                f"shape '{losses.shape}': it needs '{wanted[0]}' and '{wanted[1]}'"
            )
        for number in range(runs):
            _check_row(number, "mixture of", self.domains, mixtures[number], lowest=0.0)
            _check_row(number, "loss of", self.targets, losses[number], lowest=-np.inf)
        sums = mixtures.sum(1)
        for number in np.flatnonzero(np.abs(sums - 1) > _ROUNDED):
            raise UserError(
                f"run {number + 1} of the table: its mixture sums to '{sums[number]:.4g}': it has "
                "to sum to 1, within 2 %"
            )
        object.__setattr__(self, "mixtures", mixtures / sums[:, None])
        object.__setattr__(self, "losses", losses)

    @property
    def parameters(self) -> int:
        """See `parameters`."""
        return parameters(len(self.domains))

    def check_runs(self) -> None:
        """Raise UserError when the table has fewer runs than a law has parameters."""
        if len(self.mixtures) < self.parameters:
            raise UserError(
                f"the table has '{len(self.mixtures)}' runs, fewer than the {self.parameters} "
                f"parameters of a law for {len(self.domains)} domains: give more runs, best "
                f"{3 * self.parameters} or more"
            )


def parameters(domains: int) -> int:
    """Of the exponential law for one target: c, K, and one for each domain."""
    return domains + 2


def _check_row(
    number: int, what: str, names: Sequence[str], values: np.ndarray, *, lowest: float
) -> None:
    for name, value in zip(names, values, strict=True):
        if not np.isfinite(value) or value < lowest:
            least = "" if lowest == -np.inf else ", 0 or more"
            raise UserError(
                f"run {number + 1} of the table: the {what} '{name}' is '{value}': it has to be a "
                f"finite number{least}"
            )


def write_table(path: str | os.PathLike[str], table: RunTable) -> None:
    """Write `table` as CSV; every number is read back the same."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = [_MIXTURE + name for name in table.domains] + [_LOSS + name for name in table.targets]
    writer.writerow(["run", *header])
    rows = np.hstack([table.mixtures, table.losses]).tolist()
    writer.writerows([number, *map(repr, row)] for number, row in enumerate(rows, 1))
    files.write_atomic(path, text.getvalue())


def read_table(path: str | os.PathLike[str]) -> RunTable:
    """Read a table of runs that is enough for a law. Raises UserError."""
    header, rows = _read_csv(path)
    domains = _named(header, _MIXTURE)
    targets = _named(header, _LOSS)
    for prefix, found in ((_MIXTURE, domains), (_LOSS, targets)):
        if not found:
            raise UserError(
                f"'{os.fspath(path)}' has no column '{prefix}NAME': a table of runs has "
                f"'{_MIXTURE}NAME' for each domain and '{_LOSS}NAME' for each held-out loss"
            )
    try:
        table = RunTable(
            tuple(domains), tuple(targets),
            _numbers(rows, domains), _numbers(rows, targets),
        )  # fmt: skip
        table.check_runs()
    except UserError as error:
        raise UserError(f"'{os.fspath(path)}': {error}") from None
    return table


def read_regmix(folder: str | os.PathLike[str], split: str) -> RunTable:
    """The runs of RegMix's 'train_1m', 'test_1m', 'test_60m' or 'test_1B' in `folder`.

    Some domains that are mixed have no loss. Raises UserError.
    """
    if split not in REGMIX_SPLITS:
        raise UserError(f"no split '{split}' in RegMix: choose {', '.join(REGMIX_SPLITS)}")
    part, size = split.split("_")
    mixtures = files.join(folder, f"{part}_mixture_{size}.csv")
    losses = files.join(folder, f"{part}_pile_loss_{size}.csv")
    header, rows = _by_index(mixtures)
    loss_header, loss_rows = _by_index(losses)
    if rows.keys() != loss_rows.keys():
        other = sorted(rows.keys() ^ loss_rows.keys())[0]
        raise UserError(f"only one of '{mixtures}' and '{losses}' has a run with index '{other}'")
    domains = _named(header, _REGMIX_MIXTURE)
    targets = _named(loss_header, *_REGMIX_LOSS)
    order = sorted(rows, key=int)
    return RunTable(
        tuple(domains), tuple(targets),
        _numbers([rows[index] for index in order], domains),
        _numbers([loss_rows[index] for index in order], targets),
    )  # fmt: skip


def _read_csv(path: str | os.PathLike[str]) -> tuple[list[str], list[list[str]]]:
    try:
        text = files.read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the table of runs '{os.fspath(path)}': {error}") from None
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if len(rows) < 2:
        raise UserError(f"'{os.fspath(path)}' has no runs: a header and a row for each is needed")
    header = [name.strip() for name in rows[0]]
    for name in header:
        if header.count(name) > 1:
            raise UserError(f"'{os.fspath(path)}' has the column '{name}' twice: leave one out")
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(header):
            raise UserError(
                f"'{os.fspath(path)}', run {number}: '{len(row)}' values for {len(header)} columns"
            )
    return header, rows[1:]


def _by_index(path: str) -> tuple[list[str], dict[str, list[str]]]:
    header, rows = _read_csv(path)
    if "index" not in header:
        raise UserError(f"'{path}' has no column 'index', which joins mixtures and losses")
    column = header.index("index")
    for row in rows:
        if not row[column].isdecimal():
            raise UserError(f"'{path}' has the index '{row[column]}': it has to be a number")
    return header, {row[column]: row for row in rows}


def _named(header: Sequence[str], prefix: str, suffix: str = "") -> dict[str, int]:
    """Names between `prefix` and `suffix`, with their columns."""
    return {
        name.removeprefix(prefix).removesuffix(suffix): column
        for column, name in enumerate(header)
        if name.startswith(prefix) and name.endswith(suffix)
    }


def _numbers(rows: Sequence[Sequence[str]], columns: dict[str, int]) -> np.ndarray:
    found = np.empty((len(rows), len(columns)))
    for number, row in enumerate(rows):
        for place, (name, column) in enumerate(columns.items()):
            try:
                found[number, place] = float(row[column])
            except ValueError:
                raise UserError(
                    f"run {number + 1} of the table: '{row[column]}' in the column of '{name}' is "
                    "no number"
                ) from None
    return found


def draw_mixtures(
    prior: np.ndarray, count: int, *, seed: int, concentration: tuple[float, float]
) -> np.ndarray:
    """Mixtures (count, k) for small runs, as RegMix draws them.

    Each is from the Dirichlet distribution with parameters strength * prior, its strength
    log-uniform between the two of `concentration`: a low one puts nearly all on a few domains, a
    high one stays near the prior (k,). A domain that has none there has none in any mixture.
    """
    prior = np.asarray(prior, np.float64) / np.sum(prior)
    random = np.random.default_rng(seed)
    low, high = np.log(concentration)
    strengths = np.exp(random.uniform(float(low), float(high), size=count))
    mixed = prior > 0
    found = np.zeros((count, len(prior)))
    for number, strength in enumerate(strengths):
        found[number, mixed] = random.dirichlet(strength * prior[mixed])
    return found
