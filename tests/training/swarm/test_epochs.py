"""The rules of an epoch, each by itself."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.swarm.epochs import brought, judge, too_long
from training.swarm.types import Announcement, Member, PeerInfo, Role, RoundResult
from training.swarm.whereabouts import Elsewhere, elsewhere, refuge, view


def told(
    name: str, epoch: int, samples: int = 4, state_hash: str = "h", role: Role = "node"
) -> Announcement:
    return Announcement(PeerInfo(name, name, role, "cpu"), epoch, samples, 1.0, state_hash, 0.0,
                        None, 0)  # fmt: skip


def member(name: str, samples: int = 4, **more: Any) -> Member:
    gathered = {"epoch": 3, "samples": samples, "state_hash": "h", "role": "node", "active": 3,
                "attempt": 1, "labels": [2.0 * samples]}  # fmt: skip
    weight = more.pop("weight", float(samples))
    return Member(name, weight, {**gathered, **more})


def round_of(*members: Member, complete: bool = True, rates: Any = None) -> RoundResult:
    found = {one.peer_id: 1.0 for one in members} if rates is None else rates
    return RoundResult(3, "g", members, 1.0 if complete else 0.5, 1.0, 1, found, complete)


def test_only_reports_of_this_epoch_and_of_peers_with_gradients_count() -> None:
    seen = view(
        told("a", 3, samples=5),
        [told("a", 2, samples=9), told("b", 3), told("c", 2, samples=100), told("d", 4, samples=50),
         told("x", 3, samples=70, role="auxiliary")],
    )  # fmt: skip
    assert seen.samples == 9
    assert seen.contributors == 3
    assert not seen.alone
    assert not seen.closed
    assert view(told("a", 3), [told("b", 4, state_hash="")]).closed
    assert not seen.left_behind
    assert view(told("a", 3), [told("b", 5, state_hash="")]).left_behind
    assert not view(told("a", 3), [told("b", 5), told("c", 4)]).left_behind
    assert seen.shared
    assert not view(told("a", 3), [told("b", 4), told("c", 3, state_hash="x")]).shared
    assert view(told("a", 3), [told("x", 3, role="auxiliary")]).alone
    # a coordinator or an auxiliary that watches keeps nobody from believing the one peer there is
    watcher = told("x", 3, state_hash="", role="auxiliary")
    assert elsewhere(view(told("a", 3), [watcher, told("b", 4, state_hash="n")])) == Elsewhere(
        4, "n", ("b",)
    )
    # what a coordinator has kept is all that there is
    kept = told("x", 7, state_hash="k", role="auxiliary")
    assert elsewhere(view(told("a", 3), [kept])) == Elsewhere(7, "k", ("x",))
    assert elsewhere(view(told("a", 7), [kept])) is None


def test_auxiliary_goes_with_the_trainers() -> None:
    own = told("x", 0, role="auxiliary")
    assert view(own, []).newest == 0
    assert view(own, [told("a", 5)]).newest == 5
    assert view(own, [told("a", 5), told("b", 4), told("c", 4), told("y", 9, role="auxiliary")]
                ).newest == 4  # fmt: skip
    assert view(own, [told("a", 5, state_hash=""), told("b", 4)]).newest == 4


ELSEWHERE = [
    # own, others, expected
    (("a", 3, "h"), [], None),
    (("a", 3, "h"), [("b", 3, "h"), ("c", 2, "old")], None),
    # the only other peer is believed, one of several is not
    (("a", 3, "h"), [("b", 4, "n")], (4, "n", ("b",))),
    (("a", 3, "h"), [("b", 4, "n"), ("c", 3, "h")], None),
    (("a", 3, "h"), [("b", 4, "n"), ("c", 4, "n"), ("d", 3, "h")], (4, "n", ("b", "c"))),
    # a liar far ahead draws nobody away
    (("a", 3, "h"), [("b", 999, "x"), ("c", 4, "n"), ("d", 4, "n")], (4, "n", ("c", "d"))),
    # the newest that two have
    (("a", 3, "h"), [("b", 4, "n"), ("c", 4, "n"), ("d", 5, "m"), ("e", 5, "m")],
     (5, "m", ("d", "e"))),
    # in the same epoch most peers are right, in a tie the smallest hash
    (("a", 3, "h"), [("b", 3, "x"), ("c", 3, "x")], (3, "x", ("b", "c"))),
    (("a", 3, "h"), [("b", 3, "x")], None),
    (("a", 3, "h"), [("b", 3, "g")], (3, "g", ("b",))),
    # weights that are not known yet are no vote
    (("a", 3, ""), [("b", 3, "x"), ("c", 3, "x")], None),
    (("a", 3, "h"), [("b", 4, ""), ("c", 4, "")], None),
    (("a", 3, "h"), [("b", 4, "n"), ("c", 4, "")], None),
]  # fmt: skip


@pytest.mark.parametrize(("own", "others", "expected"), ELSEWHERE)
def test_elsewhere(own: Any, others: Any, expected: Any) -> None:
    name, epoch, state_hash = own
    seen = view(
        told(name, epoch, state_hash=state_hash),
        [told(one, at, state_hash=other) for one, at, other in others],
    )
    assert elsewhere(seen) == (None if expected is None else Elsewhere(*expected))


def around(own: tuple[int, str], *others: tuple[int, str]) -> Any:
    return view(
        told("a", own[0], state_hash=own[1]),
        [
            told(name, at, state_hash=what)
            for name, (at, what) in zip("bcdef", others, strict=False)
        ],
    )


def test_newcomers_vote_for_nothing_and_nobody_waits_for_them() -> None:
    """A swarm of one keeps its weights when two join it at once."""
    assert elsewhere(around((0, "h"), (0, "h"), (5, "n"))) == Elsewhere(5, "n", ("c",))
    one = around((5, "n"), (0, "h"), (0, "h"))
    assert elsewhere(one) is None
    assert one.alone
    assert not one.stranded
    assert view(told("x", 0, role="auxiliary"), (*one.others, one.own)).newest == 5
    # where all begin nobody is a newcomer
    assert not around((1, "n"), (0, "h"), (0, "h")).alone
    assert not around((0, "h"), (0, "h"), (0, "h")).alone
    # delayed: peers that gather for epoch 1 have taken no step
    assert around((3, ""), (1, ""), (0, "h")).alone


def test_weights_of_a_coordinator_are_no_partner() -> None:
    kept = told("x", 3, state_hash="h", role="auxiliary")
    assert not view(told("a", 3), [kept, told("b", 2)]).shared
    assert view(told("a", 3), [kept, told("b", 2)]).stranded


STRANDED = [
    # own, others, stranded, refuge, outnumbered
    ((3, "h"), [], False, None, False),
    ((3, "h"), [(3, "h"), (4, "n")], False, (4, "n", ("c",)), False),
    # beside its round a peer tells no hash: it may have the same
    ((3, "h"), [(4, "")], False, None, False),
    ((4, ""), [(3, "h"), (5, "n")], False, (5, "n", ("c",)), False),
    # each has its own: the second one ahead, for a liar is alone, and the only one is believed
    ((3, "h"), [(4, "n"), (5, "m")], True, (4, "n", ("b",)), False),
    ((3, "h"), [(4, "n"), (999, "x")], True, (4, "n", ("b",)), False),
    ((4, "n"), [(3, "h"), (5, "m")], True, (5, "m", ("c",)), False),
    ((5, "m"), [(4, "n"), (3, "h")], True, None, False),
    # known later
    ((3, "h"), [(5, ""), (5, "m")], True, None, False),
    # two that go together may pass
    ((5, "m"), [(4, "n"), (4, "n")], True, None, True),
    ((5, "m"), [(4, "n"), (5, "")], True, None, True),
]  # fmt: skip


@pytest.mark.parametrize(("own", "others", "stranded", "expected", "outnumbered"), STRANDED)
def test_stranded(own: Any, others: Any, stranded: bool, expected: Any, outnumbered: bool) -> None:
    seen = around(own, *others)
    assert seen.stranded is stranded
    assert refuge(seen) == (None if expected is None else Elsewhere(*expected))
    assert seen.outnumbered is outnumbered


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["g", "h", "i"])), min_size=1, max_size=7)
)
def test_everybody_is_sent_to_one_place_in_the_end(peers: list[tuple[int, str]]) -> None:
    """Peers that follow the rules, one after the other, come to have weights with which they can
    go on: all the same, or all but one that is ahead and that they may pass."""
    states = [[f"p{number}", epoch, name] for number, (epoch, name) in enumerate(peers)]
    for _ in range(4 * len(states)):
        for one in states:
            seen = view(
                told(one[0], one[1], state_hash=one[2]),
                [told(other[0], other[1], state_hash=other[2]) for other in states],
            )
            there = elsewhere(seen)
            if there is None and seen.stranded:
                there = refuge(seen)
            if there is not None:
                assert there.epoch >= one[1]
                assert there.donors
                one[1:] = [there.epoch, there.state_hash]
    by_epoch: dict[int, set[str]] = {}
    for _, epoch, name in states:
        by_epoch.setdefault(epoch, set()).add(name)
    assert all(len(names) == 1 for names in by_epoch.values())
    assert len(by_epoch) <= 2
    together = Counter(epoch for _, epoch, _ in states)
    assert len(together) == 1 or together[max(together)] == 1
    assert len(together) == 1 or together[min(together)] >= 2


JUDGED = [
    ([member("a"), member("b"), member("c")], {}, True, "12 samples of 3 of 3 peers"),
    ([member("a"), member("b")], {}, True, "8 samples of 2 of 3"),
    ([member("a"), member("b")], {"complete": False}, False, "only 50.0% was averaged"),
    ([member("a"), member("b", 3)], {}, False, "7 of 8 samples"),
    ([member("a"), member("b", epoch=4)], {}, False, "different epochs"),
    ([member("a"), member("b", weight=1.0)], {}, False, "5 of 8 samples"),
    # a gradient of other weights is in no average that is applied, but none has no share in it;
    # a last attempt takes it, and counts its samples not
    ([member("a"), member("b"), member("c", 9, state_hash="x")], {}, False, "'c' has other"),
    ([member("a"), member("b"), member("c", 0, state_hash="x")], {}, True, "8 samples of 2 of 3"),
    ([member("a"), member("b", attempt=3), member("c", 9, state_hash="x")], {}, True,
     "8 samples of 2 of 3"),
    # an auxiliary is neither a peer of the step nor of the vote
    ([member("a", 9), member("b", 9, role="auxiliary")], {}, False, "only 1 of 3 peers"),
    ([member("a", 9, attempt=3), member("x", 0, state_hash="", role="auxiliary")], {}, True,
     "9 samples of 1"),
    ([member("a"), member("b"), *(member(x, 0, state_hash="", role="auxiliary") for x in "xyz")],
     {}, True, "8 samples of 2 of 3 peers"),
    ([member("x", 9, role="auxiliary")], {}, False, "nobody with gradients"),
    # half of the peers might not be the only half
    ([member("a", active=4), member("b", active=4)], {}, False, "only 2 of 4 peers"),
    ([member("a", active=4), member("b", active=4, attempt=3)], {}, True, "8 samples of 2 of 4"),
    # one liar about the number of peers changes nothing
    ([member("a", active=3), member("b", active=3), member("c", active=10**9)], {}, True, "of 3"),
    ([member("a"), member("b", labels=[math.nan])], {}, False, "peer 'b' tells what no peer"),
    # all divide by the labels of all
    ([member("a"), member("b", labels=[1e300])], {}, False, "peer 'b' tells of labels that"),
    ([member("a"), member("b"), member("c", labels=[600.0])], {}, False, "'c' tells of labels"),
    ([member("a"), member("b"), member("c", labels=[400.0])], {}, True, "12 samples"),
    ([member("a"), member("b", labels=[1.0, 2.0])], {}, False, "peer 'b' tells what no peer"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "more", "accepted", "reason"), JUDGED)
def test_judge(members: Any, more: Any, accepted: bool, reason: str) -> None:
    verdict = judge(round_of(*members, **more), "a", needed=8, attempts=3, terms=1)
    assert verdict.accepted is accepted
    assert reason in verdict.reason
    assert not verdict.useless
    assert verdict.short is (" of 8 samples" in reason)


def test_peer_with_other_weights_is_told_so() -> None:
    members = [member("a", state_hash="x"), member("b"), member("c")]
    verdict = judge(round_of(*members), "a", needed=8, attempts=3, terms=1)
    assert (verdict.accepted, verdict.useless) == (False, True)
    other = judge(round_of(*members), "b", needed=8, attempts=3, terms=1)
    assert (other.accepted, other.useless, other.short) == (False, False, False)


@pytest.mark.parametrize(
    "more",
    [{"samples": -1}, {"samples": True}, {"samples": 1.5}, {"epoch": None}, {"state_hash": 3},
     {"role": "boss"}, {"labels": "12"}, {"labels": [-1.0]}, {"labels": [True]},
     {"weight": math.nan}, {"weight": -1.0}, {"active": "3"}, {"attempt": []}],
)  # fmt: skip
def test_nonsense_is_seen(more: dict[str, Any]) -> None:
    assert brought(Member("b", 4.0, {})) is None
    assert brought(member("b")) is not None
    assert brought(member("b", **more)) is None


def test_too_long() -> None:
    assert too_long(math.nan, [], 10)
    assert too_long(math.inf, [1.0] * 20, 10)
    assert too_long(0.0, [], 10)
    assert not too_long(1e9, [1.0] * 7, 10)
    assert too_long(10.1, [1.0] * 8, 10)
    assert not too_long(9.9, [1.0] * 8, 10)
    assert not too_long(9.9, [1.0] * 7 + [1000.0], 10)
