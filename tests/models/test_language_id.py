"""Language identification: CCNet's vectors, odd texts, other models' labels, bad files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import fasttext
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import language_id
from models.errors import UserError
from models.fasttext_classifier import FastTextClassifier
from models.fasttext_model import read_fasttext_model
from models.language_id import LanguageIdentifier, passes
from models.languages import parse_label


@pytest.fixture(scope="session")
def lid176(data_dir: Path) -> str:
    return str(data_dir / "models" / "lid.176.ftz")


@pytest.fixture(scope="session")
def golden(golden_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((golden_dir / "ccnet_golden.json").read_text())
    return loaded


class _FakeModel:
    """Answers every text with its only label and the same score."""

    def __init__(self, score: float) -> None:
        self._score = score

    def best(self, lines: list[str]) -> tuple[Any, Any]:
        return np.zeros(len(lines), np.int64), np.full(len(lines), self._score)


def _answering(monkeypatch: pytest.MonkeyPatch, label: str, score: float) -> None:
    codes = [language_id._canonical(label)]
    monkeypatch.setattr(language_id, "_load", lambda *_: (_FakeModel(score), codes))


def test_ccnet_vectors(golden: dict[str, Any], lid176: str) -> None:
    pages = [case["raw_content"] for case in golden["lid"]]
    languages, scores = LanguageIdentifier(lid176, "ccnet").identify(pages)
    kept = passes(scores, 0.5)
    for case, language, score, keep in zip(golden["lid"], languages, scores, kept, strict=True):
        label, raw_score = case["raw_top1"]
        assert language == label
        assert score == round(raw_score, 2)
        expected = {"language": language, "language_score": score} if keep else None
        assert case["output"] == expected


def test_raw_scores_of_the_ccnet_vectors(golden: dict[str, Any], lid176: str) -> None:
    # "1 2 3 4 5" has no letter, which is `und` by default.
    cases = [case for case in golden["lid"] if not case["raw_content"].startswith("1")]
    pages = [case["fed_to_fasttext"] for case in cases]
    languages, scores = LanguageIdentifier(lid176).identify(pages)
    assert languages == [case["raw_top1"][0] for case in cases]
    # fastText sums in 32 bits
    np.testing.assert_allclose(scores, [case["raw_top1"][1] for case in cases], rtol=0, atol=5e-6)


def test_ccnet_rounds_before_the_threshold_and_the_default_does_not(
    golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in golden["lid_rounding"]:
        _answering(monkeypatch, "__label__en", case["score"])
        _, scores = LanguageIdentifier("fake", "ccnet").identify(["some text"])
        assert scores[0] == case["rounded"]
        assert bool(passes(scores, 0.5)[0]) is case["kept_at_threshold_0_5"]
        _, scores = LanguageIdentifier("fake").identify(["some text"])
        assert scores[0] == case["score"]
        assert bool(passes(scores, 0.5)[0]) is (case["score"] >= 0.5)


def test_a_score_above_one_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, "__label__de", 1.0000393390655518)
    assert LanguageIdentifier("fake").identify(["Haus"])[1].tolist() == [1.0]


def test_line_breaks_keep_words_apart(lid176: str) -> None:
    identifier = LanguageIdentifier(lid176)
    glued, apart, spaces = identifier.identify(
        ["word oneword two", "word one\nword two", "word one word two"]
    )[1]
    assert apart == spaces != glued
    for line_break in ("\r\n", "\r", "\u2028", "\u0085"):
        assert identifier._line(f"word one{line_break}word two") == "word one word two"


@pytest.mark.parametrize("text", ["", " \n ", "--- ... 12 345", "।।।", "😀👍🏽", "\0\0\x01"])
def test_a_text_without_letters_is_undetermined(lid176: str, text: str) -> None:
    languages, scores = LanguageIdentifier(lid176).identify([text])
    assert (languages, scores.tolist()) == (["und"], [0.0])


def test_an_empty_page_is_undetermined_for_ccnet_too(lid176: str) -> None:
    assert LanguageIdentifier(lid176, "ccnet").identify(["", "\n\n"])[0] == ["und", "und"]


def test_a_nul_or_an_end_mark_does_not_hide_the_rest_of_the_page(lid176: str) -> None:
    german = "Das ist ein ganz normaler deutscher Satz über das Wetter."
    pages = [german, f"\0 {german}", f"</s> {german}", f"\x01\x7f {german}"]
    languages, scores = LanguageIdentifier(lid176).identify(pages)
    assert languages == ["de"] * 4
    assert min(scores) > 0.99


def test_max_chars_looks_at_the_beginning_only(lid176: str) -> None:
    page = "This is a plain English sentence about the weather. " + "Это русское предложение. " * 9
    whole = LanguageIdentifier(lid176).identify([page])[0]
    beginning = LanguageIdentifier(lid176, max_chars=50).identify([page, page[:50]])
    assert (whole, beginning[0]) == (["ru"], ["en", "en"])
    assert beginning[1][0] == beginning[1][1]


def test_bengali_and_hindi(data_dir: Path, lid176: str) -> None:
    lines = (data_dir / "bn" / "news_dev.txt").read_text(encoding="utf-8").splitlines()
    pages = [line for line in lines if len(line) > 100][:50]
    languages, scores = LanguageIdentifier(lid176).identify(pages)
    assert languages == ["bn"] * 50
    assert passes(scores, 0.5).all()


def test_no_texts(lid176: str) -> None:
    languages, scores = LanguageIdentifier(lid176).identify([])
    assert languages == []
    assert scores.shape == (0,)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=4))
def test_any_text_gets_a_known_code_and_a_score(lid176: str, texts: list[str]) -> None:
    for profile in ("default", "ccnet"):
        identifier = LanguageIdentifier(lid176, profile)
        languages, scores = identifier.identify(texts)
        assert len(languages) == len(scores) == len(texts)
        assert set(languages) <= identifier.languages() | {"und"}
        assert ((scores >= 0) & (scores <= 1)).all()


def test_every_label_of_lid176_keeps_its_name(lid176: str) -> None:
    labels = [label.decode() for label in read_fasttext_model(lid176).labels]
    _, codes = language_id._load(lid176, "auto")
    assert len(codes) == 176
    assert labels == [f"__label__{code}" for code in codes]
    assert [parse_label(label)[0] for label in labels] == codes
    assert LanguageIdentifier(lid176).languages() == set(codes)


@pytest.mark.parametrize(
    ("label", "code"),
    [
        ("__label__ben_Beng", "bn"),
        ("__label__als_Latn", "sq"),
        ("__label__xyz_Latn", "xyz"),  # not in our table: kept as the model says it
        ("__label__zxx_Zzzz", "und"),
    ],
)
def test_labels_of_other_models(monkeypatch: pytest.MonkeyPatch, label: str, code: str) -> None:
    _answering(monkeypatch, label, 0.75)
    assert LanguageIdentifier("fake").identify(["some text"])[0] == [code]


def test_predict_works_under_this_numpy(lid176: str) -> None:
    # The archived fastText raises here under NumPy 2 (fasttext-wheel issue 10).
    model = fasttext.load_model(lid176)
    labels, scores = model.predict("This is plain English")
    assert (labels, float(scores[0]) > 0.5) == (("__label__en",), True)
    assert model.predict(["This is plain English"])[0] == [["__label__en"]]


def test_one_handle_a_process_and_small_to_send(
    lid176: str, capfd: pytest.CaptureFixture[str]
) -> None:
    language_id._load.cache_clear()
    first = LanguageIdentifier(lid176)
    second = pickle.loads(pickle.dumps(LanguageIdentifier(lid176, "ccnet")))  # noqa: S301
    first.identify(["one"])
    second.identify(["two"])
    assert language_id._load.cache_info().misses == 1
    LanguageIdentifier(lid176, engine="fasttext").identify(["three"])
    assert len(pickle.dumps(first)) < 500
    assert capfd.readouterr() == ("", "")  # fastText's warning at loading is not shown


def test_bad_files_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no language identification model at '.*absent\.ftz'"):
        LanguageIdentifier(tmp_path / "absent.ftz").identify(["text"])
    broken = tmp_path / "broken.ftz"
    broken.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"broken\.ftz' is not a fastText model"):
        LanguageIdentifier(broken).identify(["text"])


def test_bad_settings_are_user_errors() -> None:
    with pytest.raises(UserError, match="max_chars is '0'"):
        LanguageIdentifier("x", max_chars=0)
    with pytest.raises(UserError, match="profile 'fast'"):
        LanguageIdentifier("x", "fast")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="engine 'ours'; valid: 'auto', 'fasttext'"):
        LanguageIdentifier("x", engine="ours")  # type: ignore[arg-type]


def test_a_model_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(language_id, "read_fasttext_model", refuse)
    path = tmp_path / "lid.ftz"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match=r"lid.ftz' cannot be read \(Permission denied\)"):
        LanguageIdentifier(path).identify(["text"])


def test_a_surrogate_is_read_as_a_question_mark(lid176: str) -> None:
    for engine in ("auto", "fasttext"):
        identifier = LanguageIdentifier(lid176, engine=engine)
        odd, plain = identifier.identify(["ein \ud800 Haus", "ein ? Haus"])[1]
        assert odd == plain > 0


def test_the_engine_is_ours_unless_asked(lid176: str) -> None:
    assert isinstance(language_id._load(lid176, "auto")[0], FastTextClassifier)
    assert not isinstance(language_id._load(lid176, "fasttext")[0], FastTextClassifier)
