"""Receipts on their way to the coordinator: what a peer tells, and what is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.training.swarm.authorities import peer
from tests.training.swarm.watched_runs import round_of
from training.swarm import identity, rounds_told
from training.swarm.rounds_told import Teller


class Store:
    """The part of hivemind's DHT that a teller uses."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        self.expires: float = 0

    def store(
        self, key: str, value: Any, *, subkey: str, expiration_time: float, return_future: bool
    ) -> None:
        assert (key, return_future) == ("run_receipts", True)
        self.records[subkey] = value
        self.expires = expiration_time


def anybody(_: str) -> bool:
    return True


def told(count: int = 1) -> tuple[Store, str, str]:
    """What peer 0 has told of rounds with peer 1, and both ids."""
    store, own, other = Store(), peer(0), peer(1).peer_id
    teller = Teller(store, "run", own)
    for epoch in range(count):
        teller.tell(round_of(epoch, {own.peer_id: 3.0, other: 5.0}), 1000.0)
    return store, own.peer_id, other


def test_what_is_told_is_heard() -> None:
    store, own, other = told()
    (found,) = rounds_told.heard(store.records, allowed=anybody)
    result = found.result()
    assert (found.receipt.signer, store.expires) == (own, 1600.0)
    assert (result.epoch, result.seconds, result.fraction, result.complete) == (0, 1.5, 1.0, True)
    assert {one.peer_id: one.weight for one in result.members} == {own: 3.0, other: 5.0}


def test_the_last_eight_are_kept() -> None:
    store, _, _ = told(11)
    assert [one.receipt.epoch for one in rounds_told.heard(store.records, allowed=anybody)] == list(
        range(3, 11)
    )


def test_what_is_told_fits_into_one_write_of_a_pipe() -> None:
    store, ids = Store(), {peer(0).peer_id: 1.0}
    for number in range(39):
        ids[identity.base58_of(b"\x12\x20" + bytes([number]) * 32)] = 1.0
    teller = Teller(store, "run", peer(0))
    for epoch in range(8):
        teller.tell(round_of(epoch, ids), 1000.0)
    (text,) = store.records.values()
    assert len(text) < 12_288
    epochs = [one.receipt.epoch for one in rounds_told.heard(store.records, allowed=anybody)]
    assert epochs == list(range(8 - len(epochs), 8)) and len(epochs) > 1


def test_a_round_alone_is_not_told() -> None:
    store = Store()
    alone = round_of(0, {peer(0).peer_id: 3.0})
    Teller(store, "run", peer(0)).tell(
        type(alone)(**{**vars(alone), "group_id": ""}), 1000.0
    )  # fmt: skip
    assert store.records == {}


def test_a_receipt_under_another_id() -> None:
    store, own, other = told()
    assert list(rounds_told.heard({other: store.records[own]}, allowed=anybody)) == []


@pytest.mark.parametrize(
    "text",
    [None, 5, "", "{}", "[1]", '[{"receipt": 1}]', '[{"receipt": "{}", "seconds": 1}]',
     "x" * (1 << 18), '[{"receipt": "{}"}]'],
)  # fmt: skip
def test_what_is_none(text: object) -> None:
    assert list(rounds_told.heard({"a": text}, allowed=anybody)) == []


def test_nothing_is_read_of_who_takes_no_part() -> None:
    store, own, other = told()
    assert list(rounds_told.heard(store.records, allowed={other}.__contains__)) == []
    assert len(list(rounds_told.heard(store.records, allowed={own}.__contains__))) == 1


def test_brackets_without_end_do_not_stop_the_coordinator() -> None:
    store, own, _ = told()
    records = {"Qm": "[" * 100_000, own: store.records[own]}
    assert [one.receipt.signer for one in rounds_told.heard(records, allowed=anybody)] == [own]


@pytest.mark.parametrize(
    "seconds", ["NaN", "Infinity", '"1"', "null", "true", "-1", "1" * 400, "1e300"]
)
def test_seconds_that_are_none(seconds: str) -> None:
    store, own, _ = told()
    (entry,) = json.loads(store.records[own])
    text = f'[{{"receipt": {json.dumps(entry["receipt"])}, "seconds": {seconds}}}]'
    assert list(rounds_told.heard({own: text}, allowed=anybody)) == []
