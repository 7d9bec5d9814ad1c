"""One table of language codes, and the reading of every style of label into it.

The table (`languages.tsv`) holds all 176 labels of fastText's lid.176, all of ISO 639-1, and the
languages that larger identification models tell apart. A language has ONE name here:

- what lid.176 calls it, where lid.176 knows it, since that is what CCNet's files, its cutoff
  table and its models are called; otherwise the ISO 639-1 code; otherwise ISO 639-3;
- a macrolanguage and its standard form are one (`cmn` is `zh`, `arb` is `ar`, `nob` and `nb` are
  `no`, `swh` is `sw`, `fil` is `tl`); other members stay themselves (`arz`, `yue`, `prs`, `nn`);
- retired codes are read as what replaced them (`iw` is `he`, `in` is `id`, `mo` is `ro`);
- `sh` (Serbo-Croatian, ISO 639-3 `hbs`) stays apart from `sr`, `hr` and `bs`, `eml` and `nah`
  stay whole, and `bh` is Bhojpuri (`bho`): so lid.176 has them, after the Wikipedias.

`als` means two languages. Bare, it is lid.176's (and Wikipedia's) Alemannic, ISO `gsw`; with a
script, `als_Latn`, it is ISO's Tosk Albanian, as NLLB and GlotLID write it, and is read as `sq`.
"""

from __future__ import annotations

import csv
import difflib
import functools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from models.errors import UserError

UNDETERMINED = "und"
# ISO 639's "no linguistic content", "several languages" and "uncoded".
_NO_SINGLE_LANGUAGE = frozenset({"und", "zxx", "mul", "mis"})
_LABEL = re.compile(
    r"(?:__label__)?(?P<language>[a-z]{2,3})"
    r"(?:[-_](?P<script>[a-z]{4}))?(?:[-_](?:[a-z]{2}|[0-9]{3}))?",
    re.IGNORECASE,
)
_REGION_SCRIPTS = {"zh-tw": "Hant", "zh-hk": "Hant", "zh-mo": "Hant"}


@dataclass(frozen=True, slots=True)
class Language:
    """One row of the table. `script` is ISO 15924, the usual one; `iso639_1` may be ''."""

    code: str
    iso639_3: str
    iso639_1: str
    name: str
    script: str
    in_lid176: bool


@functools.cache
def table() -> dict[str, Language]:
    """Every language by its canonical code."""
    return {row["code"]: _language(row) for row in _rows()}


def parse_label(label: str) -> tuple[str, str]:
    """The canonical language code and the ISO 15924 script of a label.

    Reads `en`, `eng`, `eng_Latn`, `zh-Hans`, `pt-BR` and `__label__` before any of them, in any
    case. Without a script in the label it is the language's usual one; `und` has ''.
    Raises UserError for anything else.

    >>> parse_label("__label__eng_Latn"), parse_label("cmn"), parse_label("zh-Hant")
    (('en', 'Latn'), ('zh', 'Hans'), ('zh', 'Hant'))
    """
    found = find_label(label)
    if found is None:
        raise _unknown(label)
    return found


def find_label(label: str) -> tuple[str, str] | None:
    """As `parse_label`, but None for what it does not know."""
    match = _LABEL.fullmatch(label.strip())
    if match is None:
        return None
    written = match["language"].lower()
    script = (match["script"] or "").title()
    if written in _NO_SINGLE_LANGUAGE:
        return UNDETERMINED, script
    code = "sq" if written == "als" and script else _codes().get(written)
    if code is None:
        return None
    if not script:
        tag = label.strip().lower().removeprefix("__label__").replace("_", "-")
        script = _REGION_SCRIPTS.get(tag, table()[code].script)
    return code, script


def check_codes(codes: Iterable[str], produced: Collection[str] | None = None) -> list[str]:
    """The canonical forms of `codes`, in order, each once.

    `produced`: the codes that the identification model in use can give (`und` is always among
    them); a valid language outside them would select nothing, and is an error too. So is a
    script other than the language's usual one: pages are chosen by language alone.
    Raises UserError.
    """
    checked: dict[str, None] = {}
    for written in codes:
        code, script = parse_label(written)
        if code != UNDETERMINED and script != table()[code].script:
            raise UserError(
                f"the language '{written}' asks for script '{script}', but languages are chosen "
                f"without their script; write '{code}'"
            )
        if produced is not None and code != UNDETERMINED and code not in produced:
            near = _close(code, produced)
            raise UserError(
                f"the language '{written}' is never given by the language identification model, "
                f"so no page could be kept; {near} see the model's {len(produced)} codes, or use "
                "another model"
            )
        checked[code] = None
    return list(checked)


def _unknown(label: str) -> UserError:
    written = label.strip().lower().removeprefix("__label__")
    names = [row.name.lower() for row in table().values()]
    near = _close(written, [written] if written in names else [*_codes(), *names])
    return UserError(
        f"unknown language code '{label}'; {near} valid are ISO 639-1 and 639-3 codes such as "
        "'bn' or 'ben', with or without a script ('ben_Beng'), and 'und'"
    )


def _close(written: str, valid: Iterable[str]) -> str:
    names = {row.name.lower(): code for code, row in table().items()}
    found = difflib.get_close_matches(written, valid, n=4, cutoff=0.6)
    codes = dict.fromkeys(names.get(match) or _codes().get(match, match) for match in found)
    listed = ", ".join(f"'{code}' ({table()[code].name})" for code in codes if code in table())
    return f"close to it: {listed};" if listed else "nothing is close to it;"


@functools.cache
def _codes() -> dict[str, str]:
    """Canonical code by every code that means it (not by name)."""
    codes: dict[str, str] = {}
    for row in _rows():
        for other in (row["iso639_3"], row["iso639_1"], *row["also"].split()):
            codes.setdefault(other, row["code"])
    codes.update({row["code"]: row["code"] for row in _rows()})
    codes.pop("", None)
    return codes


def _language(row: dict[str, str]) -> Language:
    return Language(
        code=row["code"],
        iso639_3=row["iso639_3"],
        iso639_1=row["iso639_1"],
        name=row["name"],
        script=row["script"],
        in_lid176=row["lid176"] == "yes",
    )


@functools.cache
def _rows() -> tuple[dict[str, str], ...]:
    path = Path(__file__).with_name("languages.tsv")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
