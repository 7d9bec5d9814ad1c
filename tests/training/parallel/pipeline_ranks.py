"""What `test_pipeline` runs in each of some gloo processes: cases, each one step of a pipeline.

A case is a dict that JSON could hold; `alone` computes the same step in one process.
"""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from models.albert import albert_config, build_albert
from models.decoder import decoder_config
from models.errors import UserError
from training.batches import Batch
from training.examples import IGNORED
from training.networks import checkpoint_blocks
from training.objectives import Objective
from training.parallel.chain import Chain, module_chain, objective_chain, run_chain, unpacked
from training.parallel.pipeline import Pipeline, Weigh
from training.parallel.schedules import SCHEDULES, rank_of
from training.parallel.stage import unit_seed
from training.parallel.units import Cut

VOCAB, LENGTH, ROWS = 90, 12, 3
SEED, STEP = 5, 7
CPU = torch.device("cpu")
Case = dict[str, Any]
"""network, units, schedule, stages_per_rank, microbatches (of one pipeline), cut; where they are
not as usual: pipelines, shard, recompute, dropout, bf16, refused."""


def run(rank: int, ranks: int, port: int, cases: Sequence[Case], folder: str) -> None:
    """Every case on this rank; what came out goes to `folder`/`rank`.pt."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    try:
        meshes: dict[int, DeviceMesh] = {}
        found = [_told(case, meshes) for case in cases]
    finally:
        dist.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.pt")


def _told(case: Case, meshes: dict[int, DeviceMesh]) -> dict[str, Any]:
    """The outcome of a case; an error says which one it was."""
    try:
        return _outcome(case, meshes)
    except Exception as error:
        raise RuntimeError(f"in case {case}") from error


def _outcome(case: Case, meshes: dict[int, DeviceMesh]) -> dict[str, Any]:
    pipelines = case.get("pipelines", 1)
    mesh = None
    if pipelines > 1:
        shape = (dist.get_world_size() // pipelines, pipelines)
        if pipelines not in meshes:
            meshes[pipelines] = init_device_mesh("cpu", shape, mesh_dim_names=("pipe", "data"))
        mesh = meshes[pipelines]
    chain = chain_of(case)
    first = 0 if mesh is None else mesh.get_local_rank("data")
    pipe_rank = dist.get_rank() if mesh is None else mesh.get_local_rank("pipe")
    if "refused" not in case:
        _spoil(case, chain, first, pipe_rank)
    try:
        pipeline = Pipeline(
            chain, Cut(tuple(case["cut"])), schedule=SCHEDULES[case["schedule"]],
            stages_per_rank=case["stages_per_rank"], microbatches=case["microbatches"], mesh=mesh,
            device=CPU, bf16=case.get("bf16", False), shard=case.get("shard", False),
        )  # fmt: skip
    except UserError as error:
        return {"refused": str(error)}
    # Only this rank's part of the network stays in memory.
    modules = [weakref.ref(module) for unit in chain.units for _, module in unit.modules]
    del chain
    gc.collect()
    own = {id(module) for module in pipeline.module.modules()}
    assert {id(found) for found in (one() for one in modules) if found is not None} <= own
    batches = batches_of(case)[first::pipelines]
    weigh = weigh_of(case)
    outputs = pipeline.step(batches, weigh, seed=SEED, step=STEP)
    gradients = _gradients(pipeline)
    norm = pipeline.gradient_norm()
    pipeline.scale_gradients(0.5)
    half = pipeline.gradient_norm()
    # Other numbers and shapes of batches than the schedule has.
    evaluated = pipeline.forward([*batches, *_shorter(batches[:1])])
    for parameter in pipeline.module.parameters():
        parameter.grad = None
    calls = _counted(pipeline.module)
    again = pipeline.step(batches, weigh, seed=SEED, step=STEP)
    assert (outputs is None) == (again is None) == (not pipeline.last)
    for one, other in zip(outputs or (), again or (), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(_gradients(pipeline), gradients, rtol=0, atol=1e-6)
    return {
        "gradients": gradients,
        "sharded": sorted(
            pipeline.parameter_names[id(parameter)]
            for parameter in pipeline.module.parameters()
            if isinstance(parameter, DTensor)
        ),
        "calls": calls[0],
        "numbers": list(range(first, pipelines * case["microbatches"], pipelines)),
        "outputs": outputs,
        "evaluated": evaluated,
        "norm": norm,
        "half": half,
    }


def _counted(root: nn.Module) -> list[int]:
    """A list with one number: passes through the feed-forward layers of a decoder from now on."""
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    for module in root.modules():
        if isinstance(module, LlamaMLP):
            module.register_forward_pre_hook(count)
    return calls


def _gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    names = pipeline.parameter_names
    return {
        names[id(parameter)]: _whole(parameter.grad) for parameter in pipeline.module.parameters()
    }


def _spoil(case: Case, chain: Chain, data_rank: int, pipe_rank: int) -> None:
    """Let copies begin with other weights here: those of the first holder have to count."""
    schedule, cut = SCHEDULES[case["schedule"]], Cut(tuple(case["cut"]))
    ranks = dist.get_world_size() // case.get("pipelines", 1)
    names = chain.parameter_names()
    place = {unit: stage for stage in range(cut.stages) for unit in cut.of(stage)}
    for name, units in chain.holders().items():
        if data_rank > 0 or rank_of(schedule, place[units[0]], ranks) != pipe_rank:
            for parameter in _parameters(chain):
                if names[id(parameter)] == name:
                    parameter.data.add_(1.0)


def _parameters(chain: Chain) -> Iterator[nn.Parameter]:
    """Each once."""
    found = {
        id(parameter): parameter
        for unit in chain.units
        for _, module in unit.modules
        for parameter in module.parameters()
    }
    yield from found.values()


def _whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def chain_of(case: Case) -> Chain:
    """The same chain on every call: `units` units."""
    root = root_of(case)
    if isinstance(root, Objective):
        return objective_chain(root)
    return module_chain(root)


def root_of(case: Case) -> nn.Module:
    """The whole network: `tied` and `untied` decoders, `albert`, or a `sequential` of blocks."""
    torch.manual_seed(0)
    layers, dropout = case["units"] - 2, case.get("dropout", 0.0)
    if case["network"] == "sequential":
        return _sequential(case["units"])
    if case["network"] == "shared":
        return nn.Sequential(nn.Embedding(VOCAB, 8), *(_shared() for _ in range(case["units"] - 1)))
    if case["network"] == "twice":
        return nn.Sequential(nn.Embedding(VOCAB, 8), *(_Twice() for _ in range(case["units"] - 1)))
    if case["network"] == "albert":
        config = albert_config("tiny", VOCAB, dropout=dropout, max_length=LENGTH)
        config.num_hidden_layers = layers
        network: Any = type(build_albert("tiny", VOCAB))(config)
    else:
        config = decoder_config("tiny", VOCAB, dropout=dropout, max_length=LENGTH)
        config.num_hidden_layers = layers
        config.tie_word_embeddings = case["network"] == "tied"
        network = LlamaForCausalLM(config)
    if case.get("recompute"):
        checkpoint_blocks(network)
    # Parts of the logits are recomputed, too.
    return Objective(network, max_logit_rows=7 if case.get("recompute") else 8192).train()


def _sequential(units: int) -> nn.Module:
    """Blocks of which the second and the last are one, and one gives a view."""
    wide = nn.Linear(8, 8)
    blocks: list[nn.Module] = [nn.Embedding(VOCAB, 8), wide]
    blocks += [nn.Sequential(nn.Linear(8, 8), nn.Unflatten(2, (2, 4)), nn.Flatten(2))]
    blocks += [nn.Sequential(nn.GELU(), nn.Linear(8, 8)) for _ in range(units - 4)]
    return nn.Sequential(*blocks, wide).train()


def _shared() -> nn.Module:
    """Two modules with one weight, and one with a weight of its own between them."""
    first, second, third = (nn.Linear(8, 8, bias=False) for _ in range(3))
    third.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third, nn.Tanh())


class _Twice(nn.Module):
    """Uses a weight twice, one use after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        for weight in (self.first, self.second, self.first):
            hidden = torch.tanh(functional.linear(hidden, weight))
        return hidden


