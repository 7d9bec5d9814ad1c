"""Receipts: what is signed, who may sign, and what a majority is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.swarm.receipt_examples import peers, result
from training.swarm import keys, receipts
from training.swarm.keys import Untrusted
from training.swarm.receipts import Contribution
from training.swarm.types import RoundResult


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> list[receipts.Signer]:
    return peers(tmp_path_factory.mktemp("identities"), 5)


def ids(signers: list[receipts.Signer]) -> list[str]:
    return [one.peer_id for one in signers]


def test_a_receipt_says_what_the_round_was(five: list[receipts.Signer]) -> None:
    given = result({five[1].peer_id: 24.5, five[0].peer_id: 8.0}, epoch=7, group="ab12")
    receipt = receipts.sign(given, run="bn", key=five[0])
    body = json.loads(receipt.text)
    assert body["weights"] == [[five[0].peer_id, 8000], [five[1].peer_id, 24500]]
    assert (body["run"], body["epoch"], body["group"], body["fraction"]) == ("bn", 7, "ab12", 10**6)
    assert receipt.signer == five[0].peer_id
    assert receipts.read(receipt.text) == receipts.read(receipt.text.encode()) == receipt
    assert receipts.stored(receipt.text, receipt.signer) == receipt


def test_an_incomplete_round_is_signed_as_nothing(five: list[receipts.Signer]) -> None:
    given = result(dict.fromkeys(ids(five), 1.0), complete=False)
    assert receipts.sign(given, run="bn", key=five[0]).fraction == 0


@pytest.mark.parametrize("field", ["run", "epoch", "group", "weights", "fraction"])
def test_nothing_in_a_receipt_can_be_changed(five: list[receipts.Signer], field: str) -> None:
    body = json.loads(
        receipts.sign(result(dict.fromkeys(ids(five), 8.0)), run="bn", key=five[0]).text
    )
    changed = {"run": "bm", "epoch": 8, "group": "cd", "fraction": 5, "weights": body["weights"][:]}
    changed["weights"][2] = [body["weights"][2][0], 9000]
    body[field] = changed[field]
    with pytest.raises(Untrusted, match="signature is wrong"):
        receipts.read(keys.canonical(body))


def test_a_stranger_to_the_round_cannot_sign(five: list[receipts.Signer]) -> None:
    given = result({five[0].peer_id: 1.0, five[1].peer_id: 1.0})
    with pytest.raises(ValueError, match="not in the round"):
        receipts.sign(given, run="bn", key=five[2])


def test_another_members_key_gives_another_signer(five: list[receipts.Signer]) -> None:
    given = result(dict.fromkeys(ids(five), 1.0))
    body = json.loads(receipts.sign(given, run="bn", key=five[0]).text)
    body["public_key"] = keys.encode(five[1].public_key)
    with pytest.raises(Untrusted, match="signature is wrong"):
        receipts.read(keys.canonical(body))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("run", "a b", "run is not a name"),
        ("group", "AB", "not hex"),
        ("epoch", -1, "not a count"),
        ("epoch", True, "not a count"),
        ("fraction", 1_000_001, "above 1"),
        ("weights", [], "1 to 256"),
        ("weights", [["x", 1]], "not a peer and a weight"),
        ("weights", {"a": 1}, "1 to 256"),
        ("signature", 3, "not text"),
        ("public_key", "!", "base64url"),
    ],
)
def test_malformed_receipts(
    five: list[receipts.Signer], field: str, value: object, message: str
) -> None:
    body = json.loads(
        receipts.sign(result(dict.fromkeys(ids(five), 1.0)), run="bn", key=five[0]).text
    )
    body[field] = value
    with pytest.raises(Untrusted, match=message):
        receipts.read(keys.canonical(body))


def test_other_forms_and_fields_are_refused(five: list[receipts.Signer]) -> None:
    text = receipts.sign(result(dict.fromkeys(ids(five), 1.0)), run="bn", key=five[0]).text
    body = json.loads(text)
    for bad in (json.dumps(body), "[]", "", "{", text[:-1], text + " ", b"\xff", "[" * 10_000):
        with pytest.raises(Untrusted):
            receipts.read(bad)
    with pytest.raises(Untrusted, match="fields"):
        receipts.read(keys.canonical({**body, "more": 1}))
    with pytest.raises(Untrusted, match="at most"):
        receipts.read(" " * 40_000)
    body["weights"].reverse()
    with pytest.raises(Untrusted, match="order"):
        receipts.read(keys.canonical(body))


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf"), 1e300])
def test_a_weight_is_a_count(five: list[receipts.Signer], weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        receipts.sign(result({five[0].peer_id: weight}), run="bn", key=five[0])


def signed(signers: list[receipts.Signer], given: RoundResult) -> list[receipts.Receipt]:
    return [receipts.sign(given, run="bn", key=one) for one in signers]


@pytest.mark.parametrize(
    ("count", "counts"), [(0, False), (1, False), (2, False), (3, True), (5, True)]
)
def test_more_than_half_of_the_group_must_sign(
    five: list[receipts.Signer], count: int, counts: bool
) -> None:
    given = result(dict.fromkeys(ids(five), 4.0))
    found = receipts.tally(signed(five[:count], given))
    assert [one.peer_id for one in found] == (ids(five) if counts else [])
    assert all(one.weight == 4.0 and one.witnesses == count for one in found)


def test_half_of_four_is_no_majority(five: list[receipts.Signer]) -> None:
    given = result(dict.fromkeys(ids(five[:4]), 1.0))
    assert receipts.tally(signed(five[:2], given)) == []
    assert len(receipts.tally(signed(five[:3], given))) == 4


def test_a_lone_peer_proves_nothing(five: list[receipts.Signer]) -> None:
    assert receipts.tally(signed(five[:1], result({five[0].peer_id: 1e6}))) == []


def test_a_weight_that_the_majority_does_not_report_counts_nothing(
    five: list[receipts.Signer],
) -> None:
    honest = dict.fromkeys(ids(five[:3]), 8.0)
    boast = honest | {five[0].peer_id: 800.0}
    found = receipts.tally([*signed(five[:1], result(boast)), *signed(five[1:3], result(honest))])
    assert {one.peer_id: (one.weight, one.witnesses) for one in found} == {
        five[0].peer_id: (8.0, 2),
        five[1].peer_id: (8.0, 3),
        five[2].peer_id: (8.0, 3),
    }


def test_no_vote_counts_twice(five: list[receipts.Signer]) -> None:
    given = result(dict.fromkeys(ids(five[:3]), 1.0))
    assert receipts.tally([*signed(five[:1], given), *signed(five[:1], given)]) == []


def test_incomplete_rounds_and_other_groups_do_not_add_up(five: list[receipts.Signer]) -> None:
    weights = dict.fromkeys(ids(five[:3]), 1.0)
    partly = result(weights, complete=False)
    assert receipts.tally(signed(five[:3], partly)) == []
    mixed = [
        *signed(five[:1], result(weights, group="aa")),
        *signed(five[1:2], result(weights, group="bb")),
    ]
    assert receipts.tally(mixed) == []


def test_a_peer_counts_once_in_the_group_with_most_witnesses(five: list[receipts.Signer]) -> None:
    small = result(dict.fromkeys(ids(five[:2]), 9.0), group="aa")
    large = result(dict.fromkeys(ids(five), 4.0), group="bb")
    both = [*signed(five[:2], small), *signed(five[:4], large)]
    for order in (both, both[::-1]):
        found = receipts.tally(order)
        assert found == [Contribution("bb", peer, 4.0, 4, 5) for peer in ids(five)]


def test_an_auxiliary_is_a_witness_with_weight_0(five: list[receipts.Signer]) -> None:
    given = result({five[0].peer_id: 6.0, five[1].peer_id: 0.0})
    found = receipts.tally(signed(five[:2], given))
    assert [(one.weight, one.witnesses) for one in found] == [(6.0, 2), (0.0, 2)]


def test_identities_of_the_examples_are_in_order(tmp_path: Path) -> None:
    made = ids(peers(tmp_path, 2))
    assert made == sorted(made)
