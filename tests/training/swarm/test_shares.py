"""Shares: golden numbers of the links in shared/SWARM.md, a naive grid, a solver, the guarantee."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from training.swarm.shares import CAP, FLOOR_TRAFFIC, Link, busy_s, equal_shares, share_out, traffic
from training.swarm.types import Role

VECTOR_BYTES = 40_000_000  # 20 M parameters in fp16: 320 Mbit
ELEMENTS = 20_000_000


def nodes(*rates_mbit: float) -> list[Link]:
    return [Link(f"peer{n:03}", "node", rate, rate) for n, rate in enumerate(rates_mbit)]


def round_s(links: list[Link], shares: tuple[int, ...]) -> float:
    return max(busy_s(links, shares, VECTOR_BYTES))


def test_three_links_as_measured() -> None:
    links = nodes(200, 50, 20)
    shares = share_out(links, ELEMENTS)
    # The slowest has the floor, the fastest the cap, the third what is left.
    assert shares == (10_000_000, 9_800_000, 200_000)
    # Equal: (1 + 1/3) 320 Mbit / 20 Mbit/s. Here: (1 + 0.01) 320 / 20.
    assert round_s(links, equal_shares(links, ELEMENTS)) == pytest.approx(21.333, abs=1e-3)
    assert busy_s(links, shares, VECTOR_BYTES) == pytest.approx((2.4, 9.536, 16.16))


@pytest.mark.parametrize(
    ("links", "adaptive_s", "equal_s"),
    [
        # The fastest has the cap, 1/2; the other three 1/6 each: 1 + 2 f of 320 Mbit at 100 Mbit/s.
        (nodes(1000, 100, 100, 100), 3.2 * (1 + 2 / 6), 4.8),
        (nodes(500, 500, 100, 100, 100, 20, 20, 20), 16.16, 28.0),
        (nodes(*[100] * 15, 10), 32 * 1.01, 60.0),
        (nodes(100, 10), 32.0, 32.0),
        ([*nodes(1000, 100), Link("z", "client", 100, 100)], 4.8, 4.8),
        ([*nodes(100, 100, 100), Link("z", "auxiliary", 1000, 1000)], 3.2 * (1 + 1 / 6), 4.0),
    ],
)
def test_groups_by_hand(links: list[Link], adaptive_s: float, equal_s: float) -> None:
    assert round_s(links, equal_shares(links, ELEMENTS)) == pytest.approx(equal_s, rel=1e-6)
    assert round_s(links, share_out(links, ELEMENTS)) == pytest.approx(adaptive_s, rel=1e-6)


def test_the_only_reachable_peer_reduces_all() -> None:
    links = [Link("a", "client", 10, 10), Link("b", "node", 5, 5), Link("c", "client", None, None)]
    assert share_out(links, 1000) == (0, 1000, 0)


def test_two_reachable_peers_have_half_each() -> None:
    assert share_out(nodes(1000, 1), 1001) == (501, 500)


def test_equal_links_have_equal_shares_and_ties_go_by_id() -> None:
    links = [Link(name, "node", 7, 7) for name in ("c", "a", "b")]
    assert share_out(links, 8) == (2, 3, 3)
    assert share_out([Link(name, "node") for name in ("c", "a", "b")], 8) == (2, 3, 3)


def test_an_unknown_rate_is_the_median_of_the_known() -> None:
    known = nodes(200, 50, 20, 50)
    unknown = [*known[:3], Link("peer003", "node")]
    assert share_out(unknown, ELEMENTS) == share_out(known, ELEMENTS)


def test_a_slow_auxiliary_is_left_alone() -> None:
    links = [*nodes(100, 100, 100), Link("z", "auxiliary", 0.001, 0.001)]
    shares = share_out(links, ELEMENTS)
    assert shares[3] < 100
    assert round_s(links, shares) == pytest.approx(3.2 * (1 + 1 / 3), rel=2e-3)


def test_traffic_adds_up() -> None:
    links = [*nodes(3, 2, 1), Link("x", "client", 1, 1), Link("z", "auxiliary", 1, 1)]
    moved = traffic(links, (50, 30, 0, 0, 20), 1000.0)
    # Sender: what others reduce, and the averages of its own part for the other 3 senders.
    assert moved == (500 + 3 * 500, 700 + 3 * 300, 1000, 1000, 4 * 200)


@pytest.mark.parametrize(
    ("links", "elements", "message"),
    [
        ([Link("a", "client", 1, 1)], 10, "all are clients"),
        ([Link("a", "node"), Link("a", "node")], 10, "same id"),
        ([Link("a", "node")], 0, "0 elements"),
    ],
)
def test_groups_that_cannot_average(links: list[Link], elements: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share_out(links, elements)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_a_positive_number(rate: float) -> None:
    with pytest.raises(ValueError, match="Mbit/s"):
        Link("a", "node", rate, 1.0)


roles = st.sampled_from(["node", "node", "node", "client", "auxiliary"])
rates = st.one_of(st.none(), st.floats(0.01, 10_000))


@st.composite
def groups(draw: st.DrawFn, most: int) -> list[Link]:
    drawn: list[Role] = draw(st.lists(roles, min_size=1, max_size=most))
    drawn[draw(st.integers(0, len(drawn) - 1))] = "node"
    return [Link(f"p{n}", role, draw(rates), draw(rates)) for n, role in enumerate(drawn)]


@given(groups(9), st.integers(1, 100_000))
def test_never_slower_than_equal_shares(links: list[Link], elements: int) -> None:
    shares, equal = share_out(links, elements), equal_shares(links, elements)
    assert sum(shares) == elements
    assert all(
        share == 0 for link, share in zip(links, shares, strict=True) if link.role == "client"
    )
    # A round is over when its busiest link is: with the same figures for all, for every peer.
    assert round_s(links, shares) <= round_s(links, equal)


@given(groups(9), st.randoms(use_true_random=False))
def test_the_order_of_the_group_changes_nothing(links: list[Link], random: object) -> None:
    mixed = list(links)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    shares = dict(zip([link.peer_id for link in links], share_out(links, 1009), strict=True))
    assert share_out(mixed, 1009) == tuple(shares[link.peer_id] for link in mixed)


@given(groups(9), st.integers(1000, 100_000))
def test_floor_and_cap(links: list[Link], elements: int) -> None:
    shares = share_out(links, elements)
    reachable = sum(link.role != "client" for link in links)
    senders = sum(link.role != "auxiliary" for link in links)
    least = min(FLOOR_TRAFFIC / max(1, senders - 2), Fraction(1, reachable)) * elements
    for link, share in zip(links, shares, strict=True):
        if link.role == "node":
            assert share >= max(1, least - 1)
        assert share <= max(CAP, Fraction(1, reachable)) * elements + 1


@settings(deadline=None, max_examples=60)
@given(groups(4))
def test_no_grid_point_is_faster(links: list[Link]) -> None:
    assume(sum(link.role != "auxiliary" for link in links) > 1)  # else there is nothing to average
    elements = 24
    reachable = [n for n, link in enumerate(links) if link.role != "client"]
    most = max(CAP, Fraction(1, len(reachable))) * elements
    mine = round_s(links, share_out(links, elements, floor_traffic=Fraction(0)))
    least = [int(links[n].role == "node") for n in reachable]  # the floor of any node: one element
    best = min(
        round_s(
            links,
            tuple(dict(zip(reachable, point, strict=True)).get(n, 0) for n in range(len(links))),
        )
        for point in itertools.product(range(elements + 1), repeat=len(reachable))
        if sum(point) == elements
        and all(low <= share <= most for low, share in zip(least, point, strict=True))
    )
    # The level is exact, its elements are rounded: by less than one element of any link.
    assert mine <= best + max(element_s(links, n, elements) for n in reachable)


def element_s(links: list[Link], number: int, elements: int) -> float:
    """What one element more costs the link, in a group of at least two."""
    few, more = [0] * len(links), [0] * len(links)
    more[number] = 1
    few[number - 1], more[number - 1] = elements, elements - 1
    pair = [busy_s(links, tuple(shares), VECTOR_BYTES)[number] for shares in (few, more)]
    return pair[1] - pair[0]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(1, 1000), min_size=3, max_size=12), st.integers(0, 3), st.integers(0, 2))
def test_a_solver_finds_no_better(rates_mbit: list[float], auxiliaries: int, clients: int) -> None:
    links = nodes(*rates_mbit)
    links += [Link(f"x{n}", "auxiliary", 50.0 + n, 80.0) for n in range(auxiliaries)]
    links += [Link(f"y{n}", "client", 1e6, 1e6) for n in range(clients)]
    senders = len(rates_mbit) + clients
    reachable = [link for link in links if link.role != "client"]
    size = len(reachable)
    fixed = np.array([link.role == "node" for link in reachable], dtype=float)
    each = np.where(fixed == 1, senders - 2.0, senders)
    speed = np.array(
        [round(min(link.up_mbit or 0, link.down_mbit or 0) * 1000) for link in reachable]
    )
    floor = min(0.01 / max(1, senders - 2), 1 / size)
    found = linprog(
        [0.0] * size + [1.0],
        A_ub=np.hstack([np.diag(each / speed), -np.ones((size, 1))]),
        b_ub=-fixed / speed,
        A_eq=[[1.0] * size + [0.0]],
        b_eq=[1.0],
        bounds=[(floor * one, max(0.5, 1 / size)) for one in fixed] + [(0, None)],
        method="highs",
    )
    assert found.success
    expected = found.x[-1] * VECTOR_BYTES * 8 / 1000
    assert round_s(links, share_out(links, ELEMENTS)) == pytest.approx(expected, rel=1e-5)


def test_256_peers_are_shared_out_at_once() -> None:
    links = [Link(f"p{n:03}", "node", 1 + n * 0.37, 1 + n * 0.73) for n in range(256)]
    shares = share_out(links, 18_105_474)
    assert sum(shares) == 18_105_474
    assert shares == tuple(sorted(shares))
    assert round_s(links, shares) < 0.6 * round_s(links, equal_shares(links, 18_105_474))
