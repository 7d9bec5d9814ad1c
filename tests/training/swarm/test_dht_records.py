"""Records of the DHT: who wrote them, in hivemind's own forms of key, subkey and value."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from tests.training.swarm.authorities import RUN, START, Clock, authority, peer, trust
from training.swarm.authority import Authority
from training.swarm.dht_records import EXPIRY_GRACE_S, RunRecords, _parts
from training.swarm.identity import Identity, peer_id_bytes
from training.swarm.revocation import DHT_LIFE_S, Trust
from training.swarm.tokens import TokenFile

TOKEN_LIFE_S = 600


@pytest.fixture
def made(tmp_path: Path) -> Authority:
    """An authority with two users."""
    return authority(tmp_path / "a", Clock(), users=("asha", "bina"))


def _validator(
    made: Authority, who: Identity, folder: Path, peers: Trust | None = None
) -> RunRecords:
    own = TokenFile(folder / who.peer_id)
    own.write(made.issue("asha", who.peer_id, life_s=TOKEN_LIFE_S))
    return RunRecords(peers or trust(made), who, own)


def _record(key: str, subkey: Any, value: Any, expires: float = START + 60.0) -> DHTRecord:
    """As DHTNode.store_many makes it."""
    dumps = MSGPackSerializer.dumps
    return DHTRecord(DHTID.generate(key).to_bytes(), dumps(subkey), dumps(value), expires)


def _signed(validator: RunRecords, record: DHTRecord) -> DHTRecord:
    return dataclasses.replace(record, value=validator.sign_value(record))


@pytest.mark.parametrize("as_bytes", [False, True], ids=["ours", "hivemind's"])
def test_a_peer_writes_in_its_own_name_only(
    made: Authority, tmp_path: Path, *, as_bytes: bool
) -> None:
    def subkey(who: Identity) -> Any:
        return peer_id_bytes(who.peer_id) if as_bytes else who.peer_id

    mine, theirs = (_validator(made, peer(number), tmp_path) for number in (0, 1))
    value = {"epoch": 5, "loss": 0.25, "samples": [1, 2]}
    good = _signed(mine, _record(f"{RUN}_announcements", subkey(peer(0)), value))
    assert mine.validate(good) and theirs.validate(good) and theirs.validate(good)
    assert MSGPackSerializer.loads(theirs.strip_value(good)) == value
    forged = _record(f"{RUN}_announcements", subkey(peer(0)), value)
    assert theirs.sign_value(forged) == forged.value
    assert not mine.validate(forged)
    # The value of one peer under the name of another.
    moved = dataclasses.replace(good, subkey=MSGPackSerializer.dumps(subkey(peer(1))))
    assert not mine.validate(moved)


def test_no_part_of_a_record_may_differ(made: Authority, tmp_path: Path) -> None:
    mine, other = (_validator(made, peer(number), tmp_path) for number in (0, 1))
    good = _signed(mine, _record("k", peer(0).peer_id, [1, 2, 3]))
    parts = _parts(good.value)
    assert parts is not None
    changed = [
        dataclasses.replace(good, key=DHTID.generate("l").to_bytes()),
        dataclasses.replace(good, expiration_time=good.expiration_time + 1),
        dataclasses.replace(good, value=good.value[:-1]),
        dataclasses.replace(good, value=good.value + b"\0"),
        dataclasses.replace(good, value=good.value.replace(parts[0], b"\x93\x01\x02\x04")),
        dataclasses.replace(good, value=parts[0]),
        dataclasses.replace(good, value=b"GMr1"),
        dataclasses.replace(good, value=b"GMr1" + b"\xff" * 8),
        dataclasses.replace(good, value=b""),
        dataclasses.replace(good, value=good.value + b"\0" * (1 << 18)),
        dataclasses.replace(good, subkey=MSGPackSerializer.dumps(None)),
        dataclasses.replace(good, subkey=b""),
        dataclasses.replace(good, subkey=MSGPackSerializer.dumps(5)),
        dataclasses.replace(good, subkey=MSGPackSerializer.dumps("Qm")),
        dataclasses.replace(good, subkey=good.subkey + b"\0"),
    ]
    assert [number for number, record in enumerate(changed) if other.validate(record)] == []
    assert other.validate(good)


@given(data=st.data())
def test_no_byte_of_a_signed_value_may_differ(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    validator, good = _good_record(tmp_path_factory)
    place = data.draw(st.integers(0, len(good.value) - 1))
    flipped = bytearray(good.value)
    flipped[place] ^= data.draw(st.integers(1, 255))
    assert not validator.validate(dataclasses.replace(good, value=bytes(flipped)))
    assert validator.validate(good)


_KEPT: list[tuple[RunRecords, DHTRecord]] = []


def _good_record(folders: pytest.TempPathFactory) -> tuple[RunRecords, DHTRecord]:
    if not _KEPT:
        folder = folders.mktemp("records")
        made = authority(folder / "a", Clock(), users=("asha",))
        mine = _validator(made, peer(0), folder)
        _KEPT.append((mine, _signed(mine, _record("k", peer(0).peer_id, "value"))))
    return _KEPT[0]


@given(value=st.binary(max_size=200), subkey=st.binary(max_size=60), key=st.binary(max_size=20))
def test_any_bytes_at_all_are_refused_without_an_error(
    tmp_path_factory: pytest.TempPathFactory, value: bytes, subkey: bytes, key: bytes
) -> None:
    validator, good = _good_record(tmp_path_factory)
    assert not validator.validate(DHTRecord(key, subkey, value, START + 1.0))
    assert not validator.validate(dataclasses.replace(good, value=b"GMr1" + value))
    assert isinstance(validator.strip_value(dataclasses.replace(good, value=value)), bytes)


def test_the_tokens_of_a_run_are_stored_as_they_are(made: Authority, tmp_path: Path) -> None:
    validator, ids = RunRecords(trust(made)), [peer(number).peer_id for number in (0, 1)]
    rogue = authority(tmp_path / "rogue", Clock(), users=("asha",))
    text = made.issue("asha", ids[0], life_s=TOKEN_LIFE_S)
    expires = float(START + TOKEN_LIFE_S)
    good = _record(f"{RUN}_tokens", ids[0], text, expires)
    assert validator.sign_value(good) == good.value == validator.strip_value(good)
    assert validator.validate(good)
    bad = {
        "lasts longer than the token": _record(f"{RUN}_tokens", ids[0], text, expires + 0.1),
        "under another peer": _record(f"{RUN}_tokens", ids[1], text, expires),
        "under no peer": _record(f"{RUN}_tokens", None, text, expires),
        "of another authority": _record(f"{RUN}_tokens", ids[0], rogue.issue("asha", ids[0]), 1.0),
        "no text": _record(f"{RUN}_tokens", ids[0], {"token": text}, expires),
        "no token": _record(f"{RUN}_tokens", ids[0], "x", expires),
        "another run's key": _record("other_tokens", ids[0], text, expires),
    }
    assert [name for name, record in bad.items() if validator.validate(record)] == []


def test_a_record_may_outlast_its_writers_token_a_little(made: Authority, tmp_path: Path) -> None:
    mine, end = _validator(made, peer(0), tmp_path), START + TOKEN_LIFE_S
    inside = _signed(mine, _record("k", peer(0).peer_id, 1, end + EXPIRY_GRACE_S))
    outside = _signed(mine, _record("k", peer(0).peer_id, 1, end + EXPIRY_GRACE_S + 1))
    assert mine.validate(inside) and not mine.validate(outside)


def test_what_was_good_stays_good(made: Authority, tmp_path: Path) -> None:
    """hivemind drops a dictionary for one bad entry, so no entry may turn bad."""
    peers = trust(made)
    mine = _validator(made, peer(0), tmp_path, peers)
    good = _signed(mine, _record("k", peer(0).peer_id, 1))
    token = _record(
        f"{RUN}_tokens", peer(0).peer_id, made.issue("asha", peer(0).peer_id), START + 9.0
    )
    (old,) = made.public_keys()
    made.rotate()
    peers.offer(made.revocations())
    made.retire(old)
    made.revoke("asha")
    made.revoke(peer(0).peer_id)
    peers.offer(made.revocations())
    fresh = RunRecords(peers)
    assert fresh.validate(good) and fresh.validate(token)


def test_the_revocation_list_is_the_authoritys(made: Authority, tmp_path: Path) -> None:
    validator = RunRecords(trust(made))
    rogue = authority(tmp_path / "rogue", Clock())
    text, life = made.revocations().decode(), START + float(DHT_LIFE_S)
    good = _record(f"{RUN}_revoked", None, text, life)
    assert validator.sign_value(good) == good.value and validator.validate(good)
    assert not validator.validate(_record(f"{RUN}_revoked", None, text, life + 1))
    assert not validator.validate(_record(f"{RUN}_revoked", peer(0).peer_id, text, life))
    assert not validator.validate(
        _record(f"{RUN}_revoked", None, rogue.revocations().decode(), life)
    )


def test_without_a_token_nothing_is_signed(made: Authority, tmp_path: Path) -> None:
    validator = RunRecords(trust(made), peer(0), TokenFile(tmp_path / "none"))
    record = _record("k", peer(0).peer_id, 1)
    assert validator.sign_value(record) == record.value
    assert not validator.validate(record)


def test_it_works_among_hiveminds_validators(made: Authority, tmp_path: Path) -> None:
    mine = _validator(made, peer(0), tmp_path)
    both = CompositeValidator([mine, RunRecords(trust(made))])
    assert both._validators == [mine]
    record = _record("k", peer(0).peer_id, {"a": (1, 2)})
    good = dataclasses.replace(record, value=both.sign_value(record))
    assert both.validate(good)
    assert both.strip_value(good) == record.value
    assert len(good.value) - len(record.value) < 1100
