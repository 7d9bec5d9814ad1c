"""Peers with a transport in memory: equal to one process, and alike whatever happens to some."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from models.errors import Fault, UserError
from tests.training.swarm.memory_swarm import MemoryTransport, World
from tests.training.swarm.toy_peers import Language, Regression, ToyPeer, alone, batches, lamb, rate
from training.swarm.epochs import Stage
from training.swarm.settings import Collaboration
from training.swarm.state import state_hash
from training.swarm.types import State

MODES = ("sync", "delayed", "diloco")


def settings(mode: str = "sync", **more: Any) -> Collaboration:
    """Fast ones; a step of twelve samples, or of three local steps with four.

    Delayed epochs have three times as many, so that rounds of some 3 s fit well into them.
    """
    ends: dict[str, Any] = (
        {"diloco": {"local_steps": 3, "local_batch": 4, "patience_s": 5.0}}
        if mode == "diloco"
        else {"target_batch": 36 if mode == "delayed" else 12}
    )
    common = {"mode": mode, "min_peers": 2, "announce_s": 0.5, "look_s": 0.3,
              "round_timeout_s": 8.0, "download_timeout_s": 20.0}  # fmt: skip
    return Collaboration(**{**common, **ends, **more})


def run(world: World, *peers: ToyPeer) -> None:
    for peer in peers:
        world.start(peer.name, peer.run)
    world.run()


def assert_alike(*peers: ToyPeer, needed: float = 12) -> None:
    """All have the same bits, and no step was taken with too few samples."""
    assert len({peer.collaborative.epoch for peer in peers}) == 1
    assert len({peer.state() for peer in peers}) == 1
    assert len({peer.collaborative.state_hash for peer in peers}) == 1
    for peer in peers:
        assert peer.collaborative.state_hash == state_hash(peer.collaborative.state())
        assert all(one.samples >= needed for one in peer.applied)
        assert all(bool(one.isfinite().all()) for one in peer.learner.network.parameters())


def weights(peer: ToyPeer) -> list[torch.Tensor]:
    return [one.detach() for one in peer.learner.network.parameters()]


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


LEARNERS: dict[str, tuple[Callable[[], Any], tuple[float, ...]]] = {
    "one term": (Regression, ()),
    "two terms": (lambda: Regression(2), ()),
    "expected labels": (lambda: Regression(2), (2.1, 1.9)),
    "albert": (lambda: Language("albert"), ()),
    "decoder": (lambda: Language("decoder"), ()),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_sync_is_one_process_with_the_big_batch(name: str) -> None:
    """Two nodes, a client and an auxiliary, of different speeds; weights after each step."""
    build, labels = LEARNERS[name]
    world = World(3)
    common = settings(min_peers=3, labels_per_sample=labels)
    peers = [
        ToyPeer(world, "a", common, learner=build()),
        ToyPeer(world, "b", common, learner=build(), compute_s=0.4, microbatch=1),
        ToyPeer(world, "c", common, learner=build(), role="client", microbatch=3),
    ]
    helper = ToyPeer(world, "x", common, learner=build(), role="auxiliary")
    run(world, *peers, helper)
    found = batches(peers)
    assert sorted(found) == [0, 1, 2, 3]
    for peer in peers:
        assert [one.samples for one in peer.applied] == [len(found[epoch]) for epoch in range(4)]
        assert {len(one.result.members) for one in peer.applied} == {4}
    assert not helper.gathered
    assert not helper.applied
    assert (helper.collaborative.epoch, helper.collaborative.state_hash) == (4, "")
    assert len({str(sorted(peer.hashes.items())) for peer in peers}) == 1
    assert_alike(*peers)
    assert_close(weights(peers[0]), alone(build(), found, labels))
    assert peers[1].collaborative.counters["samples"] == sum(map(len, found.values()))


def test_fp16_average_still_gives_the_same_bits_to_all() -> None:
    world = World(3, half=True)
    peers = [ToyPeer(world, name, settings()) for name in "ab"]
    run(world, *peers)
    assert_alike(*peers)
    for one, other in zip(weights(peers[0]), alone(Regression(), batches(peers)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)


def test_a_lone_peer_goes_on_by_itself() -> None:
    world = World()
    peer = ToyPeer(world, "a", settings(min_peers=1))
    run(world, peer)
    assert [one.result.group_id for one in peer.applied] == [""] * 4
    assert world.now < 24 * 1.5 + peer.linger_s  # it waits for no group
    assert_close(weights(peer), alone(Regression(), batches([peer])))


def test_stages_follow_each_other() -> None:
    world = World(1)
    peers = [ToyPeer(world, name, settings()) for name in "ab"]
    run(world, *peers)
    names = [stage.value for stage, epoch, _ in peers[0].lines if (epoch, stage) != (0, "publish")]
    told = ["accumulate", "announce", "match", "reduce", "check", "apply", "publish"]
    assert names == told * 4


def test_delayed_steps_are_those_of_gradients_one_step_old() -> None:
    """Each microbatch's gradient is taken at the weights that it met, and counts in its epoch."""
    world = World(2)
    common = settings("delayed", target_batch=12)
    peers = [ToyPeer(world, name, common, steps=6, compute_s=1.5, linger_s=0) for name in "ab"]
    run(world, *peers)
    assert len({str(sorted(peer.hashes.items())) for peer in peers}) == 1
    gathered = [one for peer in peers for one in peer.gathered]
    late = sum(epoch > at for epoch, at, _ in gathered)
    assert late >= 10  # computed while a round ran
    learner = Regression()
    parameters = list(learner.parameters())
    optimiser = lamb(parameters)
    history = []
    for epoch in range(6):
        history.append([one.detach().clone() for one in parameters])
        sums = [torch.zeros_like(one) for one in parameters]
        labels = 0.0
        for at, samples in [(at, samples) for to, at, samples in gathered if to == epoch]:
            stale = Regression()
            for parameter, value in zip(stale.parameters(), history[at], strict=True):
                parameter.data.copy_(value)
            losses = stale(samples)
            found = torch.autograd.grad(losses.sums.sum(), list(stale.parameters()))
            sums = [a + b for a, b in zip(sums, found, strict=True)]
            labels += float(losses.counts.sum())
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total / labels
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimiser.param_groups[0]["lr"] = rate(epoch)
        optimiser.step()
    assert_close(weights(peers[0]), [one.detach() for one in parameters])


