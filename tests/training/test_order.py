"""The order of rows, against known vectors and properties of a permutation."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from training.order import DomainOrder, hashes, mix, permutation


def test_the_hashes_are_splitmix64() -> None:
    # Reference outputs for the state 1234567, as published with the algorithm.
    assert hashes(1234567, 5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert mix(1234567) == 6457827717110365317


def test_mix_depends_on_each_value_and_on_their_order() -> None:
    values = {mix(1, 2, 3), mix(1, 3, 2), mix(1, 2), mix(2, 3), mix(1, 2, 4), mix(1, 2, 3, 0)}
    assert len(values) == 6
    assert mix(-1) == mix((1 << 64) - 1)


def test_a_permutation_never_changes() -> None:
    assert permutation(7, 10).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]
    assert sorted(permutation(7, 1000).tolist()) == list(range(1000))
    assert permutation(7, 0).tolist() == []


SHARDS = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8
).filter(lambda shards: all(sum(shard) for shard in shards))


def sequence(order: DomainOrder, start: int, count: int) -> list[tuple[int, int, int] | None]:
    found: list[tuple[int, int, int] | None] = []
    for position in range(start, start + count):
        window = order.window(position)
        assert window.first == order.window_start(position)
        offset = position - window.first
        assert 0 <= offset < len(window.row)
        assert len(window.groups) <= order.window_row_groups
        group = window.group[offset]
        found.append(None if group < 0 else (*window.groups[group], int(window.row[offset])))
    return found


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.integers(1, 9), st.integers(0, 99), st.data())
def test_each_epoch_has_each_row_once(
    shards: list[list[int]], window: int, key: int, data: st.DataObject
) -> None:
    damaged = data.draw(st.sets(st.integers(0, len(shards) - 1), max_size=2))
    order = DomainOrder(
        [sum(shard) for shard in shards],
        data.draw(st.lists(st.integers(1, 20), min_size=len(shards), max_size=len(shards))),
        key=key,
        window_row_groups=window,
        row_counts=lambda shard: None if shard in damaged else shards[shard],
    )
    rows = [
        None if shard in damaged else (shard, group, row)
        for shard, groups in enumerate(shards)
        for group, count in enumerate(groups)
        for row in range(count)
    ]
    for epoch in (0, 1, 7):
        found = sequence(order, epoch * len(rows), len(rows))
        assert Counter(found) == Counter(rows)


def test_epochs_and_keys_have_different_orders() -> None:
    def order(key: int, window: int = 4) -> DomainOrder:
        return DomainOrder(
            [50] * 20, [1] * 20, key=key, window_row_groups=window, row_counts=lambda _: [25, 25]
        )

    first = sequence(order(1), 0, 1000)
    for other in (
        sequence(order(1), 1000, 1000),
        sequence(order(2), 0, 1000),
        sequence(order(1, 8), 0, 1000),
    ):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 30
    # Neighbours come from all over a window: 4 of 40 row groups, 3/4 of the time another one.
    changes = [a and b and a[:2] != b[:2] for a, b in itertools.pairwise(first)]
    assert 0.65 < np.mean(changes) < 0.85


def test_only_the_footers_of_a_run_are_asked_for() -> None:
    asked: list[int] = []

    def row_counts(shard: int) -> list[int]:
        asked.append(shard)
        return [10]

    order = DomainOrder([10] * 1000, [1] * 1000, key=3, window_row_groups=8, row_counts=row_counts)
    order.window(5_000)
    assert len(asked) == 8
    order.window(10_000 * 1_000_000)  # a far epoch costs no more
    assert len(asked) == 16
