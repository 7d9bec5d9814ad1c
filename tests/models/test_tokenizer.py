"""The Unigram tokenizer: round trips, pieces against an oracle, folder, mistakes, same bytes."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from models import tokenizer as tok
from models.errors import UserError
from models.files import sha256_file
from models.normalisers import normaliser, profile_of, profiles

PROSE = [
    "the mill grinds the grain, and the river turns the wheel of the mill",
    "a miller carries 12 sacks of flour to the market; the market is far",
    "grain, flour and bread: the miller's day begins before the morning",
    "দুঃখের দিনে নদীর ধারে বসে আছি। নদীর জল বয়ে যায়, দিন যায়।",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ ภาษาไทยสวย",
    "我们在河边磨面。河水转动磨轮,我们吃面包。",
]


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return tok.train_tokenizer(PROSE * 5, vocab_size=300, at_most=True, character_coverage=1.0)


@pytest.fixture(scope="module")
def folder(small: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer") / "t"
    tok.save_tokenizer(small, place, {"sources": ["abc"]})
    return place


def _wiki(data_dir: Path, language: str) -> list[str]:
    text = (data_dir / "wiki" / f"{language}.txt").read_text(encoding="utf-8")
    return [line for line in text[:60_000].split("\n") if line.strip()]


def _marks(text: str) -> Counter[str]:
    return Counter(c for c in text if unicodedata.category(c)[0] == "M" or c in "\u200c\u200d")


@pytest.mark.parametrize("language", ["bn", "hi", "th", "ar"])
def test_real_text_comes_back_with_all_its_marks(data_dir: Path, language: str) -> None:
    lines = _wiki(data_dir, language)
    trained = tok.train_tokenizer(lines, vocab_size=1500)
    normalise = normaliser("default").normalize_str
    marks = 0
    for line in lines:
        encoding = trained.encode(line)
        assert tok.UNK_ID not in encoding.ids
        decoded = trained.decode(encoding.ids, skip_special_tokens=True)
        assert decoded == normalise(line)
        assert _marks(decoded) == _marks(unicodedata.normalize("NFKC", line)), line
        marks += _marks(decoded).total()
    assert marks > 300


def test_bengali_comes_back_in_bn_v2(data_dir: Path) -> None:
    lines = _wiki(data_dir, "bn")
    trained = tok.train_tokenizer(lines, profile="bn-v2", vocab_size=2000)
    for line in lines:
        decoded = trained.decode(trained.encode(line).ids, skip_special_tokens=True)
        assert decoded == normaliser("bn-v2").normalize_str(line)
    spellings = ["ব\u09be\u09a1\u09bc\u09bf", "ব\u09be\u09dc\u09bf"]
    assert trained.encode(spellings[0]).ids == trained.encode(spellings[1]).ids
    assert tok.UNK_ID not in trained.encode(spellings[0]).ids


def test_words_are_cut_before_pieces(small: Tokenizer) -> None:
    def words(text: str) -> list[str]:
        return [word for word, _ in small.pre_tokenizer.pre_tokenize_str(text)]

    assert words("a mill, 12") == ["▁a", "▁mill", ",", "▁", "1", "2"]
    assert words("(mill)") == ["▁", "(", "mill", ")"]
    assert words("দিন।") == ["▁দিন", "।"]
    vocabulary = [piece for piece, _ in _scores(small)]
    for piece in vocabulary[len(tok.SPECIAL_TOKENS) :]:
        assert "▁" not in piece[1:]
        assert len(piece) == 1 or not any(c.isnumeric() or c in ",.;:'।。" for c in piece)


def _scores(tokenizer: Tokenizer) -> list[tuple[str, float]]:
    return [tuple(entry) for entry in json.loads(tokenizer.to_str())["model"]["vocab"]]


def _best_score(word: str, scores: dict[str, float]) -> float:
    """The highest sum of scores over all cuts of `word` into pieces, by dynamic programming."""
    best = [0.0] + [-math.inf] * len(word)
    for end in range(1, len(word) + 1):
        for start in range(end):
            score = scores.get(word[start:end], -math.inf)
            best[end] = max(best[end], best[start] + score)
    return best[-1]


def test_pieces_are_the_most_probable_ones(small: Tokenizer) -> None:
    scores = dict(_scores(small)[len(tok.SPECIAL_TOKENS) :])
    for line in PROSE:
        for word, _ in small.pre_tokenizer.pre_tokenize_str(small.normalizer.normalize_str(line)):
            found = sum(scores[token.value] for token in small.model.tokenize(word))
            assert found == pytest.approx(_best_score(word, scores), abs=1e-6)
    assert all(score < 0 for score in scores.values())  # log probabilities


def test_special_tokens_and_pairs(small: Tokenizer) -> None:
    ids = [tok.PAD_ID, tok.UNK_ID, tok.CLS_ID, tok.SEP_ID, tok.MASK_ID]
    assert [small.id_to_token(number) for number in ids] == list(tok.SPECIAL_TOKENS)
    assert ids == [0, 1, 2, 3, 4]
    one, two = small.encode("the mill").ids[1:-1], small.encode("a river").ids[1:-1]
    assert small.encode("the mill").ids == [2, *one, 3]
    assert small.encode("the mill").type_ids == [0] * (len(one) + 2)
    pair = small.encode("the mill", "a river")
    assert pair.ids == [2, *one, 3, *two, 3]
    assert pair.type_ids == [0] * (len(one) + 2) + [1] * (len(two) + 1)
    # The mask takes the space before it.
    assert small.encode("the [MASK] mill").ids == [
        2, *small.encode("the").ids[1:-1], 4, *small.encode("mill").ids[1:-1], 3
    ]  # fmt: skip


def test_unknown_characters(small: Tokenizer) -> None:
    encoding = small.encode("the ꙮꙮꙮ mill ꙮ")
    assert encoding.ids.count(tok.UNK_ID) == 2  # a run is one
    assert small.decode(encoding.ids, skip_special_tokens=True) == "the  mill "


def test_the_same_ids_from_every_reader(
    small: Tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    texts = [*PROSE, "  THE   mill\nriver\t 3,5 ", "ꙮ", "", "the [MASK] mill"]
    opened = tok.load_tokenizer(folder)
    for reader in (Tokenizer.from_file(str(folder / "tokenizer.json")), opened):
        for text in texts[:-1]:
            assert reader.encode(text).ids == small.encode(text).ids
            assert reader.encode(text, text).type_ids == small.encode(text, text).type_ids
    for model_type in (None, "albert", "llama"):  # an export has the model's config beside it
        config = folder / "config.json"
        if model_type:
            config.write_text(json.dumps({"model_type": model_type, "vocab_size": 300}))
        fast: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
        config.unlink(missing_ok=True)
        assert isinstance(fast, transformers.PreTrainedTokenizerFast)
        for text in texts:
            assert fast(text).input_ids == small.encode(text).ids
            assert fast(text, "a").token_type_ids == small.encode(text, "a").type_ids
        assert [fast.pad_token, fast.unk_token, fast.cls_token, fast.sep_token,
                fast.mask_token] == list(tok.SPECIAL_TOKENS)  # fmt: skip
        assert (fast.bos_token, fast.eos_token) == ("[CLS]", "[SEP]")
        assert (fast.pad_token_id, fast.mask_token_id) == (0, 4)
        assert fast.model_max_length == 512
        assert fast.padding_side == "right"
        assert len(fast) == small.get_vocab_size()
        assert profile_of(fast.backend_tokenizer) == "default"


def test_transformers_saves_it_whole(
    small: Tokenizer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.AutoTokenizer.from_pretrained(str(folder)).save_pretrained(str(tmp_path))
    again: Any = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["normaliser_profile"] == "default"
    opened = tok.load_tokenizer(tmp_path)
    assert profile_of(opened) == "default"
    for text in [*PROSE, ""]:
        assert again(text).input_ids == opened.encode(text).ids == small.encode(text).ids
    batch = again(["mill", "the river"], ["a", "the mill"], padding=True)
    sizes = [len(small.encode(*pair).ids) for pair in (("mill", "a"), ("the river", "the mill"))]
    assert [sum(row) for row in batch.attention_mask] == sizes
    assert all(len(row) == max(sizes) for row in batch.input_ids)
    short = batch.input_ids[sizes.index(min(sizes))]
    assert short[min(sizes) :] == [tok.PAD_ID] * (max(sizes) - min(sizes))


def test_joined_emoji_come_back() -> None:
    emoji = ["👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "1\ufe0f\u20e3"]
    trained = tok.train_tokenizer([" ".join(emoji)] * 3, vocab_size=100, at_most=True)
    for text in emoji:
        assert trained.decode(trained.encode(text).ids, skip_special_tokens=True) == text


def test_the_folder_of_something_else_is_spared(small: Tokenizer, tmp_path: Path) -> None:
    """A mined crawl without its manifest would be lost."""
    crawl = tmp_path / "mined"
    crawl.mkdir()
    for text in ('{"schema_version": 3}', "[]", "{"):
        (crawl / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=r"'.*mined' holds the manifest.json of something else"):
            tok.save_tokenizer(small, crawl, {})
        assert [path.name for path in crawl.iterdir()] == ["manifest.json"]
        assert (crawl / "manifest.json").read_text() == text
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"'.*file' cannot be the tokenizer's folder \(Not a dir"):
        tok.save_tokenizer(small, tmp_path / "file", {})
    tok.save_tokenizer(small, tmp_path / "new", {})
    tok.save_tokenizer(small, tmp_path / "new", {"again": 1})
    assert json.loads((tmp_path / "new" / "manifest.json").read_text())["again"] == 1


def test_a_page_cannot_hold_special_tokens(folder: Path) -> None:
    text = "the mill [SEP] the river [MASK] [PAD]"
    ids = tok.load_tokenizer(folder).encode(text, add_special_tokens=False).ids
    assert not {tok.PAD_ID, tok.CLS_ID, tok.SEP_ID, tok.MASK_ID} & set(ids)


def test_the_folder(small: Tokenizer, folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "tokenizer.json", "tokenizer_config.json", "manifest.json"
    }  # fmt: skip
    assert json.loads((folder / "manifest.json").read_text()) == {
        "kind": "tokenizer-unigram",
        "profile": "default",
        "vocab_size": small.get_vocab_size(),
        "sha256": sha256_file(folder / "tokenizer.json"),
        "sources": ["abc"],
    }
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["normaliser_profile"] == "default"
    digest = sha256_file(folder / "tokenizer.json")
    assert tok.tokenizer_digest(folder) == digest
    assert tok.tokenizer_digest(str(folder / "tokenizer.json")) == digest


def test_the_profile_is_known_by_its_steps() -> None:
    for profile in profiles():
        trained = tok.train_tokenizer(PROSE, profile=profile, vocab_size=200, at_most=True)
        assert profile_of(Tokenizer.from_str(trained.to_str())) == profile
    other = Tokenizer(models.Unigram())
    assert profile_of(other) is None


_TRAIN = """
import sys
from models.tokenizer import train_tokenizer
lines = [line for line in sys.stdin.read().split("\\n") if line]
print(train_tokenizer(lines, vocab_size=250, at_most=True).to_str(), end="")
"""


def test_the_same_text_gives_the_same_bytes_in_any_order_and_process() -> None:
    lines = PROSE * 3
    expected = tok.train_tokenizer(lines, vocab_size=250, at_most=True).to_str()
    random.Random(3).shuffle(lines)
    assert tok.train_tokenizer(lines, vocab_size=250, at_most=True).to_str() == expected
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _TRAIN],
            input="\n".join(lines),
            capture_output=True,
            encoding="utf-8",
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
            cwd=Path(__file__).resolve().parents[2],
        )
        assert done.stdout == expected


def test_word_starts(small: Tokenizer) -> None:
    starts = tok.word_starts(small)
    assert starts.dtype == np.bool_
    assert starts.shape == (small.get_vocab_size(),)
    by_piece = {small.id_to_token(n): bool(starts[n]) for n in range(small.get_vocab_size())}
    for piece, start in by_piece.items():
        if piece in tok.SPECIAL_TOKENS:
            expected = False
        elif piece.startswith("▁") or piece in ",;:'।。12":
            expected = True
        else:
            expected = unicodedata.name(piece[0]).startswith(("CJK", "THAI CHARACTER")) and (
                unicodedata.category(piece[0]) == "Lo"
            )
        assert start == expected, piece
    assert by_piece["▁mill"]
    assert not by_piece["e"]
    assert by_piece["我"]

    def starts_in(text: str) -> int:
        return int(starts[small.encode(text, add_special_tokens=False).ids].sum())

    assert starts_in("the mill grinds the grain") == 5
    assert starts_in("the mill, the grain.") == 5  # the full stop was never seen: unknown


def test_rare_characters_are_unknown_and_marks_are_not() -> None:
    lines = ["mill river grain flour"] * 500 + ["ঔষ\u09a7\u09c7 ৪৯ ঞ\u0981 Q"]
    trained = tok.train_tokenizer(lines, vocab_size=60, at_most=True, character_coverage=0.999)
    vocabulary = trained.get_vocab()
    assert "ঔ" not in vocabulary
    for kept in ("\u09c7", "\u0981", "৪", "৯", "Q"):  # marks, digits, ASCII
        assert kept in vocabulary
    whole = tok.train_tokenizer(lines, vocab_size=60, at_most=True, character_coverage=1.0)
    assert "ঔ" in whole.get_vocab()
    # 25 characters are more than an eighth of 60 and less than an eighth of 400.
    assert "ঔ" not in tok.train_tokenizer(lines * 2, vocab_size=60, at_most=True).get_vocab()
    assert "ঔ" in tok.train_tokenizer(lines * 2, vocab_size=400, at_most=True).get_vocab()


def test_odd_text_is_trained_on() -> None:
    odd = ["\u2585 mill\u0000 ab\u0085cd", "x" * 5000, "ক" * 3000, "mill miller " * 20, "▁ \ue000"]
    for profile in profiles():
        trained = tok.train_tokenizer(odd, profile=profile, vocab_size=80, at_most=True)
        assert "▁mill" in trained.get_vocab()
        decoded = trained.decode(trained.encode("mill x").ids, skip_special_tokens=True)
        assert decoded == "mill x"


MISTAKES = {
    "no text": ({"texts": ["", " \n\t"]}, "no text to train"),
    "profile": ({"profile": "bengali"}, "'bengali'.*'default'"),
    "vocabulary below any": ({"vocab_size": 5}, "'5'.*at least 6"),
    "vocabulary too small": ({"vocab_size": 20}, r"'20' pieces is too small.*at least \d+"),
    "vocabulary too large": ({"vocab_size": 9000}, r"'9000' pieces is too large.*at most \d+"),
    "coverage": ({"character_coverage": 0.5}, r"'0\.5'.*0\.9 to 1\.0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    arguments: dict[str, Any] = {"texts": PROSE, **changes}
    with pytest.raises(UserError, match=message) as caught:
        tok.train_tokenizer(arguments.pop("texts"), **arguments)
    assert "\n" not in str(caught.value)


def test_the_sizes_that_an_error_names_are_right() -> None:
    def number_after(words: str, size: int) -> int:
        with pytest.raises(UserError) as caught:
            tok.train_tokenizer(PROSE, vocab_size=size)
        return int(str(caught.value).split(words)[-1].split()[0].rstrip(",;"))

    least = number_after("at least ", 20)
    most = number_after("at most ", 9000)
    assert tok.train_tokenizer(PROSE, vocab_size=most).get_vocab_size() == most
    assert tok.train_tokenizer(PROSE, vocab_size=9000, at_most=True).get_vocab_size() == most
    with pytest.raises(UserError, match="too small"):
        tok.train_tokenizer(PROSE, vocab_size=least - 1, character_coverage=0.9995)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.*train-tokenizer"):
        tok.load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"nowhere.*train-tokenizer"):
        tok.tokenizer_digest(tmp_path / "nowhere")
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=r"not a tokenizer") as caught:
        tok.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)).save(str(broken))
    with pytest.raises(UserError, match=r"begins with '<unk>', 'a'.*\[CLS\]"):
        tok.load_tokenizer(broken)
