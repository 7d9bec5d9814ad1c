"""Announcements as values of the DHT: plain maps, read back with every field checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from training.swarm.types import ROLES, Announcement, PeerInfo

_MOST_CHARS = 200
_HASH = re.compile(r"([0-9a-f]{64})?")
LEFT = "left"
"""What a peer that leaves puts in the place of its announcement."""


def dht_key(run: str) -> str:
    """The key under which the peers of `run` announce themselves; the subkey is the peer id."""
    return f"{run}_announcements"


def to_value(announcement: Announcement) -> dict[str, Any]:
    """`announcement` as msgpack can hold it."""
    peer = announcement.peer
    return {
        "name": peer.name,
        "role": peer.role,
        "device": peer.device,
        "epoch": announcement.epoch,
        "samples": announcement.samples,
        "rate": float(announcement.rate),
        "state_hash": announcement.state_hash,
        "time": float(announcement.time),
        "loss": None if announcement.loss is None else float(announcement.loss),
        "rss_bytes": announcement.rss_bytes,
    }


def from_value(peer_id: object, value: object) -> Announcement | None:
    """The announcement that the peer `peer_id` stored; None for anything that is not one."""
    if not isinstance(value, Mapping) or not isinstance(peer_id, str):
        return None
    texts = [value.get(name) for name in ("name", "device", "state_hash")]
    counts = [value.get(name) for name in ("epoch", "samples", "rss_bytes")]
    numbers = [value.get(name) for name in ("rate", "time")]
    loss, role = value.get("loss"), value.get("role")
    if not all(isinstance(text, str) and len(text) <= _MOST_CHARS for text in (*texts, peer_id)):
        return None
    name, device, state_hash = (str(text) for text in texts)
    if not (name + device).isprintable() or not _HASH.fullmatch(state_hash):
        return None  # they stand in terminals and in names of files
    if not all(type(count) is int and 0 <= count < 1 << 53 for count in counts) or not all(
        isinstance(number, float) and 0 <= number < math.inf for number in numbers
    ):
        return None
    # A loss may be NaN: that is what the coordinator's alarm is for.
    if role not in ROLES or not (loss is None or isinstance(loss, float)):
        return None
    epoch, samples, rss_bytes = counts
    rate, time = numbers
    return Announcement(
        peer=PeerInfo(peer_id, name, role, device),
        epoch=int(epoch or 0),
        samples=int(samples or 0),
        rate=float(rate or 0),
        state_hash=state_hash,
        time=float(time or 0),
        loss=loss,
        rss_bytes=int(rss_bytes or 0),
    )
