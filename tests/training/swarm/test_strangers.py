"""Strangers at the three doors of a real swarm: the DHT, the averager, the weights.

Two members, a node and a client with tokens, and one stranger who shows one bad token after the
other. The members run once for the whole file; the tests stand in the order in which things happen.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.swarm import authorities, guarded_peers
from tests.training.swarm.guarded_peers import REFUSED, Knocks
from tests.training.swarm.real_peers import RUN, Peer, hub, state_of, tensors_of
from training.swarm import keys, tokens
from training.swarm.authority import Authority
from training.swarm.state import NoState, state_hash
from training.swarm.tokens import Token
from training.swarm.types import Announcement, PeerInfo
from training.swarm.whereabouts import elsewhere, view

pytestmark = pytest.mark.peers

STATE_VALUES = 50_000
HASH = state_hash(state_of(7, STATE_VALUES))
LIES = "f" * 64
BAD = ("none", "expired", "rogue", "altered", "other kind", "other run", "replayed")
KEYS = ("announcements", "tokens", "receipts")
WITHIN_S = 60.0


class Swarm:
    """The peers by name, their authority, and which epoch is next."""

    def __init__(self, folder: Path, peers: Sequence[Peer]) -> None:
        self.made = Authority.create(folder / "authority", RUN)
        self.rogue = Authority.create(folder / "rogue", RUN)
        self.rogue.allow_add("eve")
        for user in ("asha", "bina", "chitra", "dipa"):
            self.made.allow_add(user)
        self.names = dict(zip(("asha", "bina", "chitra", "dipa", "eve"), peers, strict=True))
        self.ids = {name: authorities.peer(at).peer_id for at, name in enumerate(self.names)}
        self.epoch = 0

    def __getitem__(self, name: str) -> Peer:
        return self.names[name]

    def begin(self, name: str, **options: Any) -> None:
        """Start a peer; who has no token given gets one of the authority."""
        who = authorities.peer(list(self.names).index(name))
        if "token" not in options:
            options["token"] = self.made.issue(name, who.peer_id)
        first = [*self["asha"].addresses, *self["bina"].addresses]
        publics = list(self.made.public_keys().values())
        self[name].begin_start(first, keys=publics, key=str(who.path), **options)

    def average(self, **values: float) -> dict[str, tuple[Any, list[Any]]]:
        """(RoundResult or None, tensors after it) of each peer; weights are 1, 2, 3, ..."""
        self.epoch += 1
        for weight, (name, value) in enumerate(values.items(), start=1):
            limit_s = 2.5 if name == "eve" else 20.0
            self[name].begin("average", value, float(weight), self.epoch, limit_s)
        return {name: self[name].end() for name in values}

    def together(self, **values: float) -> dict[str, tuple[Any, list[Any]]]:
        """As `average`, again until all are in one group: newcomers have to hear of each other."""
        wanted = {self.ids[name] for name in values}
        for _ in range(5):
            found = self.average(**values)
            groups = [
                {one.peer_id for one in result.members} for result, _ in found.values() if result
            ]
            if groups == [wanted] * len(values):
                return found
        raise AssertionError(f"{list(values)} did not come together: {found}")

    def bad_token(self, kind: str) -> str:
        """A token that must not let the stranger in."""
        own, now = self.ids["eve"], int(time.time())
        (signer,) = self.made._signers.values()
        right = Token(RUN, "asha", own, now - 60, now + 600, signer.id)
        past = dataclasses.replace(right, issued=now - 601, expires=now - 1)
        body = dataclasses.asdict(right)
        bina = self.made.issue("bina", self.ids["bina"])
        return {
            "none": "",
            "expired": tokens.issue(past, signer),
            "rogue": self.rogue.issue("eve", own),
            "altered": bina.replace(self.ids["bina"], own),
            # Signed by the authority, but as another thing than a token.
            "other kind": keys.canonical({**body, "signature": signer.sign("run", body)}).decode(),
            "other run": tokens.issue(dataclasses.replace(right, run="otherrun"), signer),
            "replayed": bina,
        }[kind]


def is_mean(found: tuple[Any, list[Any]], names: Sequence[str], swarm: Swarm, mean: float) -> None:
    """Assert that a round was whole, of these members, and gave exactly this mean."""
    result, tensors = found
    assert result is not None and result.complete and result.fraction == 1.0
    assert {one.peer_id for one in result.members} == {swarm.ids[name] for name in names}
    for got, one in zip(tensors, tensors_of(1.0), strict=True):
        np.testing.assert_allclose(got, one.numpy() * mean, rtol=3e-7, atol=0)


def wait_for(what: Callable[[], Any], expected: Any) -> None:
    """Stores are not waited for, so what is written is there a little later."""
    deadline = time.monotonic() + WITHIN_S
    while (found := what()) != expected:
        assert time.monotonic() < deadline, f"{found} is not {expected}"
        time.sleep(0.2)


def heard_by(peer: Peer) -> list[str]:
    """Whose announcements a peer believes."""
    return [one.peer.peer_id for one in peer.do("announcements")]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """asha and bina: members. chitra: a client with a token. dipa: a node with one, which will be
    revoked. eve: a stranger."""
    folder = tmp_path_factory.mktemp("strangers")
    with hub(folder, 5, guarded_peers.__file__) as peers:
        made = Swarm(folder, peers)
        made.begin("asha")
        made["asha"].end_start()
        made.begin("bina")
        made["bina"].end_start()
        made.begin("eve", token="", stranger=True)
        made.begin("dipa")
        made.begin("chitra", role="client")
        for name in ("dipa", "chitra", "eve"):
            made[name].end_start()
        yield made


def test_members_and_clients_with_tokens_pass_all_three_doors(swarm: Swarm) -> None:
    members = ("asha", "bina", "chitra", "dipa")
    for name in members:
        swarm[name].do("announce", 1, HASH)
    found = swarm.together(asha=1.0, bina=2.0, chitra=4.0, dipa=8.0)
    for name in members:
        is_mean(found[name], members, swarm, (1 * 1 + 2 * 2 + 3 * 4 + 4 * 8) / 10)
        swarm[name].do("tell", found[name][0])
    ids = sorted(swarm.ids[name] for name in members)
    for name in members:
        wait_for(lambda: [swarm[name].do("records")[key] for key in KEYS], [ids] * 3)  # noqa: B023
        wait_for(lambda: heard_by(swarm[name]), ids)  # noqa: B023
    wait_for(lambda: swarm["asha"].do("heard"), ids)
    assert [swarm[name].do("share", 7, STATE_VALUES) for name in ("asha", "bina")] == [HASH] * 2
    donors = [swarm.ids["asha"]]
    for name in ("chitra", "dipa"):
        assert swarm[name].do("fetch", HASH, donors, 30.0) == 7
        knocks = swarm[name].do("knock", swarm.ids["asha"], HASH)
        assert knocks.state_bytes > 4 * STATE_VALUES
        assert REFUSED not in (knocks.join, knocks.aggregate)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("none", "replayed") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in BAD
    ],
)
def test_a_stranger_gets_nothing_and_changes_nothing(swarm: Swarm, kind: str) -> None:
    eve, token = swarm["eve"], swarm.bad_token(kind)
    members = ("asha", "bina")

    # The DHT: it answers nothing and keeps nothing.
    assert eve.do("enter", token) == 0
    eve.do("claim", 1_000_000, LIES, token)
    there = eve.do("records")
    own = {swarm.ids["eve"]}
    assert all(set(map(str, found)) <= own for found in there.values())  # what it told itself
    for name in members:
        known = swarm[name].do("records")
        assert not any(swarm.ids["eve"] in found for found in known.values())
        assert LIES not in {one.state_hash for one in swarm[name].do("announcements")}

    # Averaging: while the members average, it has no average, and theirs is exact.
    found = swarm.average(asha=1.0, bina=2.0, eve=1000.0)
    for name in members:
        is_mean(found[name], members, swarm, (1 * 1 + 2 * 2) / 3)
    result, tensors = found["eve"]
    assert result is None
    for got, one in zip(tensors, tensors_of(1000.0), strict=True):
        np.testing.assert_array_equal(got, one.numpy())

    # And by hand, at both averagers: refused by both calls, and no byte of the state.
    for name in members:
        knocks = eve.do("knock", swarm.ids[name], HASH)
        assert knocks.refused and "does not know this peer as authorised" in knocks.said
    if kind in ("none", "replayed"):
        with pytest.raises(NoState):
            eve.do("fetch", HASH, [swarm.ids[name] for name in members], 2.0)


def test_a_revoked_peer_is_out_within_a_minute(swarm: Swarm) -> None:
    dipa, members = swarm["dipa"], ("asha", "bina", "chitra")
    # Before: all believe it, its lie as well.
    dipa.do("claim", 1_000_000, LIES, swarm.made.issue("dipa", swarm.ids["dipa"]))
    wait_for(lambda: LIES in {a.state_hash for a in swarm["asha"].do("announcements")}, True)
    assert not dipa.do("knock", swarm.ids["bina"], HASH).refused
    assert swarm.ids["dipa"] in swarm["asha"].do("heard")

    swarm.made.revoke("dipa")
    assert swarm["asha"].do("publish_revocations", swarm.made.revocations())
    published = time.monotonic()
    # bina, chitra and dipa itself hear of it from the DHT alone.
    waiting = {"asha", "bina"}
    while waiting:
        assert time.monotonic() - published < WITHIN_S, f"{waiting} still let it in"
        for name in list(waiting):
            knocks: Knocks = dipa.do("knock", swarm.ids[name], HASH)
            if knocks.refused:
                waiting.remove(name)
        time.sleep(0.2)
    while not all(swarm[name].do("why_not", swarm.ids["dipa"]) for name in members):
        assert time.monotonic() - published < WITHIN_S
        time.sleep(0.2)

    # What it has in the DHT is still there, and nobody believes it any more: it can move no one.
    assert swarm.ids["dipa"] in swarm["asha"].do("records")["announcements"]
    own = Announcement(PeerInfo(swarm.ids["bina"], "", "node", ""), 1, 0, 0.0, HASH, 0.0, None, 0)
    for name in members:
        heard = swarm[name].do("announcements")
        assert {one.peer.peer_id for one in heard} == {swarm.ids[one] for one in members}
        seen = view(own, heard)
        assert elsewhere(seen) is None and not seen.left_behind and seen.newest == 1
    assert swarm.ids["dipa"] not in swarm["asha"].do("heard")

    found = swarm.together(asha=1.0, bina=2.0, chitra=4.0)
    for name in members:
        is_mean(found[name], members, swarm, (1 * 1 + 2 * 2 + 3 * 4) / 6)
    with pytest.raises(NoState):
        dipa.do("fetch", HASH, [swarm.ids["asha"]], 2.0)
    dipa.do("announce", 2_000_000, LIES)
    assert all(one.epoch < 1_000_000 for one in swarm["asha"].do("announcements"))


def test_with_a_new_token_it_is_back_and_its_token_is_published_again(swarm: Swarm) -> None:
    dipa, own = swarm["dipa"], swarm.ids["dipa"]
    renewed = swarm.made.issue("dipa", own)
    dipa.do("renew", renewed)
    begun = time.monotonic()
    while not dipa.do("come_back"):
        assert time.monotonic() - begun < WITHIN_S
        time.sleep(0.2)
    while dipa.do("knock", swarm.ids["bina"], HASH).refused:
        assert time.monotonic() - begun < WITHIN_S
        time.sleep(0.2)
    assert swarm["bina"].do("token_of", own) == renewed
    assert dipa.do("fetch", HASH, [swarm.ids["asha"]], 30.0) == 7
