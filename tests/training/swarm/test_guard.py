"""The guard: whom it lets in, how it learns of a new peer, that strangers cannot hold it up."""

import asyncio
import multiprocessing
import time
from pathlib import Path

from tests.training.swarm.authorities import Clock, authority, peer, trust
from training.swarm.guard import OpenGuard, TokenGuard
from training.swarm.tokens import TokenFile


def test_an_open_guard_lets_everybody_in() -> None:
    assert OpenGuard().allowed("anybody")


def test_who_has_a_token_that_holds_is_let_in(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha", "bina"))
    rogue = authority(tmp_path / "rogue", clock, users=("eve",))
    peers, ids = trust(made), [peer(number).peer_id for number in range(4)]
    own = TokenFile(tmp_path / "token")
    own.write(made.issue("asha", ids[0]))
    published = {
        ids[1]: made.issue("bina", ids[1], life_s=100),
        ids[2]: rogue.issue("eve", ids[2]),
        ids[3]: made.issue("bina", ids[1]),  # a copy of another peer's token
    }
    guard = TokenGuard(peers, lambda: published, own, wait_s=0.3)
    guard.refresh()
    assert [guard.allowed(peer_id) for peer_id in ids] == [True, True, False, False]
    assert guard.why_not(ids[2]) == "it has published no token that holds"
    clock.now += 100
    assert guard.why_not(ids[1]) == "the token expired 0 s ago"
    assert not guard.allowed(ids[1])
    assert guard.allowed(ids[0])
    made.revoke("asha")
    peers.offer(made.revocations())
    assert not guard.allowed(ids[0])
    guard.stop()


def test_a_new_peer_is_looked_up_while_it_asks(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    published: dict[str, str] = {}
    guard = TokenGuard(trust(made), lambda: published, wait_s=5.0, refresh_s=3600.0)
    mine = peer(0).peer_id
    guard.refresh()
    assert guard.why_not(mine)
    published[mine] = made.issue("asha", mine)
    begun = time.monotonic()
    assert asyncio.run(guard.admit(mine))
    assert time.monotonic() - begun < 5.0
    assert guard.allowed(mine)
    guard.stop()


def test_who_asks_without_waiting_has_its_answer_soon(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    published: dict[str, str] = {}
    guard = TokenGuard(trust(made), lambda: published, wait_s=5.0, refresh_s=3600.0)
    mine = peer(0).peer_id
    guard.refresh()
    assert not guard.allowed(mine)
    published[mine] = made.issue("asha", mine)
    deadline = time.monotonic() + 10.0  # an unknown peer woke the look-up, an hour before its time
    while not guard.allowed(mine):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    guard.stop()


def test_the_first_question_waits_for_the_first_look_up(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    mine = peer(0).peer_id
    text = made.issue("asha", mine)

    def fetch() -> dict[str, str]:
        time.sleep(0.5)
        return {mine: text}

    guard = TokenGuard(trust(made), fetch, wait_s=20.0)
    assert guard.allowed(mine)
    guard.stop()


def test_tokens_stay_while_the_dht_is_away(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    mine = peer(0).peer_id
    answers: list[dict[str, str]] = [{mine: made.issue("asha", mine)}]

    def fetch() -> dict[str, str]:
        if not answers:
            raise TimeoutError("the DHT is\naway")
        return answers[0]

    guard = TokenGuard(trust(made), fetch)
    guard.refresh()
    answers.clear()
    guard.refresh()
    assert guard.failure == "TimeoutError: the DHT is away"
    assert guard.allowed(mine)
    answers.append({})
    guard.refresh()
    assert guard.failure == "" and guard.allowed(mine)
    guard.stop()


def test_a_renewed_token_takes_the_place_of_the_old_and_a_bad_one_does_not(tmp_path: Path) -> None:
    clock = Clock()
    made = authority(tmp_path / "a", clock, users=("asha",))
    mine = peer(0).peer_id
    published = {mine: made.issue("asha", mine, life_s=100)}
    guard = TokenGuard(trust(made), lambda: published, wait_s=0.2)
    guard.refresh()
    published[mine] = "nonsense"
    guard.refresh()
    assert guard.allowed(mine)
    clock.now += 50
    published[mine] = made.issue("asha", mine, life_s=100)
    guard.refresh()
    clock.now += 60
    assert guard.allowed(mine)
    guard.stop()


def test_strangers_neither_hold_up_the_guard_nor_flood_the_dht(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    mine, calls = peer(0).peer_id, []
    text = made.issue("asha", mine)

    def fetch() -> dict[str, str]:
        calls.append(time.monotonic())
        return {mine: text}

    guard = TokenGuard(trust(made), fetch, wait_s=1.5, refresh_s=3600.0)
    guard.refresh()

    async def ask_often() -> list[bool]:
        strangers = [asyncio.create_task(guard.admit(peer(1).peer_id)) for _ in range(50)]
        longest = 0.0
        while not all(task.done() for task in strangers):
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            assert guard.allowed(mine)
            longest = max(longest, time.monotonic() - begun)
        assert longest < 1.0, f"the event loop stood still for {longest:.1f} s"
        return [task.result() for task in strangers]

    begun = time.monotonic()
    assert asyncio.run(ask_often()) == [False] * 50
    # Four wait for 1.5 s, the others are refused at once; the DHT is asked once a second.
    assert time.monotonic() - begun < 10.0
    assert len(calls) <= 2 + (time.monotonic() - begun) / 1.0 + 1
    guard.stop()


def _ask(guard: TokenGuard, peer_id: str, told: "multiprocessing.connection.Connection") -> None:
    told.send(asyncio.run(guard.admit(peer_id)))


def test_a_fork_looks_for_itself(tmp_path: Path) -> None:
    made = authority(tmp_path / "a", users=("asha",))
    mine, other = peer(0).peer_id, peer(1).peer_id
    published: dict[str, str] = {}
    guard = TokenGuard(trust(made), lambda: published, wait_s=5.0)
    guard.refresh()
    assert guard.why_not(mine)
    published[mine] = made.issue("asha", mine)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    for peer_id, expected in ((mine, True), (other, False)):
        process = context.Process(target=_ask, args=(guard, peer_id, theirs), daemon=True)
        process.start()
        assert ours.poll(30)
        assert ours.recv() is expected
        process.join(10)
    guard.stop()
