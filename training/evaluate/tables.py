"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from training.evaluate import domain_loss
from training.evaluate.domain_loss import DomainLoss

_NAMES = {"next_token": "next token", "masked_token": "masked token",
          "sentence_order": "sentence order"}  # fmt: skip


def task_table(result: Mapping[str, Any]) -> str:
    """Test scores of `comparison.compare` in percent: mean over seeds, standard deviation."""
    names = list(result["constant"]["test"])
    main = result["main_score"]
    names.sort(key=lambda name: name != main)
    seeds = len(result["recipe"]["fine_tuning"]["seeds"])
    sizes = result["data"]["examples"]
    head = (
        f"{result['task']}: {result['kind']}, {sizes['train']:,} train, "
        f"{sizes['validation']:,} validation, {sizes['test']:,} test examples\n"
        f"test scores in percent, mean \u00b1 sample standard deviation over {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}; learning rate and epochs chosen on validation"
    )
    rows = [["model", "learning rate", "epochs", *names]]
    for model in result["models"]:
        epochs = "/".join(str(run["best_epoch"]) for run in model["runs"])
        values = [_percent(**model["test"][name]) for name in names]
        rows.append([model["name"], f"{model['learning_rate']:g}", epochs, *values])
    constant = result["constant"]
    values = [_percent(constant["test"][name], None) for name in names]
    rows.append([constant["name"], "-", "-", *values])
    lines = [
        f"{row['name']} less {row['less']}: {main} {100 * row['mean']:+.2f}"
        + ("" if row["std"] is None else f" \u00b1 {100 * row['std']:.2f}")
        for row in result["differences"]
    ]
    return "\n".join([head, "", *_aligned(rows), *([""] if lines else []), *lines])


def held_out_table(name: str, losses: Mapping[str, DomainLoss]) -> str:
    """Losses of one checkpoint by domain, in nats, each with its standard error."""
    there = {domain: loss for domain, loss in losses.items() if loss.examples}
    whole = domain_loss.total(there.values())
    terms = list(whole.terms)
    causal = "next_token" in terms
    header = ["domain", "examples"]
    for term in terms:
        header += [f"{_NAMES[term]} loss", "accuracy"]
    header += ["unigram loss"] + (["perplexity", "bits/byte"] if causal else [])
    rows = [header]
    for domain, loss in [*there.items(), ("all labels", whole)]:
        row = [domain, f"{loss.examples:,}"]
        for term in terms:
            found = loss.terms.get(term)
            row += ["-", "-"] if found is None else [
                _error(found.loss, found.standard_error, 3),
                _error(100 * found.accuracy, _times(found.accuracy_error, 100), 1) + " %",
            ]  # fmt: skip
        row.append(_number(loss.unigram_loss, 3))
        if causal:
            row += [_number(loss.perplexity, 2), _number(loss.bits_per_byte, 4)]
        rows.append(row)
    if terms:
        rows.append(_mean_row(there, terms, len(header)))
    lines = [
        f"{name}: held-out pages; losses in nats \u00b1 standard error over examples",
        "unigram loss: of guessing by the token frequencies of the training pages",
        "",
        *_aligned(rows),
    ]
    missing = domain_loss.without_examples(losses)
    if missing:
        lines += ["", f"without a held-out example: {', '.join(missing)}"]
    return "\n".join(lines)


def held_out_comparison(
    names: Sequence[str], found: Sequence[Mapping[str, DomainLoss]], *, same_tokens: bool
) -> str:
    """Checkpoints side by side: loss of the first term by domain, and each less the first one.

    `same_tokens`: all have one tokenizer, so that losses by token compare. Without it decoders are
    compared in bits by byte; ALBERTs cannot be, and the answer says so.
    """
    terms = [list(domain_loss.total(losses.values()).terms)[:1] for losses in found]
    if not terms[0] or any(one != terms[0] for one in terms):
        return "the checkpoints have other objectives: their losses do not compare"
    (term,) = terms[0]
    if not same_tokens and term != "next_token":
        return "the checkpoints have other tokenizers: their losses by token do not compare"

    def value(loss: DomainLoss) -> float | None:
        if not same_tokens:
            return loss.bits_per_byte
        return loss.terms[term].loss if term in loss.terms else None

    first, *others = names
    rows = [["domain", *names, *(f"{other} less {first}" for other in others)]]
    domains = [name for name in found[0] if all(name in losses for losses in found)]
    parts = [(name, [losses[name] for losses in found]) for name in domains]
    parts.append(("all labels", [domain_loss.total(losses.values()) for losses in found]))
    digits = 3 if same_tokens else 4
    for name, losses in parts:
        values = [value(loss) for loss in losses]
        if any(one is not None for one in values):
            rows.append([
                name,
                *(_number(one, digits) for one in values),
                *(_difference(one, values[0], digits) for one in values[1:]),
            ])  # fmt: skip
    what = f"{_NAMES[term]} loss in nats" if same_tokens else "bits by byte of text"
    return "\n".join([f"side by side: {what}", "", *_aligned(rows)])


def _difference(value: float | None, first: float | None, digits: int) -> str:
    return "-" if value is None or first is None else f"{value - first:+.{digits}f}"


def _mean_row(there: Mapping[str, DomainLoss], terms: Sequence[str], columns: int) -> list[str]:
    row = ["mean of domains", ""]
    for term in terms:
        found = domain_loss.mean(there.values(), term)
        row += ["-", "-"] if found is None else [
            _error(found.loss, found.standard_error, 3), f"{100 * found.accuracy:.1f} %"
        ]  # fmt: skip
    return row + [""] * (columns - len(row))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _percent(mean: float, std: float | None) -> str:
    return _error(100 * mean, _times(std, 100), 2)


def _error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" \u00b1 {error:.{digits}f}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
