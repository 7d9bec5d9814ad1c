"""The language model's text: CCNet's golden vectors, every code point, real pages."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastwarc import ArchiveIterator, WarcRecordType
from hypothesis import given, settings
from hypothesis import strategies as st

from models.characters import CCNET_PUNCTUATION, is_noise, remove_accents
from models.errors import UserError
from models.lm_text import normalise_for_lm, normalise_page_for_lm

# Letters with and without accents, marks of every kind, sigmas, dotted I, controls, joiners,
# the marks that are mapped, Hangul in pieces, marks that NFD reorders, astral characters.
ODD = (
    "aE1 İıΣςσΑάЙйЁ\u0301\u0323\u0338\u0345\u0307éÅ\u212b\u2183\u2184=<>〈〉\u2329«》—…．！’´-"
    "\u1ffd\t\x01\x1f\x85\u00a0\u2000\u2028\u3000\ufeff\u00ad\u200b\u200c\u200d\u2066\ufe0f"
    "কয়য\u09bc\u09c7\u09be\u09cbनऩ\u093c\u094d१ไ่שׁ\u05b8بـ\u064e\u0651がか\u3099"
    "한각\u1100\u1161\u11a8\u302e\u0344\u037e\u0958\uf900\U0001e900𝟘😀\U0001d165\U0001d16d\U000e0101"
)
odd_texts = st.text(st.sampled_from(ODD + "\n"), max_size=32)
texts = odd_texts | st.text(st.characters(exclude_categories=["Cs"]))


# The first call builds the tables, which takes longer than an example may.
patient = settings(deadline=None, derandomize=True, max_examples=300)


def _mapped(text: str) -> str:
    zeros = "".join("0" if c.isdecimal() else c for c in text)
    return "".join(CCNET_PUNCTUATION.get(c, c) for c in zeros)


def _ccnet_slowly(text: str) -> str:
    decomposed = unicodedata.normalize("NFD", text.strip().lower())
    mapped = _mapped("".join(c for c in decomposed if unicodedata.category(c) != "Mn"))
    return "".join(c for c in mapped if unicodedata.category(c) != "Cc")


def _unicode_slowly(paragraph: str) -> str:
    spaced = "".join(" " if c.isspace() else c for c in paragraph if not is_noise(c))
    bare = remove_accents(unicodedata.normalize("NFC", spaced).lower())
    return unicodedata.normalize("NFC", _mapped(bare)).strip()


def _every_code_point() -> Iterator[str]:
    """Lines that hold every scalar value but the line feed, alone and between letters.

    The planes of ideographs, private use and unassigned come as long lines.
    """
    for character in map(chr, [*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE1000)]):
        if character != "\n":
            yield character
            yield f"e{character}к"
    rest = [*range(0x20000, 0xE0000), *range(0xE1000, 0x110000)]
    for start in range(0, len(rest), 256):
        yield "".join(map(chr, rest[start : start + 256]))


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((golden_dir / "ccnet_golden.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def pages(data_dir: Path) -> list[str]:
    """All pages of a small shard, about 30 languages, 0.9 MB."""
    shard = data_dir / "wet_docs_small"
    shard /= "CC-DOCS-SMALL-20260401000000-20260401030000-00000.warc.wet.gz"
    return [
        record.reader.read().decode()
        for record in ArchiveIterator(
            str(shard), record_types=WarcRecordType.conversion, parse_http=False
        )
    ]


def test_ccnet_golden_vectors(golden: dict[str, Any]) -> None:
    cases = golden["normalize_for_lm"]
    assert len(cases) == 66
    for case in cases:
        assert normalise_for_lm(case["input"], "ccnet") == case["normalized"], case["input"]
        assert normalise_page_for_lm(case["input"], "ccnet") == case["normalized"]


def test_marks_are_the_recorded_ones_without_the_digit(golden: dict[str, Any]) -> None:
    recorded = dict(golden["char_classes"]["lm_punct_map"])
    assert recorded.pop("１") == '"'
    assert recorded == CCNET_PUNCTUATION


def test_ccnet_every_code_point() -> None:
    # A text that needs NFD takes the second way with all of its characters.
    text = "ж".join(_every_code_point())
    assert normalise_for_lm(text, "ccnet") == _ccnet_slowly(text)
    # What changes goes alone, and so the first way if it has one; the rest goes together.
    together = list(map(chr, [*range(0x20000, 0x2F800), *range(0x2FA20, 0x110000)]))
    changing = 0
    for character in map(chr, [*range(0xD800), *range(0xE000, 0x20000), *range(0x2F800, 0x2FA20)]):
        image = _ccnet_slowly(character)
        if character == image and not unicodedata.combining(character):
            together.append(character)
        else:
            changing += 1
            assert normalise_for_lm(character, "ccnet") == image
    assert changing > 15_000
    text = "".join(together)
    assert normalise_for_lm(text, "ccnet") == _ccnet_slowly(text)


def test_ccnet_marks_that_are_kept_stand_in_canonical_order() -> None:
    assert normalise_for_lm("a\u302e\U0001d165", "ccnet") == "a\U0001d165\u302e"


def test_unicode_every_code_point() -> None:
    paragraphs = list(_every_code_point())
    found = normalise_page_for_lm("\n".join(paragraphs), "unicode").split("\n")
    assert found == list(map(_unicode_slowly, paragraphs))


def test_ccnet_real_pages(pages: list[str]) -> None:
    assert len(pages) == 256
    for page in pages:
        assert normalise_page_for_lm(page, "ccnet") == _ccnet_slowly(page)


def test_unicode_real_pages(pages: list[str]) -> None:
    for page in pages:
        expected = "\n".join(map(_unicode_slowly, page.split("\n")))
        assert normalise_page_for_lm(page, "unicode") == expected


@patient
@given(texts)
def test_ccnet_any_text(text: str) -> None:
    assert normalise_for_lm(text, "ccnet") == _ccnet_slowly(text)


@patient
@given(texts)
def test_unicode_any_text(text: str) -> None:
    paragraphs = text.split("\n")
    page = normalise_page_for_lm(text, "unicode")
    assert page == "\n".join(normalise_for_lm(p, "unicode") for p in paragraphs)
    assert page == "\n".join(map(_unicode_slowly, paragraphs))
    assert normalise_for_lm(text, "unicode") == _unicode_slowly(text)


@patient
@given(texts)
def test_unicode_is_stable(text: str) -> None:
    normalised = normalise_for_lm(text, "unicode")
    assert unicodedata.is_normalized("NFC", normalised)
    assert normalise_for_lm(normalised, "unicode") == normalised
    for form in ("NFC", "NFD"):
        assert normalise_for_lm(unicodedata.normalize(form, text), "unicode") == normalised


@pytest.mark.parametrize(
    ("paragraph", "normalised"),
    [
        ("", ""),
        ("  Hello,\tWorld!\n", "hello, world!"),
        ("हिन्दी १२३", "हिन्दी 000"),
        ("বুল বল য়", "বুল বল \u09af\u09bc"),
        ("Café CAFE\u0301 Ёжик й", "cafe cafe ежик и"),
        ("ΑΣ ΣΟΦΟΣ. Σ\u00adΟΣ", "ας σοφος. σος"),
        ("ΑΣ\x01Α", "ασα"),
        ("한국어 がぎ か\u3099", "한국어 がぎ が"),
        ("عَرَبِيّ", unicodedata.normalize("NFC", "عَرَبِيّ")),
        ("«x» — 你好，世界。", '"x"  -  你好,世界.'),
        ("— a …", "-  a ..."),
        ("１１．２", "00. 0"),
        ("〈\u0338 x", "\u226e x"),
        ("\ufeffso\u00adft bell\x07", "soft bell"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("a\u00a0b\u2003c", "a b c"),
    ],
)
def test_unicode_paragraphs(paragraph: str, normalised: str) -> None:
    assert normalise_for_lm(paragraph, "unicode") == normalised


def test_page_keeps_every_line_break() -> None:
    text = "\n— One —\n\n\u00adTwo\u3000\r\n\n"
    assert normalise_page_for_lm(text, "unicode") == "\n-  one  -\n\ntwo\n\n"
    assert normalise_page_for_lm(text, "ccnet") == " -  one  - \u00adtwo"


def test_page_strips_a_line_that_only_starts_or_only_ends_with_a_space() -> None:
    assert normalise_page_for_lm("a\n—b\n", "unicode") == "a\n- b\n"
    assert normalise_page_for_lm("a—\nb", "unicode") == "a -\nb"


def test_unknown_profile() -> None:
    wrong: Any = "nfc"
    for normalise in (normalise_for_lm, normalise_page_for_lm):
        with pytest.raises(UserError, match='"nfc": choose "ccnet" or "unicode"'):
            normalise("a", wrong)


def test_profiles_differ_where_marks_carry_vowels() -> None:
    assert normalise_for_lm("हिन्दी", "ccnet") == "हिनदी"
    assert normalise_for_lm("हिन्दी", "unicode") == "हिन्दी"
