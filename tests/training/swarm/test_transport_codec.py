"""Rounds through a codec that loses: real processes, an auxiliary among them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.swarm.real_peers import hub, tensors_of
from training.swarm.codecs import CODECS


@pytest.mark.xfail(reason="seen partial once beside a whole test run: issue 7", strict=False)
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
        for peer, value, weight in zip(peers, (1.0, 3.0, 50.0), (1.0, 3.0, 7.0), strict=True):
            peer.begin("average", value, weight, 1, 20.0)
        (one, ours), (two, theirs), (helped, untouched) = (peer.end() for peer in peers)
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
