"""Normaliser profiles: golden pairs for each step, a plain Python oracle, normalising twice."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from models.normalisers import normaliser, profiles

INVISIBLE = "\u00ad\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2069\ufeff"

GOLDEN: dict[str, list[tuple[str, str]]] = {
    "default": [
        ("a\u0000b\u0007c\u007fd\u0086e", "abcde"),  # controls
        (f"x{INVISIBLE}y", "xy"),
        ("می\u200cخواهم", "می\u200cخواهم"),  # U+200C is a letter's neighbour
        ("ক্\u200dষ ক্\u200cষ", "ক্\u200dষ ক্\u200cষ"),
        ("☺\ufe0f", "☺\ufe0f"),  # a variation selector is a mark
        ("ﬁ Ａ １ ½ ℃", "fi A 1 1⁄2 °C"),  # NFKC
        ("e\u0301 \u1112\u1161\u11ab", "é 한"),
        ("นํ้า ลำ", "นํ้า ลํา"),  # NFKC: sara am is two characters
        ("\u0645\u0651\u064e \ufedf\ufe8e", "\u0645\u064e\u0651 \u0644\u0627"),  # order, shapes
        ("\u09dc \u09a1\u09bc", "\u09a1\u09bc \u09a1\u09bc"),
        ("a \t\n\r\u000b\u000c\u0085\u00a0\u2003\u2028\u3000b", "a b"),
        ("a▁b", "a b"),
        ("  ab  ", "ab"),
        ("\u00a8", "\u0308"),  # NFKC gives a space with a mark; the space goes
        ("ÀB Ç", "ÀB Ç"),  # case and accents stay
        ("ক: |", "ক: |"),
        ("\u2581 \u200b", ""),
    ],
    "default-lower": [
        ("ÀB ÇΣ", "àb çσ"),
        ("H\u0331", "\u1e96"),  # composed in lower case only
        ("Straße ＩＤ", "straße id"),
        ("a\u200b  b", "a b"),
    ],
    "bn": [
        ("a\u0001b\u000bc\u007fd", "abcd"),  # NMT: controls go
        ("a\tb\nc\u200bd\u200ee\ufefff\ufffdg", "a b c d e f g"),  # NMT: these are spaces
        ("a▁b", "a b"),
        ("ক্\u200dষ ক্\u200cষ", "ক্ ষ ক্ ষ"),  # NMT: joiners are spaces, too
        ("ত\u09cd\u200d", "ত\u09cd "),
        ("Ａ ﬁ \u2026", "a fi ..."),  # NFKC
        ("\u09dc\u09dd\u09df", "\u09a1\u09bc\u09a2\u09bc\u09af\u09bc"),  # NFKC decomposes
        ("\u0995\u09c7\u09be \u0995\u09c7\u09d7", "\u0995\u09cb \u0995\u09cc"),  # NFKC composes
        ("a   b", "a b"),
        ("a\u00a0\u2003b", "a b"),  # NFKC makes the spaces, then the run is one
        ("a\u200c\u200db", "a b"),  # NMT makes the spaces
        (" a ", " a "),  # the ends stay
        ("ক\u09e4 ক\u09e5 ক| ক\u09f7", "ক\u0964 ক\u0965 ক\u0964 ক\u0964"),
        ("ক\uff5c", "ক\u0964"),  # NFKC first: a wide bar is a bar
        ("দু:খ নাম: ১০:৪২", "দু\u0983খ নাম\u0983 ১০\u0983৪২"),
        ("ক\uff1a", "ক\u0983"),  # NFKC first: a wide colon is a colon
        ("ক\u0964: ক\u09f7: ক\u09e4:", "ক\u0964: ক\u0964: ক\u0964:"),  # dandas come before colons
        ("abc: :", "abc: :"),
        ("ক::", "ক\u0983:"),
        ("ABC ÉÀ", "abc éà"),  # lower case, accents stay
    ],
    "bn-v2": [
        ("a\u0001b\u200bc\ufeffd\u00ade", "abcde"),
        ("a\t\nb▁c", "a b c"),
        ("র\u200d্য ক্\u200cষ", "র\u200d্য ক্\u200cষ"),  # joiners stay
        ("Ａ ﬁ ABC ÉÀ", "a fi abc éà"),
        ("\u09dc\u09dd\u09df", "\u09dc\u09dd\u09df"),  # one spelling for each letter
        ("\u09a1\u09bc\u09a2\u09bc\u09af\u09bc", "\u09dc\u09dd\u09df"),
        ("\u09a1\u200b\u09bc", "\u09dc"),  # nothing visible stood between
        ("\u09ac\u09bc", "\u09ac\u09bc"),  # no such letter: the mark stays
        ("\u0995\u09c7\u09be \u0995\u09c7\u09d7", "\u0995\u09cb \u0995\u09cc"),
        ("\u0995\u09cb \u0995\u09cc", "\u0995\u09cb \u0995\u09cc"),
        ("\u09a4\u09cd\u200d \u09ce", "\u09ce \u09ce"),  # khanda ta, old and new
        ("হঠা\u09a4\u09cd\u200d|", "হঠা\u09ce\u0964"),
        ("\u09a4\u09cd \u09a4\u09cd\u200c", "\u09a4\u09cd \u09a4\u09cd\u200c"),  # ta with hasanta
        ("ক\u09e4 ক\u09e5 ক| ক\u09f7", "ক\u0964 ক\u0965 ক\u0964 ক\u0964"),
        ("দু:খ নি:শ্বাস অত:পর (দু:সহ", "দুঃখ নিঃশ্বাস অতঃপর (দুঃসহ"),
        ("ব\u09af\u09bc:সন্ধি ব\u09df:সন্ধি", "ব\u09dfঃসন্ধি ব\u09dfঃসন্ধি"),  # after the nukta step
        ("দু\uff1aখ", "দুঃখ"),
        ("নাম: নাম:রহিম ১০:৪২ ১:১", "নাম: নাম:রহিম ১০:৪২ ১:১"),  # colons
        ("বিষয়শ্রেণী:বাংলা", "বিষ\u09dfশ্রেণী:বাংলা"),
        ("দু: খ নি:, বিশেষত: সুদু:খ", "দু: খ নি:, বিশেষত: সুদু:খ"),
        ("দু::খ", "দু::খ"),
        (" ক  খ ", "ক খ"),
    ],
}

# The steps, as they were when the first tokenizer was made with them. A profile whose digest
# changes makes tokenizers that say they have it, and do not: give the new steps a new name.
DIGESTS = {
    "default": "e835bcaf45eca038",
    "default-lower": "2deca48c75241cac",
    "bn": "1515e3200e83f810",
    "bn-v2": "bac874950c13a6fd",
}


@pytest.mark.parametrize("profile", GOLDEN)
def test_golden(profile: str) -> None:
    normalise = normaliser(profile).normalize_str
    for text, expected in GOLDEN[profile]:
        assert normalise(text) == expected, ascii(text)


def test_every_profile_has_golden_pairs_and_a_description() -> None:
    assert set(GOLDEN) == set(profiles()) == set(DIGESTS)
    assert all(profiles().values())


@pytest.mark.parametrize("profile", GOLDEN)
def test_a_profile_never_changes(profile: str) -> None:
    steps = json.loads(normaliser(profile).__getstate__())
    canonical = json.dumps(steps, sort_keys=True).encode()
    assert hashlib.sha256(canonical).hexdigest()[:16] == DIGESTS[profile]


def test_unknown_profile() -> None:
    with pytest.raises(UserError, match=r"'bn-v3'.*'default'.*'bn-v2'"):
        normaliser("bn-v3")


_NMT_GONE = {*range(1, 9), 0xB, *range(0xE, 0x20), 0x7F, 0x8F, 0x9F}
_NMT_SPACE = {9, 0xA, 0xC, 0xD, 0x1680, *range(0x200B, 0x2010), 0x2028, 0x2029, 0x2581, 0xFEFF,
              0xFFFD}  # fmt: skip


def _sahajbert(text: str) -> str:
    """sahajBERT's steps in plain Python."""
    text = "".join(" " if ord(c) in _NMT_SPACE else c for c in text if ord(c) not in _NMT_GONE)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(" {2,}", " ", text)
    text = re.sub("\u09e4", "\u0964", text)
    text = re.sub("\u09e5", "\u0965", text)
    text = re.sub(r"\|", "\u0964", text)
    text = re.sub("\u09f7", "\u0964", text)
    text = re.sub("(?<=[\u0980-\u09ff]):", "\u0983", text)
    return "".join(c.lower() for c in text)