def test_delayed_computes_while_it_averages() -> None:
    """Rounds of 2.5 s beside epochs of 4.5 s cost nothing: no peer waits."""
    ends = {}
    for mode in ("sync", "delayed"):
        world = World(2)
        peers = [
            ToyPeer(
                world, name, settings(mode, target_batch=12), steps=10, compute_s=1.5, linger_s=0
            )
            for name in "ab"
        ]
        run(world, *peers)
        ends[mode] = world.now
    assert ends["delayed"] < 0.75 * ends["sync"]


def test_diloco_is_algorithm_1_of_the_paper() -> None:
    """Local LAMB from the same weights, then torch's Nesterov SGD on the mean of the ways back."""
    world = World(5)
    common = settings("diloco", min_peers=2)
    peers = [ToyPeer(world, name, common, microbatch=size) for name, size in (("a", 2), ("b", 4))]
    run(world, *peers)
    assert_alike(*peers)
    outer = Regression()
    nesterov = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    inner = {peer.name: Regression() for peer in peers}
    local = {name: lamb(learner.parameters()) for name, learner in inner.items()}
    for epoch in range(4):
        ways = []
        for peer in peers:
            learner, optimiser = inner[peer.name], local[peer.name]
            learner.load_state_dict(outer.state_dict())
            samples = batches([peer])[epoch]
            assert len(samples) == 12
            for step in range(3):
                losses = learner(samples[4 * step : 4 * step + 4])
                (losses.sums.sum() / losses.counts.sum()).backward()
                torch.nn.utils.clip_grad_norm_(learner.parameters(), 0.5)
                optimiser.param_groups[0]["lr"] = rate(3 * epoch + step)
                optimiser.step()
                optimiser.zero_grad()
            ways.append(
                [a.detach() - b.detach()
                 for a, b in zip(outer.parameters(), learner.parameters(), strict=True)]
            )  # fmt: skip
        for parameter, *found in zip(outer.parameters(), *ways, strict=True):
            parameter.grad = sum(found) / len(found)
        nesterov.step()
    assert_close(weights(peers[0]), [one.detach() for one in outer.parameters()])


