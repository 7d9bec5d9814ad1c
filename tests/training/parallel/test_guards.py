"""What would train wrongly in a pipeline is refused in one line that says what to do instead."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from models.albert import build_albert
from models.decoder import build_decoder
from models.errors import UserError
from training.objectives import Objective
from training.parallel import guards
from training.parallel.chain import Chain, module_chain, objective_chain
from training.parallel.schedules import SCHEDULES
from training.parallel.units import Cut

F1B, ZBV = SCHEDULES["1f1b"], SCHEDULES["zbv"]
INTERLEAVED = SCHEDULES["interleaved-1f1b"]


@pytest.fixture
def group() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _linears(number: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))


def _refused(check: Callable[[], None]) -> str:
    with pytest.raises(UserError) as caught:
        check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ddp_is_refused(group: None) -> None:
    root = nn.Sequential(nn.Linear(2, 2), DistributedDataParallel(nn.Linear(2, 2)))
    told = _refused(lambda: guards.no_data_parallel_wrappers(module_chain(root)))
    assert told.startswith("'1' is in DistributedDataParallel")
    assert "data ranks of the mesh" in told


def test_fsdp_is_refused(group: None) -> None:
    root = _linears()
    fully_shard(root[2], mesh=init_device_mesh("cpu", (1,)))
    told = _refused(lambda: guards.no_data_parallel_wrappers(module_chain(root)))
    assert told.startswith("'2' is in FSDP2")
    assert "shard=True" in told


def test_plain_modules_pass() -> None:
    guards.no_data_parallel_wrappers(module_chain(_linears()))


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_are_refused_where_the_backward_pass_is_split(recompute: bool) -> None:
    root = _linears()
    block = root[1]
    block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    if recompute:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    chain = module_chain(root)
    told = _refused(lambda: guards.no_compiled_parts(chain, ZBV))
    assert told.startswith("'1' is compiled, but schedule 'zbv' splits the backward pass")
    assert "'1f1b'" in told
    assert "run.compile=false" in told
    guards.no_compiled_parts(chain, F1B)


def test_a_compiled_module_is_refused_too() -> None:
    root = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))
    assert "'1' is compiled" in _refused(lambda: guards.no_compiled_parts(module_chain(root), ZBV))
    guards.no_compiled_parts(module_chain(_linears()), ZBV)


def _two_ranks(chain: Chain) -> None:
    guards.no_hidden_aliases(chain, Cut((0, 2, 4)), F1B, 2)


def test_two_parameters_with_one_memory_are_refused_across_ranks() -> None:
    root = _linears()
    root[3].weight = nn.Parameter(root[0].weight.data)
    told = _refused(lambda: _two_ranks(module_chain(root)))
    assert told.startswith("'3.weight' on rank 1 of the pipeline shares its memory with '0.weight'")
    # Units 0 and 3 are on rank 0 here: one memory is one memory, as without a pipeline.
    guards.no_hidden_aliases(module_chain(root), Cut((0, 1, 2, 3, 4)), ZBV, 2)
    # Here they are not.
    chain = module_chain(root)
    _refused(lambda: guards.no_hidden_aliases(chain, Cut((0, 1, 2, 3, 4)), INTERLEAVED, 2))


@pytest.mark.parametrize("kind", ["buffer", "attribute", "view"])
def test_tensors_shared_across_ranks_are_refused(kind: str) -> None:
    root = _linears()
    tensor = torch.zeros(4)
    for place in (1, 2):
        if kind == "attribute":
            root[place].memory = tensor
        else:
            root[place].register_buffer("memory", tensor[place:] if kind == "view" else tensor)
    told = _refused(lambda: _two_ranks(module_chain(root)))
    assert told.startswith("'2.memory' on rank 1 of the pipeline shares its memory with '1.memory'")


def test_one_parameter_object_is_no_hidden_alias() -> None:
    root = _linears()
    root[3].weight = root[0].weight
    _two_ranks(module_chain(root))
    shared = nn.Linear(2, 2)
    _two_ranks(module_chain(nn.Sequential(shared, nn.GELU(), nn.GELU(), nn.Sequential(shared))))


@pytest.mark.parametrize("build", [build_albert, build_decoder])
def test_a_parameter_of_no_unit_is_refused(build: Callable[..., nn.Module]) -> None:
    """It would be trained by no stage."""
    objective = Objective(build("tiny", 90, max_length=32))
    objective_chain(objective)
    objective.network.scale = nn.Parameter(torch.ones(1))
    told = _refused(lambda: objective_chain(objective))
    assert told.startswith("parameter 'network.scale' belongs to none of the units of a '")
    assert "another run.strategy" in told


def test_a_parameter_of_no_block_is_refused() -> None:
    told = _refused(lambda: module_chain(_linears(), ["0", "1", "3"]))
    assert told == (
        "parameter '2.weight' belongs to none of the blocks 0, 1, 3: add the block that uses it"
    )


def test_microbatches_of_different_shapes_are_refused() -> None:
    def batch(*shape: int) -> dict[str, Tensor]:
        return {"input": torch.zeros(shape), "labels": torch.zeros(2)}

    guards.one_shape([batch(2, 3), batch(2, 3)])
    told = _refused(lambda: guards.one_shape([batch(2, 3), batch(2, 3), batch(2, 4)]))
    assert told.startswith("microbatch 2 has 'input' of shape '[2, 4]', microbatch 0 of '[2, 3]'")
    missing = {"input": torch.zeros(2, 3)}
    told = _refused(lambda: guards.one_shape([batch(2, 3), missing]))
    assert "microbatch 1 has the tensors 'input', microbatch 0 'input, labels'" in told
    _refused(lambda: guards.one_shape([missing, batch(2, 3)]))


def test_a_backward_pass_that_cannot_be_split_is_told() -> None:
    """torch's own error, made as its schedules make it."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    taken = torch.randn(2, 3, requires_grad=True)
    given = functional.gelu(first(functional.gelu(second(functional.gelu(first(taken))))))
    weights = [*first.parameters(), *second.parameters()]
    _, groups = stage_backward_input([given], [torch.ones(2, 3)], [taken], iter(weights))
    with pytest.raises(RuntimeError) as caught:
        stage_backward_weight(iter(weights), groups)
    guards.explain_split(caught.value, F1B)
    told = _refused(lambda: guards.explain_split(caught.value, ZBV))
    assert told.startswith("schedule 'zbv' splits the backward pass, which torch cannot do")
    guards.explain_split(RuntimeError("something else"), ZBV)
