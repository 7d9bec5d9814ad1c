"""The swarm benchmark around its peers: arithmetic of the parts, tables, targets, arguments."""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_swarm, swarm_bench_links, swarm_bench_soak, swarm_bench_tables
from scripts.bench_parts import NotPermitted
from scripts.bench_peers import RunFailed
from scripts.swarm_bench_links import LinkRound, LinksFound, link_round, medians
from scripts.swarm_bench_orders import sizes
from scripts.swarm_bench_peers import PeerRound, end_group, group_of, last_line
from scripts.swarm_bench_processes import TrainerProcess, anonymous_bytes, anonymous_of
from scripts.swarm_bench_rounds import SIZES, RoundRow, round_row
from scripts.swarm_bench_share import ShareRow, hidden, share_row
from scripts.swarm_bench_soak import (
    EpochReport,
    Happening,
    Memory,
    SoakFound,
    first_reports,
    longest_gap,
    lost_epochs,
    memory_of,
    next_act,
    reports_of,
    short_epochs,
)
from scripts.swarm_bench_trainer import EVENTS, EpochSeconds, Toy
from training.swarm.codecs import LONG_VALUES


def _seen(reduce_s: float, **other: Any) -> PeerRound:
    round_ = PeerRound(
        call_s=reduce_s + 1.5, reduce_s=reduce_s, members=2, fraction=1.0, complete=True,
        sent_bytes=2_000_000, digest="aa", shares={"A": 0.5, "B": 0.5}, mbit={"A": 40.0, "B": None},
    )  # fmt: skip
    return replace(round_, **other)


def test_a_row_is_made_of_whole_rounds_and_their_slowest_peers() -> None:
    seen = [
        [_seen(0.1), _seen(0.3, sent_bytes=2_100_000)],
        [_seen(0.2), _seen(0.1, sent_bytes=2_100_000)],
        [_seen(9.0), _seen(9.0, digest="bb")],  # other bits at one peer
        [_seen(9.0), None],  # no group
        [_seen(9.0, members=1), _seen(9.0)],
        [_seen(9.0, complete=False, fraction=0.5), _seen(9.0)],
    ]
    row = round_row(1_000_000, 2, "float16", seen, load=0.5)
    assert (row.rounds, row.whole, row.fraction) == (6, 2, 0.0)
    assert (row.reduce_s, row.least_s, row.most_s) == (0.25, 0.2, 0.3)
    assert row.search_s == pytest.approx(1.5)
    assert row.sent_bytes == 2_050_000
    assert row.formula_bytes == 2_000_000
    assert replace(row, peers=4, codec="none").formula_bytes == 6_000_000
    assert replace(row, peers=4, codec="quantile8").formula_bytes == 1_500_000
    nothing = round_row(1_000_000, 2, "none", [[None, None]], load=0.5)
    assert nothing.whole == 0
    assert math.isnan(nothing.reduce_s)


def test_the_table_of_rounds_and_its_targets() -> None:
    row = RoundRow(18_105_474, 4, "uniform8", 5, 5, 1.02, 1.54, 1.41, 2.03, 1.0, 27.4e6, 0.5)
    assert swarm_bench_tables.rounds_table([row]).split("\n")[2] == (
        "| 18,105,474 | 4 | uniform8 | 1.02 | 1.54 | 1.41 to 2.03 | 100.0% | 5 of 5 | 27.40 "
        "| 27.16 | 0.5 |"
    )
    assert swarm_bench_tables.rounds_targets([row]) == [
        "- reached: 5 of 5 rounds whole, same bits everywhere",
        "- reached: bytes: largest difference from the formula 0.9% (2%)",
    ]
    worse = [row, replace(row, whole=4, sent_bytes=28e6)]
    assert swarm_bench_tables.rounds_targets(worse) == [
        "- missed: 9 of 10 rounds whole, same bits everywhere",
        "- missed: bytes: largest difference from the formula 3.1% (2%)",
    ]
    none = replace(row, whole=0, sent_bytes=math.nan)
    assert swarm_bench_tables.rounds_targets([none]) == [
        "- missed: 0 of 5 rounds whole, same bits everywhere"
    ]


