"""What the collector makes of announcements and rounds, and which alarms ring."""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from tests.training.swarm.watched_runs import (
    BEGAN,
    FACTS,
    Peer,
    Told,
    announcement,
    round_of,
    told,
)  # fmt: skip
from training.swarm import alarms, metrics_store
from training.swarm.alarms import Look
from training.swarm.collector import Collector, shown
from training.swarm.curve import Bin, Bins
from training.swarm.metrics_store import Alarm, Leader, MetricsStore
from training.swarm.views import Views


def said(peer: str, epoch: int, samples: int, **more: Any) -> Any:
    return announcement(peer, epoch, samples, time=0, **more)


@pytest.fixture
def run(tmp_path: Path) -> Told:
    return told(tmp_path)


def epochs(run: Told) -> dict[int, dict[str, Any]]:
    return {row["epoch"]: row for row in run.store.rows("SELECT * FROM epochs")}


def test_an_epochs_row_is_the_sum_over_peers(run: Told) -> None:
    run.say(said("a", 0, 100, loss=4.0), said("b", 0, 50, loss=1.0))
    run.say(said("a", 0, 300, loss=3.0), said("b", 0, 100, loss=2.0), after_s=9)
    run.say(said("a", 1, 0), said("b", 1, 0), after_s=10)
    row = epochs(run)[0]
    assert row["samples"] == 400
    assert row["loss"] == pytest.approx((300 * 3.0 + 100 * 2.0) / 400)
    assert row["ended"] - row["started"] == pytest.approx(19)
    assert row["peers"] == 2
    assert row["owners"] == '{"peer a": 300, "peer b": 100}'


def test_a_whole_round_says_the_samples_and_a_late_announcement_does_not(run: Told) -> None:
    run.say(said("a", 0, 90), said("b", 0, 40))
    run.say(said("a", 1, 1), said("b", 1, 1))
    run.collector.round(round_of(0, {"a": 96.0, "b": 48.0}, seconds=2.5), "a", now=run.now)
    run.collector.round(round_of(0, {"a": 96.0, "b": 48.0}, seconds=2.0), "b", now=run.now)
    run.say(said("a", 0, 99), said("b", 1, 2))
    row = epochs(run)[0]
    assert (row["samples"], row["fraction"], row["round_s"]) == (144, 1.0, 2.0)


def test_a_partial_round_counts_nothing_and_its_retry_does(run: Told) -> None:
    run.say(said("a", 0, 90), said("b", 0, 40))
    run.collector.round(round_of(0, {"a": 1e3, "b": 40.0}, fraction=0.5, group_id="01"), "a")
    run.collector.round(round_of(0, {"a": 90.0}, group_id="02"), "a", now=run.now)
    run.say(said("a", 1, 1), said("b", 1, 1))
    run.say(said("a", 1, 1), said("b", 1, 1))
    row = epochs(run)[0]
    assert (row["samples"], row["fraction"], row["failed_rounds"]) == (130, 1.0, 1)


def test_one_liar_says_nothing_about_the_others_samples(run: Told) -> None:
    """A receipt of its own, with weights that the rest of the group did not sign."""
    run.say(said("a", 0, 90), said("b", 0, 40), said("liar", 0, 10))
    truth, lie = {"a": 90.0, "b": 40.0, "liar": 10.0}, {"a": 0.0, "b": 0.0, "liar": 9e3}
    run.collector.round(round_of(0, lie), "liar", now=run.now)
    run.collector.round(round_of(0, truth, seconds=2.0), "a", now=run.now)
    run.say(said("a", 1, 1), said("b", 1, 1), said("liar", 1, 1))
    assert epochs(run)[0]["samples"] == 140  # as announced: no weights have a majority yet
    run.collector.round(round_of(0, truth, seconds=2.5), "b", now=run.now)
    run.collector.round(round_of(0, lie, group_id="02"), "nobody in it", now=run.now)
    run.collector.round(round_of(0, {"liar": 9e3}, group_id="03"), "liar", now=run.now)
    run.say(said("a", 1, 1), said("b", 1, 1), said("liar", 1, 1))
    row = epochs(run)[0]
    assert (row["samples"], row["round_s"]) == (140, 2.0)
    assert row["owners"] == '{"peer a": 90, "peer b": 40, "peer liar": 10}'


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0, 1e308])
def test_a_round_whose_time_cannot_be_is_not_believed(run: Told, seconds: float) -> None:
    run.say(said("a", 0, 90), said("b", 0, 40))
    run.collector.round(round_of(0, {"a": 1.0, "b": 1.0}, seconds=seconds), "a", now=run.now)
    assert run.store.rows("SELECT * FROM rounds") == []


