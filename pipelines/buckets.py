"""Perplexity buckets: head, middle and tail by two cutoffs for each language.

The cutoffs come from a file in the format of CCNet's `cutoff.csv`, or from the run's own
perplexities: each WET file counts its pages in a logarithmic histogram, the histograms add up,
and the percentiles are read off. Bins grow by 0.2 %, so a cutoff is within 0.1 % of the exact
percentile, and the result does not depend on how the pages were spread over files.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from models import files
from models.errors import UserError
from models.languages import check_codes

BUCKETS = ("head", "middle", "tail")
NO_BUCKET = "all"
"""Bucket of pages without a perplexity, or of a language without cutoffs."""
_BIN_GROWTH = math.log(1.002)

Cutoffs = Mapping[str, tuple[float, float]]


def histogram(perplexities: np.ndarray) -> dict[int, int]:
    """Pages by bin, from float64 `perplexities` > 0, shape (n,); NaN (not scored) is left out."""
    scored = perplexities[~np.isnan(perplexities)]
    bins = np.floor(np.log(scored) / _BIN_GROWTH).astype(np.int64)
    values, counts = np.unique(bins, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def percentile_cutoffs(
    histograms: Iterable[Mapping[int, int]], percentiles: tuple[int, int]
) -> tuple[float, float] | None:
    """The perplexities at two `percentiles` (nearest rank) of merged histograms; None if empty."""
    merged: Counter[int] = Counter()
    for part in histograms:
        merged.update(part)
    total = sum(merged.values())
    if total == 0:
        return None
    bins = sorted(merged)
    cumulative = np.cumsum([merged[b] for b in bins])
    ranks = [max(1, math.ceil(total * p / 100)) for p in percentiles]
    low, high = (
        float(f"{math.exp((bins[int(np.searchsorted(cumulative, rank))] + 0.5) * _BIN_GROWTH):.6g}")
        for rank in ranks
    )
    return low, high


def buckets_of(perplexities: np.ndarray, cutoffs: tuple[float, float] | None) -> np.ndarray:
    """Bucket names (object, shape (n,)) of float64 `perplexities`, shape (n,).

    Below the first cutoff head, below the second middle, else tail; "all" without cutoffs and
    for a perplexity that is NaN or negative (CCNet's `perplexity.py`, PerplexityBucket).
    """
    if cutoffs is None:
        return np.full(perplexities.size, NO_BUCKET, object)
    low, high = cutoffs
    names = np.full(perplexities.size, NO_BUCKET, object)
    names[perplexities >= high] = "tail"
    names[perplexities < high] = "middle"
    names[perplexities < low] = "head"
    names[perplexities < 0] = NO_BUCKET
    return names


def read_cutoffs(url: str, percentiles: tuple[int, int]) -> dict[str, tuple[float, float]]:
    """Cutoffs by language from a CSV table like CCNet's `cutoff.csv`.

    The header names the languages, behind an empty cell; each row begins with its percentile.
    Raises UserError when the file, a percentile or a number is missing.
    """
    try:
        text = files.read_bytes(url).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"quality.cutoffs = '{url}' cannot be read ({error}): "
            "give a file like CCNet's cutoff.csv, or 'run' for this run's own percentiles"
        ) from None
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise UserError(f"quality.cutoffs = '{url}' is no CSV table: {error}") from None
    languages = [name.strip() for name in rows[0][1:]] if rows else []
    by_percentile = {row[0].strip(): row[1:] for row in rows[1:] if row}
    columns = []
    for percentile in percentiles:
        row = by_percentile.get(str(percentile), by_percentile.get(f"{percentile}.0"))
        if row is None:
            raise UserError(
                f"quality.cutoffs = '{url}' has no row for percentile '{percentile}': "
                f"rows are {', '.join(by_percentile) or 'missing'}"
            )
        columns.append(row)
    cutoffs = {}
    try:
        for name, low, high in zip(languages, *columns, strict=True):
            if low and high:
                (language,) = check_codes([name])
                cutoffs[language] = (float(low), float(high))
    except ValueError as error:
        raise UserError(f"quality.cutoffs = '{url}' is not a table of numbers: {error}") from None
    for language, (below_head, below_middle) in cutoffs.items():
        if not 0 < below_head <= below_middle < math.inf:
            raise UserError(
                f"quality.cutoffs = '{url}': '{language}' has {below_head} and {below_middle}, "
                "which do not rise between 0 and infinity"
            )
    return cutoffs