def test_a_vector_is_cut_into_tensors() -> None:
    assert sum(sizes(18_105_474)) == 18_105_474
    assert sizes(33) == [5] + [4] * 7
    assert min(sizes(min(SIZES))) >= LONG_VALUES  # or the 8-bit codecs would send float16


def _share(mode: str, epoch_s: float, compute_s: float) -> ShareRow:
    seconds = EpochSeconds(epoch_s, compute_s, 1.0, 0.1)
    return share_row(mode, [(seconds, 32)] * 3, load=1.0)


def test_the_share_of_averaging_is_what_blocks() -> None:
    rows = [_share("sync", 5.5, 4.25), _share("delayed", 4.35, 4.25)]
    assert rows[0].blocked_s == 1.25
    assert rows[0].blocked_share == pytest.approx(1.25 / 5.5)
    assert hidden(rows) == pytest.approx(1 - 0.1 / 1.25)
    assert swarm_bench_tables.share_table(rows).split("\n")[2:] == [
        "| sync | 3 | 5.50 | 4.25 | 1.00 | 0.10 | 1.25 | 22.7% | 32 | 1.0 |",
        "| delayed | 3 | 4.35 | 4.25 | 1.00 | 0.10 | 0.10 | 2.3% | 32 | 1.0 |",
    ]
    assert swarm_bench_tables.share_targets(rows) == [
        "- reached: delayed hides 92% of the seconds that block an epoch in sync (75%)"
    ]
    late = [rows[0], _share("delayed", 5.0, 4.25)]
    assert swarm_bench_tables.share_targets(late)[0].startswith("- missed: delayed hides 40%")


def _link(seconds: float, fast: float, whole: bool = True) -> LinkRound:
    return LinkRound(
        (seconds, seconds, seconds + 0.1), (fast, 0.99 - fast, 0.01), (42.0, None, 19.5), whole
    )


def _links(*adaptive: LinkRound) -> LinksFound:
    equal = (_link(6.0, 0.33), _link(6.2, 0.33), _link(5.9, 0.33))
    return LinksFound((200, 50, 20), 5_000_000, 1 << 17, equal, adaptive)


def test_adaptive_rounds_count_from_where_the_shares_stay() -> None:
    found = _links(_link(6.0, 0.33), _link(5.5, 0.42), *[_link(4.5, 0.5)] * 3)
    assert found.learned_after == 2
    assert found.equal_s() == (6.0, 6.0, 6.1)
    assert found.adaptive_s() == (4.5, 4.5, 4.6)
    lines = swarm_bench_tables.links_table(found).split("\n")
    assert lines[0].startswith("5,000,000 parameters, float16, parts of at most 128 KiB")
    assert lines[4] == "| 200 | 6.00 | 4.50 | -25.0% | 0.500 | 42.0 |"
    assert lines[5].endswith("| nobody knows |")
    assert lines[8] == (
        "Slowest peer in each adaptive round, s: 6.10, 5.60, 4.60, 4.60, 4.60. Learned after 2."
    )
    assert swarm_bench_tables.links_targets(found) == [
        "- reached: 8 of 8 rounds whole",
        "- reached: the shares settled, with three rounds after",
        "- reached: 200 Mbit/s: 25.0% faster than equal shares (20%)",
        "- reached: 50 Mbit/s: 25.0% faster than equal shares (20%)",
        "- reached: 20 Mbit/s, the slowest: 0.754 of equal shares' time (1.03)",
    ]


def test_shares_that_do_not_settle_and_slow_peers_are_missed_targets() -> None:
    found = _links(_link(6.0, 0.33), *[_link(6.3, 0.5)] * 2, _link(6.3, 0.5, whole=False))
    assert found.learned_after == 1
    found = _links(_link(6.3, 0.33), _link(6.3, 0.42), _link(6.3, 0.33), _link(6.3, 0.42, False))
    assert found.learned_after is None
    targets = swarm_bench_tables.links_targets(found)
    assert [line.split(":")[0] for line in targets] == ["- missed"] * 5
    assert "no number of rounds" in swarm_bench_tables.links_table(found)
    assert medians([_link(6.0, 0.3, whole=False)]) == (math.inf,) * 3


