"""The state as bytes: canonical, hashed as a tree, copied in checked pieces."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.proto import averaging_pb2, runtime_pb2
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from training.swarm import state_transfer
from training.swarm.state import (
    CHUNK_BYTES,
    Digests,
    NoState,
    PartialCopy,
    read_state,
    state_hash,
    write_state,
)
from training.swarm.state_transfer import CorruptDonor, Donor, DonorFailed, receive, request
from training.swarm.types import State

SMALL = State(
    3,
    {
        "b": torch.tensor([1.5, -2.0]),
        "a": torch.tensor([[1, 2]], dtype=torch.int64),
        "c": torch.tensor(0.5, dtype=torch.bfloat16),
    },
    {"step": 7, "lr": 0.1},
)


def big(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return State(seed, {"w": torch.randn(900_000, generator=generator)})  # 3.6 MB: four chunks


def naive_hash(data: bytes) -> str:
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    tree = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    head = b"gristmill-swarm-state-1\n" + len(data).to_bytes(8, "little")
    return hashlib.sha256(head + tree).hexdigest()


@pytest.mark.parametrize("state", [SMALL, big(), State(0, {})], ids=["small", "big", "empty"])
def test_the_file_is_safetensors_and_its_hash_that_of_the_state(
    state: State, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    digests = write_state(path, state)
    data = path.read_bytes()
    assert digests.hash == state_hash(state) == naive_hash(data)
    assert digests.size_bytes == len(data)
    loaded = load_file(path)
    assert set(loaded) == set(state.tensors)
    again = read_state(path)
    assert (again.epoch, again.metadata) == (state.epoch, state.metadata)
    for name, tensor in state.tensors.items():
        for found in (loaded[name], again.tensors[name]):
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_the_bytes_are_these(tmp_path: Path) -> None:
    write_state(tmp_path / "state", SMALL)
    data = (tmp_path / "state").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert list(header) == ["__metadata__", "a", "b", "c"]
    assert header["b"] == {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}
    assert header["__metadata__"]["state"] == '{"epoch": 3, "metadata": {"lr": 0.1, "step": 7}}'
    assert data[
        8 + length :
    ].hex() == "0100000000000000020000000000000000 00c03f000000c0003f".replace(" ", "")


def test_order_and_layout_do_not_change_the_hash() -> None:
    turned = State(3, dict(reversed(SMALL.tensors.items())), dict(reversed(SMALL.metadata.items())))
    assert state_hash(turned) == state_hash(SMALL)
    strided = State(0, {"w": torch.arange(6.0).reshape(2, 3).t()})
    assert state_hash(strided) == state_hash(State(0, {"w": strided.tensors["w"].contiguous()}))


@pytest.mark.parametrize(
    "other",
    [
        State(4, SMALL.tensors, SMALL.metadata),
        State(3, SMALL.tensors, {"step": 8, "lr": 0.1}),
        State(3, {**SMALL.tensors, "b": torch.tensor([1.5, -2.0000002])}, SMALL.metadata),
        State(3, {**SMALL.tensors, "b": torch.tensor([[1.5], [-2.0]])}, SMALL.metadata),
        State(3, {"x" if n == "b" else n: t for n, t in SMALL.tensors.items()}, SMALL.metadata),
        State(
            3, {**SMALL.tensors, "b": torch.tensor([1.5, -2.0]).view(torch.int32)}, SMALL.metadata
        ),
    ],
    ids=["epoch", "metadata", "value", "shape", "name", "type"],
)
def test_any_difference_changes_the_hash(other: State) -> None:
    assert state_hash(other) != state_hash(SMALL)


def test_what_no_file_can_hold_is_told() -> None:
    with pytest.raises(ValueError, match=r"tensor 'z' has the type torch.complex64"):
        state_hash(State(0, {"z": torch.zeros(1, dtype=torch.complex64)}))
    with pytest.raises(ValueError, match="Out of range float values"):
        state_hash(State(0, {}, {"loss": float("nan")}))


def test_a_file_that_is_no_state_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a state at all")
    with pytest.raises(NoState, match="holds no state of a swarm"):
        read_state(tmp_path / "x")


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)


@given(
    st.one_of(
        json_values,
        st.fixed_dictionaries(
            {"size": st.integers() | json_values, "digests": st.text() | json_values}
        ),
    )
)
def test_digests_of_a_stranger_never_fail(value: Any) -> None:
    found = Digests.from_json(value)
    assert found is None or Digests.from_json(found.to_json()) == found


# Copies.


@pytest.fixture
def donor(tmp_path: Path) -> tuple[Donor, str, Path]:
    path = tmp_path / "shared"
    digests = write_state(path, big())
    donor = Donor(at_once=2, limit_mbit=None)
    donor.offer(path, digests)
    return donor, digests.hash, path


def fetch(donor: Donor, copy: PartialCopy, wanted: str, *, stop_after: int | None = None) -> None:
    async def stream() -> AsyncIterator[averaging_pb2.DownloadData]:
        number = 0
        async for message in donor.serve(request(wanted, copy)):
            if number == stop_after:
                raise ConnectionError("gone")
            number += 1
            yield message

    asyncio.run(receive(stream(), copy, chunk_timeout_s=5.0))


def test_a_copy_is_the_state(donor: tuple[Donor, str, Path], tmp_path: Path) -> None:
    source, wanted, _ = donor
    copy = PartialCopy(tmp_path / "mine", wanted)
    fetch(source, copy, wanted)
    assert copy.complete
    state = read_state(copy.finish())
    assert state_hash(state) == wanted
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [f"{wanted}.safetensors"]


def test_a_copy_goes_on_in_another_process(donor: tuple[Donor, str, Path], tmp_path: Path) -> None:
    source, wanted, path = donor
    with pytest.raises(DonorFailed, match="the connection broke: ConnectionError"):
        fetch(source, PartialCopy(tmp_path / "mine", wanted), wanted, stop_after=3)
    with path.open("r+b") as file:  # chunk 0 is not asked for again
        file.write(b"\xff" * 100)
    with (tmp_path / "mine" / f"{wanted}.part").open("ab") as file:  # a write cut by a kill
        file.write(b"half a chunk")
    copy = PartialCopy(tmp_path / "mine", wanted)
    assert copy.chunks == 2
    fetch(source, copy, wanted)
    assert state_hash(read_state(copy.finish())) == wanted


def test_a_corrupt_chunk_is_refused_and_the_ones_before_kept(
    donor: tuple[Donor, str, Path], tmp_path: Path
) -> None:
    source, wanted, path = donor
    with path.open("r+b") as file:
        file.seek(2 * CHUNK_BYTES + 9)
        file.write(b"\x01\x02\x03")
    copy = PartialCopy(tmp_path / "mine", wanted)
    with pytest.raises(CorruptDonor, match="chunk 2 is corrupt"):
        fetch(source, copy, wanted)
    assert copy.chunks == 2 and not copy.complete


def test_a_donor_that_lies_about_the_digests_is_refused(tmp_path: Path) -> None:
    other = write_state(tmp_path / "other", big(1))
    liar = Donor(at_once=1, limit_mbit=None)
    liar.offer(tmp_path / "other", other)
    wanted = state_hash(big())
    liar._states[wanted] = liar._states.pop(other.hash)
    copy = PartialCopy(tmp_path / "mine", wanted)
    with pytest.raises(CorruptDonor, match="its digests are not those of the state"):
        fetch(liar, copy, wanted)
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_donor_keeps_two_states_and_removes_older_ones(tmp_path: Path) -> None:
    donor = Donor(at_once=1, limit_mbit=None)
    hashes = []
    for seed in range(3):
        path = tmp_path / f"shared-{seed}"
        digests = write_state(path, big(seed))
        donor.offer(path, digests)
        hashes.append(digests.hash)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shared-1", "shared-2"]
    with pytest.raises(DonorFailed, match=r"it has no such state \(any more\)"):
        fetch(donor, PartialCopy(tmp_path / "mine", hashes[0]), hashes[0])


def test_a_donor_serves_so_many_at_once_and_stalled_ones_do_not_count(
    donor: tuple[Donor, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, wanted, _ = donor
    copy = PartialCopy(tmp_path / "mine", wanted)

    async def run() -> None:
        streams = [source.serve(request(wanted, copy)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        refused = await anext(source.serve(request(wanted, copy)))
        assert json.loads(refused.metadata) == {"refused": "it serves 2 others"}
        monkeypatch.setattr(state_transfer, "STALLED_S", -1.0)
        served = await anext(source.serve(request(wanted, copy)))
        assert "digests" in json.loads(served.metadata)
        monkeypatch.undo()
        for stream in streams:
            await stream.aclose()
        assert "digests" in json.loads((await anext(source.serve(request(wanted, copy)))).metadata)

    asyncio.run(run())


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"[]",
        b"{}",
        b'{"hash": 3, "from_chunk": 0}',
        b'{"hash": "x", "from_chunk": -1}',
        b"\xff",
    ],
)
def test_a_request_that_is_none_is_refused(donor: tuple[Donor, str, Path], metadata: bytes) -> None:
    async def run() -> averaging_pb2.DownloadData:
        return await anext(donor[0].serve(averaging_pb2.DownloadData(metadata=metadata)))

    assert json.loads(asyncio.run(run()).metadata) == {"refused": "the request is not valid"}


def test_a_silent_donor_is_left(tmp_path: Path) -> None:
    async def silent() -> AsyncIterator[averaging_pb2.DownloadData]:
        await asyncio.sleep(30)
        yield averaging_pb2.DownloadData(tensor_part=runtime_pb2.Tensor())

    copy = PartialCopy(tmp_path, "a" * 64)
    with pytest.raises(DonorFailed, match=r"it sent nothing for 0\.1 s"):
        asyncio.run(receive(silent(), copy, chunk_timeout_s=0.1))


def test_the_copy_of_another_state_makes_room(tmp_path: Path) -> None:
    for name in ("old.part", "old.index", "shared-x.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    PartialCopy(tmp_path, "b" * 64)
    assert [path.name for path in tmp_path.iterdir()] == ["shared-x.safetensors"]
