"""The authority's folder: the signed log, what each command does to it, keys that come and go."""

import json
import multiprocessing
from pathlib import Path

import pytest

from models.errors import UserError
from tests.training.swarm.authorities import RUN, START, Clock, authority, peer, trust
from training.swarm import allowlist, keys, tokens
from training.swarm.authority import ROTATION_DELAY_S, Authority
from training.swarm.keys import Untrusted
from training.swarm.revocation import Trust


def _lines(made: Authority) -> list[bytes]:
    return (made.folder / "allowlist.jsonl").read_bytes().splitlines(keepends=True)


def test_the_log_says_what_was_done(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock)
    clock.now += 10
    credential = made.allow_add("asha")
    made.allow_add("bina")
    clock.now += 10
    made.allow_remove("bina")
    assert [(user.name, user.added) for user in made.allow_list()] == [("asha", START + 10)]
    actions = [json.loads(line)["action"] for line in _lines(made)]
    assert actions == ["begin", "add", "add", "remove"]
    again = Authority.load(tmp_path / "a", clock=clock)
    assert again.state == made.state
    assert again.state.admits("asha", credential)
    assert not again.state.admits("asha", credential + "x")
    assert not again.state.admits("bina", credential)
    assert not again.state.admits("chitra", "")
    assert credential.encode() not in b"".join(_lines(made))
    assert len(credential) == 32
    assert (tmp_path / "a" / "allowlist.jsonl").stat().st_mode & 0o777 == 0o600
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "keys").iterdir()] == [0o600]


def test_a_credential_is_hashed_for_its_run_and_user() -> None:
    one = allowlist.credential_digest("r", "u", "c")
    assert one == allowlist.credential_digest("r", "u", "c")
    assert (
        len(
            {
                one,
                allowlist.credential_digest("r2", "u", "c"),
                allowlist.credential_digest("r", "uc", ""),
                allowlist.credential_digest("r", "", "uc"),
            }
        )
        == 4
    )


def _dropped(lines: list[bytes]) -> list[bytes]:
    return [*lines[:1], *lines[2:]]


def _swapped(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[2], lines[1], lines[3]]


def _renamed(lines: list[bytes]) -> list[bytes]:
    return [*lines[:1], lines[1].replace(b'"asha"', b'"ashb"'), *lines[2:]]


def _repeated(lines: list[bytes]) -> list[bytes]:
    return [*lines, lines[-1]]


def _headless(lines: list[bytes]) -> list[bytes]:
    return lines[1:]


def _nonsense(lines: list[bytes]) -> list[bytes]:
    return [*lines, b"{}\n"]


def _not_json(lines: list[bytes]) -> list[bytes]:
    return [lines[0], b"\xff\n", *lines[1:]]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_dropped, 2),
        (_swapped, 2),
        (_renamed, 2),
        (_repeated, 5),
        (_headless, 1),
        (_nonsense, 5),
        (_not_json, 2),
    ],
)
def test_an_altered_log_is_not_believed(tmp_path: Path, change: object, line: int) -> None:
    made = authority(tmp_path / "a", users=("asha", "bina", "chitra"))
    altered = change(_lines(made))  # type: ignore[operator]
    (tmp_path / "a" / "allowlist.jsonl").write_bytes(b"".join(altered))
    with pytest.raises(UserError, match=f"was altered: line {line} cannot be believed"):
        Authority.load(tmp_path / "a")
    with pytest.raises(UserError, match="was altered"):
        made.allow_add("dipa")


