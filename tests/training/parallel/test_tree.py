"""SageMaker's algorithm on cases worked by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from tests.training.parallel.chains import chain
from training.parallel.tree import Node, dhondt, merge_shared, place, profile_tree, segments
from training.parallel.units import Cut, Profile, UnitCost


def _leaf(name: str, cost: float, **shared: float) -> Node:
    return Node(name, cost, cost, shared=shared)


def test_dhondt_gives_the_seats_of_the_textbook() -> None:
    """Votes 100, 80, 30, 20 and 8 seats: 4, 3, 1, 0."""
    assert dhondt([100, 80, 30, 20], 8) == [4, 3, 1, 0]
    assert dhondt([5, 5], 3) == [2, 1]
    assert dhondt([9, 1], 2) == [2, 0]


def test_segments_by_hand() -> None:
    assert segments([1, 2, 3, 4, 5], 2) == [(0, 3), (3, 5)]
    assert segments([7, 1, 1, 1], 2) == [(0, 1), (1, 4)]
    assert segments([1, 1, 1], 3) == [(0, 1), (1, 2), (2, 3)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_segments_have_the_least_dearest(costs: list[int], count: int) -> None:
    count = min(count, len(costs))
    found = segments(costs, count)
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == len(costs)
    every = [
        max(
            sum(costs[first:end])
            for first, end in zip((0, *inner), (*inner, len(costs)), strict=True)
        )
        for inner in combinations(range(1, len(costs)), count - 1)
    ]
    assert max(sum(costs[first:end]) for first, end in found) == min(every)


def test_devices_go_down_the_tree() -> None:
    """Three devices: container and head cost the same, the first gets the odd seat and splits its
    four layers between its two devices."""
    layers = Node("layers", children=tuple(_leaf(f"layer {n}", 1) for n in range(4)))
    root = Node("root", children=(layers, _leaf("head", 4)))
    found = place(root, 3)
    assert found.device == {
        "root": 0,
        "layers": 0,
        "layer 0": 0,
        "layer 1": 0,
        "layer 2": 1,
        "layer 3": 1,
        "head": 2,
    }
    assert found.cut() == Cut((0, 2, 4, 5))
    assert found.hops() == [("layer 1", "layer 2"), ("layer 3", "head")]
    assert found.idle(3) == []
    assert set(place(root, 1).device.values()) == {0}


def test_a_heavy_leaf_keeps_devices_that_it_cannot_use() -> None:
    """Costs 1, 1, 10 on 4 devices: three segments, and the seats go 10, 5, 3.3, 2.5 to the head;
    the layers have none and stay on the module's first device."""
    root = Node("root", children=(_leaf("layer 0", 1), _leaf("layer 1", 1), _leaf("head", 10)))
    found = place(root, 4)
    assert [found.device[name] for name in found.leaves] == [0, 0, 0]
    assert found.idle(4) == [1, 2, 3]
    assert found.cut() == Cut((0, 3))


def _row(*costs: float) -> Node:
    return Node("root", children=tuple(_leaf(f"{n}", cost) for n, cost in enumerate(costs)))


def _devices(root: Node, devices: int) -> list[int]:
    found = place(root, devices)
    return [found.device[name] for name in found.leaves]


def test_segments_of_several_nodes_share_devices() -> None:
    """Costs 6 5 5 2: on three devices 6 | 5 | 5 2 with a seat each, on two 6 5 | 5 2. Costs 4 4 1 1
    on four: each is a segment, the seats go 4, 4, 2, 2 to the first two, the others have none."""
    assert _devices(_row(6, 5, 5, 2), 3) == [0, 1, 2, 2]
    assert _devices(_row(6, 5, 5, 2), 2) == [0, 0, 1, 1]
    assert _devices(_row(4, 4, 1, 1), 4) == [0, 2, 0, 0]


