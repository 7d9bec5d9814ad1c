"""Perplexity of pages: CCNet's vectors, a slow oracle, what is not scored, bad files."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import ngram
from models.errors import UserError
from models.files import sha256_file
from models.lm_text import normalise_for_lm
from models.ngram import PageScorer, find_language_models
from models.sentencepiece_lm import load_sentencepiece


@pytest.fixture(scope="session")
def golden(golden_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((golden_dir / "ccnet_golden.json").read_text())
    section: dict[str, Any] = loaded["perplexity"]
    return section


@pytest.fixture(scope="session")
def pair(golden_dir: Path) -> tuple[Path, Path]:
    folder = golden_dir / "ccnet_golden_model"
    return folder / "en.sp.model", folder / "en.arpa.bin"


def _oracle(pair: tuple[Path, Path], page: str, min_chars: int) -> float:
    """The Unicode profile's perplexity in plain steps, or NaN."""
    import kenlm

    tokenizer, model = load_sentencepiece(pair[0]), kenlm.Model(str(pair[1]))
    total, tokens, chars = 0.0, 0, 0
    paragraphs = [normalise_for_lm(paragraph, "unicode") for paragraph in page.split("\n")]
    for paragraph in filter(None, paragraphs):
        chars += len(paragraph)
        pieces = tokenizer.encode(paragraph, out_type=str)
        words = [score for score, _, _ in model.full_scores(" ".join(pieces))]
        total += sum(words)
        tokens += len(words)
    return 10 ** (-total / tokens) if chars >= min_chars and tokens else math.nan


def test_ccnet_vectors(golden: dict[str, Any], pair: tuple[Path, Path]) -> None:
    docs = golden["docs"]
    scores = PageScorer(*pair, "ccnet").score([doc["raw_content"] for doc in docs])
    assert [None if math.isnan(score) else score for score in scores] == [
        doc["perplexity"] for doc in docs
    ]


def test_ccnet_pages_are_one_line(pair: tuple[Path, Path]) -> None:
    two_lines, glued = PageScorer(*pair, "ccnet").score(
        ["the river crosses\nthe stone bridge", "the river crossesthe stone bridge"]
    )
    assert two_lines == glued == 6.4


def test_unicode_scores_are_sums_over_paragraphs(pair: tuple[Path, Path]) -> None:
    pages = [
        "the river crosses\nthe stone bridge",
        "The river crosses the stone bridge before sunrise.\n\n  \nIn 1987 a quiet garden",
        "zzz qqq xxx",
        "日本語\nЖ",
    ]
    scores = PageScorer(*pair, "unicode", min_chars=1).score(pages)
    np.testing.assert_allclose(scores, [_oracle(pair, page, 1) for page in pages], rtol=1e-6)
    one, other = (PageScorer(*pair, "unicode", min_chars=1).score([p])[0] for p in pages[:2])
    assert (scores[0], scores[1]) == (one, other)


@settings(max_examples=50, deadline=None)
@given(pages=st.lists(st.text(max_size=200) | st.text("the rivr\n", max_size=200), max_size=5))
def test_any_text_scores_as_the_oracle_says(pages: list[str], pair: tuple[Path, Path]) -> None:
    scores = PageScorer(*pair, "unicode", min_chars=20).score(pages)
    for page, score in zip(pages, scores, strict=True):
        assert score == pytest.approx(_oracle(pair, page, 20), rel=1e-5, nan_ok=True)
    assert PageScorer(*pair, "ccnet").score(pages).shape == (len(pages),)


def test_short_and_empty_pages_are_not_scored(pair: tuple[Path, Path]) -> None:
    pages = ["", "\n \n", "the river", "the stone bridge " * 6]
    assert np.isnan(PageScorer(*pair, "unicode").score(pages)).tolist() == [True] * 3 + [False]
    everything = PageScorer(*pair, "unicode", min_chars=0).score(pages)
    assert np.isnan(everything).tolist() == [True, True, False, False]
    ccnet = PageScorer(*pair, "ccnet", min_chars=50).score(pages)
    assert np.isnan(ccnet).tolist() == [True, True, True, False]
    assert PageScorer(*pair, "unicode").score([]).shape == (0,)