def test_diloco_waits_for_a_slow_peer_only_so_long() -> None:
    world = World(5, window_s=15.0)
    common = settings("diloco", min_peers=3, round_timeout_s=30.0)
    quick = [ToyPeer(world, name, common, microbatch=4) for name in "ab"]
    slow = ToyPeer(world, "s", common, microbatch=4, compute_s=4.5)
    run(world, *quick, slow)
    assert_alike(*quick, slow)
    assert {len(one.result.members) for one in quick[0].applied} == {3}
    assert [one.samples for one in quick[0].applied] == [36, 32, 36, 36]


# What goes wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", ["accumulate", "announce", "match", "waiting", "reduce", "check",
                                   "apply", "publish"])  # fmt: skip
def test_a_peer_killed_at_any_stage(mode: str, stage: str) -> None:
    """Of four; the others go on, alike, and what the dead one had reported counts no more."""
    world = World(len(stage))
    common = settings(mode, min_peers=4)

    def tell(found: Stage, epoch: int, text: str) -> None:
        if epoch == 2 and found == stage:
            world.kill("d")

    peers = [ToyPeer(world, name, common, steps=8) for name in "abc"]
    dead = ToyPeer(world, "d", common, tell=tell if stage != "reduce" else None)

    def reap() -> None:
        """Kill it while it waits for a group, or in the middle of the average of epoch 2."""
        if stage == "waiting":
            world.wait(
                ready=lambda: any(one.peer.peer_id == "d" for one in world.queues.get(2, ()))
            )
        else:
            world.wait(ready=lambda: any(group.epoch == 2 for group in world.groups))
        world.kill("d")

    if stage in ("waiting", "reduce"):
        world.start("reaper", reap)
    run(world, *peers, dead)
    assert world.dead == {"d"}
    assert dead.collaborative.epoch <= 3
    assert peers[0].collaborative.epoch >= 8
    assert_alike(*peers)
    assert {len(one.result.members) for one in peers[0].applied[-2:]} == {3}


@pytest.mark.parametrize("mode", MODES)
def test_partial_round_is_retried_with_the_same_gradients(mode: str) -> None:
    def breaks(number: int, names: Sequence[str]) -> Sequence[str]:
        return names if number in (0, 2) else ()

    whole, partial = World(4), World(4, breaks=breaks)
    found = []
    for world in (whole, partial):
        peers = [ToyPeer(world, name, settings(mode), microbatch=4) for name in "ab"]
        run(world, *peers)
        assert_alike(*peers)
        found.append(peers)
    checks = [text for stage, _, text in found[1][0].lines if stage == "check"]
    assert sum("refused: only 50.0% was averaged" in text for text in checks) == 2
    assert [one.result.group_id for one in found[1][0].applied][:2] == ["00000001", "00000003"]
    if mode == "sync":  # nothing is gathered while it retries: the same run, later
        assert batches(found[0]) == batches(found[1])
        assert weights(found[0][0])[0].equal(weights(found[1][0])[0])
    if mode != "diloco":
        taken = {one.epoch - 1: one.samples for one in found[1][0].applied}
        assert taken == {e: len(s) for e, s in batches(found[1]).items() if e in taken}


