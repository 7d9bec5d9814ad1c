"""Guards of a mix: numbers, sentences, and the stream that the numbers are about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from tests.training.corpora import data, make_corpus, random_pages
from tests.training.word_examples import WordExamples
from training.domains import load_corpus
from training.mix import guards
from training.sampler import ExampleStream


def test_absence_by_hand() -> None:
    assert guards.absence(4, 2) == pytest.approx(9 / 16)
    assert guards.expected_absent(4, 2) == pytest.approx(9 / 4)
    assert guards.expected_absent(22, 512) == pytest.approx(1.0e-9, rel=0.05)  # the paper's Pile


@given(st.integers(2, 500))
def test_smallest_batch_passes_and_a_smaller_one_does_not(domains: int) -> None:
    smallest = guards.smallest_batch(domains)
    assert (1 - 1 / domains) ** smallest <= 0.1 < (1 - 1 / domains) ** (smallest - 1)
    guards.check_batch(domains, smallest)
    with pytest.raises(UserError, match=f"batch.samples={smallest} or more"):
        guards.check_batch(domains, smallest - 1)


def test_small_batch_is_warned_of_and_a_large_one_is_not() -> None:
    assert guards.smallest_batch(8) == 18
    with pytest.raises(UserError, match=r"batch of '17' examples for 8 domains: .* 10% of the"):
        guards.check_batch(8, 17)
    warning = guards.check_batch(8, 18)
    assert warning is not None and "absent from 9.0% of the steps" in warning
    assert guards.check_batch(8, 34) is not None
    assert guards.check_batch(8, 35) is None


def test_domains_absent_from_a_uniform_stream(tmp_path: Path) -> None:
    """The stream draws domains one by one: what is absent is what the formula says."""
    languages = ["ar", "bn", "de", "en", "fr", "hi"]
    pages = {name: random_pages(12, seed=number) for number, name in enumerate(languages)}
    found = data(make_corpus(tmp_path / "crawl", pages))
    corpus = load_corpus(found)
    steps, examples = 600, 12
    with ExampleStream(corpus, np.full(6, 1 / 6), WordExamples(8), data=found) as stream:
        absent = [
            6 - len({example.domain for example in stream.take(examples)}) for _ in range(steps)
        ]
    expected = guards.expected_absent(6, examples)
    assert expected == pytest.approx(0.673, abs=0.001)
    error = np.std(absent) / steps**0.5
    assert abs(np.mean(absent) - expected) < 3 * error < 0.1


def test_epochs_and_their_warning() -> None:
    times = guards.epochs({"a": 0.75, "b": 0.25}, 4000, {"a": 1000, "b": 200})
    assert times == {"a": 3.0, "b": 5.0}
    (text,) = guards.repeated({"uniform": times, "proportional": {"a": 4.0, "b": 1.0}})
    assert text.startswith("mixture 'uniform' reads domain 'b' 5.0 times: above 4 epochs")
    (text,) = guards.repeated({"m": {"a": 9.0, "b": 5.0, "c": 1.0}})
    assert "'a' 9.0 times, and 1 more domains above 4" in text


def test_collapse() -> None:
    assert guards.collapsed({"a": 0.9, "b": 0.06, "c": 0.04}) is None
    assert guards.collapsed({"a": 0.99, "b": 0.01}) is None  # of two, that can be right
    text = guards.collapsed({"a": 0.05, "b": 0.92, "c": 0.03})
    assert text is not None and text.startswith("domain 'b' got 92.0% of the weight")


def test_domains_without_held_out_pages() -> None:
    assert guards.not_held_out(["a", "b"], []) is None
    assert guards.not_held_out(["a", "b"], ["b"]) == (
        "no held-out page in 'b': no loss of it is compared; raise data.held_out"
    )
    with pytest.raises(UserError, match="no domain has a held-out page"):
        guards.not_held_out(["a", "b"], ["a", "b"])
