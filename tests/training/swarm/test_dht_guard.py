"""Guard and revocations over hivemind's own DHT processes, as a peer runs them."""

import asyncio
import time
from pathlib import Path

import pytest
from hivemind import DHT

from tests.training.swarm.authorities import RUN, peer
from training.swarm import guard, reaching, revocation, tokens
from training.swarm.authority import Authority
from training.swarm.dht_access import PeerAuthorizer
from training.swarm.dht_records import RunRecords
from training.swarm.guard import TokenGuard
from training.swarm.keys import Untrusted
from training.swarm.revocation import Poller, Trust
from training.swarm.tokens import TokenFile


def test_peers_learn_of_each_other_and_of_revocations(tmp_path: Path) -> None:
    made = Authority.create(tmp_path / "a", RUN)
    trusts, owns, dhts, users = [], [], [], ("asha", "bina")
    for number, user in enumerate(users):
        made.allow_add(user)
        path = tmp_path / f"trust{number}.json"
        trusts.append(Trust(RUN, list(made.public_keys().values()), path))
        owns.append(TokenFile(tmp_path / f"token{number}"))
        owns[-1].write(made.issue(user, peer(number).peer_id))
    try:
        for number in range(2):
            dhts.append(
                DHT(
                    [str(address) for dht in dhts for address in dht.get_visible_maddrs()],
                    start=True,
                    record_validators=[RunRecords(trusts[number], peer(number), owns[number])],
                    authorizer=PeerAuthorizer(trusts[number], owns[number]),
                    identity_path=str(peer(number).path),
                    host_maddrs=["/ip4/127.0.0.1/tcp/0"],
                    use_relay=False,
                    nat_port_map=False,
                    check_if_identity_free=False,
                    startup_timeout=60.0,
                )
            )
            assert str(dhts[number].peer_id) == peer(number).peer_id
        ids = [peer(number).peer_id for number in range(2)]
        for number in range(2):
            assert guard.publish(dhts[number], trusts[number], owns[number], ids[number])
        guards = [
            TokenGuard(trusts[number], guard.dht_fetch(dhts[number], RUN), owns[number])
            for number in range(2)
        ]
        for each in guards:
            assert [asyncio.run(each.admit(peer_id)) for peer_id in ids] == [True] * 2
        assert not guards[0].allowed(peer(2).peer_id)

        # The second user is revoked. The coordinator (the first peer) has the list from the
        # service and puts it into the DHT, where the second finds it.
        made.revoke("bina")
        trusts[0].offer(made.revocations())
        assert not guards[0].allowed(ids[1])
        source = revocation.dht_source(dhts[0], RUN)
        assert source() is None
        assert revocation.publish(dhts[0], trusts[0])
        assert source() == trusts[0].sealed()
        poller = Poller(trusts[1], [revocation.dht_source(dhts[1], RUN)])
        # The DHT process of the first refuses the second from now on, within the half second in
        # which it looks at its file. Whether the list was stored at the second before that is
        # chance.
        time.sleep(1.0)
        with pytest.raises(Untrusted, match="the user 'bina' was revoked"):
            guard.publish(dhts[0], trusts[0], owns[1], ids[1])
        # With a new token it is back; hivemind would not have asked the first again by itself.
        entrances = [str(address) for address in dhts[0].get_visible_maddrs()]
        assert reaching.call(dhts[1], entrances) == 0
        owns[1].write(made.issue("bina", ids[1]))
        time.sleep(1.0)
        assert reaching.call(dhts[1], entrances) == 1
        assert guard.publish(dhts[1], trusts[1], owns[1], ids[1])
        assert poller.poll() and trusts[1].newest() == trusts[0].newest()
        assert asyncio.run(guards[0].admit(ids[1]))
        found = dhts[0].get(tokens.dht_key(RUN), latest=True)
        assert found.value[ids[1]].value == owns[1].text()
        for each in guards:
            each.stop()
    finally:
        for dht in dhts:
            dht.shutdown()
