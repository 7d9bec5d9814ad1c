"""Revocation lists: who is believed, which is newest, what the file gives to other processes."""

import json
import multiprocessing
from pathlib import Path

import pytest

from models.errors import UserError
from tests.training.swarm.authorities import START, Clock, authority, peer, trust
from training.swarm import keys, revocation
from training.swarm.authority import Authority
from training.swarm.keys import SigningKey, Untrusted
from training.swarm.revocation import Poller, Trust


def _sealed(made: Authority, signer: SigningKey | None = None, **changed: object) -> bytes:
    """The list of `made` with some fields changed, signed anew."""
    body = {**json.loads(made.revocations())["body"], **changed}
    if signer is not None:
        return keys.seal(revocation.KIND, body, [signer])
    return made.seal(revocation.KIND, body)


def test_only_a_newer_list_is_taken(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha",))
    peers = trust(made)
    assert peers.newest() is None
    first = made.revocations()
    assert peers.offer(first)
    assert not peers.offer(first)
    clock.now += 5
    second = made.revocations()
    assert peers.offer(second)
    made.revoke("asha")
    third = made.revocations()
    assert peers.offer(third)
    # An old list, which does not know of the revocation, is no way back.
    assert not peers.offer(first) and not peers.offer(second)
    found = peers.newest()
    assert found is not None
    assert (found.serial, dict(found.users)) == (3, {"asha": START + 5})
    assert peers.sealed().encode() == third


def test_bad_lists_are_refused(tmp_path: Path) -> None:
    made = authority(tmp_path / "a")
    peers, (name,) = trust(made), made.public_keys()
    public = made.public_keys()[name]
    bad: list[tuple[bytes | str, str]] = [
        (b"", "canonical form"),
        (b"\xff", "canonical form"),
        ("{}", "no sealed revocation list"),
        (_sealed(made, SigningKey.new()), "not signed by a key of the run's authority"),
        (made.seal("run", json.loads(made.revocations())["body"]), "not signed by a key"),
        (_sealed(made, run="other"), "of the run 'other'"),
        (_sealed(made, issued=START + 31), "signed in the future"),
        (_sealed(made, serial="1"), "not well formed"),
        (_sealed(made, serial=True), "not well formed"),
        (_sealed(made, users=[]), "not well formed"),
        (_sealed(made, users={"asha": "1"}), "not well formed"),
        (_sealed(made, peers={}), "not well formed"),
        (_sealed(made, peers=[1]), "not well formed"),
        (_sealed(made, keys={}), "not well formed"),
        (_sealed(made, keys={"0" * 32: public}), "by another's id"),
        (_sealed(made, keys={name: "ed25519:x"}), "is no public key"),
        (_sealed(made, extra=1), "other fields"),
    ]
    for data, why in bad:
        with pytest.raises(Untrusted, match=why):
            peers.offer(data)
    assert peers.newest() is None
    assert peers.offer(made.revocations())


def _refuses(peers: Trust, text: str, told: "multiprocessing.connection.Connection") -> None:
    before = True
    while True:
        try:
            peers.check(text, peer(0).peer_id)
        except Untrusted as error:
            told.send((before, str(error)))
            return
        if before:
            told.send("accepted")
            before = False


def test_every_process_of_a_peer_sees_a_revocation(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    text = made.issue("asha", peer(0).peer_id)
    peers = trust(made, path=tmp_path / "trust.json")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_refuses, args=(peers, text, theirs), daemon=True)
    process.start()
    assert ours.poll(30) and ours.recv() == "accepted"
    made.revoke("asha")
    peers.offer(made.revocations())
    assert ours.poll(10), "the other process did not see it within 10 s"
    assert ours.recv() == (False, "the token is void: the user 'asha' was revoked")
    process.join(10)


def test_a_restarted_peer_remembers(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha",))
    publics = list(made.public_keys().values())
    (old,) = made.public_keys()
    path = tmp_path / "trust.json"
    before = Trust(made.run, publics, path, clock=clock)
    text = made.issue("asha", peer(0).peer_id)
    first = made.revocations()
    new = made.rotate()
    before.offer(made.revocations())
    made.retire(old)
    before.offer(made.revocations())
    # The run file still names the retired key alone; what was learned since is on disk.
    after = Trust(made.run, publics, path, clock=clock)
    assert list(after.current_keys()) == [new]
    with pytest.raises(Untrusted, match="unknown key"):
        after.check(text, peer(0).peer_id)
    with pytest.raises(Untrusted, match="not signed by a key"):
        after.offer(first)
    # Without the file, the list of the new key alone is not believed.
    (tmp_path / "a" / "keys" / f"{old}.pem").unlink()
    gone = Authority.load(tmp_path / "a", clock=clock)
    stranger = Trust(made.run, publics, clock=clock)
    with pytest.raises(Untrusted, match="not signed by a key"):
        stranger.offer(gone.revocations())


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"sealed":"x"}', b'{"sealed":1}', b"\xff", b"[]"])
def test_a_damaged_file_is_replaced_by_the_next_list(tmp_path: Path, damage: bytes) -> None:
    made = authority(tmp_path / "a")
    path = tmp_path / "trust.json"
    path.write_bytes(damage)
    peers = trust(made, path=path)
    assert peers.newest() is None
    assert peers.offer(made.revocations())
    assert trust(made, path=path).newest() == peers.newest() is not None


def test_a_poller_asks_all_and_tells_what_failed(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    peers = trust(made)

    def broken() -> bytes:
        raise OSError("no route\nto host")

    poller = Poller(peers, [broken, lambda: None, lambda: b"{}"], interval_s=0.05)
    assert not poller.poll()
    assert poller.last_good is None
    assert poller.failures == {
        0: "OSError: no route to host",
        1: "it has no list",
        2: "Untrusted: it is no sealed revocation list",
    }
    good = Poller(peers, [broken, made.revocations], interval_s=0.05)
    assert good.poll() and good.last_good == START
    assert set(good.failures) == {0}


def test_a_poller_goes_on_until_it_is_stopped(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    peers, text = trust(made), made.issue("asha", peer(0).peer_id)
    poller = Poller(peers, [made.revocations], interval_s=0.02)
    poller.start()
    peers.check(text, peer(0).peer_id)
    made.revoke("asha")
    for _ in range(500):
        try:
            peers.check(text, peer(0).peer_id)
        except Untrusted:
            break
        poller._ended.wait(0.02)
    with pytest.raises(Untrusted, match="'asha' was revoked"):
        peers.check(text, peer(0).peer_id)
    poller.stop()
    assert not poller._thread.is_alive()
    Poller(peers, []).stop()


def test_who_was_away_while_keys_changed_comes_back_with_a_new_run_file(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha",))
    (old,) = made.public_keys()
    trust(made, clock, tmp_path / "trust.json").offer(made.revocations())
    new = made.rotate()
    clock.now += 3600
    made.retire(old)
    (tmp_path / "a" / "keys" / f"{old}.pem").unlink()
    gone = Authority.load(tmp_path / "a", clock=clock)
    # Its file names the old key only, its run file the new one.
    back = trust(gone, clock, tmp_path / "trust.json")
    assert list(back.current_keys()) == [new] and back.newest() is None
    assert back.offer(gone.revocations())
    assert back.check(gone.issue("asha", peer(0).peer_id), peer(0).peer_id).key == new


def test_an_initial_key_that_is_none_is_told() -> None:
    with pytest.raises(UserError, match="'x' is no public key"):
        Trust("r", ["x"])
