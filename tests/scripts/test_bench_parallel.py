"""The parallel benchmark around its runs: models, units that sleep, counting bytes, the tables."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from models.errors import UserError
from scripts import (
    bench_parallel,
    parallel_chains,
    parallel_cuts,
    parallel_peer,
    parallel_traffic,
)
from scripts.bench_peers import RunFailed
from scripts.parallel_chains import (
    real_batch,
    real_chain,
    scaled,
    sleeping_batch,
    sleeping_chain,
)
from scripts.parallel_models import LENGTH, MICROBATCH, SHAPES, build, mean_loss, tokens
from scripts.parallel_ranks import Measured
from scripts.parallel_traffic import received_bytes
from training.parallel.chain import run_chain
from training.parallel.timing import step_time
from training.parallel.units import Cut, Profile, UnitCost

_NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 1234567    1000    0    0    0     0          0         0  7654321    1000    0    0
  eth0:99 1 0 0 0 0 0 0 1 1 0 0
"""


def _block(channels: int) -> int:
    """Parameters of a block that keeps its width: 12 d^2 and the vectors."""
    return 12 * channels**2 + 13 * channels


@pytest.mark.parametrize(
    ("name", "units", "parameters"),
    [
        ("A", 10, 2 * 16_384 * 128 + 8 * _block(128) + 256),
        (
            "B",
            14,
            4096 * 384 + 4 * _block(384) + 384 * 128 + 128 + 8 * _block(128) + 256 + 4096 * 128,
        ),
        ("T", 10, 2 * 1024 * 128 + 8 * _block(128) + 256),
    ],
)
def test_models_have_the_shapes_that_they_are_described_by(
    name: str, units: int, parameters: int
) -> None:
    network = build(SHAPES[name])
    assert len(network) == units
    assert sum(one.numel() for one in network.parameters()) == parameters
    ids, _ = tokens(SHAPES[name], 0)
    assert network(ids).shape == (MICROBATCH, LENGTH, SHAPES[name].vocab)


def test_weights_and_tokens_are_the_same_in_every_program() -> None:
    first, second = build(SHAPES["T"]), build(SHAPES["T"])
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    ids, labels = tokens(SHAPES["T"], 3)
    assert torch.equal(ids, tokens(SHAPES["T"], 3)[0])
    assert not torch.equal(ids, tokens(SHAPES["T"], 4)[0])
    assert torch.equal(ids[:, 1:], labels[:, :-1])


def test_a_block_sees_no_later_token() -> None:
    network = build(SHAPES["T"])
    ids, _ = tokens(SHAPES["T"], 0)
    other = ids.clone()
    other[:, 40:] = 0
    before, after = network(ids), network(other)
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-5)
    assert not torch.allclose(before[:, 40:], after[:, 40:], atol=1e-2)


def test_the_chain_gives_the_loss_of_the_model() -> None:
    chain = real_chain("T")
    assert [unit.name for unit in chain.units] == [
        "embedding", *(f"layer {number}" for number in range(8)), "head",
    ]  # fmt: skip
    batch = real_batch("T", 5)
    expected = mean_loss(build(SHAPES["T"])(batch["input"]), batch["labels"])
    torch.testing.assert_close(run_chain(chain, batch), expected.reshape(1, 1))


def _profile(*seconds: float) -> Profile:
    units = [UnitCost(f"unit {one}", one, 2 * one, parameters=1) for one in seconds]
    return Profile(tuple(units), 1, "measured")


def test_sleeping_units_take_their_times_and_hand_on_what_they_get() -> None:
    chain = sleeping_chain(_profile(0.02, 0.03))
    begin_s = time.perf_counter()
    output = run_chain(chain, sleeping_batch(6))
    forward_s = time.perf_counter() - begin_s
    output.sum().backward()
    both_s = time.perf_counter() - begin_s
    assert output.tolist() == [[7.0]]
    # Not less; more when the machine is busy.
    assert forward_s >= 0.0499
    assert both_s >= 0.1499
    assert both_s < 1.5
    for unit in chain.units:
        for _, module in unit.modules:
            (weight,) = module.parameters()
            assert weight.grad is not None
            assert weight.grad.item() == 7.0


def test_what_one_sleep_takes_too_much_the_next_ones_give_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        assert seconds > 0
        now_s += seconds + 0.0015  # late

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    rest = parallel_chains.Rest()
    for number in range(1, 101):
        rest.take(0.001, "F", number)
        assert 0.001 * number <= now_s + 1e-9 <= 0.001 * number + 0.0015 + 2e-9