def test_a_round_of_an_epoch_that_is_far_is_not_believed(run: Told) -> None:
    run.say(said("a", 2000, 90), said("b", 2000, 40))
    for epoch in (-1, 3, 999, 2002, 1 << 50):
        run.collector.round(round_of(epoch, {"a": 1.0, "b": 1.0}), "a", now=run.now)
    assert run.store.rows("SELECT * FROM rounds") == []
    run.collector.round(round_of(1999, {"a": 1.0, "b": 1.0}), "a", now=run.now)
    assert len(run.store.rows("SELECT * FROM rounds")) == 1


@pytest.mark.parametrize("loss", [1e308, -1e308, 1e7])
def test_a_loss_that_cannot_be_spoils_no_sum(run: Told, loss: float) -> None:
    run.say(said("a", 0, 90, loss=2.0), said("b", 0, 40, loss=loss))
    run.say(said("a", 1, 1), said("b", 1, 1))
    assert epochs(run)[0]["loss"] == 2.0
    alarms_now = run.store.rows("SELECT * FROM alarms WHERE key = 'loss'")
    assert alarms_now[0]["text"] == "The loss is not a number at b (b)"
    json.dumps(Views(run.store).status(run.now), allow_nan=False)


def test_a_million_names_leave_a_bounded_store(run: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_store, "KEPT_PEERS", 50)
    for turn in range(5):
        run.say(*[said(f"{turn}-{number}", 0, 1) for number in range(40)], said("a", 0, 1))
    names = {row["peer_id"] for row in run.store.rows("SELECT peer_id FROM peers")}
    assert len(names) == 50
    assert "a" in names
    run.say(said("a", 0, 2), after_s=100)
    assert set(run.collector._ages) == {"a"}


def test_the_epoch_is_that_of_more_than_half(run: Told) -> None:
    run.say(said("a", 5, 1), said("b", 5, 1), said("liar", 10**9, 1))
    assert run.store.fact("epoch") == 5
    run.say(said("a", 6, 1), said("b", 5, 2), said("liar", 10**9, 2))
    assert run.store.fact("epoch") == 6


def test_who_only_follows_does_not_hold_the_epoch_back(run: Told) -> None:
    slow = {"role": "auxiliary", "state_hash": ""}
    run.say(said("a", 5, 1), said("coordinator", 3, 0, **slow), said("helper", 3, 0, **slow))
    assert run.store.fact("epoch") == 5
    run.say(said("coordinator", 4, 0, **slow), after_s=40)
    assert run.store.fact("epoch") == 4


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"epoch": 1.5}, {"epoch": True}, {"samples": -3}, {"samples": 10**9},
        {"rate": math.nan}, {"rate": -1.0}, {"rate": "7"}, {"time": math.inf}, {"rss_bytes": -1},
        {"state_hash": 7}, {"loss": "2"},
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_and_counted(run: Told, change: dict[str, Any]) -> None:
    good = announcement("a", 0, 10, time=BEGAN)
    run.collector.look([good, replace(announcement("b", 0, 10, time=BEGAN), **change)], BEGAN + 1)
    assert [row["peer_id"] for row in run.store.rows("SELECT peer_id FROM peers")] == ["a"]
    assert run.store.fact("refused") == 1