def test_a_line_by_a_stranger_is_not_believed(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    rogue = keys.SigningKey.new()
    body = {
        name: value for name, value in json.loads(_lines(made)[-1]).items() if name != "signature"
    }
    state = made.state
    for signer in (rogue.id, next(iter(state.keys))):
        forged = {
            **body,
            "number": 2,
            "previous": state.last_digest,
            "user": "eve",
            "signed_by": signer,
        }
        line = keys.canonical({**forged, "signature": rogue.sign(allowlist.KIND, forged)})
        with pytest.raises(Untrusted, match="its signature is wrong"):
            allowlist.read(tmp_path / "a" / "allowlist.jsonl").take(line)


def test_a_line_that_a_crash_cut_was_never_said(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    path = tmp_path / "a" / "allowlist.jsonl"
    note = path.with_name("allowlist.jsonl.head")
    before = note.read_bytes()
    made.allow_add("bina")
    path.write_bytes(path.read_bytes()[:-20])
    note.write_bytes(before)  # which is written after the line
    again = Authority.load(tmp_path / "a", clock=Clock())
    assert [user.name for user in again.allow_list()] == ["asha"]
    again.allow_add("chitra")
    assert [user.name for user in made.allow_list()] == ["asha", "chitra"]
    assert len(_lines(made)) == 3


def test_a_log_that_was_cut_or_is_an_old_copy_lets_nobody_back_in(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha", "bina"))
    path = tmp_path / "a" / "allowlist.jsonl"
    old = path.read_bytes()
    made.allow_remove("asha")
    path.write_bytes(old)
    for ask in (lambda: Authority.load(tmp_path / "a"), lambda: made.allow_add("chitra"),
                lambda: made.issue("asha", peer(0).peer_id)):  # fmt: skip
        with pytest.raises(UserError, match="was cut: it has 3 lines and had 4"):
            ask()
    # Other lines in the place of those that were there.
    note = path.with_name("allowlist.jsonl.head")
    kept = note.read_bytes()
    note.unlink()
    Authority.load(tmp_path / "a", clock=made.clock).allow_add("eve")
    note.write_bytes(kept)
    with pytest.raises(UserError, match="was replaced: line 4 is not the one"):
        Authority.load(tmp_path / "a")
    for damaged in (b"{}", b"\xff", b'{"digest":1,"lines":"x"}'):
        note.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read"):
            Authority.load(tmp_path / "a")


def _add_some(folder: Path, number: int) -> None:
    made = Authority.load(folder)
    for user in range(5):
        made.allow_add(f"user{number}x{user}")


def test_commands_at_the_same_time_do_not_lose_lines(tmp_path: Path) -> None:
    authority(tmp_path / "a")
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_add_some, args=(tmp_path / "a", number)) for number in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert len(Authority.load(tmp_path / "a").allow_list()) == 10


def test_a_token_is_issued_to_allowlisted_users_only(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    text = made.issue("asha", peer(0).peer_id, life_s=100)
    token = tokens.read(text, made.public_keys())
    assert (token.run, token.user, token.peer) == (RUN, "asha", peer(0).peer_id)
    assert (token.issued, token.expires) == (START, START + 100)
    with pytest.raises(UserError, match="'bina' is not on the allowlist of 'sahajbert': gristmill"):
        made.issue("bina", peer(0).peer_id)
    with pytest.raises(UserError, match="'me' is no peer id"):
        made.issue("asha", "me")
    for life_s in (0, -1, tokens.LONGEST_LIFE_S + 1):
        with pytest.raises(UserError, match=f"a token cannot last '{life_s}' s"):
            made.issue("asha", peer(0).peer_id, life_s=life_s)


def test_removal_revocation_and_return(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha", "bina"))
    peers = trust(made)
    mine, other = peer(0).peer_id, peer(1).peer_id
    first, second = made.issue("asha", mine), made.issue("bina", other)
    assert made.revoke("asha") == "user"
    peers.offer(made.revocations())
    with pytest.raises(Untrusted, match="the token is void: the user 'asha' was revoked"):
        peers.check(first, mine)
    peers.check(second, other)
    # The user is still on the list: a new token counts, even one of the same second.
    peers.check(made.issue("asha", mine), mine)
    assert made.revoke(other) == "peer"
    peers.offer(made.revocations())
    with pytest.raises(Untrusted, match=r"the peer .* was revoked"):
        peers.check(second, other)
    with pytest.raises(UserError, match="was revoked: `gristmill swarm allow restore"):
        made.issue("bina", other)
    made.restore(other)
    peers.offer(made.revocations())
    peers.check(second, other)
    made.allow_remove("bina")
    peers.offer(made.revocations())
    with pytest.raises(Untrusted, match="the user 'bina' was revoked"):
        peers.check(second, other)
    made.allow_add("bina")
    clock.now += 5
    peers.check(made.issue("bina", other), other)


def test_a_new_credential_ends_the_old_one_and_its_tokens(tmp_path: Path) -> None:
    made = authority(tmp_path / "a")
    peers, mine = trust(made), peer(0).peer_id
    old = made.allow_add("asha")
    text = made.issue("asha", mine)
    with pytest.raises(
        UserError, match=r"'asha' is on the allowlist .* comes with `gristmill swarm allow renew"
    ):
        made.allow_add("asha")
    new = made.allow_add("asha", renew=True)
    assert made.state.admits("asha", new) and not made.state.admits("asha", old)
    peers.offer(made.revocations())
    with pytest.raises(Untrusted, match="was revoked"):
        peers.check(text, mine)
    with pytest.raises(UserError, match="'bina' is not on the allowlist"):
        made.allow_add("bina", renew=True)


def test_keys_rotate_while_the_run_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha",))
    peers, mine = trust(made), peer(0).peer_id
    (old,) = made.public_keys()
    new = made.rotate()
    # Peers that have not polled yet must not meet a token of the new key.
    assert tokens.read(made.issue("asha", mine), made.public_keys()).key == old
    peers.offer(made.revocations())
    clock.now += ROTATION_DELAY_S
    by_old, by_new = made.issue("asha", mine), made.issue("asha", mine)
    assert tokens.read(by_new, made.public_keys()).key == new
    peers.check(by_new, mine)
    made.retire(old)
    assert peers.offer(made.revocations())
    assert list(peers.current_keys()) == [new]
    peers.check(by_new, mine)
    # One who knows only the old key from its run file is told of the new one, while the old
    # private key is there to say so.
    away = Trust(RUN, [key.public for key in made._signers.values() if key.id == old], clock=clock)
    assert away.offer(made.revocations()) and list(away.current_keys()) == [new]
    (tmp_path / "a" / "keys" / f"{old}.pem").unlink()
    gone = Authority.load(tmp_path / "a", clock=clock)
    away = Trust(RUN, [key.public for key in made._signers.values() if key.id == old], clock=clock)
    with pytest.raises(Untrusted, match="is not signed by a key"):
        away.offer(gone.revocations())
    late = Authority.load(tmp_path / "a", clock=clock)
    with pytest.raises(UserError, match="is no key of 'sahajbert' in force"):
        late.retire(old)
    with pytest.raises(UserError, match="is the only key"):
        late.retire(new)
    late.allow_add("bina")
    assert json.loads(_lines(late)[-1])["signed_by"] == new
    assert by_old


def test_a_stolen_key_is_retired_at_once(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha",))
    peers, mine = trust(made), peer(0).peer_id
    (old,) = made.public_keys()
    text = made.issue("asha", mine)
    new = made.rotate()
    peers.offer(made.revocations())
    made.retire(old)
    peers.offer(made.revocations())
    with pytest.raises(Untrusted, match=f"unknown key '{old}'"):
        peers.check(text, mine)
    # Who wrote a record can still be told.
    assert peers.written_by(text, mine).user == "asha"
    # The new key signs before its time, as it is the only one.
    assert tokens.read(made.issue("asha", mine), made.public_keys()).key == new


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no authority: `gristmill swarm start` makes one"):
        Authority.load(tmp_path / "a")
    made = authority(tmp_path / "a")
    with pytest.raises(UserError, match="holds an authority already"):
        Authority.create(tmp_path / "a", RUN)
    with pytest.raises(UserError, match="'a b' is no name of a run"):
        Authority.create(tmp_path / "b", "a b")
    with pytest.raises(UserError, match="'a b' is no name of a user"):
        made.allow_add("a b")
    with pytest.raises(UserError, match="'asha' is not on the allowlist"):
        made.allow_remove("asha")
    with pytest.raises(UserError, match="'asha' is neither a user of 'sahajbert' nor a peer id"):
        made.revoke("asha")
    with pytest.raises(UserError, match="is not revoked in 'sahajbert'"):
        made.restore(peer(0).peer_id)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Authority.create(tmp_path / "file" / "a", RUN)


def test_lost_and_swapped_private_keys_are_told(tmp_path: Path) -> None:
    made = authority(tmp_path / "a")
    (path,) = (tmp_path / "a" / "keys").iterdir()
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(UserError, match=r"has no private key that 'allowlist\.jsonl' names"):
        Authority.load(tmp_path / "a")
    other = authority(tmp_path / "b")
    (theirs,) = (tmp_path / "b" / "keys").iterdir()
    path.write_bytes(theirs.read_bytes())
    path.chmod(0o600)
    with pytest.raises(UserError, match="put the right one back"):
        Authority.load(tmp_path / "a")
    path.write_bytes(kept)
    assert Authority.load(tmp_path / "a").public_keys() == made.public_keys() != other.public_keys()
