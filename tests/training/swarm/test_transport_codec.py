"""Rounds through a codec that loses: real processes, an auxiliary among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.training.swarm.real_peers import Peer, hub, tensors_of
from training.swarm.codecs import CODECS

pytestmark = [pytest.mark.peers, pytest.mark.slow]

ATTEMPTS = 4
VALUES = (1.0, 3.0, 50.0)


def rounds_until_whole(peers: list[Peer]) -> list[Any]:
    """What each peer has of the first round that all three were in and that was whole.

    No peer promises that the first one is: on a busy machine one comes late, or falls silent for
    longer than the others wait. But then nobody may have taken anything of it.
    """
    told = []
    for _ in range(ATTEMPTS):
        for peer, value, weight in zip(peers, VALUES, (1.0, 3.0, 0.0), strict=True):
            peer.begin("average", value, weight, 1, 20.0)
        ends = [peer.end() for peer in peers]
        results = [result for result, _ in ends]
        if all(one is not None and one.complete and len(one.members) == 3 for one in results):
            return ends
        told.append(results)
        for value, (result, tensors) in zip(VALUES, ends, strict=True):
            if result is None or not result.complete:
                assert tensors[0].tobytes() == tensors_of(value)[0].numpy().tobytes()
    raise AssertionError(f"no whole round of all three: {told}")


def test_all_hold_the_same_bits_after_an_8_bit_round(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with hub(tmp_path_factory.mktemp("swarm"), 3) as peers:
        # Two clients, so that the auxiliary is the only one who can reduce.
        first, second, auxiliary = peers
        auxiliary.begin_start([], codec="uniform8", role="auxiliary")
        auxiliary.end_start()
        for client in (first, second):
            client.begin_start(auxiliary.addresses, codec="uniform8", role="client")
        for client in (first, second):
            client.end_start()
        (one, ours), (two, theirs), (helped, untouched) = rounds_until_whole(peers)
    for result in (one, two, helped):
        assert result.complete and result.fraction == 1.0
        assert sorted(member.weight for member in result.members) == [0.0, 1.0, 3.0]
    assert [tensor.tobytes() for tensor in ours] == [tensor.tobytes() for tensor in theirs]
    expected = [tensor.numpy() * 2.5 for tensor in tensors_of(1.0)]
    spread = np.sqrt(np.mean((ours[0] - expected[0]) ** 2)) / expected[0].std()
    # Two passes; float16, which the short tensors take, is much closer.
    assert 1e-4 < spread < 2 * CODECS["uniform8"].relative_error
    np.testing.assert_allclose(ours[1], expected[1], rtol=2e-3)
    # The auxiliary has sent the average to both, and its own tensors mean nothing.
    vector_bytes = sum(tensor.size for tensor in ours)  # a byte a value, but for the short ones
    assert helped.sent_bytes > 2 * vector_bytes
    assert one.sent_bytes > vector_bytes
    assert untouched[0].tobytes() == tensors_of(50.0)[0].numpy().tobytes()
