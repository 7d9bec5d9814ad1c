"""Whatever peers do and suffer, those that live have the same bits in the end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.training.swarm.memory_swarm import World
from tests.training.swarm.toy_peers import ToyPeer
from training.swarm.settings import Collaboration, DiLoCo

FATES = st.lists(
    st.tuples(
        st.sampled_from(["live", "live", "kill", "leave"]),
        st.floats(0, 30),  # when it joins
        st.floats(1, 60),  # how long it stays
        st.sampled_from(["node", "node", "client", "auxiliary"]),
        st.floats(0.3, 1.6),  # seconds of a microbatch
    ),
    max_size=4,
)


LIMIT_S = 2000.0
"""Runs that go well end within some 300 s of the world's time."""


def common(mode: str) -> Collaboration:
    times = {"announce_s": 0.5, "look_s": 0.3, "round_timeout_s": 8.0, "download_timeout_s": 20.0}
    if mode == "diloco":
        diloco = DiLoCo(local_steps=3, local_batch=4, patience_s=5.0)
        return Collaboration(mode="diloco", diloco=diloco, **times)
    return Collaboration(mode=mode, target_batch=18, **times)


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a stall is long: it is not shrunk
    suppress_health_check=[HealthCheck.too_slow],
)
# Every peer came to have weights of its own, and all waited for each other.
@example(
    "delayed",
    84,
    [
        ("kill", 1.776031433452086, 30.364006848911547, "node", 1.4402462891123344),
        ("live", 22.699583654620554, 1.5757589591172327, "node", 1.5757589591172327),
    ],
    {0: {"a"}, 5: {"a"}},
)
@given(
    st.sampled_from(["sync", "delayed", "diloco"]),
    st.integers(0, 1000),
    FATES,
    st.dictionaries(st.integers(0, 12), st.sets(st.sampled_from("abcdef"), min_size=1), max_size=4),
)
def test_survivors_are_alike(
    mode: str,
    seed: int,
    fates: list[tuple[str, float, float, str, float]],
    broken: dict[int, set[str]],
) -> None:
    """Two peers live through it; others join, leave and are killed; rounds break for some."""

    def breaks(number: int, names: Sequence[str]) -> set[str]:
        return broken.get(number, set()) & set(names)

    world = World(seed, breaks=breaks)
    settings_of_run = common(mode)
    peers = [ToyPeer(world, name, settings_of_run, steps=6, linger_s=200.0) for name in "ab"]
    for peer in peers:
        world.start(peer.name, peer.run)
    for name, (fate, joins, stays, role, compute_s) in zip("cdef", fates, strict=False):
        peer = ToyPeer(world, name, settings_of_run, role=role, steps=6, compute_s=compute_s,
                       linger_s=200.0)  # fmt: skip
        if fate == "live":
            peers.append(peer)
        elif fate == "kill":
            world.start("reaper", lambda name=name: world.kill(name), at=joins + stays)
        else:
            world.start("door", lambda peer=peer: goes(world, peer), at=joins + stays)
        world.start(name, peer.run, at=joins)
    world.run(LIMIT_S)
    peers = [peer for peer in peers if peer.transport.peer.role != "auxiliary"]
    assert len({peer.collaborative.epoch for peer in peers}) == 1
    assert peers[0].collaborative.epoch >= 6
    assert len({peer.state() for peer in peers}) == 1
    needed = 12 if mode == "diloco" else 18
    for peer in peers:
        assert all(one.samples >= needed for one in peer.applied)
        assert peer.collaborative.counters["skipped"] == 0


def goes(world: World, peer: ToyPeer) -> None:
    """A clean leave: nobody sees it any more."""
    peer.transport.leave()
    world.kill(peer.name)
