"""The report of a mix as one HTML page: what was found, and what it is worth.

In the style of the report of a mined crawl (`pipelines.report_page`). The traces of alpha come
from the proxies' folders, all else from the manifest. The same mix gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from models.errors import UserError
from pipelines.report_charts import require_renderer
from pipelines.report_page import Page, check_target, render_page, write_page
from pipelines.report_parts import Column, Section, Table, counted, visible
from pipelines.report_plots import STYLES
from pipelines.report_provenance import setting_rows
from training.mix import comparison, report_sections, table
from training.mix.comparison import Score
from training.mix.recipe import MixRecipe
from training.mix.results import MixManifest
from training.mix.stages import RUNS_FOLDER
from training.trace import Trace, read_trace


def write_report(manifest: MixManifest, folder: str | os.PathLike[str], target: str) -> int:
    """Write the page of `manifest`, whose runs lie below `folder`, to `target`, all or nothing.

    Gives its size in bytes. Raises UserError when `target` is a folder or has the name of a file
    of the mix, or when the extra `report` is not installed.
    """
    check_target(target)
    require_renderer()
    traces, missing = read_traces(manifest, Path(folder))
    return write_page(render(manifest, traces, missing), target)


def read_traces(manifest: MixManifest, folder: Path) -> tuple[dict[str, Trace], list[str]]:
    """The traces of the last round by seed, and what is wrong with those that are not there."""
    traces: dict[str, Trace] = {}
    missing = []
    for entry in manifest.rounds[-1:]:
        for seed in entry.weights:
            run = folder / RUNS_FOLDER / f"proxy-{entry.number}" / f"seed-{seed}"
            try:
                trace = read_trace(run)
                if trace.domains != manifest.names:
                    raise UserError(f"'{run}' has the trace of other domains")
                if len(trace.alpha):
                    traces[seed] = trace
                else:
                    missing.append(f"'{run}' has a trace without a step")
            except UserError as error:
                missing.append(str(error))
    return traces, missing


def render(manifest: MixManifest, traces: dict[str, Trace], missing: Sequence[str] = ()) -> str:
    """The page as HTML text. missing: what is wrong with the traces that are not there."""
    scores = comparison.scores(manifest)
    verdicts = comparison.verdicts(manifest, scores)
    notices = [f"No trace of alpha: {reason}" for reason in missing]
    page = Page(
        kind="Mix",
        name=manifest.name,
        summary=comparison.conclusion(manifest, verdicts),
        tiles=_tiles(manifest, scores),
        notices=[visible(line) for line in (*report_sections.warnings(manifest), *notices)],
        sections=[
            _comparison(manifest, scores),
            report_sections.weights(manifest),
            *report_sections.found_by(manifest, traces),
            _runs(manifest),
            _provenance(manifest),
        ],
        tool_version=manifest.tool_version,
    )
    return render_page(page, styles=(STYLES,))


def _tiles(manifest: MixManifest, scores: Sequence[Score]) -> list[tuple[str, str, str]]:
    seeds = {run.seed for run in manifest.runs if run.label == manifest.method}
    chars = sum(domain.chars for domain in manifest.domains)
    tiles = [
        ("method", {"doremi": "DoReMi", "regress": "mixing law"}[manifest.method], ""),
        ("domains", f"{len(manifest.domains):,}", ""),
        ("characters", f"{chars:,}", ""),
        ("seeds", f"{len(seeds):,}", ""),
    ]
    if manifest.rounds:
        tiles.append(("rounds", f"{len(manifest.rounds):,}", ""))
    for score in scores:
        tiles.append((f"mean loss, {score.label}", f"{score.mean_loss.mean:.3f}", _sd(score)))
    return tiles


def _sd(score: Score) -> str:
    return "" if score.mean_loss.sd is None else f"± {score.mean_loss.sd:.3f}"


def _comparison(manifest: MixManifest, scores: Sequence[Score]) -> Section:
    rows = table.domain_rows(manifest, scores)
    if scores:
        rows += table.total_rows(manifest, scores)
    titles = table.header(manifest)
    whole = Table(
        "Domains and mixtures",
        (Column(titles[0], "name"), *(Column(title, "number") for title in titles[1:])),
        tuple((visible(row[0]), *row[1:]) for row in rows),
    )
    intro = table.notes(manifest, scores)
    if scores:
        intro = [table.explanation(manifest, scores), *intro]
    return Section(
        "comparison",
        "Mixtures compared",
        tuple(_sentence(visible(line)) for line in intro),
        charts=report_sections.loss_charts(manifest, scores),
        tables=(whole,),
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def _runs(manifest: MixManifest) -> Section:
    runs = [*manifest.runs, *manifest.specialists]
    rows = tuple(
        (f"{run.label}, seed {run.seed}", run.size, f"{run.steps:,}", f"{run.tokens:,}",
         visible(run.run), run.manifest_sha256)
        for run in runs
    )  # fmt: skip
    columns = (
        Column("run", "name"), Column("size", "name"), Column("steps", "number"),
        Column("tokens", "number"), Column("folder", "code"),
        Column("SHA-256 of its manifest", "code"),
    )  # fmt: skip
    return Section(
        "runs",
        "Runs",
        (f"{counted(len(manifest.runs), 'run')}, "
         f"{counted(len(manifest.specialists), 'specialist')}: each is a folder of its own, "
         "for gristmill inspect.",),
        charts=(),
        tables=(Table(f"Runs ({len(rows):,})", columns, rows, folded=True),),
    )  # fmt: skip


def _provenance(manifest: MixManifest) -> Section:
    facts = [
        ("tool version", manifest.tool_version),
        ("recipe", manifest.name),
        ("recipe digest (XXH3)", manifest.recipe_digest),
        ("manifest schema", str(manifest.schema_version)),
        ("tokenizer (SHA-256)", manifest.tokenizer_sha256),
    ]
    sources = tuple(
        (f"{place}", source.manifest_sha256, source.recipe_digest)
        for place, source in enumerate(manifest.sources, 1)
    )
    return Section(
        "provenance",
        "Provenance",
        ("gristmill inspect --verify checks weights.json and the runs against this manifest.",),
        tables=(
            Table("Mix", (Column("what", "name"), Column("value", "code")),
                  tuple((name, visible(value)) for name, value in facts)),
            Table("Mined crawls",
                  (Column("crawl", "name"), Column("SHA-256 of its manifest", "code"),
                   Column("recipe digest", "code")), sources),
            Table("Recipe, every setting",
                  (Column("setting", "name"), Column("value", "code"), Column("meaning")),
                  tuple(setting_rows(MixRecipe, manifest.recipe)), folded=True),
        ),
    )  # fmt: skip
