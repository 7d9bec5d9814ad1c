"""What the transport needs of hivemind 1.1.12 beneath its public interface, name by name.

A release that renames or reshapes one of these fails here, and not in the midst of a round.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import typing
from typing import Any

import pytest
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.averaging.partition import TensorPartContainer
from hivemind.p2p import ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2

from training.swarm.averager import RoundAverager, Search
from training.swarm.reduction import ExactRunner, PartReducer

ARGUMENTS = {
    DecentralizedAverager._aggregate_with_group: ["self", "group_info", "min_vector_size"],
    DecentralizedAverager._run_allreduce_inplace_: ["self", "tensors", "group_info", "group_id"],
    DecentralizedAverager._register_allreduce_group: ["self", "group_info"],
    DecentralizedAverager.rpc_join_group: ["self", "request", "context"],
    DecentralizedAverager.rpc_aggregate_part: ["self", "stream", "context"],
    DecentralizedAverager.rpc_download_state: ["self", "_request", "_context"],
    DecentralizedAverager.run: ["self"],
    AllReduceRunner._communicate_with_peer: ["self", "peer_id"],
    AllReduceRunner._generate_input_for_peer: ["self", "peer_index"],
    AllReduceRunner._ban_sender: ["self", "peer_id"],
    AllReduceRunner._check_reasons_to_reject: ["self", "request", "context"],
    AllReduceRunner._get_peer_stub: ["self", "peer"],
    AllReduceRunner.rpc_aggregate_part: ["self", "stream", "context"],
    AllReduceRunner.finalize: ["self", "cancel", "exception"],
    GroupKeyManager.get_averagers: ["self", "group_key", "only_active"],
    GroupKeyManager.update_key_on_group_assembled: ["self", "group_info"],
    Matchmaking.look_for_group: ["self", "step"],
    TensorPartContainer.register_processed_part: ["self", "peer_index", "part_index", "part"],
    TensorPartContainer.register_failed_reducer: ["self", "peer_index"],
    TensorPartContainer.iterate_input_parts_for: ["self", "peer_index"],
}
FIELDS = {
    DecentralizedAverager: [
        "_averaged_tensors", "_running_groups", "_pending_groups_registered", "_matchmaking",
        "_outer_pipe", "_p2p", "_parent_pid", "shutdown_timeout", "total_size", "serializer",
    ],
    AllReduceRunner: [
        "tensor_part_container", "tensor_part_reducer", "parts_for_local_averaging",
        "sender_peer_ids", "ordered_peer_ids", "active_senders", "all_senders_started",
        "banned_senders", "sender_timeout", "reducer_timeout", "weight", "peer_id",
    ],
    TensorPartContainer: [
        "_input_parts_by_peer", "failed_size", "total_size", "prefetch", "return_deltas",
    ],
    Matchmaking: ["group_key_manager", "step_control"],
    GroupKeyManager: ["group_bits", "dht", "prefix", "target_group_size"],
}  # fmt: skip


def test_the_release_is_the_one_that_was_read() -> None:
    assert importlib.metadata.version("hivemind") == "1.1.12"


@pytest.mark.parametrize("method", ARGUMENTS, ids=lambda method: method.__qualname__)
def test_arguments(method: Any) -> None:
    found = [
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    assert found == ARGUMENTS[method]


@pytest.mark.parametrize("owner", FIELDS, ids=lambda owner: owner.__name__)
def test_fields(owner: type) -> None:
    source = inspect.getsource(owner)
    for field in FIELDS[owner]:
        assert re.search(rf"\bself\.{field}\b|\b{field}\b *[:=]", source), field


def test_our_reducer_has_all_that_the_runner_asks_of_its_own() -> None:
    replaced = {"accumulate_part", "on_sender_failed"}  # only in methods that we override
    source = inspect.getsource(AllReduceRunner)
    used = set(re.findall(r"self\.tensor_part_reducer\.(\w+)", source))
    assert used == {"accumulate_part", "finalize", "finished", "num_parts", "on_sender_failed"}
    overridden = {
        name for name in vars(ExactRunner) if inspect.isfunction(getattr(ExactRunner, name))
    }
    for name, method in inspect.getmembers(AllReduceRunner, inspect.isfunction):
        if any(f"tensor_part_reducer.{one}" in inspect.getsource(method) for one in replaced):
            assert name in overridden | {"_accumulate_parts_streaming"}
    # ... which only the runner's own rpc_aggregate_part calls, and ours does not.
    assert "_accumulate_parts_streaming" not in inspect.getsource(ExactRunner)
    source = inspect.getsource(PartReducer)
    assert all(f"self.{name}" in source or f"def {name}" in source for name in used - replaced)


def test_matchmaking_reads_nothing_else_of_a_step() -> None:
    used = set()
    for module in ("matchmaking",):
        source = inspect.getsource(importlib.import_module(f"hivemind.averaging.{module}"))
        used |= set(re.findall(r"\b(?:step|self\.step_control)\.(\w+)", source))
    search = Search(b"", 1.0, 2.0)
    assert used == {"get_timeout", "data_for_gather", "scheduled_time", "deadline"}
    assert all(hasattr(search, name) for name in used)


def test_every_remote_call_is_one_that_we_guard() -> None:
    RoundAverager._rpc_handlers = None
    RoundAverager._collect_rpc_handlers()
    handlers = {handler.method_name: handler for handler in RoundAverager._rpc_handlers}
    assert set(handlers) == {
        "rpc_aggregate_part", "rpc_download_state", "rpc_join_group", "rpc_read_state"
    }  # fmt: skip
    assert all(handler.stream_output for handler in handlers.values())
    assert handlers["rpc_aggregate_part"].stream_input
    for name in handlers:
        assert name in vars(RoundAverager), f"{name} is hivemind's own, without a guard"


def test_streams_are_known_by_the_name_of_the_annotation() -> None:
    strip = ServicerBase._strip_iterator_hint
    assert strip(typing.AsyncIterator[int]) == (int, True)


def test_messages() -> None:
    fields = {f.name for f in averaging_pb2.AveragingData.DESCRIPTOR.fields}
    assert fields == {"code", "group_id", "peer_id", "tensor_part", "weight"}
    fields = {f.name for f in averaging_pb2.DownloadData.DESCRIPTOR.fields}
    assert fields == {"metadata", "tensor_part"}
    assert "buffer" in {f.name for f in runtime_pb2.Tensor.DESCRIPTOR.fields}
    for code in ("AVERAGED_PART", "PART_FOR_AVERAGING", "PROTOCOL_VIOLATION", "CANCELLED"):
        assert code in averaging_pb2.MessageCode.keys()  # noqa: SIM118  (an enum wrapper)