def test_credits_are_given_once_even_over_a_restart(tmp_path: Path) -> None:
    run = told(tmp_path)
    peers = [Peer("a", "Asha", 300), Peer("b", "Bilal", 100)]
    run.epochs(peers, 0, 10)
    run.store.close()
    again = Told(MetricsStore(tmp_path / "metrics.sqlite"), now=run.now)
    again.epochs(peers, 10, 20)
    again.collector.finish(again.now)
    again.collector.finish(again.now + 1)
    owners = {row["label"]: row for row in again.store.rows("SELECT * FROM owners")}
    # The last epoch has not ended: nobody went on from it.
    assert {label: row["samples"] for label, row in owners.items()} == {"Asha": 5700, "Bilal": 1900}
    assert owners["Asha"]["epochs"] == 19
    assert owners["Asha"]["seconds"] == pytest.approx(19 * 20, abs=25)
    assert sum(row["samples"] for row in epochs(again).values()) == 19 * 400


def test_a_token_says_who_is_credited(tmp_path: Path) -> None:
    users = {"a": "asha", "a2": "asha"}
    run = told(tmp_path, options={"user_of": users.get})
    peers = [Peer("a", "laptop", 10), Peer("a2", "spot", 20), Peer("b", "asha", 40)]
    run.epochs(peers, 0, 5)
    run.collector.finish(run.now)
    board = Views(run.store).board()
    assert [(row["owner"], row["label"], row["samples"]) for row in board["leaders"]] == [
        ("peer b", "asha", 160), ("user asha", "asha", 120),
    ]  # fmt: skip


def test_the_leaderboard_is_the_ledgers_where_there_is_one(tmp_path: Path) -> None:
    leaders = [
        Leader("user asha", "asha", 900.0, 7, 1.5),
        Leader("user b\u202e", "b", 100.0, 1, 0.5),
    ]
    run = told(tmp_path, options={"leaders": lambda: leaders})
    run.epochs([Peer("a", "Asha", 300)], 0, 5)
    board = Views(run.store).board()
    assert board["source"] == "receipts"
    assert [(row["label"], row["samples"], row["part"]) for row in board["leaders"]] == [
        ("asha", 900.0, 0.9), ("b", 100.0, 0.1),
    ]  # fmt: skip


def test_the_end_is_whole_though_all_left_before_most_were_heard_at_it(tmp_path: Path) -> None:
    board = [Leader("user asha", "asha", 200.0, 1, 0.5)]
    run = told(tmp_path, facts=replace(FACTS, epochs=3), options={"leaders": lambda: board})
    for epoch in (0, 1, 2):
        run.say(said("a", epoch, 10), said("b", epoch, 20), after_s=10)
    run.say(said("a", 3, 0), said("b", 2, 20))  # no majority at 3
    run.collector.finish(run.now)
    assert run.say(after_s=100) == []
    run.collector.finish(run.now)
    assert run.store.rows("SELECT * FROM alarms WHERE until IS NULL") == []
    assert [row["settled"] for row in run.store.rows("SELECT * FROM epochs")] == [1, 1, 1]
    assert [row["label"] for row in Views(run.store).board()["leaders"]] == ["asha"]
    status = Views(run.store).status(run.now)
    assert (status["epoch"], status["epochs_seen"], status["samples"]) == (3, 3, 90)


def test_an_alarm_from_elsewhere_hides_nothing(run: Told) -> None:
    run.collector.ring("download", "refused: \x1b[2J\u202egnp" + "x" * 9000)
    run.say(said("a", 0, 1))
    (row,) = run.store.rows("SELECT text FROM alarms")
    assert "\x1b" not in row["text"] and "\u202e" not in row["text"]
    assert len(row["text"]) <= 320


def test_another_runs_file_is_refused(tmp_path: Path) -> None:
    run = told(tmp_path)
    with pytest.raises(UserError, match="is of a run with the recipe digest 'abab"):
        Collector(run.store, replace(FACTS, recipe_digest="cd" * 16))