@pytest.mark.parametrize("mode", MODES)
def test_round_that_only_some_have_whole(mode: str) -> None:
    """One of three has not got everything: the others move on, it downloads what came of it."""
    world = World(4, breaks=lambda number, names: ["c"] if number == 1 else ())
    peers = [ToyPeer(world, name, settings(mode, min_peers=3), steps=5) for name in "abc"]
    run(world, *peers)
    assert_alike(*peers)
    assert any(who == "c" for who, _ in world.downloads)


@pytest.mark.parametrize("mode", MODES)
def test_round_that_only_one_has_whole(mode: str) -> None:
    """One of three moves on alone; the two others take another step, and it downloads theirs."""
    world = World(4, breaks=lambda number, names: ["b", "c"] if number == 1 else ())
    peers = [ToyPeer(world, name, settings(mode, min_peers=3), steps=5) for name in "abc"]
    run(world, *peers)
    assert_alike(*peers)
    assert {who for who, _ in world.downloads} == {"a"}


def test_smaller_group_without_the_peer_that_breaks_every_round() -> None:
    """Every round with `c` breaks; the transport leaves it out, and the retry goes well."""
    world = World(4, breaks=lambda number, names: names if "c" in names else (), blamed="c")
    peers = [ToyPeer(world, name, settings(min_peers=4), steps=3) for name in "abcd"]
    run(world, *peers)
    assert_alike(*peers)
    assert all(one.result.complete for one in peers[0].applied)
    checks = [text for stage, _, text in peers[0].lines if stage == "check"]
    assert checks[0] == "refused: only 50.0% was averaged"
    assert checks[1].endswith("of 3 of 4 peers")
    # It learns all the same, by downloads.
    assert {who for who, _ in world.downloads} == {"c"}


class Boaster(MemoryTransport):
    """Tells of labels that nobody can have."""

    def average(self, tensors: Any, *, gathered: Any, **more: Any) -> Any:
        gathered = {**gathered, "labels": [1e6 for _ in gathered["labels"]]}
        return super().average(tensors, gathered=gathered, **more)


@pytest.mark.parametrize("mode", MODES)
def test_peer_that_nobody_could_take_a_round_with_is_left_out(mode: str) -> None:
    world = World(5)
    peers = [ToyPeer(world, name, settings(mode, min_peers=4), steps=3) for name in "abcd"]
    peers[2].transport.__class__ = Boaster
    run(world, *peers)
    assert_alike(*peers)
    good = [one for name, one in zip("abcd", peers, strict=True) if name != "c"]
    checks = [text for stage, _, text in good[0].lines if stage == "check"]
    assert checks[0] == "refused: peer 'c' tells of labels that its samples can not have"
    for peer in good:
        members = {who.peer_id for one in peer.applied for who in one.result.members}
        assert members == {"a", "b", "d"}
    assert {who for who, _ in world.downloads} == {"c"}


@pytest.mark.parametrize("mode", MODES)
def test_microbatches_that_are_not_finite_count_nothing(mode: str) -> None:
    world = World(6)
    good = ToyPeer(world, "a", settings(mode))
    bad = ToyPeer(world, "b", settings(mode), spoilt=(0, 3, 4))
    run(world, good, bad)
    assert_alike(good, bad)
    assert bad.collaborative.dropped >= 2
    assert bad.collaborative.counters["skipped"] == 0
    if mode == "sync":
        assert_close(weights(good), alone(Regression(), batches([good, bad])))


def test_gradient_far_out_of_the_usual_is_not_sent() -> None:
    """From its 30th microbatch on the peer's gradients are 10^6 times too long."""
    world = World(6)
    good = ToyPeer(world, "a", settings(), steps=16)
    bad = ToyPeer(world, "b", settings(), steps=16, scaled=1e6, scaled_from=30)
    run(world, good, bad)
    assert_alike(good, bad)
    assert any("is not sent" in text for _, _, text in bad.lines)
    assert good.collaborative.counters["skipped"] == 0
    assert max(good.collaborative.counters["norms"]) < 100


