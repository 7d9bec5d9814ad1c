"""Pass 3: one WET file becomes its kept pages, identified, scored, and sorted by language.

The pages go to a staging Parquet file whose row groups hold one language each, in crawl order.
Beside it stands a JSON report, written last: counts, losses, and the file's digest. Both are
named by all that they depend on; a report whose file has the right digest is finished work.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from models import files
from models.errors import DamagedInput, Fault
from models.language_id import LanguageIdentifier, passes
from models.languages import UNDETERMINED, check_codes
from pipelines.arrays import open_arrays
from pipelines.dedup import FileKeys, apply
from pipelines.hashing import batches, input_bytes
from pipelines.model_check import check_models
from pipelines.pages import Page, read_page
from pipelines.plan import FORMAT, InputFile, Plan
from pipelines.sealed import read_sealed, write_sealed
from pipelines.staging import rows_of, write_drops, write_staging
from pipelines.wet import WetReader

_EMPTY_KEY = np.uint64(957_977_401_221_134_810)  # SHA-1 of "", its first 8 bytes

Report = dict[str, Any]


def clean_file(plan: Plan, unit: InputFile, keys_path: str, bits: np.ndarray) -> Report:
    """Apply `bits` (bool, one for each distinct key of `unit`), filter, score, stage.

    Gives the report. Raises Fault when the WET file is not the one that pass 1 hashed, or a model
    is not the planned one any more, DamagedInput when the key file is damaged, OSError.
    """
    with open_arrays(keys_path) as file:
        keys, hashed_identity = FileKeys.read(file), file.header["xxh3"]
    base = files.join(plan.staging, "pages", _digest(plan, unit, hashed_identity, bits))
    report = _finished(base)
    if report is None:
        with _input(unit.url) as data:
            identity = files.xxh3_bytes(data)
            if identity != hashed_identity:
                raise Fault("changed during the run; the next run takes it as it then is")
            check_models(plan)
            report = _Cleaner(plan, unit, keys, bits).run(data, base)
            check_models(plan)
            if files.xxh3_bytes(data) != identity:
                raise Fault("changed while it was read; the next run takes it as it then is")
            report["input"] = {"bytes": len(data), "xxh3": identity}
        write_sealed(f"{base}.json", report)
    return report | {"path": f"{base}.parquet", "drops_path": f"{base}.drops.parquet"}


@contextlib.contextmanager
def _input(url: str) -> Iterator[memoryview]:
    """The bytes of a WET file that pass 1 has read. Raises Fault when they are gone."""
    with contextlib.ExitStack() as stack:
        try:
            data = stack.enter_context(input_bytes(url))
        except OSError as error:
            raise Fault(
                f"cannot be read any more ({error.strerror or error}): put it back, or leave it "
                "out and add --restart"
            ) from error
        yield data


def _digest(plan: Plan, unit: InputFile, identity: str, bits: np.ndarray) -> str:
    recipe = plan.recipe
    settled = [
        FORMAT,
        unit.name,
        identity,
        files.xxh3_bytes(np.packbits(bits).tobytes()),
        bits.size,
        plan.model_digests(),
        recipe.pages.model_dump(),
        recipe.paragraphs.model_dump(),
        recipe.dedup.within_page,
        recipe.language.model_dump(mode="json", exclude={"model"}),
        recipe.quality.profile,
        recipe.quality.min_chars,
        recipe.output.drops,
    ]
    return files.xxh3_bytes(json.dumps(settled, sort_keys=True).encode())


def _finished(base: str) -> Report | None:
    try:
        report: Report = read_sealed(f"{base}.json")
        good = report["xxh3"] == files.xxh3_file(f"{base}.parquet")
        if good and report["drops_xxh3"]:
            good = report["drops_xxh3"] == files.xxh3_file(f"{base}.drops.parquet")
    except (OSError, DamagedInput):
        return None
    return report if good else None


class _Cleaner:
    """The work on one WET file: made for it, thrown away after it."""

    def __init__(self, plan: Plan, unit: InputFile, keys: FileKeys, bits: np.ndarray) -> None:
        self.plan = plan
        self.recipe = plan.recipe
        self.unit = unit
        kept = apply(keys, bits, self.recipe.dedup.within_page)
        mask, repeated = kept.mask, kept.repeated_in_page
        empty = np.zeros(mask.size, bool)
        if self.recipe.paragraphs.profile == "unicode":
            empty = (keys.distinct == _EMPTY_KEY)[keys.inverse]
            mask, repeated = mask & ~empty, repeated & ~empty
        self.mask = mask
        # By page: how many paragraphs there are, how many stay, and why the others do not.
        self.sizes = np.diff(keys.offsets).tolist()
        self.kept = _by_page(mask, keys.offsets)
        self.empty = _by_page(empty, keys.offsets)
        self.repeated = _by_page(repeated, keys.offsets)
        places = np.flatnonzero(mask)
        starts = np.repeat(keys.offsets[:-1], self.kept)
        self.line_ids = (places - starts).astype(np.int32)  # of what stays, in its page
        self.next_line = 0  # of `mask`
        self.next_kept = 0  # of `line_ids`
        self.pages: Counter[str] = Counter()
        self.paragraphs: Counter[str] = Counter()
        self.kept_paragraphs = 0
        self.read_paragraphs = 0
        self.tables: list[pa.Table] = []
        self.drops: list[dict[str, Any]] = []
        self.next_page = 0
        self.identifier = LanguageIdentifier(
            plan.language_id.local(), self.recipe.language.profile, self.recipe.language.max_chars
        )
        self.allow = frozenset(check_codes(self.recipe.language.allow))
        self.deny = frozenset(check_codes(self.recipe.language.deny))

    def run(self, data: memoryview, base: str) -> Report:
        reader = WetReader(data)
        for batch in batches(self._entering(reader)):
            self._clean_batch(batch)
        if self.next_page != len(self.sizes):
            raise Fault(f"'{self.unit.name}' has {self.next_page} pages, its key file others")
        written = sum(table.num_rows for table in self.tables)
        row_groups, xxh3 = write_staging(self.plan, self.tables, f"{base}.parquet")
        drops_xxh3 = ""
        if self.recipe.output.drops:
            drops_xxh3 = write_drops(self.drops, f"{base}.drops.parquet")
        counts = reader.counts
        return {
            "records": {
                "read": counts.read,
                "not_pages": counts.not_pages,
                "lost": counts.lost,
                "length_corrected": counts.length_corrected,
            },
            "pages": {
                "read": counts.read,
                "written": written,
                "dropped": dict(sorted(self.pages.items())),
            },
            "paragraphs": {
                "read": self.read_paragraphs,
                "kept": self.kept_paragraphs,
                "dropped": dict(sorted(self.paragraphs.items())),
            },
            "losses": [[loss.offset, loss.bytes, loss.reason] for loss in reader.losses],
            "row_groups": row_groups,
            "xxh3": xxh3,
            "drops_xxh3": drops_xxh3,
        }

    def _entering(self, reader: WetReader) -> Any:
        """The pages that enter, in file order; the others are counted here."""
        for record in reader:
            page = read_page(record, self.recipe.pages)
            if page.dropped:
                self.read_paragraphs += len(page.lines)
                self._drop(page, page.dropped, paragraphs=len(page.lines), chars=page.chars)
            else:
                yield page

    def _clean_batch(self, batch: list[Page]) -> None:
        kept_pages, texts, line_ids, sizes = [], [], [], []
        lines_of_batch = sum(len(page.lines) for page in batch)
        mask = self.mask[self.next_line : self.next_line + lines_of_batch].tolist()
        line = 0
        for page in batch:
            if self.next_page == len(self.sizes) or len(page.lines) != self.sizes[self.next_page]:
                raise Fault(f"'{self.unit.name}' has other paragraphs than its key file")
            kept, empty, repeated = (
                self.kept[self.next_page],
                self.empty[self.next_page],
                self.repeated[self.next_page],
            )
            self.next_page += 1
            count = len(page.lines)
            ids = self.line_ids[self.next_kept : self.next_kept + kept]
            self.next_kept += kept
            self.read_paragraphs += count
            self.paragraphs["empty"] += empty
            self.paragraphs["repeated_in_page"] += repeated
            self.paragraphs["duplicate"] += count - kept - empty - repeated
            text = "\n".join(compress(page.lines, mask[line : line + count]))
            line += count
            if not text.strip():  # nothing, or nothing but blank lines
                self._drop(page, "emptied_by_dedup", paragraphs=kept, chars=0)
            elif len(text) < self.recipe.pages.min_chars_after:
                self._drop(page, "too_short_after_dedup", paragraphs=kept, chars=len(text))
            else:
                kept_pages.append(page)
                texts.append(text)
                line_ids.append(ids)
                sizes.append(kept)
        self.next_line += line
        if not texts:
            return
        languages, scores = self.identifier.identify(texts)
        rows = []
        passing = passes(scores, self.recipe.language.threshold).tolist()
        for i, page in enumerate(kept_pages):
            if not passing[i] and self.recipe.language.keep_undetermined:
                languages[i], passing[i] = UNDETERMINED, True
            reason = self._language_fault(languages[i], passing[i])
            if reason:
                self._drop(
                    page, reason, paragraphs=sizes[i], chars=len(texts[i]),
                    language=languages[i], score=float(scores[i]),
                )  # fmt: skip
            else:
                rows.append(i)
                self.kept_paragraphs += sizes[i]
        self.tables.append(
            rows_of(
                [kept_pages[i] for i in rows],
                [texts[i] for i in rows],
                [line_ids[i] for i in rows],
                [languages[i] for i in rows],
                [float(scores[i]) for i in rows],
                warc_file=self.unit.name,
            )
        )

    def _language_fault(self, language: str, passes: bool) -> str:
        if not passes:
            return "language_below_threshold"
        if (self.allow and language not in self.allow) or language in self.deny:
            return "language_not_wanted"
        return ""

    def _drop(
        self,
        page: Page,
        reason: str,
        *,
        paragraphs: int,
        chars: int,
        language: str | None = None,
        score: float | None = None,
    ) -> None:
        self.pages[reason] += 1
        if paragraphs:
            self.paragraphs[f"page_{reason}"] += paragraphs
        if self.recipe.output.drops:
            record = page.record
            self.drops.append(
                {
                    "url": record.url, "record_id": record.record_id, "warc_file": self.unit.name,
                    "warc_offset": record.warc_offset, "reason": reason, "language": language,
                    "language_score": score, "chars": chars,
                }
            )  # fmt: skip


def _by_page(flags: np.ndarray, offsets: np.ndarray) -> list[int]:
    """How many of `flags`, one for each paragraph, are set on each page."""
    sums = np.concatenate([[0], np.cumsum(flags)])
    counts: list[int] = np.diff(sums[offsets]).tolist()
    return counts
