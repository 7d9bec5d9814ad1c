"""Checkpoints: any number of ranks and strategy goes on; damage and tampering are seen."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from models.errors import Fault, UserError
from tests.training.checkpointed import STATE, Job, Trained, on_ranks, work
from training import checkpoint, checkpoint_tensors, folders

DECODER = Job("decoder", "adamw", "single", steps=5)
ALBERT = Job("albert", "lamb", "single", steps=5)
SAVED, MORE = 2, 3


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def first_part(job: Job, strategy: str, folder: Path, **changes: Any) -> Job:
    return job._replace(strategy=strategy, steps=SAVED, save=str(folder), **changes)


def second_part(job: Job, strategy: str, folder: Path, **changes: Any) -> Job:
    return job._replace(strategy=strategy, steps=MORE, start=SAVED, load=str(folder), **changes)


def test_saved_on_two_ranks_and_read_on_one_two_and_four(tmp_path: Path) -> None:
    expected = {job: work(job) for job in (DECODER, ALBERT)}
    written = [
        (DECODER, "ddp"), (DECODER, "zero1"), (DECODER, "zero2"), (DECODER, "zero3"),
        (ALBERT, "ddp"), (ALBERT, "zero3"),
    ]  # fmt: skip
    places = [tmp_path / f"{job.family}-{strategy}" for job, strategy in written]
    firsts = [
        first_part(job, strategy, place, recompute=strategy == "zero2")
        for (job, strategy), place in zip(written, places, strict=True)
    ]
    # What one strategy saved another one reads: each list is turned by one.
    others = ["zero3", "ddp", "zero1", "zero2", "zero1", "ddp"]
    seconds = [
        second_part(job, other, place, recompute=other == "zero3")
        for (job, _), other, place in zip(written, others, places, strict=True)
    ]
    single = tmp_path / "single"
    work(first_part(ALBERT, "single", single))
    two = on_ranks(2, [*firsts, *seconds, second_part(ALBERT, "zero2", single)])
    four = on_ranks(4, [seconds[0], seconds[3], seconds[5]])
    for (job, _), losses in zip(written, two[: len(firsts)], strict=True):
        assert losses == pytest.approx(expected[job][:SAVED], abs=1e-5)
    for (job, _), losses in zip([*written, (ALBERT, "")], two[len(firsts) :], strict=True):
        assert losses == pytest.approx(expected[job][SAVED:], abs=1e-5)
    for index, losses in zip((0, 3, 5), four, strict=True):
        assert losses == pytest.approx(expected[written[index][0]][SAVED:], abs=1e-5)
    for (job, _), place in zip(written, places, strict=True):
        losses = work(second_part(job, "single", place))
        assert losses == pytest.approx(expected[job][SAVED:], abs=1e-5)


def test_one_rank_goes_on_bit_by_bit(tmp_path: Path) -> None:
    for job in (DECODER, ALBERT):
        place = tmp_path / job.family
        assert work(first_part(job, "single", place)) + work(
            second_part(job, "single", place)
        ) == work(job)


def test_names_are_those_of_the_plain_network(tmp_path: Path) -> None:
    """Each parameter once, whatever stands around it; only safetensors and JSON on the disk."""
    trained = Trained(DECODER)
    trained.step(0)
    names = [name for name, _ in trained.objective.network.named_parameters()]
    trained.objective.network.model.layers[0] = checkpoint_wrapper(
        trained.objective.network.model.layers[0]
    )
    compiled = torch.compile(trained.objective, backend="eager")
    path = checkpoint.save(
        tmp_path, 1, objective=compiled, optimiser=trained.optimiser, state=STATE, keep=1
    )
    (shard,) = path.glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        found = set(file.keys())
    states = ("exp_avg", "exp_avg_sq", "step")
    assert found == {f"network.{name}" for name in names} | {
        f"optimiser.{name}.{key}" for name in names for key in states
    }
    assert "network.model.embed_tokens.weight" in found
    assert "network.lm_head.weight" not in found  # tied to it
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


@pytest.fixture
def run(tmp_path: Path) -> tuple[Trained, Path, dict[int, list[float]]]:
    """A run with checkpoints after steps 1 and 2, and the losses that follow each."""
    trained = Trained(DECODER)
    folder = tmp_path / "run"
    losses = [trained.step(0)]
    trained.save(folder, 1)
    losses.append(trained.step(1))
    trained.save(folder, 2)
    losses.append(trained.step(2))
    return trained, folder, {1: losses[1:], 2: losses[2:]}


def spoil_cut(path: Path) -> str:
    (file,) = path.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    return "is cut"


def spoil_bit(path: Path) -> str:
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    return "differs from its digest"


def spoil_missing(path: Path) -> str:
    (file,) = path.glob("*.safetensors")
    file.unlink()
    return "is missing"


def spoil_state(path: Path) -> str:
    file = path / checkpoint.STATE_FILE
    file.write_text(file.read_text().replace('"tokens": 96', '"tokens": 97'))
    return "is cut or differs from its checksum"


def spoil_no_state(path: Path) -> str:
    (path / checkpoint.STATE_FILE).unlink()
    return "No such file"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def spoil_pickle(path: Path) -> str:
    """What DCP's own reader would unpickle."""
    (path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    return "'.metadata' is no file of it"


SPOILS = [spoil_cut, spoil_bit, spoil_missing, spoil_state, spoil_no_state, spoil_pickle]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_damaged_checkpoint_is_passed_over(
    spoil: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trained, folder, losses = run
    monkeypatch.chdir(tmp_path)
    newest = folder / "checkpoints/step-00000002"
    assert checkpoint.latest(folder) == newest
    assert capsys.readouterr().err == ""
    reason = spoil(newest)
    assert checkpoint.latest(folder) == folder / "checkpoints/step-00000001"
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: checkpoint '{newest}' is passed over: ")
    assert reason in warning
    assert warning.count("\n") == 1
    with pytest.raises(UserError, match=r"cannot be used: .*: take another one"):
        checkpoint.checked(newest)
    trained.load(checkpoint.latest(folder))
    assert [trained.step(1), trained.step(2)] == losses[1]
    # The run comes to the damaged one again, and replaces it.
    trained.load(folder / "checkpoints/step-00000001")
    trained.step(1)
    trained.save(folder, 2)
    assert checkpoint.damage(newest) is None
    trained.load(newest)
    assert [trained.step(2)] == losses[2]
    assert not Path("exploded").exists()


def test_no_sound_checkpoint_is_no_beginning(run: Any) -> None:
    """A run that is all damaged does not silently begin again."""
    _, folder, _ = run
    for path in (folder / "checkpoints").glob("step-*"):
        spoil_bit(path)
    with pytest.raises(UserError, match="can be used: start from the beginning with --restart"):
        checkpoint.latest(folder)
    checkpoint.clear(folder)
    assert checkpoint.latest(folder) is None


def test_keep_and_latest(tmp_path: Path) -> None:
    trained = Trained(DECODER)
    for step in (1, 2, 3, 10):
        trained.save(tmp_path, step, keep=2)
        assert (tmp_path / "checkpoints/latest").read_text() == f"step-{step:08d}\n"
    assert listing(tmp_path) == ["latest", "step-00000003", "step-00000010"]
    # Killed between a checkpoint's name and the pointer: the pointer holds.
    (tmp_path / "checkpoints/latest").write_text("step-00000003\n")
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints/step-00000003"
    (tmp_path / "checkpoints/latest").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints/step-00000010"
    trained.save(tmp_path, 11, keep=1)
    assert listing(tmp_path) == ["latest", "step-00000011"]


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_same_state_is_not_written_again(tmp_path: Path) -> None:
    trained = Trained(DECODER)
    path = trained.save(tmp_path, 1)
    before = (path / checkpoint.STATE_FILE).stat().st_ino
    trained.save(tmp_path, 1)
    assert (path / checkpoint.STATE_FILE).stat().st_ino == before
    trained.save(tmp_path, 1, state={**STATE, "step": 1})
    assert checkpoint.read_state(path)["state"]["step"] == 1
    assert listing(tmp_path) == ["latest", "step-00000001"]


def test_left_overs_of_killed_runs_go(tmp_path: Path) -> None:
    trained = Trained(DECODER)
    left = folders.partial(tmp_path / "checkpoints/step-00000007")
    shutil.copytree(trained.save(tmp_path, 1), left)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints/step-00000001"
    trained.save(tmp_path, 2)
    assert not left.exists()


def test_a_failing_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(DECODER)
    trained.save(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(folders, "sync", full)
    with pytest.raises(Fault, match=r"cannot save '.*step-00000002': No space left on device"):
        trained.save(tmp_path, 2)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints/step-00000001"


def fail_on_rank_1(job: Job, rank: int, ranks: int) -> str:
    """Rank 1 cannot write its part; both must hear of it."""
    trained = Trained(job, rank, ranks)
    trained.step(0)
    if rank == 1:

        def broken(*_: Any) -> None:
            raise OSError(5, "Input/output error", "shard")

        checkpoint_tensors.HuggingFaceStorageWriter.write_data = broken
    try:
        trained.save(str(job.save), 1)
    except Fault as error:
        return str(error)
    return "saved"


def test_a_rank_that_fails_while_saving_fails_all(tmp_path: Path) -> None:
    for message in on_ranks(
        2, [DECODER._replace(strategy="zero3", save=str(tmp_path))], fail_on_rank_1
    ):
        assert message.startswith(f"cannot save '{tmp_path}/checkpoints/step-00000001': ")
        assert "Input/output error" in message
        assert "\n" not in message
    assert checkpoint.latest(tmp_path) is None


def test_another_network_is_told(tmp_path: Path) -> None:
    path = Trained(DECODER).save(tmp_path, 1)
    with pytest.raises(UserError, match=r"is of another network: .* use the recipe that wrote it"):
        Trained(ALBERT).load(path)


def test_object_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'s3://bucket/run' is a URL: checkpoints and exports need"):
        Trained(DECODER).save("s3://bucket/run", 1)


def test_whole_network_is_that_of_the_step(tmp_path: Path) -> None:
    """An older one must not be exported as the last one, when the last one is damaged."""
    trained = Trained(DECODER)
    for step in (1, 2):
        trained.step(step)
        newest = trained.save(tmp_path, step, state=STATE | {"step": step})
    found = checkpoint.whole_network(tmp_path, 2)
    for name, tensor in trained.objective.network.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    part = next(newest.glob("shard-*"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(
        Fault, match=r"of step 2 .* the newest sound one is of step 1: run the same"
    ):
        checkpoint.whole_network(tmp_path, 2)
    with pytest.raises(Fault, match="there is none"):
        checkpoint.whole_network(tmp_path / "empty", 2)
