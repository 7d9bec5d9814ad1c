"""What makes a mix worthless, told before it is trained, or when its weights are there.

Pure functions on numbers. A sentence that a function gives is a warning: the mix goes on, and its
manifest has it. What cannot work is refused by UserError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from models.errors import UserError

REFUSED_ABSENCE = 0.1
"""A domain that misses so large a share of the steps has a weight made of chance."""
WARNED_ABSENCE = 0.01
MANY_EPOCHS = 4.0
"""Up to here repeated text is worth almost what new text is (Muennighoff et al. 2023,
arXiv 2305.16264)."""
COLLAPSED = 0.9
_MOST_NAMED = 3


def absence(domains: int, examples: int) -> float:
    """Probability that a domain has none of the `examples` of a step, each of which is drawn from
    one of the `domains` by itself, all equally likely: (1 - 1/k)^B."""
    return float((1 - 1 / domains) ** examples)


def expected_absent(domains: int, examples: int) -> float:
    """Domains that a step has no example of, on average: k (1 - 1/k)^B."""
    return domains * absence(domains, examples)


def smallest_batch(domains: int) -> int:
    """Fewest examples in a step that `check_batch` lets pass."""
    if domains == 1:
        return 1
    examples = max(1, math.ceil(math.log(REFUSED_ABSENCE) / math.log1p(-1 / domains)))
    while absence(domains, examples) > REFUSED_ABSENCE:  # rounding
        examples += 1
    return examples


def check_batch(domains: int, examples: int) -> str | None:
    """Whether a proxy's steps are large enough for its domains. Raises UserError."""
    found = absence(domains, examples)
    if found > REFUSED_ABSENCE:
        raise UserError(
            f"batch of '{examples}' examples for {domains} domains: each domain is absent from "
            f"{found:.0%} of the steps, and its weight would be chance: give "
            f"batch.samples={smallest_batch(domains)} or more, or fewer domains"
        )
    if found > WARNED_ABSENCE:
        return (
            f"{examples} examples in a step for {domains} domains: each domain is absent from "
            f"{found:.1%} of the steps; a larger batch gives steadier weights"
        )
    return None


def epochs(
    weights: Mapping[str, float], tokens: float, once: Mapping[str, float]
) -> dict[str, float]:
    """How often a run of `tokens` reads each domain. once: tokens of one pass over it."""
    return {name: weights[name] * tokens / once[name] for name in weights}


def repeated(by_mixture: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A warning for each mixture that reads a domain too often. by_mixture: its `epochs`."""
    found = []
    for mixture, times in by_mixture.items():
        if not times:
            continue
        worst = max(times, key=lambda name: times[name])
        more = sum(one > MANY_EPOCHS for one in times.values()) - 1
        if times[worst] > MANY_EPOCHS:
            others = f", and {more} more domains above {MANY_EPOCHS:.0f}" if more else ""
            found.append(
                f"mixture '{mixture}' reads domain '{worst}' {times[worst]:.1f} times{others}: "
                f"above {MANY_EPOCHS:.0f} epochs repeated text is worth less than new text"
            )
    return found


def collapsed(weights: Mapping[str, float]) -> str | None:
    """Whether the mean of alpha has gone to one domain. (alpha of a single step reaches 0.999 in
    every healthy run.)"""
    name = max(weights, key=lambda one: weights[one])
    if len(weights) < 3 or weights[name] <= COLLAPSED:
        return None
    return (
        f"domain '{name}' got {weights[name]:.1%} of the weight: known causes are a batch that is "
        "small for the domains, a doremi.step_size that is too large, or a reference that is "
        "undertrained on this domain or has another tokenizer"
    )


def not_held_out(names: Sequence[str], without: Sequence[str]) -> str | None:
    """Of domains `without` a held-out example. Raises UserError when no domain has one."""
    if not without:
        return None
    listed = ", ".join(f"'{name}'" for name in without[:_MOST_NAMED])
    listed += f" and {len(without) - _MOST_NAMED} more" if len(without) > _MOST_NAMED else ""
    if len(without) == len(names):
        raise UserError(
            f"no domain has a held-out page ({listed}), so that nothing can be compared: raise "
            "data.held_out"
        )
    return f"no held-out page in {listed}: no loss of it is compared; raise data.held_out"
