"""The weights of the domains: hand-computed updates, and the excess against a plain loop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from training.doremi import (
    DomainWeights,
    ProxySettings,
    domain_excess,
    mean_excess,
    read_trace,
    read_weights,
)
from training.mix.recipe import Excess
from training.trace import TraceLog, write_weights


def test_two_updates_by_hand() -> None:
    weights = DomainWeights(3, step_size=1.0, smoothing=0.1)
    # 1/3 x (2, 1, 1) is in the ratio 2 : 1 : 1; a tenth of it goes to 1/3 each.
    first = [0.9 * 1 / 2 + 0.1 / 3, 0.9 * 1 / 4 + 0.1 / 3, 0.9 * 1 / 4 + 0.1 / 3]
    assert weights.update(np.array([math.log(2), 0, 0])).tolist() == pytest.approx(first, abs=1e-15)
    assert first == pytest.approx([29 / 60, 31 / 120, 31 / 120], abs=1e-15)
    # 58/120, 31/120, 31/120 times (1, 3, 1) are 58, 93 and 31 of 182.
    second = [0.9 * 58 / 182 + 0.1 / 3, 0.9 * 93 / 182 + 0.1 / 3, 0.9 * 31 / 182 + 0.1 / 3]
    assert weights.update(np.array([0, math.log(3), 0])).tolist() == pytest.approx(
        second, abs=1e-15
    )
    assert second == pytest.approx([0.3201465, 0.4932234, 0.1866300], abs=1e-7)
    # alpha_0, a third each, is not in the mean.
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert weights.mean.tolist() == pytest.approx(mean, abs=1e-15)
    assert mean == pytest.approx([0.4017399, 0.3757784, 0.2224817], abs=1e-7)
    assert weights.steps == 2


def test_step_size_and_smoothing_are_the_papers() -> None:
    weights = DomainWeights(2)
    weights.update(np.array([math.log(3), 0.0]))
    assert weights.alpha.tolist() == pytest.approx([0.999 * 0.75 + 0.0005, 0.999 * 0.25 + 0.0005])
    half = DomainWeights(2, step_size=0.5)
    half.update(np.array([math.log(9), 0.0]))
    assert half.alpha.tolist() == pytest.approx(weights.alpha.tolist(), abs=1e-15)


def test_no_update_is_uniform() -> None:
    assert DomainWeights(4).alpha.tolist() == [0.25] * 4
    assert DomainWeights(4).mean.tolist() == [0.25] * 4


@pytest.mark.parametrize("scale", [1e4, 1e300, -1e4])
def test_a_large_excess_does_not_overflow(scale: float) -> None:
    weights = DomainWeights(4, smoothing=1e-3)
    for _ in range(3):
        weights.update(np.array([scale, 0.0, 0.0, 0.0]))
    high, low = (1 - 1e-3) + 1e-3 / 4, 1e-3 / 4
    if scale > 0:
        assert weights.alpha.tolist() == pytest.approx([high, low, low, low], abs=1e-15)
    else:
        rest = (1 - low) / 3
        assert weights.alpha.tolist() == pytest.approx([low, rest, rest, rest], abs=1e-15)


@given(
    excesses=st.lists(
        st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=8
    ),
    step_size=st.floats(1e-3, 1e3),
    smoothing=st.floats(1e-6, 0.999),
)
def test_no_weight_falls_below_its_floor(
    excesses: list[list[float]], step_size: float, smoothing: float
) -> None:
    weights = DomainWeights(3, step_size=step_size, smoothing=smoothing)
    found = []
    for excess in excesses:
        found.append(weights.update(np.array(excess)))
        assert (found[-1] >= smoothing / 3 * (1 - 1e-12)).all()
        assert found[-1].sum() == pytest.approx(1, abs=1e-12)
    assert weights.mean.tolist() == pytest.approx(np.mean(found, axis=0).tolist(), abs=1e-12)


def test_an_infinite_excess_moves_nothing() -> None:
    weights = DomainWeights(2)
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            weights.update(np.array([wrong, 0.0]))
    assert weights.alpha.tolist() == [0.5, 0.5]
    assert weights.steps == 0


def test_weights_go_through_a_checkpoint_exactly() -> None:
    draw = np.random.default_rng(0)
    excesses = draw.random((6, 3))
    weights, again = DomainWeights(3), DomainWeights(3)
    for excess in excesses[:3]:
        weights.update(excess)
    again.restore(json.loads(json.dumps(weights.state())))
    for excess in excesses[3:]:
        assert weights.update(excess).tolist() == again.update(excess).tolist()
    assert weights.mean.tolist() == again.mean.tolist()
    assert again.steps == 6


@pytest.mark.parametrize("excess", get_args(Excess))
def test_excess_is_that_of_a_plain_loop(excess: Excess) -> None:
    """With padding, an example without a label, and a domain without an example."""
    draw = torch.Generator().manual_seed(1)
    proxy, reference = (torch.rand(5, 7, generator=draw) * 6 for _ in range(2))
    labelled = torch.rand(5, 7, generator=draw) < 0.6
    labelled[3] = False
    labelled[:, 5:] = False
    proxy[~labelled], reference[~labelled] = math.nan, math.inf
    domains = torch.tensor([2, 0, 2, 1, 0])
    sums, tokens = [0.0] * 4, [0] * 4
    for example in range(5):
        for position in range(7):
            if labelled[example, position]:
                own = float(proxy[example, position])
                other = float(reference[example, position])
                value = {"excess": max(own - other, 0.0), "hardest": own, "easiest": -other}[excess]
                sums[int(domains[example])] += value
                tokens[int(domains[example])] += 1
    found_sums, found_tokens = domain_excess(
        proxy, reference, labelled, domains, k=4, excess=excess
    )
    assert found_sums.dtype == found_tokens.dtype == torch.float64
    assert found_sums.tolist() == pytest.approx(sums, abs=1e-12)
    assert found_tokens.tolist() == tokens
    assert tokens[1] == tokens[3] == 0


def test_a_domain_that_is_not_in_the_batch() -> None:
    sums, tokens = np.array([6.0, 0.0, 1.0]), np.array([3.0, 0.0, 2.0])
    found = mean_excess(sums, tokens, "excess")
    assert found.tolist() == [2.0, 0.0, 0.5]
    # Its weight is multiplied by 1, and falls only as the others grow.
    weights = DomainWeights(3, smoothing=1e-3)
    whole = math.exp(2) + 1 + math.exp(0.5)
    assert weights.update(found)[1] == pytest.approx(0.999 / whole + 1e-3 / 3, abs=1e-15)
    assert mean_excess(sums, tokens, "hardest").tolist() == [2.0, 1.25, 0.5]
    assert mean_excess(-sums, tokens, "easiest").tolist() == [-2.0, -1.25, -0.5]
    assert mean_excess(np.zeros(3), np.zeros(3), "easiest").tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"excess": "hard"}, "doremi.excess = 'hard': choose excess, hardest, easiest"),
        ({"step_size": 0.0}, "doremi.step_size = '0.0': give a number above 0"),
        ({"step_size": math.inf}, "doremi.step_size = 'inf': give a number above 0"),
        ({"smoothing": 1.0}, "doremi.smoothing = '1.0': give a number between 0 and 1"),
        ({"smoothing": 0.0}, "doremi.smoothing = '0.0': give a number between 0 and 1"),
    ],
)
def test_settings_that_mean_nothing(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        ProxySettings("reference", **fields)
    assert str(error.value) == said


def _write(log: TraceLog, *steps: int) -> None:
    for step in steps:
        excess = None if step == 2 else np.array([step, 0.125])
        log.write(step, np.array([1 / 3, 2 / 3]), excess, np.array([10.0, step]))


def test_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = TraceLog(tmp_path, ["bn", "hi"], step=0)
    _write(log, 1, 2, 3)
    log.close()
    assert (tmp_path / "alpha.jsonl").read_text().splitlines()[:2] == [
        '{"domains": ["bn", "hi"]}',
        '{"step": 1, "alpha": [0.333333333, 0.666666667], "excess": [1.0, 0.125], '
        '"tokens": [10, 1]}',
    ]
    trace = read_trace(tmp_path)
    assert trace.domains == ("bn", "hi")
    assert trace.alpha.tolist() == [[0.333333333, 0.666666667]] * 3
    assert trace.tokens.tolist() == [[10, 1], [10, 2], [10, 3]]
    assert np.isnan(trace.excess[1]).all()
    assert trace.excess[[0, 2]].tolist() == [[1, 0.125], [3, 0.125]]


def test_trace_is_cut_back_to_its_checkpoint(tmp_path: Path) -> None:
    log = TraceLog(tmp_path, ["bn", "hi"], step=0)
    _write(log, 1, 2, 3)
    log.close()
    path = tmp_path / "alpha.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 4, "alp')
    log = TraceLog(tmp_path, ["bn", "hi"], step=2)
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:3])
    _write(log, 3)
    log.close()
    assert path.read_bytes() == before
    TraceLog(tmp_path, ["bn", "hi"], step=0).close()
    assert path.read_bytes() == before.splitlines(keepends=True)[0]
    with pytest.raises(UserError, match=r"has not the 2 steps of the checkpoint: .*--restart"):
        TraceLog(tmp_path, ["bn", "hi"], step=2)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no trace at '.*' \(FileNotFoundError\): only the run of"):
        read_trace(tmp_path)
    with pytest.raises(UserError, match=r"no weights at '.*' \(FileNotFoundError\): the proxy has"):
        read_weights(tmp_path)
    for text in ("", "[1]\n", '{"weights": 3}\n', '{"domains": ["a"]}\n{"step": 1}\n'):
        (tmp_path / "alpha.jsonl").write_text(text)
        (tmp_path / "weights.json").write_text(text)
        with pytest.raises(UserError, match="is no trace of a proxy"):
            read_trace(tmp_path)
        with pytest.raises(UserError, match="holds no weights"):
            read_weights(tmp_path)
    write_weights(tmp_path, ["bn", "hi"], np.array([0.1, 0.9]))
    assert read_weights(tmp_path) == {"bn": 0.1, "hi": 0.9}


def test_trace_with_a_hole_is_none(tmp_path: Path) -> None:
    log = TraceLog(tmp_path, ["bn", "hi"], step=0)
    _write(log, 1, 2, 3)
    log.close()
    path = tmp_path / "alpha.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole)[:-9])  # cut by a kill
    assert len(read_trace(tmp_path).alpha) == 2
    for number in (1, 2):
        damaged = [*whole[:number], whole[number][:-9] + b"\n", *whole[number + 1 :]]
        path.write_bytes(b"".join(damaged))
        with pytest.raises(UserError, match="is no trace of a proxy, or not a whole one"):
            read_trace(tmp_path)
