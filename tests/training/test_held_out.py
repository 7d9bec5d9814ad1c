"""The split into training and held-out pages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from training.held_out import held_out, is_held_out

URLS = [f"https://site{number % 997}.example/page/{number}" for number in range(20_000)]


def test_the_share_is_kept_and_never_changes() -> None:
    chosen = [number for number in range(1000) if is_held_out(URLS[number], 0.01)]
    assert chosen == [5, 92, 107, 134, 262, 285, 290, 297, 380, 407, 548, 553, 752, 857, 976]
    for share in (0.001, 0.01, 0.1, 0.5):
        found = sum(is_held_out(url, share) for url in URLS)
        assert abs(found - share * len(URLS)) < 4 * (share * len(URLS)) ** 0.5


@given(st.text(), st.floats(0, 0.999), st.floats(0, 0.999))
def test_a_larger_share_only_adds(url: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert is_held_out(url, small) <= is_held_out(url, large)
    assert held_out([url], one).tolist() == [is_held_out(url, one)]


def test_nothing_is_held_out_of_a_share_of_0() -> None:
    assert not held_out(URLS, 0).any()
    assert not any(is_held_out(url, 0) for url in URLS)


def test_both_schemes_are_one_page() -> None:
    for url in URLS[:500]:
        assert is_held_out(url, 0.3) == is_held_out(url.replace("https://", "http://"), 0.3)