def test_a_segment_with_several_devices_is_split_again() -> None:
    """1 24 | 2 on two devices: the seats go 25, 12.5 to the first segment, where the 24 has both
    and splits its layers between them. The rest stays on the first device, so the chain comes back
    to it."""
    layers = Node("layers", children=tuple(_leaf(f"layer {n}", 6) for n in range(4)))
    found = place(Node("root", children=(_leaf("in", 1), layers, _leaf("out", 2))), 2)
    assert [found.device[name] for name in found.leaves] == [0, 0, 0, 1, 1, 0]
    with pytest.raises(UserError, match="'out' goes back to device 0"):
        found.cut()


def test_leaves_have_the_first_of_their_devices() -> None:
    """Seats 2, 2, 1 for costs 5 4 3."""
    assert _devices(_row(5, 4, 3), 5) == [0, 2, 4]


def test_what_is_weighed_decides() -> None:
    """a has the memory, d the computing: of three units more memory goes with less company."""
    root = Node("root", children=(Node("a", 8, 1), Node("b", 1, 1), Node("c", 1, 8)))
    memory, speed = place(root, 2, "memory"), place(root, 2, "speed")
    assert [memory.device[name] for name in "abc"] == [0, 1, 1]
    assert [speed.device[name] for name in "abc"] == [0, 0, 1]


def test_shared_parameters_are_one_node_on_one_device() -> None:
    """Embedding and head hold the same 6 and the head 1 of its own: one node of 7 memory, and the
    computing of both."""
    root = Node(
        "root",
        children=(
            Node("embedding", 6, 1, shared={"weight": 6}),
            Node("layers", children=tuple(_leaf(f"layer {n}", 2) for n in range(2))),
            Node("head", 7, 3, shared={"weight": 6}),
        ),
    )
    merged, into = merge_shared(root)
    assert into == {"head": "embedding"}
    first = merged.children[0]
    assert (first.name, first.memory, first.compute) == ("embedding", 7, 4)
    assert [child.name for child in merged.children] == ["embedding", "layers"]
    found = place(root, 2)
    assert [found.device[name] for name in found.leaves] == [0, 1, 1, 0]
    with pytest.raises(UserError) as refusal:
        found.cut()
    assert str(refusal.value) == (
        "'head' goes back to device 0: no pipeline has such stages; the hops are 'embedding' (0) "
        "to 'layer 0' (1), 'layer 1' (1) to 'head' (0)"
    )


def test_nodes_that_a_third_one_links_are_merged_too() -> None:
    leaves = (
        _leaf("a", 1, x=1),
        _leaf("b", 2, y=1),
        _leaf("c", 5, x=1, y=1),
        _leaf("d", 1),
    )
    merged, into = merge_shared(Node("root", children=leaves))
    assert into == {"b": "a", "c": "a"}
    assert (merged.children[0].memory, merged.children[0].compute) == (1 + 2 + 5 - 2, 8)
    assert [child.name for child in merged.children] == ["a", "d"]


def test_only_leaves_share() -> None:
    with pytest.raises(ValueError, match="only leaves share"):
        Node("root", children=(_leaf("a", 1),), shared={"weight": 1})


def test_no_devices() -> None:
    with pytest.raises(UserError, match="'0' devices"):
        place(_leaf("a", 1), 0)


def test_a_profile_as_a_tree() -> None:
    units = (
        UnitCost("embedding", 1, 2, 100, {"weight": 90}, kept_bytes=7),
        UnitCost("layer 0", 2, 4, 10),
        UnitCost("layer 1", 2, 4, 10),
        UnitCost("head", 3, 5, 95, {"weight": 90}),
    )
    root = profile_tree(Profile(units, 1, "given"))
    assert [child.name for child in root.children] == ["embedding", "layers", "head"]
    assert [child.name for child in root.children[1].children] == ["layer 0", "layer 1"]
    assert (root.children[0].memory, root.children[0].compute) == (16 * 100 + 7, 3)
    assert root.children[2].shared == {"weight": 16 * 90}
    assert root.total_compute == 3 + 6 + 6 + 8
    assert [child.name for child in profile_tree(chain([1.0] * 3)).children] == [
        "unit 0",
        "unit 1",
        "unit 2",
    ]