def test_a_scaled_profile_has_the_same_best_cut() -> None:
    profile = _profile(0.3, 0.1, 0.1, 0.1, 0.2)
    slow = scaled(profile, 3.0)
    assert [unit.forward_s for unit in slow.units] == pytest.approx([0.9, 0.3, 0.3, 0.3, 0.6])
    assert [unit.backward_s for unit in slow.units] == pytest.approx([1.8, 0.6, 0.6, 0.6, 1.2])
    assert slow.source == "given"
    cut, pipe = Cut((0, 2, 5)), parallel_cuts.pipe()
    assert step_time(slow, cut, pipe).step_s == pytest.approx(
        3 * step_time(profile, cut, pipe).step_s
    )


def test_received_bytes_are_those_of_the_interface() -> None:
    assert received_bytes(_NET_DEV) == 1_234_567
    assert received_bytes(_NET_DEV, "eth0") == 99
    with pytest.raises(ValueError, match="no interface 'wlan0'"):
        received_bytes(_NET_DEV, "wlan0")


def test_expected_bytes_are_those_of_the_formulas() -> None:
    weights = 4 * (2 * 1024 * 128 + 8 * _block(128) + 256)
    blocks = 4 * 8 * _block(128)
    hidden = 4 * 1024 * 128  # 1,024 tokens of 128 channels
    expected = {
        "DDP": (2 * 3 * weights, 2 * 3 * weights),
        "FSDP2, no reshard": (2 * 3 * weights, 3 * 3 * weights),
        "FSDP2, reshard": (3 * (2 * weights + blocks), 3 * (3 * weights + blocks)),
        "pipeline of 4": (2 * 3 * hidden, 2 * 3 * hidden),
        "DDP 2 x pipeline of 2": (2 * weights + 2 * hidden, 2 * weights + 2 * hidden),
    }
    for method, (ring, gloo) in expected.items():
        assert parallel_traffic.expected(method)[1:] == (ring, gloo), method


def test_counting_bytes_refuses_an_interface_in_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parallel_traffic, "received_bytes", lambda _: 5)
    assert parallel_traffic.main(["--work", str(tmp_path)]) == 2
    assert "start this with `unshare -n`" in capsys.readouterr().err


def test_without_a_namespace_the_reason_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunFailed, match=r"no network namespace: .*'unshare'"):
        parallel_traffic.count_bytes(tmp_path)
    program = tmp_path / "unshare"
    program.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(RunFailed, match="exit 1: unshare failed: Operation not permitted"):
        parallel_traffic.count_bytes(tmp_path)


def test_the_round_with_the_least_step_counts() -> None:
    rounds = [Measured(0.7, 0.71, 9.0), Measured(0.6, 0.9, 9.0)]
    assert bench_parallel.best(rounds) == rounds[1]


def test_a_peer_that_fails_says_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho first\necho "rank $RANK: no such model"\nexit 3\n')
    program.chmod(0o755)
    with pytest.raises(RunFailed, match=r"exit 3: rank 0: no such model \(.*rank-0\.log\)"):
        parallel_peer.run(
            program, tmp_path, model="A", method="uniform", ranks=2, microbatches=2, steps=1
        )
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(parallel_peer, "_RUN_TIMEOUT_S", 0.5)
    with pytest.raises(RunFailed, match="not done after"):
        parallel_peer.run(
            program, tmp_path, model="A", method="uniform", ranks=2, microbatches=2, steps=1
        )


def test_parts_run_one_by_one_and_say_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def good(_: Path) -> bench_parallel.Part:
        return "a table", ["- reached: it"], {"figure": 1}

    def missed(_: Path) -> bench_parallel.Part:
        return "a table", ["- missed: it"], {}

    def broken(_: Path) -> bench_parallel.Part:
        raise RunFailed("no namespace")

    def wrong(_: Path) -> bench_parallel.Part:
        raise UserError("a mistake")

    output = tmp_path / "figures.json"
    for part, code in ((good, 0), (missed, 1), (broken, 1), (wrong, 2)):
        monkeypatch.setattr(bench_parallel, "PARTS", {"one": ("One", part)})
        words = ["--parts", "one", "--work", str(tmp_path), "--output", str(output)]
        assert bench_parallel.main(words) == code
    printed = capsys.readouterr()
    assert "## One\n\na table\n\n- reached: it\n" in printed.out
    assert "## One\n\nnot run: no namespace\n" in printed.out
    assert "bench_parallel: a mistake" in printed.err
    assert json.loads(output.read_text()) == {"one": {"failed": "no namespace"}}
