"""What lets a peer in: refused before anything is started, and shown to the others again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from training.swarm.authority import Authority
from training.swarm.membership import Membership, membership

RUN = "sahajbert-small"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    found = Authority.create(tmp_path / "authority", RUN)
    found.allow_add("asha")
    return found


@pytest.fixture
def member(authority: Authority, tmp_path: Path) -> Membership:
    publics = tuple(authority.public_keys().values())
    found = membership(tmp_path / "peer", RUN, publics, authorised=True)
    found.token.write(authority.issue("asha", found.identity.peer_id, life_s=3600))
    return found


def test_a_revoked_token_is_refused_at_the_door(authority: Authority, member: Membership) -> None:
    member.enter()
    authority.revoke("asha")
    assert member.trust is not None
    member.trust.offer(authority.revocations())
    with pytest.raises(UserError, match="lets nobody in") as refused:
        member.enter()
    assert "revoked" in str(refused.value) and "--token FILE" in str(refused.value)
    assert "\n" not in str(refused.value)


class Table:
    """A DHT whose first stores nobody takes."""

    def __init__(self, *stored: bool) -> None:
        self.answers, self.asked = list(stored), 0

    def store(self, *_: Any, **__: Any) -> bool:
        self.asked += 1
        return self.answers.pop(0) if self.answers else True


def test_a_token_that_was_not_stored_is_shown_again(member: Membership) -> None:
    now, said, table = 0.0, list[str](), Table(False, False, False, True, False, True)
    source = member.showing(table, said.append, clock=lambda: now)
    asked = []
    for _ in range(18):  # six minutes, polled each 20 s
        now += 20
        assert source() is None
        asked.append(table.asked)
    assert asked == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6]
    assert said == ["warning: this peer's token is not stored in the network: others refuse it"]


def test_a_void_token_is_told_once(authority: Authority, member: Membership) -> None:
    assert member.trust is not None
    authority.revoke("asha")
    member.trust.offer(authority.revocations())
    now, said, table = 0.0, list[str](), Table()
    source = member.showing(table, said.append, clock=lambda: now)
    for _ in range(4):
        now += 60
        assert source() is None
    assert (len(said), table.asked) == (1, 0)
    assert "this peer's token is void" in said[0]


def test_without_authorisation_nothing_is_shown(tmp_path: Path) -> None:
    found = membership(tmp_path, RUN, (), authorised=False)
    table = Table()
    assert found.show(table, lambda _: None)
    assert (found.keep(table, lambda _: None), table.asked) == (None, 0)
