"""Training of n-gram models: CCNet's bytes, same bytes, discounts, sidecar, errors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from models import kenlm_tools
from models.errors import Fault, UserError
from models.files import sha256_file
from models.ngram import PageScorer, find_language_models
from models.ngram_training import train_ngram
from models.sentencepiece_lm import train_sentencepiece


@pytest.fixture(scope="session", autouse=True)
def _kenlm_programs() -> None:
    """KenLM's programs: built at the first run on a machine (about a minute), then found."""
    from scripts.build_kenlm import build

    try:
        build()
    except UserError as error:
        pytest.skip(f"KenLM's programs cannot be built here: {error}")


@pytest.fixture(scope="module")
def bengali(data_dir: Path) -> list[str]:
    text = (data_dir / "bn" / "news_dev.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()][:2500]


@pytest.fixture(scope="module")
def trained(bengali: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bn.sp.model, bn.arpa.bin and bn.lm.json."""
    folder = tmp_path_factory.mktemp("lm")
    train_sentencepiece(bengali[:2000], folder / "bn.sp.model", vocab_size=2000)
    train_ngram(
        bengali[:2000], folder / "bn.sp.model", folder / "bn.arpa.bin", order=3, memory="200M"
    )
    return folder


def test_the_golden_binary(golden_dir: Path, tmp_path: Path) -> None:
    golden = golden_dir / "ccnet_golden_model"
    corpus = (golden / "corpus.txt").read_text(encoding="utf-8").splitlines()
    output = tmp_path / "en.arpa.bin"
    report = train_ngram(corpus, golden / "en.sp.model", output, profile="ccnet", min_chars=1)
    assert sha256_file(output) == sha256_file(golden / "en.arpa.bin")
    assert report["discount_fallback"] is True  # found out, not asked for
    assert report["ngrams"] == [86, 288, 444, 605, 801]


def test_the_same_lines_give_the_same_bytes_and_the_sidecar_says_how(
    trained: Path, bengali: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "bn.arpa.bin"
    report = train_ngram(bengali[:2000], trained / "bn.sp.model", output, order=3, memory="200M")
    assert output.read_bytes() == (trained / "bn.arpa.bin").read_bytes()
    sidecar = (tmp_path / "bn.lm.json").read_text(encoding="utf-8")
    assert sidecar == (trained / "bn.lm.json").read_text(encoding="utf-8")
    assert json.loads(sidecar) == report
    assert report["tokenizer_sha256"] == sha256_file(trained / "bn.sp.model")
    assert report["model_sha256"] == sha256_file(output)
    assert (report["profile"], report["order"], report["vocab_size"]) == ("unicode", 3, 2000)
    counts = report["paragraphs"]
    assert counts["read"] == 2000 == counts["too_short"] + counts["duplicate"] + counts["kept"]
    assert len(report["ngrams"]) == 3
    assert str(tmp_path) not in sidecar
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bn.arpa.bin", "bn.lm.json"]


def test_a_trained_model_prefers_its_language(trained: Path, bengali: list[str]) -> None:
    files = find_language_models(trained, "unicode")["bn"]
    held_out = bengali[2000:2100]
    draw = random.Random(3)
    shuffled = [" ".join(draw.sample(line.split(), len(line.split()))) for line in held_out]
    scorer = PageScorer(files.tokenizer, files.model, "unicode")
    whole = "\n".join(held_out)
    natural, mixed, foreign = scorer.score([whole, "\n".join(shuffled), "nothing of this " * 50])
    assert 1 < natural < mixed < foreign


def test_a_trie_scores_as_the_probing_model(
    trained: Path, bengali: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "bn.arpa.bin"
    tokenizer = trained / "bn.sp.model"
    train_ngram(bengali[:2000], tokenizer, output, order=3, memory="200M", structure="trie")
    assert output.stat().st_size < (trained / "bn.arpa.bin").stat().st_size
    pages = bengali[2000:2020]
    probing = PageScorer(tokenizer, trained / "bn.arpa.bin", "unicode").score(pages)
    trie = PageScorer(tokenizer, output, "unicode").score(pages)
    assert trie == pytest.approx(probing, rel=1e-5, nan_ok=True)


def test_forbidden_words_in_the_text_do_not_stop_the_training(
    trained: Path, bengali: list[str], tmp_path: Path
) -> None:
    # None of these characters is in the tokenizer, so that each comes out as one unknown piece.
    marked = [*bengali[:300], *(f"{line} <s> </s> <unk>" for line in bengali[300:310])]
    report = train_ngram(
        marked, trained / "bn.sp.model", tmp_path / "bn.arpa.bin", order=2, memory="200M"
    )
    assert report["paragraphs"]["kept"] > 250


def test_the_fallback_is_the_callers_choice_too(
    trained: Path, bengali: list[str], tmp_path: Path
) -> None:
    few, tokenizer, output = bengali[:2], trained / "bn.sp.model", tmp_path / "bn.arpa.bin"
    with pytest.raises(UserError, match="too small or too artificial for Kneser-Ney discounts"):
        train_ngram(few, tokenizer, output, memory="200M", discount_fallback=False)
    assert list(tmp_path.iterdir()) == []
    enough = bengali[:500]
    for asked in (None, True):
        report = train_ngram(
            enough, tokenizer, output, order=2, memory="200M", discount_fallback=asked
        )
        assert report["discount_fallback"] is bool(asked)


def test_no_usable_text_is_an_error_with_numbers(trained: Path, tmp_path: Path) -> None:
    for lines in ([], ["", "  "], ["short"] * 3):
        with pytest.raises(UserError, match=rf"of {len(lines)} paragraphs {len(lines)} have fewer"):
            train_ngram(lines, trained / "bn.sp.model", tmp_path / "bn.arpa.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_program_is_a_fault_and_leaves_no_file(
    trained: Path, bengali: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "bn.arpa.bin"
    with pytest.raises(Fault, match="'lmplz' failed with status"):
        train_ngram(bengali[:300], trained / "bn.sp.model", output, memory="1K")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"order": 7}, "order is '7'; it must be 2 to 6"),
        ({"profile": "moses"}, "unknown LM profile 'moses'"),
        ({"memory": "much"}, "memory is 'much'"),
        ({"structure": "hash"}, "unknown model structure 'hash'"),
    ],
)
def test_bad_settings_are_user_errors(
    setting: dict[str, Any], message: str, trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train_ngram(["text"], trained / "bn.sp.model", tmp_path / "bn.arpa.bin", **setting)
    with pytest.raises(UserError, match=r"'.*bn\.bin' must end in '\.arpa\.bin'"):
        train_ngram(["text"], trained / "bn.sp.model", tmp_path / "bn.bin")


def test_without_the_programs_the_message_says_how_to_build_them(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=kenlm_tools.BUILD_COMMAND):
        train_ngram(["text"], trained / "bn.sp.model", tmp_path / "bn.arpa.bin")
