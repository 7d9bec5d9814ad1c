"""The ledger: idempotent, in any order, capped by announced speed, exported."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path

import pytest

from models.errors import UserError
from tests.training.swarm.receipt_examples import peers, result
from training.swarm import receipts
from training.swarm.identity import Identity
from training.swarm.keys import Untrusted
from training.swarm.ledger import LATE_EPOCHS, SLACK, VERSION, Ledger, Standing
from training.swarm.metrics_store import Leader

RUN = "bn"
START = 1_700_000_000.0 // 3600 * 3600  # the start of an hour


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    return peers(tmp_path_factory.mktemp("identities"), 4)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def texts(four: list[Identity], weights: list[float], epoch: int, group: str = "aa") -> list[str]:
    """The receipts of a round of the first peers with these weights, one of each."""
    members = four[: len(weights)]
    by_peer = {one.peer_id: weight for one, weight in zip(members, weights, strict=True)}
    given = result(by_peer, epoch=epoch, group=group)
    return [receipts.sign(given, run=RUN, key=one).text for one in members]


def fast(ledger: Ledger, four: list[Identity], minutes: int = 60, rate: float = 1e6) -> None:
    for one in four:
        for minute in range(minutes):
            ledger.see(RUN, one.peer_id, rate, START + 60 * minute)


def test_who_brought_what(ledger: Ledger, four: list[Identity]) -> None:
    fast(ledger, four[:3], minutes=30)
    ledger.know(four[0].peer_id, "rahim")
    ledger.know(four[1].peer_id, "rahim")
    for epoch in range(3):
        for text in texts(four, [10.0, 20.5, 5.0], epoch):
            assert ledger.add(text, run=RUN, epoch=epoch, now=START + epoch)
    assert ledger.standings(RUN) == [
        Standing("user rahim", "rahim", 91.5, 91.5, 6, 1.0, 2),
        Standing(f"peer {four[2].peer_id}", four[2].peer_id, 15.0, 15.0, 3, 0.5, 1),
    ]
    assert ledger.leaders(RUN)[0] == Leader("user rahim", "rahim", 91.5, 6, 1.0)
    assert ledger.standings("another") == []


def test_a_contribution_stands_once_a_majority_reports_it(
    ledger: Ledger, four: list[Identity]
) -> None:
    for count, text in enumerate(texts(four, [1.0, 2.0, 3.0, 4.0], 5), start=1):
        ledger.add(text, run=RUN, epoch=5, now=START)
        found = ledger.contributions(RUN, 5)
        assert [one.weight for one in found] == ([1.0, 2.0, 3.0, 4.0] if count > 2 else [])
        assert all(one.witnesses == count for one in found)


def test_twice_late_and_in_any_order_is_the_same(tmp_path: Path, four: list[Identity]) -> None:
    epochs = [(n, texts(four, [float(n), 2.0 * n, 1.0], n, f"a{n}")) for n in range(6)]
    given = [(n, text) for n, group in epochs for text in group]
    boards = []
    for seed in range(4):
        random.Random(seed).shuffle(given)
        with Ledger(tmp_path / f"{seed}.sqlite") as ledger:
            seen = [(one.peer_id, minute) for one in four for minute in range(20)] * 2
            random.Random(seed).shuffle(seen)
            for peer, minute in seen:
                ledger.see(RUN, peer, float(minute % 7), START + 60 * minute)
            came = [ledger.add(t, run=RUN, epoch=6, now=START + n) for n, t in given + given[:9]]
            assert came == [True] * 18 + [False] * 9
            boards.append((ledger.standings(RUN), [ledger.contributions(RUN, n) for n in range(6)]))
    assert all(board == boards[0] for board in boards)
    assert [one.reported for one in boards[0][0]] == [30.0, 15.0, 6.0]


def test_nobody_is_credited_more_than_its_speed_allows(
    ledger: Ledger, four: list[Identity]
) -> None:
    for minute in range(10):
        ledger.see(RUN, four[0].peer_id, 2.0, START + 60 * minute)
        ledger.see(RUN, four[1].peer_id, 2.0, START + 60 * minute)
    for text in texts(four, [1000.0, 1_000_000.0, 5.0], 1):
        ledger.add(text, run=RUN, epoch=1, now=START + 600)
    credited = {one.label: (one.samples, one.reported) for one in ledger.standings(RUN)}
    assert credited == {
        four[0].peer_id: (1000.0, 1000.0),
        four[1].peer_id: (SLACK * 2.0 * 600, 1_000_000.0),
        four[2].peer_id: (0.0, 5.0),  # it never announced itself
    }


def test_an_epoch_of_hours_is_credited_whole(ledger: Ledger, four: list[Identity]) -> None:
    """Its receipts come at its end; the minutes before are not kept one by one."""
    for minute in range(180):
        ledger.see(RUN, four[0].peer_id, 10.0, START + 60 * minute)
    for text in texts(four, [108_000.0, 0.0], 1):
        ledger.add(text, run=RUN, epoch=1, now=START + 3 * 3600)
    first = ledger.standings(RUN)[0]
    assert (first.samples, first.hours) == (108_000.0, 3.0)
    (kept,) = ledger._db.execute("SELECT count(*) FROM seen").fetchone()
    assert kept <= 121


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 1e12])
def test_a_speed_that_cannot_be_is_none(ledger: Ledger, four: list[Identity], rate: float) -> None:
    ledger.see(RUN, four[0].peer_id, rate, START)
    for text in texts(four, [4.0, 0.0], 1):
        ledger.add(text, run=RUN, epoch=1, now=START)
    assert [one.samples for one in ledger.standings(RUN)] == [0.0, 0.0]
    assert ledger.standings(RUN)[0].hours == pytest.approx(1 / 60)


def test_a_retried_epoch_counts_once(ledger: Ledger, four: list[Identity]) -> None:
    """A second group of the epoch, without the peer that died: the larger majority stands."""
    fast(ledger, four)
    for text in texts(four, [4.0, 4.0, 4.0, 4.0], 1, "aa")[:3]:
        ledger.add(text, run=RUN, epoch=1, now=START)
    for text in texts(four, [5.0, 5.0, 5.0], 1, "bb"):
        ledger.add(text, run=RUN, epoch=1, now=START)
    assert [one.weight for one in ledger.contributions(RUN, 1)] == [4.0, 4.0, 4.0, 4.0]
    assert [one.rounds for one in ledger.standings(RUN)] == [1, 1, 1, 1]


def test_what_a_receipt_may_not_be(ledger: Ledger, four: list[Identity]) -> None:
    text = texts(four, [1.0, 2.0], 100)[0]
    with pytest.raises(Untrusted, match="run 'bn', not of 'other'"):
        ledger.add(text, run="other", epoch=100, now=START)
    for epoch in (100 - LATE_EPOCHS - 1, 100 + LATE_EPOCHS + 1):
        with pytest.raises(Untrusted, match="epoch 100"):
            ledger.add(text, run=RUN, epoch=epoch, now=START)
    assert ledger.add(text, run=RUN, epoch=100 + LATE_EPOCHS, now=START)
    other = texts(four, [1.0, 3.0], 100)[0]
    with pytest.raises(Untrusted, match="other weights"):
        ledger.add(other, run=RUN, epoch=100, now=START)
    with pytest.raises(Untrusted, match="not JSON"):
        ledger.add("nothing", run=RUN, epoch=100, now=START)
    again = texts(four, [1.0, 2.0], 100)[0]  # signed anew: the same words, other bytes
    assert again != text
    assert not ledger.add(again, run=RUN, epoch=100, now=START)


def test_a_signer_cannot_fill_the_disk_with_groups(ledger: Ledger, four: list[Identity]) -> None:
    for number in range(8):
        ledger.add(texts(four, [1.0, 1.0], 1, f"{number:02x}")[0], run=RUN, epoch=1, now=START)
    with pytest.raises(Untrusted, match="8 groups"):
        ledger.add(texts(four, [1.0, 1.0], 1, "ff")[0], run=RUN, epoch=1, now=START)


def test_old_receipts_go_and_what_they_added_up_to_stays(
    tmp_path: Path, four: list[Identity]
) -> None:
    with Ledger(tmp_path / "small.sqlite", kept_epochs=LATE_EPOCHS) as ledger:
        fast(ledger, four)
        for epoch in range(0, 60, 3):
            for text in texts(four, [1.0, 1.0], epoch):
                ledger.add(text, run=RUN, epoch=epoch, now=START)
        assert [one.samples for one in ledger.standings(RUN)] == [20.0, 20.0]
        assert len(ledger.contributions(RUN, 0)) == 2
        with sqlite3.connect(ledger.path) as other:
            stored = other.execute("SELECT DISTINCT epoch FROM receipts ORDER BY epoch").fetchall()
        assert stored == [(epoch,) for epoch in range(42, 60, 3)]


def test_the_file_goes_on_after_a_restart(tmp_path: Path, four: list[Identity]) -> None:
    first, second = texts(four, [1.0, 2.0], 1)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        ledger.add(first, run=RUN, epoch=1, now=START)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert not ledger.add(first, run=RUN, epoch=1, now=START)
        assert ledger.add(second, run=RUN, epoch=1, now=START)
        assert [one.reported for one in ledger.standings(RUN)] == [1.0, 2.0]


def test_the_export(ledger: Ledger, four: list[Identity], tmp_path: Path) -> None:
    fast(ledger, four)
    ledger.know(four[0].peer_id, "রহিম")
    for epoch in (4, 5):
        for text in texts(four, [10.0, 20.0], epoch):
            ledger.add(text, run=RUN, epoch=5, now=START)
    board = ledger.export(RUN, tmp_path / "board.json")
    assert json.loads((tmp_path / "board.json").read_text()) == board
    assert board["run"] == "bn"
    assert board["epochs"] == {"epochs": 2, "first": 4, "last": 5}
    assert [(one["label"], one["samples"]) for one in board["contributors"]] == [
        (four[1].peer_id, 40.0),
        ("রহিম", 20.0),
    ]
    assert ledger.export("none", tmp_path / "none.json")["contributors"] == []


def test_files_that_are_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be taken for one" * 20)
    with pytest.raises(UserError, match="no ledger"):
        Ledger(tmp_path / "text")
    with sqlite3.connect(tmp_path / "newer.sqlite") as newer:
        newer.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(UserError, match=f"version {VERSION + 1}"):
        Ledger(tmp_path / "newer.sqlite")