def test_batches_do_not_change_a_score(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [f"the river {i} crosses\nthe stone bridge\n" * (1 + i % 3) for i in range(40)]
    whole = PageScorer(*pair, "unicode", min_chars=0).score(pages)
    monkeypatch.setattr(ngram, "_BATCH_CHARS", 50)
    assert PageScorer(*pair, "unicode", min_chars=0).score(pages).tolist() == whole.tolist()


def test_long_and_odd_pages(pair: tuple[Path, Path]) -> None:
    pages = ["x" * 200_000, "字" * 50_000, "<s> </s> <unk> " * 20, "the\0river\x01" * 20]
    for profile in ("unicode", "ccnet"):
        scores = PageScorer(*pair, profile).score(pages)
        assert np.isfinite(scores).all()
        assert (scores > 1).all()


def test_one_handle_a_process_and_small_to_send(pair: tuple[Path, Path]) -> None:
    ngram._load.cache_clear()
    first = PageScorer(*pair, "unicode")
    assert ngram._load.cache_info().misses == 0  # nothing is opened before the first score
    second = pickle.loads(pickle.dumps(PageScorer(*pair, "ccnet")))  # noqa: S301
    first.score(["the river"])
    second.score(["the river"])
    assert ngram._load.cache_info().misses == 1
    assert len(pickle.dumps(first)) < 1000


def test_bad_files_are_user_errors(pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "xx.arpa.bin"
    with pytest.raises(UserError, match=r"no language model at '.*xx\.arpa\.bin'"):
        PageScorer(pair[0], broken, "unicode").score(["text"])
    for content in (b"", b"<html>not found</html>", pair[1].read_bytes()[:2000]):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=r"xx\.arpa\.bin' is not a KenLM model that can be"):
            PageScorer(pair[0], broken, "unicode").score(["text"])
    with pytest.raises(UserError, match="unknown LM profile 'fast'"):
        PageScorer(*pair, "fast")  # type: ignore[arg-type]


def _install(pair: tuple[Path, Path], folder: Path, language: str) -> None:
    shutil.copy(pair[0], folder / f"{language}.sp.model")
    shutil.copy(pair[1], folder / f"{language}.arpa.bin")


def test_models_are_found_by_language(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for language in ("en", "ben", "zh"):
        _install(pair, tmp_path, language)
    (tmp_path / "README.md").write_text("not a model")
    (tmp_path / ".en.arpa.bin.0123.gristmill-tmp").write_bytes(b"a crash left this")
    found = find_language_models(tmp_path, "unicode")
    assert list(found) == ["bn", "en", "zh"]
    assert found["bn"].model == tmp_path / "ben.arpa.bin"
    assert found["bn"].tokenizer == tmp_path / "ben.sp.model"
    assert found["bn"].sidecar is None
    assert find_language_models(tmp_path / "..", "ccnet") == {}


@pytest.mark.parametrize(
    ("removed", "kept"), [("bn.sp.model", "bn.arpa.bin"), ("bn.arpa.bin", "bn.sp.model")]
)
def test_half_a_pair_names_what_is_missing(
    pair: tuple[Path, Path], tmp_path: Path, removed: str, kept: str
) -> None:
    _install(pair, tmp_path, "bn")
    (tmp_path / removed).unlink()
    with pytest.raises(UserError, match=f"'{removed}' is missing beside '.*{kept}'"):
        find_language_models(tmp_path, "unicode")


def test_sidecars_are_checked(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _install(pair, tmp_path, "bn")
    sidecar = tmp_path / "bn.lm.json"
    made = {
        "profile": "unicode",
        "tokenizer_sha256": sha256_file(pair[0]),
        "model_bytes": pair[1].stat().st_size,
    }
    sidecar.write_text(json.dumps(made))
    assert find_language_models(tmp_path, "unicode")["bn"].sidecar == sidecar
    assert list(find_language_models(tmp_path)) == ["bn"]
    with pytest.raises(UserError, match="trained with profile 'unicode', the recipe asks for 'cc"):
        find_language_models(tmp_path, "ccnet")
    sidecar.write_text(json.dumps({**made, "tokenizer_sha256": "0" * 64}))
    with pytest.raises(UserError, match=r"bn\.sp\.model' is not the tokenizer that 'bn\.lm\.json'"):
        find_language_models(tmp_path, "unicode")
    sidecar.write_text(json.dumps({**made, "model_bytes": 7}))
    with pytest.raises(UserError, match=r"bytes, but 'bn\.lm\.json' describes a model of '7'"):
        find_language_models(tmp_path, "unicode")
    for content in ("", "[]", "{}"):
        sidecar.write_text(content)
        with pytest.raises(UserError, match=r"bn\.lm\.json' is not the description"):
            find_language_models(tmp_path, "unicode")


def test_names_that_are_no_language_and_folders_that_are_none(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    _install(pair, tmp_path, "en")
    _install(pair, tmp_path, "eng")
    with pytest.raises(UserError, match=r"'eng\.arpa\.bin' and 'en\.arpa\.bin' in .* of 'en'"):
        find_language_models(tmp_path, "unicode")
    other = tmp_path / "other"
    other.mkdir()
    _install(pair, other, "wiki")
    with pytest.raises(UserError, match=r"'wiki\.\*' in .* unknown language code 'wiki'"):
        find_language_models(other, "unicode")
    for absent in (tmp_path / "absent", "s3://bucket/models"):
        with pytest.raises(UserError, match="is not a local folder of language models"):
            find_language_models(absent, "unicode")
