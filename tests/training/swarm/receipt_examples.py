"""Peers with identities, and rounds that they were in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from training.swarm import identity
from training.swarm.identity import Identity
from training.swarm.types import Member, RoundResult


def peers(folder: Path, count: int) -> list[Identity]:
    """Identities in order of their peer ids."""
    made = [identity.load_or_create(folder / f"identity{number}") for number in range(count)]
    return sorted(made, key=lambda one: one.peer_id)


def result(
    weights: Mapping[str, float], *, epoch: int = 1, group: str = "aa", complete: bool = True
) -> RoundResult:
    """A round of `group` in which each peer had its weight."""
    return RoundResult(
        epoch=epoch,
        group_id=group,
        members=tuple(Member(peer, weight, {}) for peer, weight in weights.items()),
        fraction=1.0,
        seconds=1.0,
        sent_bytes=1000,
        rates={},
        complete=complete,
    )