def test_a_round_over_links_is_whole_when_all_had_the_same() -> None:
    seen = [_seen(1.0), _seen(2.0)]
    assert link_round(seen, ["A", "B"]) == LinkRound((1.0, 2.0), (0.5, 0.5), (40.0, None), True)
    assert not link_round([_seen(1.0), None], ["A", "B"]).whole
    assert not link_round([_seen(1.0), _seen(2.0, digest="b")], ["A", "B"]).whole
    nobody = link_round([None, None], ["A", "B"])
    assert (nobody.seconds, nobody.shares) == ((math.inf, math.inf), (0.0, 0.0))


def test_links_are_skipped_aloud_where_they_are_not_permitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(swarm_bench_links.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(swarm_bench_links.shutil, "which", lambda name: f"/sbin/{name}")
    with (
        pytest.raises(NotPermitted, match="network namespaces need root"),
        swarm_bench_links.namespaces(),
    ):
        pass
    figures = tmp_path / "figures.json"
    words = ["--parts", "links", "--work", str(tmp_path), "--output", str(figures)]
    assert bench_swarm.main(words) == 0
    assert "skipped: network namespaces need root" in capsys.readouterr().out
    assert json.loads(figures.read_text()) == {"links": {"skipped": "network namespaces need root"}}


def test_a_kernel_that_refuses_is_named_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[list[str]] = []

    def run(words: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(list(words))
        failed = "tbf" in words
        return subprocess.CompletedProcess(words, int(failed), "", "Error: qdisc kind is unknown.")

    monkeypatch.setattr(swarm_bench_links.os, "geteuid", lambda: 0)
    monkeypatch.setattr(swarm_bench_links.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(swarm_bench_links.subprocess, "run", run)
    with (
        pytest.raises(NotPermitted, match=r"tbf.*qdisc kind is unknown"),
        swarm_bench_links.namespaces(),
    ):
        pass
    added = {words[3] for words in ran if words[:3] == ["ip", "netns", "add"]}
    deleted = {words[3] for words in ran if words[:3] == ["ip", "netns", "delete"]}
    assert len(added) == 4
    assert added == deleted


def _report(peer: str, at_s: float, epoch: int, state_hash: str, **other: Any) -> EpochReport:
    return EpochReport(peer, at_s, epoch, state_hash, **{"samples": 48, "members": 2, **other})


def test_lost_epochs_are_those_that_peers_keep_otherwise() -> None:
    reports = [
        _report("A", 1, 1, "h1"), _report("B", 1, 1, "h1"),
        _report("A", 2, 2, "h2"), _report("B", 2, 2, "x2"), _report("B", 3, 2, "h2", samples=None),
        _report("A", 4, 3, "h3"), _report("D", 4, 3, "d3"),  # D died with it
        _report("A", 5, 4, "h4"), _report("B", 5, 4, "h4"),
    ]  # fmt: skip
    assert lost_epochs(reports, ["A", "B"]) == ([], 1)
    outlived = [*reports, _report("D", 6, 4, "h4")]
    assert lost_epochs(outlived, ["A", "B"]) == (["epoch 3: 2 different weights"], 1)
    gap = [*reports, _report("A", 9, 6, "h6")]
    assert lost_epochs(gap, ["A", "B"])[0] == ["epoch 5: nobody had it"]
    split = [*reports, _report("A", 9, 5, "a5"), _report("B", 9, 5, "b5")]
    assert lost_epochs(split, ["A", "B"])[0] == ["epoch 5: 2 different weights"]
    assert short_epochs([*reports, _report("A", 9, 5, "h5", samples=47)], 48) == [
        "epoch 5 at A: 47 of 48 samples"
    ]


def test_gaps_are_between_new_epochs_and_to_the_end() -> None:
    reports = [
        _report("A", 3.0, 1, ""), _report("B", 3.5, 1, ""), _report("B", 7.0, 2, ""),
        _report("C", 8.0, 1, ""), _report("A", 20.0, 3, ""),
    ]  # fmt: skip
    new = first_reports(reports)
    assert new == [(1, 3.0), (2, 7.0), (3, 20.0)]
    assert longest_gap([0.0, 3.0, 7.0, 20.0], 22.0) == (13.0, 3.5, 7.0)
    assert longest_gap([0.0, 3.0], 40.0)[0] == 37.0


def test_events_become_reports() -> None:
    events = {
        "A": [
            {"kind": "address", "at": 99.0, "addresses": []},
            {"kind": "started", "at": 101.0, "epoch": 7, "hash": "h7"},
            {"kind": "epoch", "at": 104.0, "epoch": 8, "hash": "h8", "samples": 50, "members": 3},
        ]
    }
    assert reports_of(events, 100.0) == [
        EpochReport("A", 1.0, 7, "h7", None, None), EpochReport("A", 4.0, 8, "h8", 50, 3)
    ]  # fmt: skip


def test_acts_follow_the_seed_and_leave_two_trained_peers() -> None:
    acts = [next_act(random.Random(5), 3, 3) for _ in range(3)]
    assert len(set(acts)) == 1
    draw = random.Random(0)
    assert {next_act(draw, 4, 4) for _ in range(40)} == {"kill whole", "kill main"}
    assert {next_act(draw, 2, 3) for _ in range(40)} == {"join"}
    assert {next_act(draw, 3, 3) for _ in range(60)} == {"kill whole", "kill main", "join"}


def test_memory_is_judged_after_the_first_minutes() -> None:
    weighed = [(0.0, 900_000_000)] + [
        (120.0 + 60 * minute, 300_000_000 + minute * 100_000) for minute in range(31)
    ]
    found = memory_of("A", weighed)
    assert found is not None
    assert (found.minutes, found.first_bytes, found.most_bytes) == (30.0, 300_000_000, 303_000_000)
    assert found.bytes_an_hour == pytest.approx(6e6)
    assert found.growth_an_hour == pytest.approx(0.02)
    assert memory_of("A", weighed[:2]) is None


def _soak(**other: Any) -> SoakFound:
    flat = Memory("peer-0", 30.0, 300_000_000, 303_000_000, 304_000_000, 6e6)
    found = SoakFound(
        minutes=60.0, seed=1, epochs=700, longest_gap_s=12.25, longest_gap_at_s=70.0,
        median_gap_s=4.5, lost=(), healed=1, short=(), fell=(), orphans=(), joined_s=(9.0, 11.0),
        never_joined=0, happenings=(Happening(60.0, "kill main", "peer-2"),
                                    Happening(120.0, "join", "peer-4")),
        memory=(flat, Memory("peer-4", 2.0, 300_000_000, 400_000_000, 400_000_000, 3e9)), load=2.0,
    )  # fmt: skip
    return replace(found, **other)


def test_the_soak_is_judged() -> None:
    lines = swarm_bench_tables.soak_table(_soak()).split("\n")
    assert lines[2] == "| 60 | 1 | 1 | 1 | 700 | 4.50 | 12.25 | 11.0, 11.0 | 0 | 0 | 2.0 |"
    assert "| peer-0 | 30.0 | 300.0 | 303.0 | 304.0 | 6.0 |" in lines
    assert swarm_bench_tables.soak_targets(_soak()) == [
        "- reached: longest time without an epoch 12.2 s (30 s)",
        "- reached: 0 lost epochs, 0 with too few samples (0)",
        "- reached: 0 dead peers with processes left (0)",
        "- reached: 0 peers ended by themselves (0)",
        "- reached: 0 joiners that never began (0)",
        "- reached: memory of peer-0, weighed for 30 minutes: +2.0% an hour (at most +10%)",
    ]
    bad = _soak(
        longest_gap_s=31.0, lost=("epoch 3: 2 different weights",), orphans=("peer-2: 3",),
        fell=("peer-1",), never_joined=1,
        memory=(Memory("peer-0", 30.0, 300_000_000, 320_000_000, 320_000_000, 40e6),),
    )  # fmt: skip
    targets = swarm_bench_tables.soak_targets(bad)
    assert [line.split(":")[0] for line in targets] == ["- missed"] * 6
    assert "- epoch 3: 2 different weights" in swarm_bench_tables.soak_table(bad)
    young = swarm_bench_tables.soak_targets(_soak(memory=()))
    assert young[-1] == "- not judged: memory; no peer was weighed for 10 minutes"


_SMAPS = """\
00400000-7fff 00000000 00:00 0 [rollup]
Rss:              300000 kB
Pss:              200000 kB
Pss_Anon:         120000 kB
Pss_File:          70000 kB
Pss_Shmem:         10000 kB
"""


def test_memory_leaves_the_pages_of_files_out() -> None:
    assert anonymous_of(_SMAPS) == 130_000 * 1024
    assert anonymous_bytes(0) == 0


def test_a_process_group_is_found_and_ended() -> None:
    program = "import os, time; os.fork(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            while len(group_of(process.pid)) < 2:
                assert process.poll() is None
        finally:
            end_group(process.pid)
    assert group_of(process.pid) == []
    end_group(process.pid)  # nothing is there: no error


def test_events_are_read_line_by_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    peer = TrainerProcess(tmp_path, "peer", [])
    events = tmp_path / "peer" / EVENTS
    events.write_text('{"kind": "epoch", "epoch": 1}\n{"kind": "ep')
    assert peer.look() == [{"kind": "epoch", "epoch": 1}]
    with events.open("a") as file:
        file.write('och", "epoch": 2}\n')
    assert peer.look() == [{"kind": "epoch", "epoch": 2}]
    assert [one["epoch"] for one in peer.of_kind("epoch")] == [1, 2]
    assert peer.close() == []
    with pytest.raises(RunFailed, match="peer ended: no output"):
        peer.wait_for("address", 5.0)


def test_the_toy_learns_from_its_samples() -> None:
    toy = Toy(1_000_000)
    assert sum(one.numel() for one in toy.parameters()) == 1_000_000
    small = Toy(64)
    losses = small.losses(3, 2)
    assert losses.sums.shape == losses.counts.shape == (1, 2)
    assert losses.sums[0, 1].item() == small.losses(4, 1).sums[0, 0].item()


def test_the_last_line_is_what_a_program_said(tmp_path: Path) -> None:
    log = tmp_path / "output"
    log.write_text("Traceback\n\nValueError: no\n\n")
    assert last_line(log) == "ValueError: no"
    log.write_text("")
    assert last_line(log) == "no output"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "1"], "'1' must be a whole number from 2 to 8"),
        (["--rounds", "x"], "'x' must be a whole number from 1 on"),
        (["--minutes", "0"], "'0' must be a number above 0"),
        (["--minutes", "nan"], "'nan' must be a number above 0"),
        (["--parts", "sok"], "invalid choice: 'sok'"),
    ],
)
def test_bad_arguments_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_swarm.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_exit_code_says_whether_all_targets_were_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def part(target: str) -> Any:
        def run(work: Path, given: argparse.Namespace) -> bench_swarm.Part:
            if target == "fails":
                raise RunFailed("peer 0 ended: no memory")
            return "| table |", [target], {"seed": given.seed}

        return run

    for target, code in (("- reached: a", 0), ("- missed: a", 1), ("fails", 1)):
        monkeypatch.setitem(bench_swarm.PARTS, "soak", ("A soak", part(target)))
        figures = tmp_path / "figures.json"
        words = ["--parts", "soak", "--work", str(tmp_path), "--output", str(figures)]
        assert bench_swarm.main([*words, "--seed", "7"]) == code
        out = capsys.readouterr().out
        assert out.startswith("## A soak\n")
        if target == "fails":
            assert "not run: peer 0 ended: no memory" in out
        else:
            assert json.loads(figures.read_text()) == {"soak": {"seed": 7}}


def test_a_soak_counts_from_the_first_epoch() -> None:
    soak = swarm_bench_soak.Soak(Path("unused"), 1.0, 1)
    with pytest.raises(RunFailed, match="no epoch"):
        soak._judge(100.0, [], 0, 0.0)
