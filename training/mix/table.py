"""The comparison of mixtures as a table: for a terminal, and as Markdown for documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipelines.report_parts import columns, counted
from training.mix import comparison
from training.mix.comparison import Estimate, Score, number
from training.mix.results import DomainEntry, MixManifest

_NOT_EXAMPLES = "no held-out example in every run"


def header(manifest: MixManifest) -> list[str]:
    """Titles of the columns: domain, sizes, weights, and one for each mixture."""
    law = manifest.method == "regress"
    weights = ["share", "weight"] if law else ["alpha_ref", "alpha-bar"]
    return ["domain", "characters", *weights, "epochs", *comparison.labels(manifest)]


def domain_rows(manifest: MixManifest, scores: Sequence[Score]) -> list[list[str]]:
    """A row for each domain, in the order of the corpus: weights, and the loss by mixture."""
    return [
        [
            domain.name,
            f"{domain.chars:,}",
            f"{domain.reference:.3f}",
            number(Estimate(domain.weight, domain.spread)),
            epochs(domain),
            *(number(score.losses.get(domain.name)) for score in scores),
        ]
        for domain in manifest.domains
    ]


def total_rows(manifest: MixManifest, scores: Sequence[Score]) -> list[list[str]]:
    """Rows below the domains: mean loss; worst and mean excess where there are specialists."""
    blank = [""] * 4
    rows = [["mean loss", *blank, *(number(score.mean_loss) for score in scores)]]
    if manifest.specialists and any(score.worst_excess for score in scores):
        rows.append([
            "worst domain's excess", *blank, *(number(score.worst_excess) for score in scores)
        ])  # fmt: skip
        rows.append(["mean excess", *blank, *(number(score.mean_excess) for score in scores)])
    return rows


def notes(manifest: MixManifest, scores: Sequence[Score]) -> list[str]:
    """What the numbers are, and what they say; a sentence each."""
    verdicts = comparison.verdicts(manifest, scores)
    lines = [comparison.sentence(verdict, manifest.method) for verdict in verdicts]
    seeds = {verdict.seeds for verdict in verdicts if verdict.seen is not None}
    lines += [
        f"chance: with {count} seeds, {comparison.chance(count):.0%} of differences that have no "
        "cause exceed the seed spread"
        for count in sorted(seeds)
    ]
    lines.append(_of_excess(manifest))
    worst = [f"{score.worst} ({score.label})" for score in scores if score.worst]
    if worst:
        lines.append(f"domain with the largest excess: {', '.join(worst)}")
    without = [name for name in manifest.names if scores and name not in scores[0].losses]
    if without:
        lines.append(f"{_NOT_EXAMPLES}: {', '.join(without)}")
    return lines


def _of_excess(manifest: MixManifest) -> str:
    """How well the specialists are known, which the excess is measured from."""
    if not manifest.specialists:
        return "excess: not measured (mix.specialists = 0)"
    counts = Counter(run.label for run in manifest.specialists).values()
    few, many = min(counts), max(counts)
    seeds = counted(many, "seed") if few == many else f"{few} to {many} seeds"
    return (
        f"excess: above the mean loss of a domain's specialist, of {seeds}; ± is that of the "
        "mixture alone"
    )


def explanation(manifest: MixManifest, scores: Sequence[Score]) -> str:
    """What stands in the columns of the mixtures."""
    seeds = sorted({seed for score in scores for seed in score.seeds})
    text = "held-out next-token loss in nats"
    if len(seeds) > 1:
        text += f", mean ± sample standard deviation over {len(seeds)} seeds"
    runs = [run for run in manifest.runs if run.label == manifest.method]
    if runs:
        text += f"; size {runs[0].size}, {runs[0].steps:,} steps, {runs[0].tokens:,} tokens a run"
    return text


def table(manifest: MixManifest) -> str:
    """The whole result for a terminal."""
    scores = comparison.scores(manifest)
    conclusion = comparison.conclusion(manifest, comparison.verdicts(manifest, scores))
    lines = [f"{manifest.name}: {manifest.method}, {len(manifest.domains)} domains"]
    if scores:
        lines.append(explanation(manifest, scores))
    rows = [header(manifest), *domain_rows(manifest, scores)]
    rows += total_rows(manifest, scores) if scores else []
    lines += ["", *aligned(rows), "", conclusion, *notes(manifest, scores)]
    lines += _rounds(manifest)
    lines += [f"warning: {warning}" for warning in manifest.warnings]
    return "\n".join(lines)


def markdown(manifest: MixManifest) -> str:
    """The same as a Markdown table with its sentences below."""
    scores = comparison.scores(manifest)
    titles = header(manifest)
    rows = domain_rows(manifest, scores) + (total_rows(manifest, scores) if scores else [])
    lines = [
        _markdown_row(titles),
        "|" + "|".join([" --- ", *(" ---: " for _ in titles[1:])]) + "|",
        *map(_markdown_row, rows),
        "",
    ]
    if scores:
        text = explanation(manifest, scores)
        lines.append(text[0].upper() + text[1:] + ".")
    lines.append(comparison.conclusion(manifest, comparison.verdicts(manifest, scores)))
    found = [*notes(manifest, scores), *_rounds(manifest)]
    found += [f"warning: {warning}" for warning in manifest.warnings]
    lines += ["", *(f"- {_plain(line)}" for line in found)] if found else []
    return "\n".join(lines) + "\n"


def epochs(domain: DomainEntry) -> str:
    """How often the main run reads the domain; "-" when that is not known."""
    return "-" if domain.epochs is None else f"{domain.epochs:.2f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned in a terminal: the first to the left, the others to the right."""
    widths = [max(columns(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            blank = " " * (width - columns(cell))
            cells.append(blank + cell if place else cell + blank)
        lines.append("  ".join(cells).rstrip())
    return lines


def _rounds(manifest: MixManifest) -> list[str]:
    lines = []
    for entry in manifest.rounds:
        spread = "" if entry.spread is None else f", largest spread over seeds {entry.spread:.4f}"
        lines.append(f"round {entry.number}: largest change of a weight {entry.change:.4f}{spread}")
    return lines + ([f"ended: {manifest.stopped}"] if manifest.stopped else [])


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """`text` so that Markdown shows it as it is."""
    special = "\\`*_{}[]<>|"
    return "".join(f"\\{one}" if one in special else one for one in text)
