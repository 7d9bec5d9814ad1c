"""Devices for the modules of a tree, as Amazon SageMaker's model-parallel library chose them.

After its paper (Karakus et al. 2021, algorithms 1 to 3): from the root down, the children of a
module that has several devices are split into contiguous segments, the dearest as cheap as can be,
and the devices are shared out to the segments as seats are to parties (d'Hondt). It is here to be
compared with: it sees no time of a step, no transfers and no cap of memory, gives devices to a
heavy leaf that cannot use them, and may come back to a device that it has left. `partition` is
what our pipelines are cut by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from models.errors import UserError
from training.parallel.units import Cut, Profile

MEMORY_WEIGHT = {"speed": 0.2, "memory": 0.8}
"""The rest weighs the computing."""
STATE_BYTES = 16
"""Of a parameter of a profile: weights, gradients, two moments."""


@dataclass(frozen=True)
class Node:
    """A module. Children stand in the order in which they run."""

    name: str
    memory: float = 0.0
    """Its own, beside its children."""
    compute: float = 0.0
    """Likewise."""
    children: tuple[Node, ...] = ()
    shared: Mapping[str, float] = field(default_factory=dict)
    """Parameters that other leaves use too: their part of `memory`, by name. Leaves only."""

    def __post_init__(self) -> None:
        if self.shared and self.children:
            raise ValueError(f"'{self.name}' has children: only leaves share parameters")

    @cached_property
    def total_memory(self) -> float:
        """With that of all below."""
        return self.memory + sum(child.total_memory for child in self.children)

    @cached_property
    def total_compute(self) -> float:
        """With that of all below."""
        return self.compute + sum(child.total_compute for child in self.children)

    def leaves(self) -> Iterator[Node]:
        """Those below without children, or itself, in the order in which they run."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


@dataclass(frozen=True)
class Placement:
    """Where modules are."""

    device: dict[str, int]
    """By name, of every module of the tree."""
    leaves: tuple[str, ...]
    """Modules that hold no others, in the order in which they run: the units of a chain."""

    def hops(self) -> list[tuple[str, str]]:
        """The neighbours that are on different devices."""
        following = zip(self.leaves, self.leaves[1:], strict=False)
        return [(one, next_) for one, next_ in following if self.device[one] != self.device[next_]]

    def idle(self, devices: int) -> list[int]:
        """Devices that no leaf is on."""
        used = {self.device[leaf] for leaf in self.leaves}
        return [device for device in range(devices) if device not in used]

    def cut(self) -> Cut:
        """The placement as stages of a pipeline, one for each device that has something to do.

        UserError where the chain comes back to a device that it has left.
        """
        bounds, seen = [0], [self.device[self.leaves[0]]]
        for number, leaf in enumerate(self.leaves):
            device = self.device[leaf]
            if device == seen[-1]:
                continue
            if device in seen:
                hops = ", ".join(
                    f"'{one}' ({self.device[one]}) to '{next_}' ({self.device[next_]})"
                    for one, next_ in self.hops()
                )
                raise UserError(
                    f"'{leaf}' goes back to device {device}: no pipeline has such stages; the hops "
                    f"are {hops}"
                )
            bounds.append(number)
            seen.append(device)
        return Cut((*bounds, len(self.leaves)))


def place(root: Node, devices: int, optimize: Literal["speed", "memory"] = "memory") -> Placement:
    """Algorithm 1: breadth first, a module is on the first of its devices, and what it holds gets
    them split, or all of it that one."""
    if devices < 1:
        raise UserError(f"'{devices}' devices: valid is 1 or more")
    merged, into = merge_shared(root)
    weight = MEMORY_WEIGHT[optimize]
    memory, compute = merged.total_memory or 1.0, merged.total_compute or 1.0

    def cost(node: Node) -> float:
        share = node.total_compute / compute
        return weight * node.total_memory / memory + (1 - weight) * share

    given = {merged.name: list(range(devices))}
    queue, device = deque([merged]), {}
    while queue:
        node = queue.popleft()
        own = given[node.name]
        device[node.name] = own[0]
        if len(own) > 1 and node.children:
            _split(node.children, own, own[0], cost, given)
        else:
            given.update({child.name: own for child in node.children})
        queue.extend(node.children)
    for gone, stays in into.items():
        device[gone] = device[stays]
    return Placement(device, tuple(leaf.name for leaf in root.leaves()))


