"""Training text and SentencePiece training: golden pieces, same bytes, limits, errors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from models.files import sha256_file
from models.lm_text import normalise_for_lm
from models.sentencepiece_lm import (
    VOCABULARY_SIZES,
    TrainingParagraphs,
    _reservoir,
    _sentences,
    load_sentencepiece,
    train_sentencepiece,
)


def _made_up_lines(count: int, words: int, seed: int = 1) -> list[str]:
    """Lines of words that are drawn from `words` different ones, the frequent ones more often."""
    draw = random.Random(seed)
    vocabulary = [
        "".join(draw.choice("aeioubdgklmnprst") for _ in range(draw.randint(3, 9)))
        for _ in range(words)
    ]
    weights = [1 / (rank + 1) for rank in range(words)]
    return [" ".join(draw.choices(vocabulary, weights, k=12)) for _ in range(count)]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return _made_up_lines(400, 300)


def _pieces(path: Path) -> list[tuple[str, float]]:
    tokenizer = load_sentencepiece(path)
    ids = range(tokenizer.get_piece_size())
    return [(tokenizer.id_to_piece(i), tokenizer.get_score(i)) for i in ids]


def test_the_golden_pieces_and_scores(golden_dir: Path, tmp_path: Path) -> None:
    golden = golden_dir / "ccnet_golden_model"
    corpus = (golden / "corpus.txt").read_text(encoding="utf-8").splitlines()
    output = tmp_path / "en.sp.model"
    train_sentencepiece(corpus, output, profile="ccnet", vocab_size=90, min_chars=1)
    assert _pieces(output) == _pieces(golden / "en.sp.model")


def test_the_same_lines_give_the_same_bytes(lines: list[str], tmp_path: Path) -> None:
    reports = []
    for name in ("a.sp.model", "b.sp.model"):
        reports.append(train_sentencepiece(lines, tmp_path / name, vocab_size=200))
    assert (tmp_path / "a.sp.model").read_bytes() == (tmp_path / "b.sp.model").read_bytes()
    assert reports[0] == reports[1]
    assert reports[0]["sha256"] == sha256_file(tmp_path / "a.sp.model")
    assert reports[0]["vocab_size"] == len(_pieces(tmp_path / "a.sp.model")) == 200


def test_the_seed_draws_the_sentences(lines: list[str], tmp_path: Path) -> None:
    def train(name: str, seed: int) -> tuple[bytes, dict[str, Any]]:
        path = tmp_path / name
        report = train_sentencepiece(lines, path, vocab_size=100, max_sentences=150, seed=seed)
        return path.read_bytes(), report

    (one, report), (same, _), (other, _) = train("a", 7), train("b", 7), train("c", 8)
    assert one == same != other
    assert (report["paragraphs_trained_on"], report["paragraphs"]["kept"]) == (150, 400)


def test_auto_takes_the_largest_vocabulary_that_the_text_allows(
    lines: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "x.sp.model"
    chosen = train_sentencepiece(lines, output, vocab_size="auto")["vocab_size"]
    assert chosen in VOCABULARY_SIZES[3:]
    larger = VOCABULARY_SIZES[VOCABULARY_SIZES.index(chosen) - 1]
    with pytest.raises(UserError, match=f"of '{larger}' pieces is too large"):
        train_sentencepiece(lines, output, vocab_size=larger)
    assert len(_pieces(output)) == chosen  # the failure left the older file alone


def test_too_little_text_is_an_error_with_numbers_and_leaves_no_file(tmp_path: Path) -> None:
    output = tmp_path / "x.sp.model"
    few = _made_up_lines(3, 5)
    with pytest.raises(UserError, match=r"of '32000' pieces is too large: the text \(3 sentences"):
        train_sentencepiece(few, output)
    with pytest.raises(UserError, match=r"of '250' pieces is too large: .* of at most \d+"):
        train_sentencepiece(few, output, vocab_size="auto")
    with pytest.raises(UserError, match=r"of '8' pieces is too small: .* needs \d+ for its single"):
        train_sentencepiece(few, output, vocab_size=8)
    for nothing in ([], ["", "   "], ["short"] * 9):
        with pytest.raises(UserError, match=rf"of {len(nothing)} paragraphs {len(nothing)} have"):
            train_sentencepiece(nothing, output)
    assert list(tmp_path.iterdir()) == []


def test_training_is_quiet_unless_asked(
    lines: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_sentencepiece(lines, tmp_path / "x.sp.model", vocab_size=100)
    with pytest.raises(UserError):
        train_sentencepiece(lines, tmp_path / "x.sp.model", vocab_size=50_000)
    assert capfd.readouterr() == ("", "")
    train_sentencepiece(lines, tmp_path / "x.sp.model", vocab_size=100, verbose=True)
    assert "unigram_model_trainer" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"profile": "moses"}, "profile 'moses'; valid: 'unicode', 'ccnet'"),
        ({"vocab_size": 0}, "vocab_size is '0'"),
        ({"character_coverage": 99.95}, "character_coverage is '99.95'; it must be 0.9 to 1.0"),
        ({"max_sentences": 0}, "max_sentences is '0'"),
        ({"threads": 0}, "threads '0'"),
    ],
)
def test_bad_settings_are_user_errors(
    setting: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train_sentencepiece(["some text"], tmp_path / "x.sp.model", **setting)


def test_bengali_vowel_signs_and_persian_joiners_survive(data_dir: Path, tmp_path: Path) -> None:
    bengali = (data_dir / "bn" / "news_dev.txt").read_text(encoding="utf-8").splitlines()
    persian = ["این متن را می‌خواهم بخوانم و نمی‌توانم آن را رها کنم"] * 2
    output = tmp_path / "bn.sp.model"
    text = bengali[:1500] + persian
    train_sentencepiece(text, output, vocab_size=1000, character_coverage=1.0)
    tokenizer = load_sentencepiece(output)
    for word in ("বাংলাদেশ", "কর্মসূচি", "می‌خواهم"):
        normalised = normalise_for_lm(word, "unicode")
        assert "".join(tokenizer.encode(normalised, out_type=str)) == "▁" + normalised


def test_paragraphs_are_normalised_kept_once_and_counted() -> None:
    lines = [
        "The first paragraph is long enough to be kept.\nshort",
        "THE FIRST PARAGRAPH IS LONG ENOUGH TO BE KEPT.",
        "",
        "A second paragraph that is also long enough, really.",
    ]
    paragraphs = TrainingParagraphs(lines, "unicode", 30)
    kept = list(paragraphs)
    assert kept == [normalise_for_lm(lines[i].split("\n")[0], "unicode").strip() for i in (0, 3)]
    assert paragraphs.counts == {"read": 5, "too_short": 2, "duplicate": 1, "kept": 2}
    assert paragraphs.chars == sum(map(len, kept))


@given(st.lists(st.text(max_size=50), max_size=20), st.integers(0, 20))
def test_paragraph_counts_add_up(lines: list[str], min_chars: int) -> None:
    paragraphs = TrainingParagraphs(lines, "unicode", min_chars)
    kept = list(paragraphs)
    counts = paragraphs.counts
    assert counts["read"] == sum(line.count("\n") + 1 for line in lines)
    assert counts["read"] == counts["too_short"] + counts["duplicate"] + counts["kept"]
    assert len(set(kept)) == len(kept) == counts["kept"]
    assert all(len(text) >= max(1, min_chars) for text in kept)


@given(st.text(alphabet="aé字 ", max_size=4000))
def test_long_paragraphs_are_cut_and_nothing_but_spaces_is_lost(text: str) -> None:
    parts = list(_sentences(text))
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")
    assert all(len(part.encode()) <= 4192 for part in parts)


def test_long_paragraphs_are_cut_between_words() -> None:
    words = [f"word{i:05d}" for i in range(1000)]
    parts = list(_sentences(" ".join(words)))
    assert len(parts) == 10
    assert [word for part in parts for word in part.split()] == words
    assert list(_sentences("字" * 2500)) == ["字" * 1000, "字" * 1000, "字" * 500]


def test_reserved_marks_do_not_lose_their_sentence(lines: list[str], tmp_path: Path) -> None:
    marked = [f"▅ {line}" for line in lines]
    report = train_sentencepiece(marked, tmp_path / "x.sp.model", vocab_size=100)
    assert report["paragraphs_trained_on"] == 400


def test_the_reservoir_draws_every_item_equally_often() -> None:
    drawn = [0] * 20
    for seed in range(2000):
        sample = _reservoir(map(str, range(20)), 5, seed)
        assert len(set(sample)) == 5
        for item in sample:
            drawn[int(item)] += 1
    # 500 expected; a standard deviation of 19
    assert all(400 < count < 600 for count in drawn)
    assert _reservoir(["a", "b"], 5, 0) == ["a", "b"]


def test_a_file_that_is_no_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer '.*absent\.sp\.model' cannot be read"):
        load_sentencepiece(tmp_path / "absent.sp.model")
    broken = tmp_path / "broken.sp.model"
    for content in (b"", b"<html>not found</html>"):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=r"broken\.sp\.model' is not a SentencePiece model"):
            load_sentencepiece(broken)


def test_auto_takes_what_a_short_text_of_many_characters_allows(tmp_path: Path) -> None:
    # 400 different characters: 250 pieces are too few, 500 too many.
    text = "".join(chr(0x4E00 + i) for i in range(400))
    lines = [text[at : at + 40] for at in range(0, 400, 20)]
    report = train_sentencepiece(lines, tmp_path / "ja.sp.model", vocab_size="auto")
    assert 400 < report["vocab_size"] < 500
