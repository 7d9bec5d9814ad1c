"""Authorities, peers and clocks for the tests of who may take part."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.swarm import identity, tokens
from training.swarm.authority import Authority
from training.swarm.identity import Identity
from training.swarm.keys import SigningKey
from training.swarm.revocation import Trust
from training.swarm.tokens import Token

RUN = "sahajbert"
START = 1_900_000_000


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@functools.cache
def peer(number: int) -> Identity:
    """An identity, made once for all tests: RSA keys are slow to make."""
    folder = Path(tempfile.mkdtemp(prefix="gristmill-peer-"))
    return identity.load_or_create(folder / f"peer{number}.key")


def authority(folder: Path, clock: Clock | None = None, users: tuple[str, ...] = ()) -> Authority:
    """A new authority for RUN, with users on its list."""
    made = Authority.create(folder, RUN, clock=clock or Clock())
    for user in users:
        made.allow_add(user)
    return made


def trust(made: Authority, clock: Clock | None = None, path: Path | None = None) -> Trust:
    """What a peer with a fresh run file of `made` trusts."""
    return Trust(made.run, list(made.public_keys().values()), path, clock=clock or made.clock)


def signed(key: SigningKey, **changed: Any) -> str:
    """A token by `key` for peer 0, with some fields changed."""
    made = Token(RUN, "asha", peer(0).peer_id, START, START + 600, key.id)
    return tokens.issue(replace(made, **changed), key)
