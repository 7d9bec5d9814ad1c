"""Link rates: learned from rounds of a model of links whose true rates nobody is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.swarm.rates import PROBE, LinkRates, SeenRound, links
from training.swarm.shares import Link, busy_s, equal_shares, share_out, traffic

VECTOR_BYTES = 40_000_000
ELEMENTS = 20_000_000


class Swarm:
    """Peers with true links that do rounds by the model, and go by what they gather."""

    def __init__(self, true: list[Link], declared: dict[str, float | None]) -> None:
        self.true = true
        self.rates = {
            link.peer_id: LinkRates(link.peer_id, declared[link.peer_id], declared[link.peer_id])
            for link in true
        }
        self.now = 0.0
        self.forged: dict[str, dict[str, Any]] = {}

    def links(self) -> list[Link]:
        gathered = [
            one.gathered(self.now) | self.forged.get(peer, {}) for peer, one in self.rates.items()
        ]
        return links([(link.peer_id, link.role) for link in self.true], gathered)

    def round(self) -> float:
        """One round; its seconds."""
        found = self.links()
        shares = share_out(found, ELEMENTS)
        seconds = max(busy_s(self.true, shares, VECTOR_BYTES))
        up_s, down_s = self._busy(shares)
        self.now += seconds
        for n, link in enumerate(self.true):
            mine_is_slow = down_s[n] > 0.98 * seconds
            waited = {
                other.peer_id: seconds * (0.97 if mine_is_slow or up_s[m] > 0.98 * seconds else 0.2)
                for m, other in enumerate(self.true)
                if m != n and other.role != "auxiliary" and shares[n]
            }
            seen = SeenRound(found, shares, VECTOR_BYTES, seconds, waited, seconds)
            self.rates[link.peer_id].observe(seen, self.now)
        return seconds

    def _busy(self, shares: tuple[int, ...]) -> tuple[list[float], list[float]]:
        moved = traffic(self.true, shares, VECTOR_BYTES)
        pairs = list(zip(self.true, moved, strict=True))
        ups = [bytes_ * 8e-6 / (link.up_mbit or 1) for link, bytes_ in pairs]
        return ups, [bytes_ * 8e-6 / (link.down_mbit or 1) for link, bytes_ in pairs]

    def best_s(self) -> float:
        return max(busy_s(self.true, share_out(self.true, ELEMENTS), VECTOR_BYTES))

    def equal_s(self) -> float:
        return max(busy_s(self.true, equal_shares(self.true, ELEMENTS), VECTOR_BYTES))


def symmetric(**rates: float) -> list[Link]:
    return [Link(name, "node", rate, rate) for name, rate in rates.items()]


def nothing(true: list[Link]) -> dict[str, float | None]:
    return {link.peer_id: None for link in true}


def rates_of(true: list[Link]) -> dict[str, float | None]:
    return {link.peer_id: link.up_mbit for link in true}


MIXED = symmetric(a=200, b=50, c=20)
MANY = symmetric(a=500, b=500, c=100, d=100, e=100, f=20, g=20, h=20)


@pytest.mark.parametrize("true", [MIXED, MANY])
def test_rates_are_found_when_nobody_declares_any(true: list[Link]) -> None:
    swarm = Swarm(true, nothing(true))
    assert swarm.round() == pytest.approx(swarm.equal_s())  # nothing is known yet
    later = [swarm.round() for _ in range(12)][-4:]
    assert max(later) <= 1.05 * swarm.best_s()


def test_where_most_links_are_slow_the_fast_one_must_be_declared() -> None:
    true = symmetric(a=1000, b=10, c=10, d=10, e=10)
    unknown, declared = Swarm(true, nothing(true)), Swarm(true, rates_of(true))
    for _ in range(8):
        assert unknown.round() == pytest.approx(unknown.equal_s())
        assert declared.round() == pytest.approx(declared.best_s(), rel=0.01)
    assert declared.best_s() < 0.87 * declared.equal_s()


def test_a_rate_declared_far_too_high_is_found_out_in_one_round() -> None:
    swarm = Swarm(MIXED, {"a": 200, "b": 50, "c": 1000})
    first = swarm.round()
    assert first > 1.1 * swarm.best_s()
    assert swarm.round() <= 1.05 * swarm.best_s()
    # The seconds of one round at 20 Mbit/s against one second's worth of its word.
    assert {link.peer_id: link.up_mbit for link in swarm.links()}["c"] == pytest.approx(
        20, rel=0.08
    )


def test_a_rate_declared_too_low_is_raised_by_what_was_carried() -> None:
    swarm = Swarm(MIXED, {"a": 1.0, "b": 50, "c": 20})
    for _ in range(3):
        swarm.round()
    assert swarm.links()[0].up_mbit > 1.0


def test_one_liar_among_four_moves_nobody() -> None:
    true = symmetric(a=100, b=90, c=80, d=70)
    honest, swarm = (
        Swarm(true, dict.fromkeys("abcd", 80.0)),
        Swarm(true, dict.fromkeys("abcd", 80.0)),
    )
    swarm.forged["a"] = {"seen_mbit": {other: [0.001, 1e5] for other in "bcd"}}
    for _ in range(5):
        assert swarm.round() <= 1.1 * honest.round()
    assert all((link.up_mbit or 0) > 60 for link in swarm.links())


def test_a_slow_line_down_is_not_taken_for_slow_senders() -> None:
    true = [*symmetric(a=100, b=100, c=100), Link("d", "node", 100, 10)]
    swarm = Swarm(true, dict.fromkeys("abcd", 100.0))
    swarm.round()
    assert [link.up_mbit for link in swarm.links()] == [100.0] * 4
    assert swarm.links()[3].down_mbit == pytest.approx(10, rel=0.2)
    assert [link.down_mbit for link in swarm.links()[:3]] == [100.0] * 3
    assert swarm.round() <= 1.05 * swarm.best_s()


def test_evidence_fades_towards_the_peers_own_word() -> None:
    swarm = Swarm(MIXED, {"a": 200, "b": 50, "c": 1000})
    swarm.round()
    slow = swarm.links()[2].up_mbit
    swarm.now += 24 * 3600.0
    assert slow is not None and slow < 100
    assert swarm.links()[2].up_mbit == 1000.0


def test_figures_of_one_round() -> None:
    """(1 + f) 320 Mbit in 40 s, f = 1/2 of b and c, and c waited for through 30 s of them."""
    group = [Link("a", "node"), Link("b", "node"), Link("c", "client")]
    rates = LinkRates("a", up_mbit=None, down_mbit=5.0)
    seen = SeenRound(
        group, (10_000_000, 10_000_000, 0), VECTOR_BYTES, 40.0, {"b": 5.0, "c": 30.0}, 38.0
    )
    rates.observe(seen, 100.0)
    assert rates.gathered(100.0) == {
        "up_mbit": PROBE * 12.0,  # it carried 1.5 x 320 / 40 and nobody is known to have waited
        "down_mbit": 12.0,  # declared 5, carried 12
        "seen_mbit": {"c": [8.0, 40.0]},
        "down_seen_mbit": None,
        "judged_s": 40.0,
    }
    # Half an hour later the seconds count half; a rate is still that rate.
    assert rates.gathered(1900.0)["seen_mbit"] == {"c": [8.0, 20.0]}


def test_a_round_of_milliseconds_teaches_nothing() -> None:
    rates = LinkRates("a", 5.0, 5.0)
    group = [Link("a", "node"), Link("b", "node")]
    rates.observe(SeenRound(group, (1, 1), 1e9, 0.01, {"b": 0.01}, 0.01), 1.0)
    assert rates.gathered(1.0)["up_mbit"] == 5.0
    assert rates.gathered(1.0)["seen_mbit"] == {}


def test_a_reducer_of_little_does_not_judge() -> None:
    """Its piece of a sender is here in the first second; then it hears nothing of the round."""
    group = [Link("a", "node"), Link("b", "node"), Link("c", "node")]
    rates = LinkRates("a", 5.0, 5.0)
    rates.observe(SeenRound(group, (2, 49, 49), 1e6, 10.0, {"b": 9.0, "c": 9.0}, 9.0), 10.0)
    assert rates.gathered(10.0)["seen_mbit"] == {}
    assert rates.gathered(10.0)["judged_s"] == 0.0


@pytest.mark.parametrize(("reducing_s", "judges"), [(3.4, True), (1.5, False)])
def test_waiting_counts_by_the_time_of_reducing(reducing_s: float, judges: bool) -> None:
    """As measured on links of 200, 50 and 20 Mbit/s: done after 3.4 of 5.7 s, it had waited for
    the slow one through 3.0 of them. One that was done at once has seen too little."""
    group = [Link("a", "node"), Link("b", "node"), Link("c", "node")]
    rates = LinkRates("a")
    waited = {"b": 0.03 * reducing_s, "c": 0.9 * reducing_s}
    rates.observe(SeenRound(group, (1, 1, 1), 1e7, 5.7, waited, reducing_s), 10.0)
    slow_mbit = 4 / 3 * 80 / 5.7
    assert rates.gathered(10.0)["seen_mbit"] == (
        {"c": [pytest.approx(slow_mbit, abs=0.001), 5.7]} if judges else {}
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)
names = st.sampled_from(["up_mbit", "down_mbit", "seen_mbit", "down_seen_mbit", "judged_s"])


@given(st.lists(json_values | st.dictionaries(names, json_values), min_size=3, max_size=3))
def test_nothing_that_a_peer_says_breaks_the_links(gathered: list[Any]) -> None:
    found = links([("a", "node"), ("b", "client"), ("c", "auxiliary")], gathered)
    assert [link.peer_id for link in found] == ["a", "b", "c"]
    assert sum(share_out(found, 1000)) == 1000


@pytest.mark.parametrize("least", [5e-324, 1e-300, 1e-9])
def test_a_rate_of_nothing_is_no_rate(least: float) -> None:
    said = {"up_mbit": least, "down_mbit": least, "judged_s": 1e6, "down_seen_mbit": [least, 1e6]}
    views = {"a": [least, 1e6], "b": [1e6, least], "c": [least, least]}
    roles: list[tuple[str, Any]] = [("a", "node"), ("b", "node"), ("c", "node")]
    found = links(roles, [said | {"seen_mbit": views}, {"up_mbit": 9.0, "seen_mbit": views}, {}])
    assert all(link.up_mbit is None or link.up_mbit > 0 for link in found)
    assert sum(share_out(found, 1000)) == 1000


def test_the_word_of_a_peer_without_witnesses_stands() -> None:
    found = links([("a", "node"), ("b", "node")], [{"up_mbit": 30.0, "down_mbit": 40.0}, {}])
    assert found == [Link("a", "node", 30.0, 40.0), Link("b", "node")]
