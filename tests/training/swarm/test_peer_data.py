"""What a peer reads: its own order, and where it goes on after it was killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.errors import UserError
from tests.training.tiny_runs import Place, make_place, recipe
from training.examples import Example
from training.prepare import Prepared, prepare
from training.swarm.data import LOG_FILE, POSITION_FILE, PeerData, peer_seed

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
Opened = Callable[..., PeerData]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("crawl"))


@pytest.fixture(scope="module")
def prepared(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(recipe(place, tmp_path_factory.mktemp("run")))


@pytest.fixture
def opened(place: Place, prepared: Prepared, tmp_path: Path) -> Opened:
    def made(folder: str = "peer", *, peer_id: str = PEER, seed: int = 7, **data: int) -> PeerData:
        (tmp_path / folder).mkdir(exist_ok=True)
        section = recipe(place, tmp_path).data.model_copy(update=data)
        return PeerData(prepared, section, tmp_path / folder, peer_id=peer_id, data_seed=seed)

    return made


def texts(examples: list[Example]) -> list[bytes]:
    return [np.asarray(one.arrays["input_ids"]).tobytes() for one in examples]


def test_each_peer_has_an_order_of_its_own(opened: Opened) -> None:
    first, again = opened("a", seed=1).take(12, epoch=0), opened("b", seed=1).take(12, epoch=0)
    other = opened("c", seed=2).take(12, epoch=0)
    assert texts(first) == texts(again)
    assert texts(first) != texts(other)


def test_seeds() -> None:
    found = {peer_seed(run, own) for run in range(8) for own in range(8)}
    assert len(found) == 64
    assert all(0 <= seed < 1 << 63 for seed in found)


def test_a_peer_goes_on_after_its_last_epoch(opened: Opened) -> None:
    whole = texts(opened("whole").take(30, epoch=0))
    with opened() as data:
        assert texts(data.take(4, epoch=0) + data.take(3, epoch=0)) == whole[:7]
        data.commit(0)
        assert data.committed == 7
        data.take(5, epoch=1)  # and killed: these never went into the weights
    with opened() as data:
        assert data.committed == 7
        assert texts(data.take(5, epoch=1)) == whole[7:12]
        data.commit(1)
    with opened() as data:
        assert texts(data.take(3, epoch=2)) == whole[12:15]


def test_a_round_beside_the_next_epoch(opened: Opened, tmp_path: Path) -> None:
    whole = texts(opened("whole").take(30, epoch=0))
    with opened() as data:
        data.take(4, epoch=0)
        data.take(6, epoch=1)
        data.commit(0)  # while epoch 1 goes on
        assert data.committed == 4
    with opened() as data:
        assert texts(data.take(6, epoch=1)) == whole[4:10]
        data.take(2, epoch=2)
        data.commit(1)
        data.commit(2)
    log = [json.loads(line) for line in (tmp_path / "peer" / LOG_FILE).read_text().splitlines()]
    assert log == [
        {"epoch": 0, "first": 0, "until": 4},
        {"epoch": 1, "first": 4, "until": 10},
        {"epoch": 2, "first": 10, "until": 12},
    ]


def test_epochs_without_this_peer_change_nothing(opened: Opened, tmp_path: Path) -> None:
    with opened() as data:
        data.commit(0)
        data.commit(5)
    assert not (tmp_path / "peer" / POSITION_FILE).exists()
    assert not (tmp_path / "peer" / LOG_FILE).exists()


def test_an_epoch_that_was_lost_is_passed_over(opened: Opened, tmp_path: Path) -> None:
    with opened() as data:
        data.take(4, epoch=0)
        data.take(3, epoch=7)  # the peer fell behind and downloaded epoch 7
        data.commit(7)
        assert data.committed == 7
    log = [json.loads(line) for line in (tmp_path / "peer" / LOG_FILE).read_text().splitlines()]
    assert log == [{"epoch": 7, "first": 4, "until": 7}]


def test_a_line_whose_position_was_not_saved_goes(opened: Opened, tmp_path: Path) -> None:
    with opened() as data:
        data.take(4, epoch=0)
        data.commit(0)
    log = tmp_path / "peer" / LOG_FILE
    kept = log.read_bytes()
    log.write_bytes(kept + b'{"epoch": 1, "first": 4, "until": 9}\n{"epoch": 2, "fi')
    opened().close()
    assert log.read_bytes() == kept


def test_the_position_of_another_peer(opened: Opened) -> None:
    with opened() as data:
        data.take(4, epoch=0)
        data.commit(0)
    with pytest.raises(UserError, match="the position of the peer 'QmYyQS"):
        opened(peer_id="QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC")


def test_the_position_in_other_data(opened: Opened) -> None:
    with opened() as data:
        data.take(4, epoch=0)
        data.commit(0)
    with pytest.raises(UserError, match="the saved position is of another stream"):
        opened(lanes=2)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("{}", "no position of")])
def test_a_damaged_position(text: str, message: str, opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / POSITION_FILE).write_text(text)
    with pytest.raises(UserError, match=message):
        opened()
