"""The transport with real processes of hivemind: rounds, guards and states, peers killed.

One swarm for the whole file, so the tests stand in the order in which peers go.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.swarm.real_peers import Peer, descendants, hub, is_alive, state_of, tensors_of
from training.swarm.state import CHUNK_BYTES, NoState, state_hash

pytestmark = pytest.mark.peers

STATE_VALUES = 2_000_000  # eight chunks
WAIT_S = 60.0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    """Two nodes and a client; a third and a fourth node that wait to be started."""
    with hub(tmp_path_factory.mktemp("swarm"), 5) as peers:
        peers[0].begin_start([], announcement_s=20.0)
        peers[0].end_start()
        peers[1].begin_start(peers[0].addresses, upload_limit_mbit=16.0, announcement_s=20.0)
        peers[2].begin_start(peers[0].addresses, role="client", announcement_s=20.0)
        peers[1].end_start()
        peers[2].end_start()
        yield peers


def together(
    peers: Sequence[Peer], values: Sequence[float], weights: Sequence[float], **given: Any
) -> list[Any]:
    """(RoundResult or None, tensors after it) of each peer, which all average at the same time.

    members: of the group that is wanted. Who is late on a busy machine is in none, which no peer
    promises; then they look for one again.
    """
    epochs = given.get("epochs") or [given["epoch"]] * len(peers)
    for _ in range(5):
        for peer, value, weight, epoch in zip(peers, values, weights, epochs, strict=True):
            peer.begin("average", value, weight, epoch, given.get("timeout_s", 20.0))
        rounds = [peer.end() for peer in peers]
        found = [0 if result is None else len(result.members) for result, _ in rounds]
        if "members" not in given or found == [given["members"]] * len(peers):
            return rounds
    raise AssertionError(f"groups of {found}")


def is_value(tensors: list[Any], value: float) -> bool:
    expected = tensors_of(1.0)
    return all(
        np.allclose(got, one.numpy() * value, rtol=3e-7, atol=0)
        for got, one in zip(tensors, expected, strict=True)
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def test_the_weighted_mean_is_exact_and_has_the_same_bits_at_all(swarm: list[Peer]) -> None:
    peers = swarm[:3]
    rounds = together(peers, (1.0, 2.0, 4.0), (1.0, 2.0, 5.0), epoch=1, members=3)
    ids = [peer.peer_id for peer in peers]
    for own, (result, tensors) in zip(ids, rounds, strict=True):
        assert (result.complete, result.fraction, result.epoch) == (True, 1.0, 1)
        weights = {member.peer_id: member.weight for member in result.members}
        assert weights == dict(zip(ids, (1.0, 2.0, 5.0), strict=True))
        assert {member.gathered["samples"] for member in result.members} == {1, 2, 5}
        assert is_value(tensors, (1 * 1 + 2 * 2 + 4 * 5) / 8)
        assert own not in result.rates and set(result.rates) <= set(ids)
    assert len({result.group_id for result, _ in rounds}) == 1
    first, second, client = ([t.tobytes() for t in tensors] for _, tensors in rounds)
    assert first == second == client
    vector_bytes = sum(len(one) for one in first)
    # The client reduces nothing: it sends its whole vector, once.
    assert vector_bytes < rounds[2][0].sent_bytes < 1.1 * vector_bytes


def test_peers_of_two_epochs_do_not_meet(swarm: list[Peer]) -> None:
    apart = together(swarm[:2], (1.0, 2.0), (1.0, 1.0), epochs=(2, 3), timeout_s=4.0)
    assert [result for result, _ in apart] == [None, None]
    assert is_value(apart[0][1], 1.0) and is_value(apart[1][1], 2.0)
    again = together(swarm[:2], (1.0, 2.0), (1.0, 1.0), epoch=3, members=2)
    assert all(result.complete and is_value(tensors, 1.5) for result, tensors in again)


def test_a_group_without_any_weight_averages_nothing(swarm: list[Peer]) -> None:
    empty = together(swarm[:2], (1.0, 2.0), (0.0, 0.0), epoch=4, timeout_s=4.0)
    assert [result for result, _ in empty] == [None, None]
    assert is_value(empty[0][1], 1.0)


def test_the_sender_itself_refuses_what_is_not_finite(swarm: list[Peer]) -> None:
    with pytest.raises(ValueError, match="tensor 0 holds a value that is not finite"):
        swarm[0].do("average", float("nan"), 1.0, 4, 5.0)
    with pytest.raises(ValueError, match=r"the weight '-1\.0' is not from 0 to"):
        swarm[0].do("average", 1.0, -1.0, 4, 5.0)


def test_a_peer_that_the_guard_refuses_is_in_no_group_and_gets_no_state(swarm: list[Peer]) -> None:
    shared = swarm[0].do("share", 1, 1000)
    for peer in swarm[:2]:
        (peer.folder / "banned").write_text(swarm[2].peer_id)
    rounds = together(swarm[:3], (1.0, 3.0, 100.0), (1.0, 1.0, 1.0), epoch=5, timeout_s=4.0)
    assert rounds[2][0] is None and is_value(rounds[2][1], 100.0)
    for result, tensors in rounds[:2]:
        assert result.complete and len(result.members) == 2 and is_value(tensors, 2.0)
    swarm[0].do("announce", 1, shared)
    with pytest.raises(NoState, match=f"{swarm[0].peer_id}: it does not know this peer"):
        swarm[2].do("download", shared, 4.0)
    for peer in swarm[:2]:
        (peer.folder / "banned").unlink()
    assert swarm[2].do("download", shared, 20.0) == (shared, 1)


def test_announcements_reach_everybody(swarm: list[Peer]) -> None:
    for number, peer in enumerate(swarm[:3]):
        peer.do("announce", number, f"{number}" * 64)
    ids = sorted(peer.peer_id for peer in swarm[:3])

    def all_here() -> bool:
        heard = [peer.do("announcements") for peer in swarm[:3]]
        return all([one.peer.peer_id for one in told] == ids for told in heard)

    wait_for(all_here)
    told = {one.peer.peer_id: one for one in swarm[2].do("announcements")}
    client = told[swarm[2].peer_id]
    assert (client.epoch, client.state_hash, client.peer.role) == (2, "2" * 64, "client")
    assert (client.samples, client.rate, client.loss, client.rss_bytes) == (3, 1.5, None, 1 << 20)


def test_a_joiner_takes_the_state_that_two_peers_announce(swarm: list[Peer]) -> None:
    expected = state_hash(state_of(7, STATE_VALUES))
    assert [peer.do("share", 7, STATE_VALUES) for peer in swarm[:2]] == [expected, expected]
    swarm[0].do("announce", 7, expected)
    swarm[1].do("announce", 7, "f" * 64)
    with pytest.raises(NoState, match="no two peers announce the same state"):
        swarm[2].do("download", None, 2.0)
    swarm[1].do("announce", 7, expected)
    assert swarm[2].do("download", None, 30.0) == (expected, 7)


def corrupt(peer: Peer, expected: str, chunk: int) -> None:
    with (peer.folder / f"shared-{expected}.safetensors").open("r+b") as file:
        file.seek(chunk * CHUNK_BYTES + 100)
        file.write(b"\x00\x01\x02\x03\x04")


def test_a_corrupt_donor_is_refused(swarm: list[Peer]) -> None:
    expected = swarm[0].do("share", 8, STATE_VALUES)
    corrupt(swarm[0], expected, 3)
    swarm[0].do("announce", 8, expected)
    with pytest.raises(NoState, match=f"{swarm[0].peer_id}: chunk 3 is corrupt"):
        swarm[2].do("download", expected, 5.0)
    # What was right of it is kept: three chunks.
    assert (swarm[2].folder / f"{expected}.part").stat().st_size == 3 * CHUNK_BYTES


def test_a_download_goes_on_at_another_donor_when_one_is_killed(swarm: list[Peer]) -> None:
    expected = swarm[0].do("share", 9, STATE_VALUES)
    assert swarm[1].do("share", 9, STATE_VALUES) == expected
    swarm[1].do("announce", 9, expected)
    swarm[2].begin("download", expected, WAIT_S)
    part = swarm[2].folder / f"{expected}.part"
    wait_for(lambda: part.exists() and part.stat().st_size >= 2 * CHUNK_BYTES)
    swarm[1].kill()
    # The second donor has only the rest of it whole: a download from the start would fail there.
    corrupt(swarm[0], expected, 0)
    swarm[0].do("announce", 9, expected)
    assert swarm[2].end() == (expected, 9)
    assert not part.exists()


def test_nan_of_one_peer_reaches_nobody_and_the_next_round_is_without_it(
    swarm: list[Peer],
) -> None:
    first, client, bad = swarm[0], swarm[2], swarm[3]
    bad.begin_start(first.addresses)
    bad.end_start()
    bad.do("poison", "nan")
    peers = [first, client, bad]
    spoilt = together(peers, (1.0, 2.0, 3.0), (1.0, 1.0, 1.0), epoch=10, members=3)
    for value, (result, tensors) in zip((1.0, 2.0, 3.0), spoilt, strict=True):
        assert len(result.members) == 3 and not result.complete and result.fraction < 1
        assert is_value(tensors, value)
    retried = together(peers, (1.0, 2.0, 3.0), (1.0, 1.0, 1.0), epoch=10, timeout_s=4.0)
    assert retried[2][0] is None
    for result, tensors in retried[:2]:
        assert result.complete and len(result.members) == 2 and is_value(tensors, 1.5)
    bad.kill()


def test_a_peer_killed_in_a_round_leaves_a_partial_one_that_is_seen(swarm: list[Peer]) -> None:
    first, client, dying = swarm[0], swarm[2], swarm[4]
    dying.begin_start(first.addresses)
    dying.end_start()
    dying.do("poison", "die")
    dying.begin("average", 3.0, 1.0, 11, 20.0)
    partial = together([first, client], (1.0, 2.0), (1.0, 1.0), epoch=11, members=3)
    for value, (result, tensors) in zip((1.0, 2.0), partial, strict=True):
        assert len(result.members) == 3 and not result.complete and result.fraction < 1
        assert is_value(tensors, value)
    retried = together([first, client], (1.0, 2.0), (1.0, 1.0), epoch=11, members=2)
    for result, tensors in retried:
        assert result.complete and len(result.members) == 2 and is_value(tensors, 1.5)


def test_a_peer_that_is_left_out_is_in_no_group(swarm: list[Peer]) -> None:
    first, client = swarm[0], swarm[2]
    first.do("leave_out", client.peer_id)
    for result, _ in together([first, client], (1.0, 2.0), (1.0, 1.0), epoch=12, timeout_s=4.0):
        assert result is None


def test_leaving_ends_all_processes_and_tells_the_others(swarm: list[Peer]) -> None:
    # torch's manager of shared memory belongs to the trainer, which goes on.
    children = {
        pid: name
        for pid in descendants(swarm[2].pid)
        if (name := Path(f"/proc/{pid}/comm").read_text().strip()) != "torch_shm_manag"
    }
    assert len(children) >= 3  # the DHT, its daemon, the averager
    assert swarm[2].do("leave") < 8.0
    wait_for(lambda: not [name for pid, name in children.items() if is_alive(pid)])
    wait_for(
        lambda: swarm[2].peer_id not in {one.peer.peer_id for one in swarm[0].do("announcements")}
    )


def test_no_process_outlives_the_trainer_alone_killed(swarm: list[Peer]) -> None:
    children = descendants(swarm[0].pid)
    assert len(children) >= 3
    os.kill(swarm[0].pid, signal.SIGKILL)
    wait_for(lambda: not any(is_alive(child) for child in children))
