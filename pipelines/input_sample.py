"""A look into the inputs before a run: windows of a few local files, chosen by a fixed seed."""

from __future__ import annotations

import random
from typing import NamedTuple

from models import files
from models.language_id import LanguageIdentifier
from pipelines.pages import read_page
from pipelines.plan import InputFile, Plan
from pipelines.wet import WetReader

ASSUMED_RATIO = 2.6
"""Uncompressed to stored bytes of a WET file where none can be sampled: assumed, as the next."""
_ASSUMED_WET_BYTES_PER_PARAGRAPH = 90
_SAMPLED_INPUTS = 4
_WINDOWS_PER_INPUT = 2
_WINDOW_BYTES = 512 << 10
_IDENTIFIED_CHARS = 1_000_000
_HEADER_BYTES = 370  # of a conversion record, without its URL


class Sample(NamedTuple):
    """What the windows held. inputs: how many of the inputs were read; 0 means all is assumed."""

    inputs: int
    ratio: float
    paragraphs_per_byte: float
    scored_share: float


def sample_inputs(plan: Plan) -> Sample:
    """Read windows of a few local inputs, chosen by a fixed seed."""
    local = [file for file in plan.inputs if file.bytes and files.is_local(file.url)]
    draw = random.Random(0)
    chosen = draw.sample(local, min(_SAMPLED_INPUTS, len(local)))
    identifier = LanguageIdentifier(plan.language_id.path)
    read = stored = wet = paragraphs = identified = scored = 0
    for file in chosen:
        found = [_window(plan, file, draw.random()) for _ in range(_WINDOWS_PER_INPUT)]
        read += any(window_wet for _, window_wet, _, _ in found)
        chars = _IDENTIFIED_CHARS // (len(chosen) * _WINDOWS_PER_INPUT)
        for window_stored, window_wet, window_paragraphs, pages in found:
            stored += window_stored if window_wet else 0
            wet += window_wet
            paragraphs += window_paragraphs
            texts = _first_chars(pages, chars)
            languages, _ = identifier.identify(texts) if texts else ([], None)
            for text, language in zip(texts, languages, strict=True):
                identified += len(text)
                scored += len(text) if language in plan.language_models else 0
    if not wet:
        return assumed(plan)
    return Sample(read, wet / stored, paragraphs / wet, scored / max(identified, 1))


def assumed(plan: Plan) -> Sample:
    """What is taken for true where nothing can be sampled."""
    share = 1.0 if plan.language_models else 0.0
    return Sample(0, ASSUMED_RATIO, 1 / _ASSUMED_WET_BYTES_PER_PARAGRAPH, share)


def _window(plan: Plan, file: InputFile, place: float) -> tuple[int, int, int, list[str]]:
    """Stored bytes, WET bytes, paragraphs and pages in one window of `file`.

    The reader finds the first record in it by itself. Where it finds none (one single gzip
    member), the window is the beginning of the file.
    """
    try:
        with files.mapped(file.url) as data:
            start = round(place * max(len(data) - _WINDOW_BYTES, 0))
            for begin in (start, 0):
                window = bytes(data[begin : begin + _WINDOW_BYTES])
                reader = WetReader(window)
                records = list(reader)
                if records:
                    break
    except OSError:  # the hash pass will name it
        return 0, 0, 0, []
    lost = sum(loss.bytes for loss in reader.losses)
    wet = sum(len(record.body) + len(record.url) + _HEADER_BYTES for record in records)
    pages = [read_page(record, plan.recipe.pages) for record in records]
    entering = [page for page in pages if not page.dropped]
    paragraphs = sum(len(page.lines) for page in entering)
    return len(window) - lost, wet, paragraphs, [" ".join(page.lines) for page in entering]


def _first_chars(texts: list[str], chars: int) -> list[str]:
    for number, text in enumerate(texts, start=1):
        chars -= len(text)
        if chars <= 0:
            return texts[:number]
    return texts
