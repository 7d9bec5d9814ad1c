"""The table of languages and the reading of labels into it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import models.languages
from models.errors import UserError
from models.languages import check_codes, parse_label, table


def test_no_two_languages_share_a_code() -> None:
    path = Path(models.languages.__file__).with_name("languages.tsv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    owner: dict[str, str] = {}
    for row in rows:
        for code in {row["code"], row["iso639_3"], row["iso639_1"], *row["also"].split()} - {""}:
            assert owner.setdefault(code, row["code"]) == row["code"], code
    assert len(rows) == len(table()) == 413
    assert [row["code"] for row in rows] == sorted(table())


def test_every_row_is_well_formed() -> None:
    for code, row in table().items():
        assert row.code == code
        assert len(row.iso639_3) == 3 and row.iso639_3.isalpha()
        assert row.iso639_1 in ("", code) and len(row.iso639_1) in (0, 2)
        assert len(row.script) == 4 and row.script == row.script.title()
        assert row.name
    # Every two-letter code is ISO 639-1's: 183 in force and the two that lid.176 keeps alive
    # (sh, bh), less nb and tw, which are read as no and ak.
    assert sum(len(code) == 2 for code in table()) == 183
    assert sum(row.in_lid176 for row in table().values()) == 176


@pytest.mark.parametrize("code", sorted(table()))
def test_a_canonical_code_stands_for_itself(code: str) -> None:
    assert parse_label(code) == (code, table()[code].script)
    assert check_codes([code]) == [code]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("en", ("en", "Latn")),
        ("eng", ("en", "Latn")),
        ("eng_Latn", ("en", "Latn")),
        ("__label__eng_Latn", ("en", "Latn")),
        ("__label__bn", ("bn", "Beng")),
        ("BEN-beng", ("bn", "Beng")),
        ("zh", ("zh", "Hans")),
        ("zh-Hans", ("zh", "Hans")),
        ("zho_Hant", ("zh", "Hant")),
        ("cmn_Hani", ("zh", "Hani")),
        ("zh-TW", ("zh", "Hant")),
        ("zh-Hant-HK", ("zh", "Hant")),
        ("pt-BR", ("pt", "Latn")),
        ("es_419", ("es", "Latn")),
        ("no", ("no", "Latn")),
        ("nb", ("no", "Latn")),
        ("nob_Latn", ("no", "Latn")),
        ("nn", ("nn", "Latn")),
        ("nno_Latn", ("nn", "Latn")),
        ("als", ("als", "Latn")),
        ("gsw", ("als", "Latn")),
        ("als_Latn", ("sq", "Latn")),
        ("sh", ("sh", "Latn")),
        ("hbs", ("sh", "Latn")),
        ("hbs_Cyrl", ("sh", "Cyrl")),
        ("bho_Deva", ("bh", "Deva")),
        ("ger", ("de", "Latn")),
        ("iw", ("he", "Hebr")),
        ("arb_Arab", ("ar", "Arab")),
        ("arz", ("arz", "Arab")),
        ("hin_Latn", ("hi", "Latn")),
        ("und", ("und", "")),
        ("zxx_Zxxx", ("und", "Zxxx")),
    ],
)
def test_any_style_of_label(label: str, expected: tuple[str, str]) -> None:
    assert parse_label(label) == expected


@given(st.text(max_size=20) | st.from_regex(r"[a-z]{1,4}([-_][a-zA-Z0-9]{1,5}){0,2}"))
def test_any_text_is_a_known_language_or_a_user_error(text: str) -> None:
    try:
        language, _ = parse_label(text)
    except UserError as error:
        assert f"'{text}'" in str(error)
    else:
        assert language == "und" or language in table()


@pytest.mark.parametrize(
    ("written", "close"),
    [
        ("xq", "nothing is close"),
        ("Bengali", "'bn' (Bengali)"),
        ("english", "'en' (English)"),
        ("", "und"),
    ],
)
def test_an_unknown_code_is_quoted_with_what_is_close(written: str, close: str) -> None:
    with pytest.raises(UserError) as caught:
        check_codes(["en", written])
    assert f"unknown language code '{written}'" in str(caught.value)
    assert close in str(caught.value)


def test_codes_come_back_canonical_in_order_and_once() -> None:
    assert check_codes(["eng", "bn", "nb", "no", "und", "en"]) == ["en", "bn", "no", "und"]


def test_a_language_that_the_model_never_gives_is_an_error() -> None:
    assert check_codes(["eng", "und"], produced={"en", "de"}) == ["en", "und"]
    with pytest.raises(UserError, match="'zul' is never given by the language identification"):
        check_codes(["en", "zul"], produced={"en", "de"})


def test_a_choice_of_script_is_refused_and_not_ignored() -> None:
    assert check_codes(["zh-Hans", "eng_Latn"]) == ["zh", "en"]
    with pytest.raises(UserError, match=r"'zh-Hant' asks for script 'Hant'.*write 'zh'"):
        check_codes(["zh-Hant"])
