"""What a swarm costs, worked out by hand: seconds, bytes, and what it is told to change."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from models.errors import UserError
from scripts.cli import main
from training.swarm.sizing import Design, Machine, machines, memory_bytes, size, table

# A vector of 20 million numbers, 2 bytes each: 320 Mbit. Its state: 3 x 4 x 20 M = 240 MB.
DESIGN = Design(
    parameters=20_000_000, codec="float16", mode="sync", target_batch=4096, microbatch=4,
    matchmaking_s=5.0, epochs=1000,
)  # fmt: skip
FOUR = [Machine(10.0, 100.0, 100.0)] * 4


def test_an_epoch_of_four_equal_peers() -> None:
    found = size(DESIGN, FOUR)
    assert found.compute_s == pytest.approx(4096 / 40)
    # Each link moves (1 + (4 - 2) / 4) vectors both ways: 1.5 x 320 Mbit at 100 Mbit/s.
    assert found.allreduce_s == pytest.approx(4.8)
    assert found.sent_bytes == 60_000_000
    assert found.waiting_s == pytest.approx(9.8)
    assert found.epoch_s == pytest.approx(102.4 + 9.8)
    assert found.share_averaging == pytest.approx(9.8 / 112.2)
    assert found.samples_per_s == pytest.approx(4096 / 112.2)
    assert found.run_s == pytest.approx(112_200)
    assert found.state_bytes == 240_000_000
    assert found.download_s == pytest.approx(19.2)
    assert found.advice == ()


def test_shares_are_those_of_the_rounds() -> None:
    """SWARM's 200/50/20 Mbit: the slowest link moves one vector, whatever the others do."""
    peers = [Machine(10.0, rate, rate) for rate in (200.0, 50.0, 20.0)]
    floor = 1 + 0.01  # the least share adds a hundredth of a vector to a node's traffic
    assert size(DESIGN, peers).allreduce_s == pytest.approx(16.0 * floor, rel=1e-3)


def test_delayed_hides_the_round_behind_computing() -> None:
    found = size(replace(DESIGN, mode="delayed"), FOUR)
    assert (found.waiting_s, found.share_averaging) == (0.0, 0.0)
    assert found.epoch_s == pytest.approx(102.4)
    short = size(replace(DESIGN, mode="delayed", target_batch=200), FOUR)
    assert short.compute_s == pytest.approx(5.0)
    assert short.epoch_s == pytest.approx(9.8)  # no step before the round has ended
    assert any("3 times its round of 9.8 s" in line and "at least 1,176" in line
               for line in short.advice)  # fmt: skip


def test_diloco_waits_for_half_and_then_for_its_patience() -> None:
    design = replace(DESIGN, mode="diloco", local_steps=100, local_batch=64, patience_s=60.0)
    peers = [Machine(64.0, 100, 100), Machine(64.0, 100, 100), Machine(16.0, 100, 100)]
    found = size(design, peers)
    assert found.compute_s == pytest.approx(160)  # 100 s, and 60 s for the third
    assert found.samples == 6400 + 6400 + 2560
    assert found.state_bytes == 160_000_000
    assert size(replace(design, patience_s=500.0), peers).compute_s == pytest.approx(400)


def test_memory_is_on_the_line_through_the_measurements() -> None:
    assert memory_bytes(1_000_000) == 660_000_000
    assert memory_bytes(20_000_000) == 2_100_000_000
    assert memory_bytes(10_500_000) == 1_380_000_000


def advice(design: Design, peers: list[Machine]) -> str:
    return "\n".join(size(design, peers).advice)


def test_a_short_epoch_is_told_the_batch_that_lasts_three_windows() -> None:
    short = replace(DESIGN, target_batch=500)
    told = advice(short, FOUR)
    assert "computes for 12.5 s, less than 3 matchmaking windows of 5 s" in told
    assert "(batch.samples) of at least 600" in told
    assert "matchmaking windows" not in advice(replace(short, target_batch=600), FOUR)


def test_much_averaging_is_told_a_batch_delayed_mode_or_a_codec() -> None:
    """9.8 s of averaging are a fifth of the time when computing takes 39.2 s: 1,568 samples."""
    told = advice(replace(DESIGN, target_batch=1000), FOUR)
    assert "28% of the time goes into averaging" in told
    assert "at least 1,568, or delayed mode (0%)" in told
    assert "averaging" not in advice(replace(DESIGN, target_batch=1568), FOUR)
    slow = [Machine(10.0, 10.0, 10.0)] * 4
    told = advice(replace(DESIGN, codec="none"), slow)
    assert "swarm.codec = 'scaled-float16' averages in 48 s instead of 96 s" in told
    assert "'uniform8' averages in 24 s instead of 48 s" in advice(DESIGN, slow)
    assert "codec" not in advice(replace(DESIGN, codec="uniform8"), slow)


def test_the_batch_that_is_advised_is_one_that_needs_no_advice() -> None:
    for target in (1, 77, 500, 1000):
        for mode in ("sync", "delayed"):
            design = replace(DESIGN, target_batch=target, mode=mode)
            wanted = [int(part.split()[0].rstrip(",").replace(",", ""))
                      for line in size(design, FOUR).advice
                      for part in line.split("of at least ")[1:]]  # fmt: skip
            assert wanted
            assert size(replace(design, target_batch=max(wanted)), FOUR).advice == ()