def batches_of(case: Case) -> list[Batch]:
    """All microbatches of a step; they have very different numbers of labels."""
    number = case.get("pipelines", 1) * case["microbatches"]
    make = _pairs if case["network"] == "albert" else _causal
    return [make(index) for index in range(number)]


def _causal(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(5, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    cut = 1 + index * 3 % LENGTH
    labels[:, [cut - 1, -1]] = IGNORED
    labels[:, LENGTH - 4 * (index % 3) :] = IGNORED
    positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
    return {
        "input": ids,
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions.expand(ROWS, -1),
    }


def _pairs(index: int) -> Batch:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(5, VOCAB, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, 5, 3 + index % 5])[:, None]
    seen = torch.arange(LENGTH)[None] < lengths
    masked = (torch.rand(ROWS, LENGTH, generator=generator) < 0.1 + 0.2 * (index % 3)) & seen
    return {
        "input_ids": ids,
        "attention_mask": seen.long(),
        "token_type_ids": (torch.arange(LENGTH) > 5).long().expand(ROWS, -1),
        "labels": torch.where(masked, ids, IGNORED),
        "sentence_order_label": torch.tensor([0, 1, IGNORED if index % 2 else 1]),
    }


def _shorter(batches: Sequence[Batch]) -> Iterator[Batch]:
    """The same with two examples only."""
    for batch in batches:
        yield {name: tensor[:2] for name, tensor in batch.items()}


def weigh_of(case: Case) -> Weigh:
    """The loss of a microbatch: sums over its labels by the labels of all microbatches."""
    batches = batches_of(case)
    if case["network"] in ("sequential", "twice", "shared"):
        return lambda output, _: output.float().square().sum() / len(batches)
    counts = torch.stack([Objective.counts(batch) for batch in batches]).sum(0)
    return lambda output, _: (unpacked(output).sums / counts[:, None].float()).sum()


def alone(case: Case) -> dict[str, Any]:
    """What one process computes: gradients by first name, outputs and evaluated ones, norm."""
    root = root_of(case)
    chain = objective_chain(root) if isinstance(root, Objective) else module_chain(root)
    batches, weigh = batches_of(case), weigh_of(case)
    outputs = []
    for number, batch in enumerate(batches):
        output = _passed(chain, batch, number) if case.get("dropout") else run_chain(chain, batch)
        weigh(output, batch).backward()
        outputs.append(output.detach())
    names = chain.parameter_names()
    gradients = {}
    for parameter in root.parameters():
        assert parameter.grad is not None
        gradients[names[id(parameter)]] = parameter.grad
    root.eval()
    with torch.no_grad():
        evaluated = [run_chain(chain, batch) for batch in batches]
        short = [run_chain(chain, batch) for batch in _shorter(batches)]
    return {
        "gradients": gradients,
        "outputs": outputs,
        "evaluated": evaluated,
        "short": short,
        "norm": float(torch.nn.utils.get_total_norm(list(gradients.values()))),
    }


def _passed(chain: Chain, batch: Batch, number: int) -> Tensor:
    """`run_chain` with the random choices that a pipeline makes."""
    side = chain.side(copy.copy(batch))
    hidden = batch[chain.input]
    for position, unit in enumerate(chain.units):
        torch.manual_seed(unit_seed(SEED, STEP, number, position))
        hidden = unit.run(hidden, side)
    return hidden