# Bengali, Latin, marks, joiners, dandas, colons, spaces: what the steps are about. U+09FE is
# younger than the Unicode tables of the tokenizers library.
_CHARACTERS = [chr(c) for c in range(0x980, 0x9FE) if unicodedata.name(chr(c), "")]
_CHARACTERS += "aBzÉİß:：|｜।॥ \t\u00a0\u2003\u200b\u200c\u200d\u200e\ufeff▁\u0301\u0331\u0316"
_CHARACTERS += "ﬁ½१()\u0001"
_BENGALI = st.text(st.sampled_from(_CHARACTERS), max_size=24)


@given(_BENGALI)
def test_bn_is_sahajbert(text: str) -> None:
    assert normaliser("bn").normalize_str(text) == _sahajbert(text)


@pytest.mark.parametrize("profile", ["default", "default-lower", "bn-v2"])
@given(text=st.one_of(_BENGALI, st.text(max_size=16)))
def test_normalising_twice_changes_nothing(profile: str, text: str) -> None:
    normalise = normaliser(profile).normalize_str
    once = normalise(text)
    assert normalise(once) == once


@pytest.mark.parametrize("profile", ["default", "bn-v2"])
@given(text=_BENGALI)
def test_no_mark_and_no_joiner_is_lost(profile: str, text: str) -> None:
    def marks(text: str) -> str:
        # NFD: a letter with its mark composed or apart is the same; khanda ta is a letter.
        text = unicodedata.normalize("NFKD", text.replace("\u09a4\u09cd\u200d", "\u09ce")).lower()
        return "".join(sorted(c for c in text if unicodedata.category(c)[0] == "M"))

    visible = text.translate(dict.fromkeys(map(ord, "\u200b\u200e\ufeff\u0001")))
    assert marks(normaliser(profile).normalize_str(text)).replace("\u0983", "") == marks(
        visible
    ).replace("\u0983", "")


def test_the_faults_of_bn_that_are_kept() -> None:
    """It is what sahajBERT does: not the same twice, and blind to joiners."""
    normalise = normaliser("bn").normalize_str
    assert normalise(normalise("ক::")) != normalise("ক::")
    assert normalise("ত\u09cd\u200d") != normalise("\u09ce")
