"""A coordinator lives through rotations of keys, and tells revocations at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from training.swarm import identity, keys, run_file
from training.swarm.authority import Authority
from training.swarm.membership import Membership, membership
from training.swarm.recipe import load_recipe
from training.swarm.revocation import dht_key as revoked_key
from training.swarm.run_file import RunFile
from training.swarm.tokens import dht_key as tokens_key
from training.swarm.upkeep import OWN_USER, Upkeep, renew

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
INPUTS: dict[str, Any] = {
    "tokenizer_sha256": "ab" * 32, "sources": [], "domains": {"bn": 1.0}, "init_sha256": None,
}  # fmt: skip


class Table:
    """As hivemind's DHT takes records."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, Any]] = []

    def store(self, key: str, value: Any, **_: Any) -> bool:
        self.stored.append((key, value))
        return True

    def keys(self) -> list[str]:
        return [key for key, _ in self.stored]


class Running:
    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.authority = Authority.create(
            folder / "authority", "sahajbert-small", clock=lambda: 1_800_000_000 + self.now
        )
        publics = tuple(self.authority.public_keys().values())
        self.member: Membership = membership(
            folder, "sahajbert-small", publics, authorised=True
        )  # fmt: skip
        assert self.member.trust is not None
        self.member.trust.clock = lambda: 1_800_000_000 + self.now
        self.member.trust.offer(self.authority.revocations())
        renew(self.authority, self.member)
        self.path = folder / "run.json"
        self.make().write(self.path)
        self.upkeep = Upkeep(
            self.authority, self.member, make=self.make, path=self.path, clock=lambda: self.now
        )
        self.dht = Table()

    def make(self) -> RunFile:
        return run_file.make(
            self.authority, load_recipe("sahajbert-small"), INPUTS, addresses=[ADDRESS]
        )

    def look(self, after_s: float) -> list[str]:
        """What was told then."""
        self.now += after_s
        self.dht.stored.clear()
        self.upkeep.look(self.dht)
        return self.dht.keys()


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path)


def test_all_is_told_once_a_minute(running: Running) -> None:
    everything = [revoked_key("sahajbert-small"), tokens_key("sahajbert-small")]
    assert running.look(0.0) == everything
    assert running.look(30.0) == []
    assert running.look(31.0) == everything
    assert running.upkeep.trouble is None


def test_a_revocation_is_told_at_once(running: Running, tmp_path: Path) -> None:
    running.look(0.0)
    peer = identity.load_or_create(tmp_path / "other.key").peer_id
    running.authority.allow_add("alice")
    running.authority.issue("alice", peer)
    running.look(5.0)
    running.authority.revoke(peer)
    assert revoked_key("sahajbert-small") in running.look(3.0)
    assert running.member.trust is not None
    found = running.member.trust.newest()
    assert found is not None and found.peers == (peer,)


def test_a_rotation_renews_token_and_run_file(running: Running) -> None:
    old = running.authority.state.signer_id(running.authority.clock())
    first = running.authority.public_keys()[old]
    running.look(0.0)
    new = running.authority.rotate()
    running.look(3.0)
    between = run_file.parse(running.path.read_bytes(), "run.json", trusted=[first])
    assert set(between.authority) == set(running.authority.public_keys().values())
    assert len(between.authority) == 2  # signed by both: who trusts the old one learns the new
    running.now += 180.0
    running.authority.retire(old)
    for _ in range(2):
        running.look(3.0)
        assert running.upkeep.trouble is None
    after = run_file.read(str(running.path))
    assert set(after.authority) == {running.authority.public_keys()[new]}
    assert running.member.trust is not None
    token = running.member.trust.check(running.member.token.text(), running.member.identity.peer_id)
    assert token.user == OWN_USER
    keys.unseal(run_file.KIND, after.sealed, running.authority.public_keys())


def test_a_damaged_log_is_no_end(running: Running, tmp_path: Path) -> None:
    running.look(0.0)
    log = tmp_path / "authority" / "allowlist.jsonl"
    before = log.read_bytes()
    log.write_bytes(before + b"{broken\n")
    assert running.look(61.0) == []
    assert running.upkeep.trouble is not None
    assert "not up to date" in running.upkeep.trouble
    log.write_bytes(before)
    assert running.look(61.0) != []
    assert running.upkeep.trouble is None