def test_diloco_is_told_local_steps() -> None:
    design = replace(DESIGN, mode="diloco", local_steps=2, local_batch=10)
    told = advice(design, FOUR)
    assert "local_steps of at least 15" in told  # 15 s of 10 samples/s, 10 samples a step
    assert "local_steps of at least 40" in told  # 39.2 s
    assert advice(replace(design, local_steps=40), FOUR) == ""


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ([Machine(10, 100, 100)], "one trains alone"),
        ([Machine(10, 100, 100, "client")] * 3, "all peers are clients"),
        ([Machine(10, 100, 100)] * 2, "the other trains alone"),
        ([Machine(10, 100, 100), *[Machine(10, 100, 100, "client")] * 3], "one peer alone is"),
    ],
)
def test_too_few_peers_are_told(peers: list[Machine], said: str) -> None:
    assert said in advice(DESIGN, peers)


def test_an_auxiliary_reduces_and_computes_nothing() -> None:
    """Four clients at 100 Mbit/s move one vector each, 3.2 s; who reduces alone moves four."""
    clients = [Machine(10.0, 100.0, 100.0, "client")] * 4
    found = size(DESIGN, [*clients, Machine(0.0, 400.0, 400.0, "auxiliary")])
    assert found.allreduce_s == pytest.approx(3.2)
    assert found.sent_bytes == 160_000_000
    assert (found.compute_s, found.samples) == (pytest.approx(102.4), 4096)
    assert found.download_s == 0.0  # it has no weights to give
    assert "one peer alone is reachable" in "\n".join(found.advice)
    slow = size(DESIGN, [*clients, Machine(0.0, 200.0, 200.0, "auxiliary")])
    assert slow.allreduce_s == pytest.approx(6.4)
    two = size(DESIGN, [*clients, *[Machine(0.0, 200.0, 200.0, "auxiliary")] * 2])
    assert two.allreduce_s == pytest.approx(3.2)
    assert len(two.advice) == 1
    assert two.advice[0].startswith("no peer that trains is reachable: nobody can give the weights")
    assert "downloads 240 MB, of nobody" in table(two, clients)
    assert size(DESIGN, [*FOUR, Machine(0.0, 200.0, 200.0, "auxiliary")]).advice == ()
    diloco = replace(DESIGN, mode="diloco", local_steps=100, local_batch=64)
    with_it = size(diloco, [*FOUR, Machine(0.0, 400.0, 400.0, "auxiliary")])
    assert (with_it.compute_s, with_it.samples) == (640.0, 4 * 6400)
    assert "one trains alone" in advice(DESIGN, [FOUR[0], Machine(0.0, 9.0, 9.0, "auxiliary")])


def test_a_link_that_costs_more_than_its_peer_gives() -> None:
    peers = [Machine(10.0, 100.0, 100.0)] * 4 + [Machine(1.0, 1.0, 1.0)]
    told = advice(replace(DESIGN, allreduce_limit_s=1000.0, download_limit_s=9999.0), peers)
    assert "the slowest link (1 Mbit/s) costs more than its peer gives" in told
    assert "longer than an epoch" in told  # 240 MB at 1 Mbit/s are 1,920 s
    assert "download_timeout_s of at least 3840" in advice(DESIGN, peers)
    assert "swarm.allreduce_s of at least" in advice(DESIGN, peers)


def test_a_microbatch_longer_than_the_window_is_told() -> None:
    peers = [Machine(10, 100, 100)] * 3 + [Machine(0.5, 100, 100)]
    assert "a microbatch of 4 in 8 s" in advice(DESIGN, peers)
    assert "batch.microbatch of at most 2" in advice(DESIGN, peers)


def test_all_clients_have_no_round() -> None:
    found = size(DESIGN, [Machine(10, 100, 100, "client")] * 2)
    assert math.isinf(found.allreduce_s)


def test_peers_are_read() -> None:
    assert machines(["2x30@100/50", "1.5@20:client", "0@9/8:auxiliary"]) == [
        Machine(30, 100, 50), Machine(30, 100, 50), Machine(1.5, 20, 20, "client"),
        Machine(0, 9, 8, "auxiliary"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "spec", ["", "30", "0x30@100", "2x@100", "2x30@0", "2x30@100/", "2x30@1/2:node", "2x3.0.0@1",
             "-1@100", "1@nan", "1e3@5", "0@5", "3@5:auxiliary"],
)  # fmt: skip
def test_what_is_no_peer_is_told_in_one_line(spec: str) -> None:
    with pytest.raises(UserError, match="is no peer: give COUNTxRATE@UP/DOWN") as told:
        machines([spec])
    assert "\n" not in str(told.value)


def test_too_many_and_none() -> None:
    with pytest.raises(UserError, match="more than 1000"):
        machines(["600x1@1", "600x1@1"])
    with pytest.raises(UserError, match="no peers"):
        machines(["0@100:auxiliary"])


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swarm", "size", "sahajbert", "--peers", "40x5@100/100", "10x2@20/5:client"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 18_105_474
    assert found["compute_s"] == pytest.approx(4096 / 220)
    # A client moves one vector of 18,105,474 x 16 bit both ways at 5 Mbit/s.
    assert found["allreduce_s"] == pytest.approx(18_105_474 * 16 / 5e6, rel=0.01)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "18.6 s" in text
    assert "57.9 s" in text
    assert "change:" in text
    assert main(["swarm", "size", "sahajbert", "--peers", "fast"]) == 2
    assert "--peers 'fast' is no peer" in capsys.readouterr().err
