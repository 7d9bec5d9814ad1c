"""What `test_two_ranks` runs in each of two gloo processes; spawned children import it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from models.albert import build_albert
from models.decoder import build_decoder
from training.examples import IGNORED
from training.networks import checkpoint_blocks
from training.objectives import Objective
from training.optimisers import build_optimiser, tensor_norms
from training.recipe import Optimiser

RANKS = 2
VOCAB = 90
Batch = dict[str, Tensor]
Wrap = Callable[[Objective], nn.Module]


def run(rank: int, port: int) -> None:
    """Every check, on this rank. Raises AssertionError."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        for build, batch in ((_decoder, _causal()), (_albert, _pairs())):
            for wrap in _wraps(mesh):
                _check_gradients(rank, build, batch, wrap)
        _check_norms(mesh)
        _check_optimisers(mesh)
    finally:
        dist.destroy_process_group()


def _decoder() -> nn.Module:
    return build_decoder("tiny", VOCAB, max_length=32)


def _albert() -> nn.Module:
    return build_albert("tiny", VOCAB, max_length=32)


def _causal() -> Batch:
    """Three examples of 12 tokens, so that the ranks get two and one."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(5, VOCAB, (3, 12), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, [6, 11]] = IGNORED
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(3, -1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _pairs() -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, VOCAB, (3, 12), generator=generator)
    masked = torch.rand(3, 12, generator=generator) < 0.3
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (torch.arange(12) > 5).long().expand(3, -1),
        "labels": torch.where(masked, ids, IGNORED),
        "sentence_order_label": torch.tensor([0, 1, 1]),
    }


def _wraps(mesh: DeviceMesh) -> list[Wrap]:
    """DDP, and FSDP2 rooted at the objective; last of each with everything recomputed."""

    def recomputed(wrap: Wrap) -> Wrap:
        def prepare(objective: Objective) -> nn.Module:
            objective.max_logit_rows = 5
            checkpoint_blocks(objective.network)
            return wrap(objective)

        return prepare

    def sharded(reshard: bool) -> Wrap:
        def wrap(objective: Objective) -> nn.Module:
            if objective.terms == ("next_token",):
                for block in objective.network.model.layers:
                    fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            return fully_shard(objective, mesh=mesh, reshard_after_forward=reshard)

        return wrap

    return [
        DistributedDataParallel,
        recomputed(DistributedDataParallel),
        sharded(reshard=False),
        sharded(reshard=True),
        recomputed(sharded(reshard=True)),
    ]


def _loss(module: nn.Module, batch: Batch, counts: Tensor) -> Tensor:
    return (module(batch).sums.sum(dim=1) / counts).sum()


def _check_gradients(rank: int, build: Callable[[], nn.Module], batch: Batch, wrap: Wrap) -> None:
    """The ranks' averaged gradient is that of the whole batch in one process."""
    torch.manual_seed(0)
    alone = Objective(build()).train()
    objective = copy.deepcopy(alone)
    names = [name for name, _ in objective.network.named_parameters()]
    counts = Objective.counts(batch)
    expected = _loss(alone, batch, counts)
    expected.backward()

    wrapped = wrap(objective)
    part = {name: tensor[rank::RANKS] for name, tensor in batch.items()}
    loss = _loss(wrapped, part, counts)
    (loss * RANKS).backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=0, atol=1e-6)
    assert [name for name, _ in objective.network.named_parameters()] == names
    _assert_same(
        {name: one.grad for name, one in objective.network.named_parameters()},
        {name: one.grad for name, one in alone.network.named_parameters()},
        1e-6,
    )


def _check_norms(mesh: DeviceMesh) -> None:
    """Norms of sharded, replicated and plain tensors are those of the whole tensors."""
    network, sharded = _odd_networks(mesh)
    plain = [parameter.detach() for parameter in network.parameters()]
    mixed = [*(parameter.detach() for parameter in sharded.parameters()), plain[0]]
    mixed.append(mixed[0].redistribute(mesh, [torch.distributed.tensor.Replicate()]))
    expected = torch.stack([one.norm() for one in [*plain, plain[0], plain[0]]])
    torch.testing.assert_close(tensor_norms(mixed), expected, rtol=1e-6, atol=0)


def _check_optimisers(mesh: DeviceMesh) -> None:
    """Steps on sharded parameters are those of one process."""
    for recipe in (
        Optimiser(name="lamb", learning_rate=0.05, epsilon=1e-6),
        Optimiser(name="lamb", learning_rate=0.05, epsilon=1e-6, max_trust_weight_norm=0.5),
        Optimiser(name="adamw", learning_rate=0.05),
    ):
        network, sharded = _odd_networks(mesh)
        optimisers = [build_optimiser(recipe, one) for one in (network, sharded)]
        for step in range(4):
            rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            for one, optimiser in zip((network, sharded), optimisers, strict=True):
                one(rows).square().mean().backward()
                optimiser.step()
                optimiser.zero_grad()
        _assert_same(dict(sharded.named_parameters()), dict(network.named_parameters()), 1e-6)


def _odd_networks(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """A network, plain and sharded: uneven shards, and one row, of which a rank has none."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    return network, fully_shard(copy.deepcopy(network), mesh=mesh)


def _assert_same(
    left: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None], within: float
) -> None:
    assert left.keys() == right.keys()
    for name, found in left.items():
        expected = right[name]
        assert found is not None, name
        assert expected is not None, name
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole, expected, rtol=0, atol=within, msg=name)