class Poison(list[torch.Tensor]):
    """Tensors that turn when the transport has looked at them."""

    def __init__(self, tensors: Sequence[torch.Tensor], value: float) -> None:
        super().__init__(tensors)
        self.looked, self.value = False, value

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.looked:
            for tensor in super().__iter__():
                tensor.fill_(self.value)
        self.looked = True
        return super().__iter__()


class Poisoner(MemoryTransport):
    """Sends what no check of its own has seen, from epoch 1 on."""

    value = math.nan

    def average(self, tensors: Any, *, epoch: int, **more: Any) -> Any:
        if epoch >= 1:
            tensors = Poison(tensors, self.value)
        return super().average(tensors, epoch=epoch, **more)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_average_that_is_not_finite_is_skipped_by_all(value: float) -> None:
    world = World(6)
    common = settings(min_peers=3, max_skipped=3)
    peers = [ToyPeer(world, name, common, steps=9) for name in "ab"]
    bad = ToyPeer(world, "p", common, steps=9)
    bad.transport.__class__ = Poisoner
    bad.transport.value = value  # type: ignore[attr-defined]
    faults: dict[str, str] = {}

    def until_fault(peer: ToyPeer) -> None:
        try:
            peer.run()
        except Fault as error:
            faults[peer.name] = str(error)

    for peer in (*peers, bad):
        world.start(peer.name, lambda peer=peer: until_fault(peer))  # type: ignore[misc]
    world.run()
    assert faults.keys() == {"a", "b", "p"}
    assert all("3 steps in a row were not taken" in text for text in faults.values())
    assert [one.taken for one in peers[0].applied] == [True, False, False]
    assert_alike(*peers)
    assert_close(weights(peers[0]), alone(Regression(), {0: batches([*peers, bad])[0]}))


@pytest.mark.parametrize("mode", ["sync", "delayed"])
def test_tensors_that_the_transport_refuses_are_dropped(mode: str) -> None:
    """As those too large for a codec: nobody waits for that peer, and it goes on."""
    world = World(6)
    good, bad = (ToyPeer(world, name, settings(mode)) for name in "ab")
    average, refusals = bad.transport.average, []

    def strict(tensors: Any, *, epoch: int, **more: Any) -> Any:
        if epoch == 1 and not refusals:
            refusals.append(epoch)
            raise ValueError("a value of 70000 is too large for the codec")
        return average(tensors, epoch=epoch, **more)

    bad.transport.average = strict  # type: ignore[method-assign]
    run(world, good, bad)
    assert refusals == [1]
    assert ("check", 1, "refused: a value of 70000 is too large for the codec") in bad.lines
    assert_alike(good, bad)


@pytest.mark.parametrize("mode", MODES)
def test_late_joiner_takes_part_with_the_same_weights(mode: str) -> None:
    """One donor gives other bytes, one dies while it gives; the third one's are right."""
    world = World(7)
    common = settings(mode, min_peers=3)
    peers = [ToyPeer(world, name, common, steps=8) for name in "abc"]
    world.corrupt.add("a")
    late = ToyPeer(world, "z", common, steps=8)
    world.start("z", late.run, at=20.0)
    world.start("reaper", lambda: world.kill("b"), at=20.9)
    run(world, *peers)
    assert_alike(peers[0], peers[2], late)
    assert ("z", "c") in world.downloads
    assert ("z", "a") not in world.downloads
    first = min(late.hashes)
    assert first >= 1
    assert late.hashes[first] == peers[2].hashes[first]
    assert any("z" in {one.peer_id for one in step.result.members} for step in peers[0].applied)