def segments(costs: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Algorithm 2's dynamic program: `count` contiguous segments, (first, end), none empty, the
    dearest as cheap as can be: c(k, i) = min over j of max(c(k - 1, j), costs j .. i - 1)."""
    sums = [0.0]
    for one in costs:
        sums.append(sums[-1] + one)
    best = [[float("inf")] * len(sums) for _ in range(count + 1)]
    chosen = [[0] * len(sums) for _ in range(count + 1)]
    best[0][0] = 0.0
    for k in range(1, count + 1):
        for i in range(k, len(sums)):
            for j in range(k - 1, i):
                dearest = max(best[k - 1][j], sums[i] - sums[j])
                if dearest < best[k][i]:
                    best[k][i], chosen[k][i] = dearest, j
    found, end = [], len(costs)
    for k in range(count, 0, -1):
        found.append((chosen[k][end], end))
        end = chosen[k][end]
    return found[::-1]


def dhondt(costs: Sequence[float], seats: int) -> list[int]:
    """Algorithm 3: each seat to the largest cost / (seats that it has + 1), ties to the first."""
    found = [0] * len(costs)
    for _ in range(seats):
        quotients = [cost / (held + 1) for cost, held in zip(costs, found, strict=True)]
        found[quotients.index(max(quotients))] += 1
    return found


def merge_shared(root: Node) -> tuple[Node, dict[str, str]]:
    """The tree with leaves that share parameters merged into the first of them, whose device they
    get; and into which, by name. The shared memory counts once, the computing adds up."""
    groups: list[list[Node]] = []
    for leaf in root.leaves():
        linked = [g for g in groups if any(leaf.shared.keys() & one.shared.keys() for one in g)]
        groups = [g for g in groups if g not in linked]
        groups.append([*(one for group in linked for one in group), leaf])
    order = {leaf.name: number for number, leaf in enumerate(root.leaves())}
    into: dict[str, str] = {}
    merged: dict[str, Node] = {}
    for group in groups:
        first, *others = sorted(group, key=lambda leaf: order[leaf.name])
        shared = {name: size for leaf in group for name, size in leaf.shared.items()}
        own = sum(leaf.memory - sum(leaf.shared.values()) for leaf in group)
        merged[first.name] = replace(
            first,
            memory=own + sum(shared.values()),
            compute=sum(leaf.compute for leaf in group),
            shared=shared,
        )
        into.update({leaf.name: first.name for leaf in others})

    def kept(node: Node) -> Node:
        if not node.children:
            return merged[node.name]
        children = tuple(kept(child) for child in node.children if child.name not in into)
        return replace(node, children=children)

    return kept(root), into


def _split(
    nodes: Sequence[Node],
    own: list[int],
    first: int,
    cost: Callable[[Node], float],
    given: dict[str, list[int]],
) -> None:
    """Algorithm 2: gives each of `nodes`, which run one after the other, some of the devices `own`.

    first: the one that a segment without a seat falls back to.
    """
    costs = [cost(node) for node in nodes]
    parts = segments(costs, min(len(own), len(nodes)))
    at = 0
    for (start, end), seats in zip(
        parts, dhondt([sum(costs[start:end]) for start, end in parts], len(own)), strict=True
    ):
        some = own[at : at + seats] or [first]
        at += seats
        if end - start == 1 or len(some) == 1:
            given.update({node.name: some for node in nodes[start:end]})
        else:
            _split(nodes[start:end], some, first, cost, given)


def profile_tree(profile: Profile) -> Node:
    """The tree of a chain: embedding, the layers in one container, head; other units as they are.

    Layers are the units that are named so, as `chain.objective_chain` does.
    """
    groups: list[Node] = []
    layers: list[Node] = []
    for unit in profile.units:
        node = Node(
            unit.name,
            float(STATE_BYTES * unit.parameters + unit.kept_bytes),
            unit.seconds,
            shared={name: float(STATE_BYTES * size) for name, size in unit.shared.items()},
        )
        if unit.name.startswith("layer "):
            layers.append(node)
            continue
        if layers:
            groups.append(Node("layers", children=tuple(layers)))
            layers = []
        groups.append(node)
    if layers:
        groups.append(Node("layers", children=tuple(layers)))
    return Node("root", children=tuple(groups))