def test_a_file_that_is_no_store_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not there"):
        MetricsStore(tmp_path / "none.sqlite", read_only=True)
    (tmp_path / "text").write_text("not a database, but long enough to be read as one" * 40)
    with pytest.raises(UserError, match="no store of a run's metrics"):
        MetricsStore(tmp_path / "text")
    sqlite3.connect(tmp_path / "other").execute("PRAGMA user_version = 99").close()
    with pytest.raises(UserError, match="version 1"):
        MetricsStore(tmp_path / "other")


def test_colours_stay_with_who_has_them(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    for number in range(10):
        store.credit(f"peer {number}", str(number), False, 100 - number, 1.0)
    store.colour()
    first = {row["owner"]: row["colour"] for row in store.rows("SELECT * FROM owners")}
    assert [first[f"peer {number}"] for number in range(10)] == [*range(8), None, None]
    store.credit("peer 9", "9", False, 1000, 1.0)
    store.colour()
    second = {row["owner"]: row["colour"] for row in store.rows("SELECT * FROM owners")}
    # The newcomer takes the colour of who fell out; nobody else's changes.
    assert second == first | {"peer 9": 7, "peer 7": None}


@pytest.mark.parametrize(
    ("look", "key", "level", "part"),
    [
        (Look(active=2, most_active=3), "peers", "warning", "2 peers are heard; there were 3"),
        (Look(active=1, most_active=3), "peers", "warning", "1 peer is heard"),
        (Look(active=0, most_active=1), "peers", "grave", "No peer is heard"),
        (Look(active=1, since_epoch_s=901), "stalled", "grave", "for 15 min"),
        (Look(since_epoch_s=61, epoch_s=[20, 20, 20, 900]), "stalled", "grave", "one takes 20 s"),
        (Look(fraction=0.9999, fraction_epoch=7), "partial", "grave", "Only 99.9 % was averaged"),
        (Look(failed=5, rounds=20), "retried", "warning", "5 of the last 20 rounds"),
        (Look(no_number=["a", "b"]), "loss", "grave", "not a number at a, b"),
        (Look(other_weights=list("abcde")), "split", "warning", "at a, b, c and 2 more"),
        (Look(epoch_s=[15] * 10, matchmaking_s=4), "short", "warning",
         "An epoch computes for 11 s, less than 3 matchmaking windows of 4 s"),
        (Look(epoch_s=[11] * 10, matchmaking_s=4, delayed=True), "short", "warning", "for 11 s"),
        (Look(epoch=3, highest=9), "back", "warning", "at epoch 3 and was at 9"),
        (Look(clock_s={"a": 5.0, "b": 0.0, "c": 0.1}), "clock", "warning", "of a is 5.0 s ahead"),
        (Look(clock_s={"a": -5.0}), "clock", "warning", "of a is 5.0 s behind"),
        (Look(clock_s={"a": 4.0, "b": 5.0}), "clock", "warning", "this machine differs by 4.5 s"),
    ],
)  # fmt: skip
def test_an_alarm_rings(look: Look, key: str, level: str, part: str) -> None:
    (found,) = alarms.find(look)
    assert (found.key, found.level) == (key, level)
    assert part in found.text


@pytest.mark.parametrize(
    "look",
    [
        Look(),
        Look(active=3, most_active=4),
        Look(active=0, most_active=9, since_epoch_s=1e6, epoch_s=[1.0] * 9, finished=True),
        Look(since_epoch_s=29, epoch_s=[1.0, 1.0, 1.0]),
        Look(since_epoch_s=59, epoch_s=[20.0, 20.0, 20.0]),
        Look(active=1, since_epoch_s=899),
        Look(fraction=1.0, fraction_epoch=1, failed=4, rounds=20),
        Look(failed=9, rounds=9),
        Look(epoch_s=[16] * 10, matchmaking_s=4),
        Look(epoch_s=[12] * 10, matchmaking_s=4, delayed=True),
        Look(epoch_s=[1] * 9, matchmaking_s=4),
        Look(epoch=9, highest=9, clock_s={"a": 1.9}),
    ],
)
def test_no_alarm_rings(look: Look) -> None:
    assert alarms.find(look) == []


def test_alarms_open_and_close_with_what_is_seen(run: Told) -> None:
    names = ("a", "b", "c", "d")
    assert run.say(*(said(name, 0, 1) for name in names)) == []
    nan = said("d", 0, 2, loss=math.nan, name="Dipa")
    assert run.say(*(said(name, 0, 2) for name in names[:3]), nan) == ["loss"]
    assert run.say(*(said(name, 0, 3) for name in names[:3]), nan) == []
    assert run.say(*(said(name, 0, 4) for name in names[:2]), after_s=40) == ["peers"]
    rows = run.store.rows("SELECT key, text, since, until FROM alarms ORDER BY number")
    assert [(row["key"], row["until"] is None) for row in rows] == [
        ("loss", False),
        ("peers", True),
    ]
    assert rows[0]["text"] == "The loss is not a number at Dipa (d)"
    assert rows[0]["until"] - rows[0]["since"] == pytest.approx(41)


def test_other_weights_and_a_stall_are_seen(run: Told) -> None:
    peers = [Peer("a", "a", 10), Peer("b", "b", 10), Peer("c", "c", 10)]
    run.epochs(peers, 0, 6)
    good = [said(name, 6, 1) for name in "ab"]
    assert run.say(*good, said("c", 6, 1, state_hash="astray")) == ["split"]
    assert run.say(*good, said("c", 6, 1), after_s=70) == ["stalled"]
    run.collector.ring("checkpoint", "No checkpoint: disk full")
    assert run.say(*good, said("c", 6, 1)) == ["checkpoint"]
    run.collector.ring("checkpoint", None)
    run.say(*good, said("c", 6, 1))
    assert [row["key"] for row in Views(run.store).status(run.now)["alarms"]] == ["stalled"]


@pytest.mark.parametrize("off_s", [-6.0, 0.0, 6.0])
def test_a_wrong_clock_is_measured_from_when_its_words_come(run: Told, off_s: float) -> None:
    for number in range(8):
        run.now += 2
        late_s = (number % 4) / 2  # what the network adds
        run.collector.look(
            [announcement("a", 0, 1, time=run.now - late_s + off_s),
             announcement("b", 0, 1, time=run.now - late_s),
             announcement("c", 0, 1, time=run.now - late_s)],
            run.now,
        )  # fmt: skip
    clocks = {row["peer_id"]: row["clock_s"] for row in run.store.rows("SELECT * FROM peers")}
    assert clocks["a"] == pytest.approx(off_s, abs=0.01)
    ringing = [row["key"] for row in run.store.rows("SELECT key FROM alarms WHERE until IS NULL")]
    assert ringing == (["clock"] if off_s else [])


@given(st.text(max_size=300))
def test_no_text_of_a_peer_hides_anything(text: str) -> None:
    found = shown(text, 48)
    assert len(found) <= 48 * 4
    for character in found:
        assert character == " " or character.isprintable() or ord(character) > 0x9F
    assert not set(found) & set("\u202e\u200b\u2066\ufeff\x00\n\t")


def test_stacked_accents_are_cut() -> None:
    assert shown("e" + "\u0301" * 60 + "f", 48) == "e" + "\u0301" * 3 + "f"


@given(
    losses=st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=1, max_size=200),
    most=st.sampled_from([2, 4, 8]),
)
def test_bins_keep_sums_and_extremes(losses: list[float | None], most: int) -> None:
    bins = Bins(most)
    for epoch, loss in enumerate(losses):
        weight = epoch % 5 + 1
        bins.add(
            Bin(epoch, epoch, float(epoch), 1.0, weight, epoch % 3 + 1,
                loss_sum=0 if loss is None else loss * weight,
                loss_samples=0 if loss is None else weight, loss_low=loss, loss_high=loss)
        )  # fmt: skip
    found = bins.bins()
    assert len(found) <= most
    assert [one.first for one in found] == [one.first // bins.width * bins.width for one in found]
    for one in found:
        span = range(one.first, one.last + 1)
        assert one.samples == sum(epoch % 5 + 1 for epoch in span)
        there = {epoch: losses[epoch] for epoch in span if losses[epoch] is not None}
        if not there:
            assert one.loss is None
            continue
        weights = sum(epoch % 5 + 1 for epoch in there)
        mean = sum(loss * (epoch % 5 + 1) for epoch, loss in there.items() if loss is not None)
        assert one.loss == pytest.approx(mean / weights)
        values = [loss for loss in there.values() if loss is not None]
        assert (one.loss_low, one.loss_high) == (min(values), max(values))


def test_a_long_run_is_read_in_pieces_and_once(tmp_path: Path) -> None:
    run = told(tmp_path)
    views = Views(run.store)
    peers = [Peer("a", "Asha", 300), Peer("b", "Bilal", 100)]
    for first in range(0, 900, 300):
        run.epochs(peers, first, first + 300)
        whole, status = views.history("all"), views.status(run.now)
    assert whole == Views(run.store).history("all")
    assert status == Views(run.store).status(run.now)
    assert (status["samples"], status["epochs_seen"]) == (899 * 400, 899)
    assert whole["width"] == 4
    assert sum(one["samples"] for one in whole["bins"]) == 899 * 400
    assert whole["bins"][10]["by_colour"] == {"0": 1200, "1": 400}
    recent = views.history("recent")
    assert [recent["bins"][0]["first"], recent["bins"][-1]["last"]] == [499, 898]
    assert recent["owners"] == [
        {"colour": 0, "label": "Asha", "owner": "peer a", "part": 0.75},
        {"colour": 1, "label": "Bilal", "owner": "peer b", "part": 0.25},
    ]
    kept = run.store.rows("SELECT count(*) AS n FROM work")[0]["n"]
    assert kept == 2 * 900


def test_the_moment_is_told_from_what_is_active(run: Told) -> None:
    peers = [Peer("a", "Asha", 300), Peer("b", "Bilal", 100, role="client"),
             Peer("x", "helper", 0, role="auxiliary")]  # fmt: skip
    run.epochs(peers, 0, 5)
    run.say(said("a", 5, 120, rate=15.0), said("b", 5, 40, rate=5.0, role="client"), after_s=31)
    status = Views(run.store).status(run.now)
    assert status["epoch"] == 5
    assert status["progress"] == {
        "samples": 160, "target": 400, "left_s": 12.0, "by_colour": {"0": 120, "1": 40},
    }  # fmt: skip
    assert status["roles"] == {"node": 1, "client": 1, "auxiliary": 0}
    assert [(row["name"], row["active"]) for row in status["peers"]] == [
        ("a", True), ("b", True), ("helper", False),
    ]  # fmt: skip
    assert status["peers"][0]["share"] == pytest.approx((300 * 5 + 120) / (400 * 5 + 160))
    assert status["peers"][1]["link_bytes_s"] == 2.5e6
    assert (status["rate"], status["fraction"]) == (20.0, 1.0)
    assert [row["part"] for row in status["peers"]] == [0.5, None, 0.5]


def test_alarm_rows_take_what_came_last(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    assert store.set_alarms([Alarm("a", "warning", "one")], 1.0) == [Alarm("a", "warning", "one")]
    assert store.set_alarms([Alarm("a", "grave", "two")], 2.0) == []
    assert store.rows("SELECT text, level, since FROM alarms") == [
        {"text": "two", "level": "grave", "since": 1.0}
    ]


def test_nothing_is_half_written(tmp_path: Path) -> None:
    store = MetricsStore(tmp_path / "metrics.sqlite")
    with pytest.raises(RuntimeError), store.changing():
        store.set_fact("a", 1)
        raise RuntimeError
    assert store.fact("a") is None
    reader = MetricsStore(tmp_path / "metrics.sqlite", read_only=True)
    with store.changing():
        store.set_fact("a", 2)
        assert reader.fact("a") is None
    assert reader.fact("a") == 2
