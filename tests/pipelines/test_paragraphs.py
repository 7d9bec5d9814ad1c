"""Paragraph keys: CCNet's golden vectors, every code point, real pages, any random text."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastwarc import ArchiveIterator, WarcRecordType
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import UserError
from pipelines import paragraphs
from pipelines.paragraphs import (
    PageParagraphs,
    Profile,
    normalise,
    page_lines,
    paragraph_hashes,
    split_lines,
)

PROFILES: tuple[Profile, ...] = ("ccnet", "unicode")
BLANK = 957977401221134810

# Characters that meet in odd ways: letters with and without accents of many scripts, marks of
# every kind, sigmas, dotted I, controls, joiners, Hangul in pieces, astral capitals and digits.
ODD = (
    "aeE1 İıΣςσΑάЙйЁѐ\u0301\u0323\u0338\u0345\u0307éệÅ\u212b\u2126\u2183\u2184=<«》—…．！-_'´\u1ffd"
    "\t\x01\x1f\x85\u00a0\u2028\u3000\ufeff\u00ad\u200b\u200c\u200d\u2066\ufe0f\u180b"
    "কখয়য\u09bc\u09c7\u09be\u09cbबनऩ\u093c\u094d१ไ่ำשׁ\u05b8بـ\u064e\u0651"
    "がか\u3099한각\u1100\u1161\u11a8\u0344\u037e\u0387\u0958\uf900\U0001e900𝟘😀\U0001d165\U000e0101"
)
odd_lines = st.text(st.sampled_from(ODD), max_size=24)
any_lines = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"))
lines = odd_lines | any_lines

# The first call builds the tables, which takes longer than an example may.
patient = settings(deadline=None, derandomize=True, max_examples=300)


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.sha1(key.encode()).digest()[:8], "little")


def _expected(texts: list[str], profile: Profile) -> PageParagraphs:
    """The oracle: one paragraph after the other, by definition."""
    by_page = [[_hash(normalise(line, profile)) for line in text.split("\n")] for text in texts]
    offsets = np.cumsum([0, *map(len, by_page)])
    return PageParagraphs(np.array(list(chain.from_iterable(by_page)), np.uint64), offsets)


def _assert_equal(found: PageParagraphs, expected: PageParagraphs) -> None:
    assert found.hashes.dtype == np.uint64
    assert found.offsets.dtype == np.int64
    assert found.hashes.tolist() == expected.hashes.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()


def _every_code_point() -> Iterator[str]:
    """Lines that hold every scalar value: alone and between letters.

    The planes of ideographs, private use and unassigned come as long lines.
    """
    lonely = [*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE1000)]
    for character in map(chr, lonely):
        if character not in "\n\r":
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
    """One page in thirty of a shard: dozens of languages, 0.7 MB."""
    shard = data_dir / "wet_docs" / "CC-DOCS-20260401000000-20260401030000-00000.warc.wet.gz"
    bodies = [
        record.reader.read().decode()
        for record in ArchiveIterator(
            str(shard), record_types=WarcRecordType.conversion, parse_http=False
        )
    ]
    return ["\n".join(page_lines(body)) for body in bodies[::30]]


def test_ccnet_golden_vectors(golden: dict[str, Any]) -> None:
    cases = golden["normalize_for_dedup_and_hash"]
    assert len(cases) == 55
    texts = [case["input"].strip() for case in cases]
    found = paragraph_hashes(texts, "ccnet").hashes.tolist()
    for case, hash_found in zip(cases, found, strict=True):
        assert normalise(case["input"], "ccnet") == case["normalized"]
        assert hash_found == case["str_hash_of_normalized"], case["input"]


def test_ccnet_every_code_point_against_the_recorded_classes(golden: dict[str, Any]) -> None:
    classes = golden["char_classes"]
    removed = {*classes["punct_removed_by_dedup"], *classes["control_removed"]}
    digits = {c for first, last in classes["digit_ranges"] for c in range(first, last + 1)}
    # Digits are replaced first, so the full-width one never reaches the list that names it.
    table: dict[int, str | None] = dict.fromkeys(removed) | dict.fromkeys(digits, "0")
    text = list(map(str.strip, _every_code_point()))
    expected = [line.lower().translate(table).encode() for line in text]
    assert paragraphs._ccnet_keys("\n".join(text)) == expected
    assert [normalise(line, "ccnet").encode() for line in text] == expected


def test_unicode_every_code_point_fast_way_equals_definition() -> None:
    text = list(_every_code_point())
    keys = paragraphs._unicode_keys("\n".join(text))
    assert keys == [normalise(line, "unicode").encode() for line in text]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_unicode_every_code_point_has_one_key_in_each_form(form: Any) -> None:
    text = "\n".join(_every_code_point())
    keys = paragraphs._unicode_keys(text)
    assert paragraphs._unicode_keys(unicodedata.normalize(form, text)) == keys


def test_unicode_key_of_every_code_point_is_its_own_key() -> None:
    keys = paragraphs._unicode_keys("\n".join(_every_code_point()))
    assert paragraphs._unicode_keys(b"\n".join(keys).decode()) == keys


@pytest.mark.parametrize("profile", PROFILES)
def test_real_pages_fast_way_equals_definition(pages: list[str], profile: Profile) -> None:
    assert len(pages) > 150
    _assert_equal(paragraph_hashes(pages, profile), _expected(pages, profile))


@patient
@given(st.lists(st.lists(lines, min_size=1).map("\n".join), max_size=6), st.sampled_from(PROFILES))
def test_any_text_fast_way_equals_definition(texts: list[str], profile: Profile) -> None:
    texts = ["\n".join(map(str.strip, text.split("\n"))) for text in texts]
    _assert_equal(paragraph_hashes(texts, profile), _expected(texts, profile))


@patient
@given(lines)
def test_unicode_is_stable(line: str) -> None:
    key = normalise(line, "unicode")
    assert normalise(key, "unicode") == key
    assert unicodedata.is_normalized("NFC", key)
    for form in ("NFC", "NFD"):
        assert normalise(unicodedata.normalize(form, line), "unicode") == key


def test_ccnet_is_not_idempotent() -> None:
    """Its strip comes before its deletions, so a second pass strips more."""
    assert normalise("— a", "ccnet") == " a"
    assert normalise(" a", "ccnet") == "a"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("", ""),
        ("  Hello,  World! ", "hello world"),
        ("- * -- …", ""),
        ("• item\tone", "item one"),
        ("1,234.56 €", "000000 €"),
        ("१२३ ١٢٣ １２３ 𝟘", "000 000 000 0"),
        ("Café CAFE\u0301 Ångström \u212b", "cafe cafe angstrom a"),
        ("Ёжик, й И ї", "ежик и и і"),
        ("Ὀδυσσεύς ΟΔΥΣΣΕΥΣ ᾳ", "οδυσσευσ οδυσσευσ α"),
        ("İstanbul ı Iğdır", "istanbul ı igdır"),
        ("Tiếng Việt đ", "tieng viet đ"),
        ("Straße GROẞ ø ł", "straße groß ø ł"),
        ("don’t don't don´t", "dont dont dont"),
        ("بَلْ، بل؟", "بَلْ بل"),
        ("שָׁלוֹם", unicodedata.normalize("NFC", "שָׁלוֹם")),
        ("ทั้งนี้", "ทั้งนี้"),
        ("がぎ か\u3099", "がぎ が"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("क्\u200dष", "क्\u200dष"),
        ("\ufeffso\u00adft\u200b \u2066x\u2069", "soft x"),
        ("❤\ufe0f ok", "❤ ok"),
        ("bell\x07 a\x85b\x1fc", "bell a b c"),
        ("a\u00a0\u3000\u2028b", "a b"),
        ("a.\u0301 क.\u0301", "a क\u0301"),
        ("か\u0338\u3099", "が\u0338"),
    ],
)
def test_unicode_keys(line: str, key: str) -> None:
    assert normalise(line, "unicode") == key
    assert paragraph_hashes([line], "unicode").hashes.tolist() == [_hash(key)]


@pytest.mark.parametrize(
    ("one", "other"),
    [("বল", "বুল"), ("कर", "कर्"), ("कि", "की"), ("ที", "ที่"), ("كَتَبَ", "كُتِبَ"), ("かき", "がぎ")],
)
def test_unicode_tells_words_apart_that_differ_by_a_mark(one: str, other: str) -> None:
    first, second = paragraph_hashes([one, other], "unicode").hashes.tolist()
    assert first != second


def test_unicode_keeps_every_mark_on_letters_of_other_scripts() -> None:
    selectors = {*map(chr, range(0xFE00, 0xFE10)), *map(chr, range(0xE0100, 0xE01F0))}
    every = map(chr, [*range(0xD800), *range(0xE000, 0x110000)])
    marks = [c for c in every if unicodedata.category(c) == "Mn" and c not in selectors]
    assert len(marks) > 1500
    for mark in marks:
        word = unicodedata.normalize("NFC", f"ক{mark}ক")
        assert normalise(word, "unicode") == word


def test_unicode_removes_accents_after_a_long_run_of_marks() -> None:
    accents = "\u0301" * 50_000
    keys = paragraphs._unicode_keys(f"e{accents}x\n{accents}ক{accents}".replace("ক\u0301", "ক"))
    assert keys[0] == b"ex"
    assert keys[1].decode().count("\u0301") == 99_999


def test_pages_keep_their_order_and_number_across_blocks() -> None:
    """Pages are hashed in blocks; sizes around the block's edge must not shift anything."""
    size = paragraphs._BLOCK_CHARS
    texts = ["", "x" * size, "", "y" * (size - 1), "z\n\nz", "", "é" * size + "\nend"]
    found = paragraph_hashes(texts, "ccnet")
    _assert_equal(found, _expected(texts, "ccnet"))
    assert found.offsets.tolist() == [0, 1, 2, 3, 4, 7, 8, 10]
    assert found.hashes[[0, 2, 5, 7]].tolist() == [BLANK] * 4


def test_no_pages() -> None:
    found = paragraph_hashes([], "unicode")
    assert found.hashes.tolist() == []
    assert found.offsets.tolist() == [0]


def test_unknown_profile() -> None:
    wrong: Any = "uncode"
    with pytest.raises(UserError, match='"uncode": choose "ccnet" or "unicode"'):
        normalise("a", wrong)
    with pytest.raises(UserError, match='"uncode": choose "ccnet" or "unicode"'):
        paragraph_hashes(["a"], wrong)


def test_lines_end_at_universal_newlines_only() -> None:
    text = "a\nb\r\nc\rd\u2028e\x85f\x0bg\n\r"
    assert split_lines(text) == ["a", "b", "c", "d\u2028e\x85f\x0bg", "", ""]
    assert split_lines("") == [""]
    assert page_lines(" \u3000a \r\n\t\n b\u00a0") == ["a", "", "b"]