def test_joiner_that_gets_no_good_state_never_takes_part() -> None:
    world = World(7)
    common = settings(min_peers=2, start_wait_s=60.0)
    peers = [ToyPeer(world, name, common, steps=5) for name in "ab"]
    world.corrupt |= {"a", "b"}
    late = ToyPeer(world, "z", common, steps=5)
    told = []

    def join() -> None:
        with pytest.raises(UserError) as error:
            late.run()
        told.append(str(error.value))
        late.transport.leave()

    world.start("z", join, at=12.0)
    run(world, *peers)
    assert "no good copy of the swarm's weights in 60 s" in told[0]
    assert not late.gathered
    assert late.collaborative.epoch == 0
    assert all("z" not in {one.peer_id for one in step.result.members} for step in peers[0].applied)
    assert_alike(*peers)


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_others_do_not_have_are_replaced(mode: str) -> None:
    """Another bit in the moments or weights of one peer of three, after two steps."""
    world = World(8)
    peers = [ToyPeer(world, name, settings(mode, min_peers=3), steps=7) for name in "abc"]
    broken = peers[1]

    def flip() -> None:
        world.wait(ready=lambda: broken.collaborative.epoch == 2)
        tensors = broken.collaborative.state().tensors
        name = next(name for name in tensors if name.startswith(("optimiser.", "outer.")))
        tensors[name].view(-1)[0] += 1
        broken.collaborative._hash = state_hash(broken.collaborative.state())

    world.start("flip", flip)
    run(world, *peers)
    assert_alike(*peers)
    assert any(who == "b" for who, _ in world.downloads)
    if mode == "sync":
        assert len({peer.hashes[6] for peer in peers}) == 1


def test_start_waits_for_enough_peers_and_says_so() -> None:
    world = World()
    peer = ToyPeer(world, "a", settings(min_peers=2, start_wait_s=30.0))
    world.start("a", peer.run)
    with pytest.raises(UserError, match="min_peers = '2', but after 30 s 1 are here"):
        world.run()
    assert world.now >= 30
    assert not peer.gathered


@pytest.mark.parametrize("mode", MODES)
def test_state_goes_to_another_peer_and_back(mode: str) -> None:
    """A run that stops after two steps goes on from its state as one that does not stop."""

    def common(peers: int) -> Collaboration:
        return settings(mode, min_peers=peers)

    world = World(9)
    peer = ToyPeer(world, "a", common(1), steps=2, microbatch=4, linger_s=0)
    run(world, peer)
    saved = peer.collaborative.state()
    assert saved.epoch == 2
    copy = State(saved.epoch, {k: v.clone() for k, v in saved.tensors.items()}, saved.metadata)
    other = ToyPeer(World(9), "b", common(1))
    other.collaborative.load(copy)
    assert other.collaborative.state_hash == state_hash(saved) == peer.collaborative.state_hash
    assert other.collaborative.epoch == 2
    assert other.collaborative.counters == peer.collaborative.counters
    assert_close(weights(other), weights(peer))


def test_state_of_another_network_is_refused_whole() -> None:
    own = ToyPeer(World(), "a", settings())
    before, state = own.state(), own.collaborative.state()
    strange = {
        "less": {name: one for name, one in state.tensors.items() if "second" not in name},
        "more": {**state.tensors, "network.third.weight": torch.ones(2)},
        "odd": {**state.tensors, "outer.first.weight": torch.ones(2)},
        "shape": {**state.tensors, "network.second.bias": torch.ones(3)},
        "moment": {**state.tensors, "optimiser.second.bias.exp_avg": torch.ones(3)},
    }
    for tensors in strange.values():
        with pytest.raises(Fault, match="the swarm's state is of another network"):
            own.collaborative.load(State(3, tensors, state.metadata))
        assert own.state() == before
        assert own.collaborative.epoch == 0
    with pytest.raises(Fault, match="says nothing of 'norms'"):
        own.collaborative.load(
            State(3, state.tensors, {"samples": 1, "skipped": 0, "skipped_in_a_row": 0})
        )


def test_the_world_is_the_same_for_a_seed() -> None:
    lines = []
    for _ in range(2):
        world = World(11)
        peers = [ToyPeer(world, name, settings("delayed")) for name in "ab"]
        run(world, *peers)
        lines.append([peer.lines for peer in peers])
    assert lines[0] == lines[1]
