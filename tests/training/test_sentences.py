"""Sentences: golden splits by language, and that nothing is lost."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import sentences as module
from training.sentences import sentences

GOLDEN = {
    "en": [
        "Dr. Smith paid 3.14 dollars.",
        "He left.",
        '"Why?" she asked.',
        "J. K. Rowling wrote it (in 1997.)",
        "Then… nothing.",
        "Wait...",
        "What?",
        "See Fig. 5, e.g. Mr. X of the U.S. Army.",
        "Visit example.com today!",
        "Yahoo! is big.",
    ],
    "de": ["1. Am 3. Oktober war es z. B. so.", "Im 19. Jahrhundert nicht.", "Er war 25.", "Ja!"],
    "ru": ["Что это?", "Это г. Москва, им. Ленина.", "А. С. Пушкин.", "Да!"],
    "ka": ["ეს სახლია.", "ის წავიდა."],
    "hy": ["Բարև։", "Ինչպես ես։"],
    "bn": ["আমি ভাত খাই।", "তুমি কি খাও?", "ড. মো. ইউনূস এলেন।", "দাম ৩.৫ টাকা।"],
    "hi": ["यह घर है।", "वह है.", "क्या यह है?", "डॉ. सिंह आए ।", "श्लोक ॥", "ठीक"],
    "ar": ["هذا بيت.", "هل أنت هنا؟", "نعم؛", "أنا هنا."],
    "ur": ["یہ گھر ہے۔", "کیا آپ ہیں؟", "ہاں!"],
    "am": ["ሰላም ነው።", "እንዴት ነህ፧", "ደህና፡ነኝ፡፡", "እሺ።"],
    "bo": ["བོད་ཡིག །།", "ཀ་ཁ།"],
    "km": ["នេះជាផ្ទះ។", "បាទ៕"],
    "my": ["ဒါအိမ်ပါ။", "ဟုတ်တယ်၊ ကောင်းတယ်။"],
}
UNSPACED = {
    "zh": ["你好。", "“你好吗？”他问。", "是吗?", "我不知道！", "好的……", "走吧，3.5元。"],
    "ja": ["「はい。」と言った。", "「いいえ。」", "「そう？」彼は笑った！", "終わり｡"],
    "ur": ["یہ گھر ہے۔", "کیا آپ ہیں؟"],
    "hi": ["यह घर है।", "वह ॥"],
}


@pytest.mark.parametrize("language", GOLDEN)
def test_golden_sentences(language: str) -> None:
    assert sentences(" ".join(GOLDEN[language])) == GOLDEN[language]


@pytest.mark.parametrize("language", UNSPACED)
def test_golden_sentences_without_spaces(language: str) -> None:
    assert sentences("".join(UNSPACED[language])) == UNSPACED[language]


def test_lines_end_sentences_and_white_space_is_none() -> None:
    assert sentences("Home\r\n  News and\tmore \n\n \nv. 2\u2028End") == [
        "Home", "News and\tmore", "v. 2", "End",
    ]  # fmt: skip
    assert sentences("") == sentences(" \n\u00a0\n") == []


def test_stops_alone_begin_the_sentence_behind_them() -> None:
    assert sentences("... So it was. ! Yes") == ["... So it was.", "! Yes"]


def test_thai_is_cut_at_spaces() -> None:
    phrase = "ไทยไม่มีจุดจบประโยค"
    text = " ".join([phrase] * 40)
    found = sentences(text, max_chars=100)
    assert all(set(sentence.split()) == {phrase} for sentence in found)
    assert all(60 < len(sentence) <= 100 for sentence in found[:-1])
    assert " ".join(found) == text
    assert sentences("วรรค ๚ะ๛ ต่อ") == ["วรรค ๚ะ๛", "ต่อ"]


def test_without_spaces_the_cut_is_before_no_mark() -> None:
    text = "ก็" * 300  # letter, mark, letter, mark
    found = sentences(text, max_chars=99)
    assert "".join(found) == text
    assert {len(sentence) for sentence in found[:-1]} == {98}
    marks = sentences("\u0301" * 250, max_chars=100)
    assert [len(sentence) for sentence in marks] == [100, 100, 50]


def test_every_mark_of_the_data_file_ends_a_sentence() -> None:
    data = tomllib.loads(Path(module.__file__).with_name("sentence_ends.toml").read_text())
    stops = "".join(data["stops"].split())
    assert len(stops) == len(set(stops)) > 60
    for stop in stops:
        assert sentences(f"ab{stop}Cd") == [f"ab{stop}", "Cd"], hex(ord(stop))
    for stop in data["spaced_stops"]:
        assert sentences(f"ab{stop} Cd") == [f"ab{stop}", "Cd"], hex(ord(stop))
        assert sentences(f"ab{stop} cd") == [f"ab{stop} cd"], hex(ord(stop))
    for abbreviation in " ".join(data["abbreviations"].values()).split():
        assert sentences(f"Xx {abbreviation}. Yy") == [f"Xx {abbreviation}. Yy"]
        assert sentences(f"Xx {abbreviation}? Yy")[1] == "Yy"
    for word in " ".join(data["before_numbers"].values()).split():
        assert sentences(f"Xx {word}. 12") == [f"Xx {word}. 12"]


marks = ".!?…।॥؟۔؛。！？፡።།」”)'\" \n\u00a0\u200b0٣aAสé\u0301中"


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.one_of(st.sampled_from(marks), st.characters()), max_size=80),
    st.integers(2, 40),
)
def test_nothing_is_lost(text: str, max_chars: int) -> None:
    found = sentences(text, max_chars)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in found)
    assert all(len(sentence) <= max_chars for sentence in found)
    assert not any(re.search(r"[\n\r\u2028]", sentence) for sentence in found)
