"""A swarm against one process that takes the same steps: two nodes and a client over hivemind.

`sync` is the same as one process with the whole batch, but for what 16 bits take away on the way.
How much that may be: each number of a gradient, in units of its tensor's spread, is rounded twice,
by its sender and, as the mean, by the reducer, each time by at most 2**-11 of it. LAMB's step
follows the gradient number by number, so the steps are off by at most 2**-10 of their length, and
the loss, to first order, by as much of what all steps together have changed of it. Numbers below
2**-14 of the spread lose more, up to 2**-25 of it each, which this leaves out: what makes up for it
is that roundings go both ways, so that in truth all of it together is some hundred times less. A
microbatch that is missing in each epoch changes far more.

`delayed` takes each step with gradients of weights that are up to one step older, so it is held to
a band of what one process gains. So is `diloco`, beside the same algorithm in one process: peers
that missed a round have other moments of their own than the process has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.swarm.learning_peers import (
    CLIP,
    MICROBATCH,
    Told,
    held_out,
    learner,
    loss_of,
    microbatch,
    optimiser,
    rate,
)
from tests.training.swarm.real_peers import hub
from training.batches import collate
from training.swarm.types import RoundResult

pytestmark = [pytest.mark.peers, pytest.mark.slow]

TARGET = 24
EPOCHS = 50
DELAYED_EPOCHS = 30
OUTER_EPOCHS, LOCAL_STEPS = 10, 8
LIMIT_S = 400.0
ROUNDING = 2.0**-10
DELAYED_BAND = 0.15
DILOCO_BAND = 0.05
"""Parts of what one process gains."""
OPTIONS = {"codec": "scaled-float16", "announcement_s": 20.0}
SETTINGS = {
    "min_peers": 3,
    "start_wait_s": 120.0,
    "announce_s": 0.2,
    "look_s": 0.1,
    "round_timeout_s": 10.0,
}

Batches = Mapping[int, Sequence[tuple[int, int]]]
"""By epoch: (peer, number) of each microbatch."""


def swarm(folder: Path, steps: int, **settings: Any) -> tuple[list[str], list[Told]]:
    """Peer ids, and what the peers tell when all of them have taken the steps."""
    with hub(folder, 3) as peers:
        for index, (peer, role) in enumerate(zip(peers, ("node", "node", "client"), strict=True)):
            peer.begin_learn(
                peers[0].addresses, {**OPTIONS, "role": role}, index=index, steps=steps,
                settings={**SETTINGS, **settings}, pause_s=0.04 * (index + 1),
            )  # fmt: skip
            if index == 0:
                peer.end_start()
        for peer in peers[1:]:
            peer.end_start()
        until = time.monotonic() + LIMIT_S
        while True:
            told = [peer.do("told") for peer in peers]
            assert [one.error for one in told] == [""] * 3
            if all(one.epoch >= steps for one in told):
                break
            assert time.monotonic() < until, [one.epoch for one in told]
            time.sleep(0.5)
        return [peer.peer_id for peer in peers], [peer.do("end_learning") for peer in peers]


def rounds(told: Sequence[Told]) -> dict[int, RoundResult]:
    """The round of each epoch; all peers that were in it say the same of it."""
    found: dict[int, RoundResult] = {}
    for one in told:
        for step in one.applied:
            known = found.setdefault(step.epoch - 1, step.result)
            assert step.taken and step.result.complete and step.result.fraction == 1.0
            assert {m.peer_id: m.weight for m in step.result.members} == {
                m.peer_id: m.weight for m in known.members
            }
    return found


def counted(ids: Sequence[str], results: Mapping[int, RoundResult]) -> Batches:
    """Whose microbatches are in the step of each epoch."""
    return {
        epoch: [
            (ids.index(member.peer_id), number)
            for member in result.members
            for number in range(int(member.weight) // MICROBATCH)
        ]
        for epoch, result in results.items()
    }


def alone(batches: Batches) -> tuple[list[float], float, float]:
    """One process with torch's own clipping and LAMB: its loss in each epoch, and of held out
    examples at first and in the end."""
    objective = learner()
    stepper = optimiser(objective.network)
    parameters = list(objective.network.parameters())
    losses, first = [], held_out(objective)
    for epoch in sorted(batches):
        examples = [one for index, number in batches[epoch]
                    for one in microbatch(index, epoch, number)]  # fmt: skip
        found = objective(collate(examples))
        loss = (found.sums.sum(dim=1) / found.counts.sum(dim=1).float()).sum()
        losses.append(float(loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in stepper.param_groups:
            group["lr"] = rate(epoch)
        stepper.step()
        stepper.zero_grad()
    return losses, first, held_out(objective)


def furthest(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def test_sync_is_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    ids, told = swarm(tmp_path, EPOCHS, target_batch=TARGET)
    results = rounds(told)
    assert sorted(results) == list(range(EPOCHS))
    batches = counted(ids, results)
    assert all(len(batch) * MICROBATCH >= TARGET for batch in batches.values())
    # Nobody worked for himself: most steps are of all three, and none of one.
    sizes = [len(result.members) for result in results.values()]
    assert min(sizes) >= 2 and sizes.count(3) > EPOCHS / 2
    losses = [
        loss_of([told[index].losses[epoch, number] for index, number in batches[epoch]])
        for epoch in range(EPOCHS)
    ]
    expected, first, last = alone(batches)
    bound = ROUNDING * (max(expected) - min(expected))
    assert last < first - 0.3
    far = furthest(losses, expected)
    print(f"sync: losses are at most {far:.2g} apart, the bound is {bound:.2g}")
    assert far < bound
    # What the bound would find: one microbatch fewer in each epoch.
    fewer, _, _ = alone({epoch: batch[1:] for epoch, batch in batches.items()})
    assert furthest(fewer, expected) > 10 * bound
    assert len({one.hashes[EPOCHS] for one in told}) == 1
    for one in told:
        assert abs(one.held_out[EPOCHS] - last) < bound


def alone_diloco(batches: Batches) -> tuple[float, float]:
    """DiLoCo in one process, its outer step torch's SGD: the loss of held out examples at first
    and in the end."""
    outer = learner()
    first = held_out(outer)
    anchor = list(outer.network.parameters())
    outer_step = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    workers = [learner() for _ in range(3)]
    steppers = [optimiser(worker.network) for worker in workers]
    for epoch in sorted(batches):
        ways = []
        for index, number in sorted(batches[epoch]):
            own = list(workers[index].network.parameters())
            if number == 0:
                with torch.no_grad():
                    for parameter, there in zip(own, anchor, strict=True):
                        parameter.copy_(there)
            found = workers[index](collate(microbatch(index, epoch, number)))
            (found.sums.sum(dim=1) / found.counts.sum(dim=1).float()).sum().backward()
            nn.utils.clip_grad_norm_(own, CLIP)
            for group in steppers[index].param_groups:
                group["lr"] = rate(epoch * LOCAL_STEPS + number)
            steppers[index].step()
            steppers[index].zero_grad()
            if number == LOCAL_STEPS - 1:
                ways.append([a.detach() - b.detach() for a, b in zip(anchor, own, strict=True)])
        for place, parameter in enumerate(anchor):
            parameter.grad = torch.stack([way[place] for way in ways]).mean(dim=0)
        outer_step.step()
    return first, held_out(outer)


def test_delayed_gains_as_much_as_one_process(tmp_path: Path) -> None:
    ids, told = swarm(tmp_path, DELAYED_EPOCHS, target_batch=TARGET, mode="delayed")
    results = rounds(told)
    assert sorted(results) == list(range(DELAYED_EPOCHS))
    assert len({one.hashes[DELAYED_EPOCHS] for one in told}) == 1
    _, first, last = alone(counted(ids, results))
    found = told[0].held_out[DELAYED_EPOCHS]
    print(f"delayed: {first:.4f} to {found:.4f}, one process {last:.4f}")
    assert abs(found - last) < DELAYED_BAND * (first - last)


def test_diloco_goes_the_way_of_one_process(tmp_path: Path) -> None:
    diloco = {"local_steps": LOCAL_STEPS, "local_batch": MICROBATCH, "patience_s": 20.0}
    ids, told = swarm(tmp_path, OUTER_EPOCHS, mode="diloco", diloco=diloco)
    results = rounds(told)
    assert sorted(results) == list(range(OUTER_EPOCHS))
    assert len({one.hashes[OUTER_EPOCHS] for one in told}) == 1
    first, last = alone_diloco(counted(ids, results))
    found = told[0].held_out[OUTER_EPOCHS]
    print(f"diloco: {first:.4f} to {found:.6f}, one process {last:.6f}")
    assert last < first - 0.3
    assert abs(found - last) < DILOCO_BAND * (first - last)
