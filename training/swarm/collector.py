"""The coordinator's eyes: what peers announce and how rounds went, into `MetricsStore`.

`look` is called every few seconds with the newest announcements, `round` with each round that the
coordinator was in or was told of. Everything in them is a peer's word: numbers that cannot be are
refused and counted, texts are cut and lose what could hide in them, and where a majority has to
agree (the epoch, the weights) one peer alone decides nothing.

An epoch's row changes for a while after it ended, since receipts come late; then it is settled and
its samples are credited. When a swarm goes back to a checkpoint, epochs that are done again keep
the row of the first time.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.report_parts import cut_columns, visible
from training.swarm import alarms
from training.swarm.metrics_store import (
    KEPT_EPOCHS,
    Alarm,
    Leader,
    MetricsStore,
    PeerRow,
    RoundRow,
    RunFacts,
    WorkRow,
)
from training.swarm.types import ROLES, Announcement, RoundResult

_MOST_PEERS = 2000
_NAME_COLUMNS, _ID_CHARS, _ALARM_COLUMNS = 48, 128, 300
_LARGEST = 1 << 50
_MOST_RATE = 1e6  # samples/s of one peer
_MOST_LOSS = 1e6
_SETTLED_AFTER = 2  # epochs
_SETTLED_AFTER_S = 60.0
_AGES = 5
_LONGEST_ROUND_S = 86_400.0
_PENDING_GROUPS = 4096
_MARKS = 3  # accents on one letter; more would run over the lines above and below
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


@dataclass(frozen=True)
class Watch:
    """active_s: a peer that said nothing new for so long is gone. poll_s: between two looks."""

    active_s: float = 30.0
    poll_s: float = 2.0


class Collector:
    """Fills `store` about one run."""

    def __init__(
        self,
        store: MetricsStore,
        facts: RunFacts,
        *,
        user_of: Callable[[str], str | None] | None = None,
        leaders: Callable[[], Sequence[Leader]] | None = None,
        watch: Watch | None = None,
        now: float | None = None,
    ) -> None:
        """user_of: the user that a peer's token names; None for a peer without one. leaders: the
        ledger's leaderboard; without it the store's own sums, which are the peers' word, are shown.
        """
        self._store, self._facts, self._watch = store, facts, watch or Watch()
        self._user_of, self._leaders = user_of, leaders
        now = time.time() if now is None else now
        store.set_run(facts, now)
        store.set_fact("board", "receipts" if leaders else "announcements")
        self._began = now
        self._active: deque[tuple[float, int]] = deque()
        self._ages: dict[str, deque[float]] = {}
        self._told: dict[tuple[int, str], dict[str, tuple[tuple[str, float], ...]]] = {}
        self._extra: dict[str, Alarm] = {}

    @property
    def epoch(self) -> int | None:
        """The epoch that more than half of the peers have reached; None before the first look."""
        found = self._store.fact("epoch")
        return None if found is None else int(found)

    def look(self, announcements: Iterable[Announcement], now: float | None = None) -> list[Alarm]:
        """Take in what every peer says; gives the alarms that are new."""
        now = time.time() if now is None else now
        said = list(announcements)[:_MOST_PEERS]
        good = [one for one in said if self._plausible(one)]
        no_number: list[str] = []
        with self._store.changing():
            for one in good:
                row = self._peer(one, now)
                if one.loss is not None and row.loss is None:
                    no_number.append(f"{row.name} ({short_id(row.peer_id)})")
            active = self._active_peers(now)
            epoch = self._move(active, now)
            if epoch is not None:
                self._work(good, epoch)
                self._settle(epoch, now)
            self._store.forget_peers()
            self._ages = {peer["peer_id"]: self._ages[peer["peer_id"]] for peer in active
                          if peer["peer_id"] in self._ages}  # fmt: skip
            self._store.set_fact("looked", now)
            self._store.set_fact("refused", len(said) - len(good))
            found = alarms.find(self._look(active, epoch, no_number, now))
            return self._store.set_alarms([*found, *self._extra.values()], now)

    def round(
        self,
        result: RoundResult,
        reporter: str,
        *,
        parts: Mapping[str, float] | None = None,
        now: float | None = None,
    ) -> None:
        """Take in how a round went at the peer `reporter`. parts: each member's share of the
        averaging, 0 to 1.

        Weights count once more than half of the round's members told the same: one peer alone says
        nothing about the others' samples. A round far from the run's epoch is not believed.
        """
        now = time.time() if now is None else now
        members = {member.peer_id for member in result.members}
        if (
            not self._near(result.epoch)
            or not _number(result.fraction, 0, 1)
            or not _number(result.seconds, 0, _LONGEST_ROUND_S)
            or reporter not in members
        ):
            return
        with self._store.changing():
            self._store.see_round(
                RoundRow(
                    epoch=result.epoch,
                    group_id=shown(result.group_id, _ID_CHARS),
                    reporter=shown(reporter, _ID_CHARS),
                    members=len(result.members),
                    fraction=float(result.fraction),
                    seconds=float(result.seconds),
                    complete=bool(result.complete),
                    time=now,
                )
            )
            for member in result.members:
                peer_id = shown(member.peer_id, _ID_CHARS)
                rate = result.rates.get(member.peer_id)
                part = (parts or {}).get(member.peer_id)
                self._store.see_link(
                    peer_id,
                    float(rate) if rate is not None and _number(rate, 0, _LARGEST) else None,
                    float(part) if part is not None and _number(part, 0, 1) else None,
                )
            for name, weight in self._agreed(result, reporter):
                peer_id = shown(name, _ID_CHARS)
                row = WorkRow(result.epoch, peer_id, self._owner(peer_id)[0], round(weight))
                self._store.see_work(row, averaged=True)

    def _near(self, epoch: Any) -> bool:
        """Whether a round of `epoch` can be: of what is shown still, and not of what is to come."""
        if not _whole(epoch):
            return False
        here = self.epoch
        if here is None:
            return self._facts.epochs is None or epoch < self._facts.epochs
        return bool(here - KEPT_EPOCHS <= epoch <= here + 1)

    def _agreed(self, result: RoundResult, reporter: str) -> tuple[tuple[str, float], ...]:
        """The weights of a whole round, once more than half of its members told the same: of each
        member that another one than itself has vouched for."""
        weights = tuple((member.peer_id, float(member.weight)) for member in result.members)
        if not result.complete or not all(
            _number(weight, 0, self._most_samples()) for _, weight in weights
        ):
            return ()
        told = self._told.setdefault((result.epoch, result.group_id), {})
        told.setdefault(reporter, weights)
        while len(self._told) > _PENDING_GROUPS:
            del self._told[next(iter(self._told))]
        voters = {name for name, one in told.items() if one == weights}
        if len(voters) * 2 <= len(weights):
            return ()
        return tuple((peer, weight) for peer, weight in weights if voters - {peer})

    def ring(self, key: str, text: str | None, level: str = "warning") -> None:
        """Let an alarm ring that comes from elsewhere (a checkpoint that failed); None: no more."""
        if text is None:
            self._extra.pop(key, None)
        else:
            self._extra[key] = Alarm(key, level, shown(text, _ALARM_COLUMNS))

    def finish(self, now: float | None = None) -> None:
        """The run is over: end and settle all epochs; that peers leave is no alarm any more.

        Peers may be gone before most of them were heard at the last epoch. May be called again.
        """
        now = time.time() if now is None else now
        here, planned = self.epoch, self._facts.epochs
        with self._store.changing():
            if self._store.fact("finished") is None:
                self._store.set_fact("finished", now)
            if planned is not None and here is not None and 0 < planned - here <= _SETTLED_AFTER:
                self._end(here, planned, now)
                self._store.set_fact("epoch", planned)
                self._store.set_fact("epoch_started", now)
            self._settle(_LARGEST, now)
            self._set_leaders()
            self._store.set_alarms([], now)

    def _plausible(self, one: Announcement) -> bool:
        texts = (one.peer.peer_id, one.peer.name, one.peer.device, one.state_hash)
        return (
            all(isinstance(text, str) for text in texts)
            and 0 < len(one.peer.peer_id) <= _ID_CHARS
            and one.peer.role in ROLES
            and _whole(one.epoch)
            and _whole(one.samples)
            and one.samples <= self._most_samples()
            and _number(one.rate, 0, _MOST_RATE)
            and _number(one.time, 0, _LARGEST)
            and _whole(one.rss_bytes)
            and (one.loss is None or isinstance(one.loss, int | float))
        )

    def _most_samples(self) -> int:
        """More than any peer computes in an epoch."""
        return 100 * self._facts.target_batch

    def _owner(self, peer_id: str) -> tuple[str, bool]:
        """Who a peer's work is credited to, and whether a token says so."""
        user = self._user_of(peer_id) if self._user_of else None
        return (f"user {shown(user, _ID_CHARS)}", True) if user else (f"peer {peer_id}", False)

    def _peer(self, one: Announcement, now: float) -> PeerRow:
        peer_id = shown(one.peer.peer_id, _ID_CHARS)
        loss = _loss(one)
        before = self._store.rows("SELECT said FROM peers WHERE peer_id = ?", peer_id)
        fresh = not before or before[0]["said"] != one.time
        row = PeerRow(
            peer_id=peer_id,
            owner=self._owner(peer_id)[0],
            name=shown(one.peer.name, _NAME_COLUMNS) or "unnamed",
            role=one.peer.role,
            device=shown(one.peer.device, _NAME_COLUMNS),
            said=float(one.time),
            epoch=one.epoch,
            samples=one.samples,
            rate=float(one.rate),
            state_hash=shown(one.state_hash, _ID_CHARS),
            loss=loss,
            rss_bytes=one.rss_bytes,
            clock_s=self._clock(peer_id, now - one.time, fresh),
        )
        if fresh:
            self._store.see_peer(row, now)
        return row

    def _clock(self, peer_id: str, age_s: float, fresh: bool) -> float:
        """Seconds that a clock is ahead: an announcement cannot be younger than new; and one
        that is seen for the first time is hardly older than the time between two looks."""
        ages = self._ages.setdefault(peer_id, deque(maxlen=_AGES))
        if fresh:
            ages.append(age_s)
        if not ages:
            return 0.0
        least = min(ages)
        if least < 0:
            return -least
        late = least - self._watch.poll_s
        return -least if late > 1 and len(ages) == _AGES else 0.0

    def _active_peers(self, now: float) -> list[dict[str, Any]]:
        found = self._store.rows(
            "SELECT * FROM peers WHERE last_seen >= ?", now - self._watch.active_s
        )
        self._active.append((now, len(found)))
        while self._active[0][0] < now - alarms.PEERS_WINDOW_S:
            self._active.popleft()
        return found

    def _move(self, active: Sequence[Mapping[str, Any]], now: float) -> int | None:
        """The epoch that more than half of the peers have reached; end those before it."""
        before = self._store.fact("epoch")
        if not active:
            return None if before is None else int(before)
        # Auxiliaries only follow; a coordinator that is slow to follow must not hold the run back.
        trainers = [peer for peer in active if peer["role"] != "auxiliary"] or active
        epochs = sorted((int(peer["epoch"]) for peer in trainers), reverse=True)
        epoch = epochs[len(epochs) // 2]
        if before == epoch:
            return epoch
        if before is not None and epoch > before:
            self._end(int(before), epoch, now)
        self._store.set_fact("epoch", epoch)
        self._store.set_fact("epoch_started", now)
        self._store.set_fact("highest", max(epoch, self._store.fact("highest", epoch)))
        return epoch

    def _end(self, first: int, stop: int, now: float) -> None:
        """Epochs that ended since the last look share the time evenly."""
        began = float(self._store.fact("epoch_started", now))
        rows = self._store.rows(
            "SELECT DISTINCT epoch FROM work WHERE epoch >= ? AND epoch < ?", first, stop
        )
        each = (now - began) / (stop - first)
        for row in rows:
            place = row["epoch"] - first
            self._write_epoch(row["epoch"], began + place * each, began + (place + 1) * each)

    def _work(self, said: Sequence[Announcement], epoch: int) -> None:
        """Samples of the epoch that goes on, and of the one before, which a slow look may miss.

        An announcement for an epoch to come counts once the majority is there.
        """
        for one in said:
            if one.samples and epoch - 1 <= one.epoch <= epoch + 1:
                peer_id = shown(one.peer.peer_id, _ID_CHARS)
                owner = self._owner(peer_id)[0]
                row = WorkRow(one.epoch, peer_id, owner, one.samples, _loss(one))
                self._store.see_work(row, averaged=False)

    def _settle(self, epoch: int, now: float) -> None:
        """Write the rows of ended epochs anew; settle the older ones and credit their owners."""
        credited = False
        for row in self._store.rows("SELECT * FROM epochs WHERE NOT settled ORDER BY epoch"):
            owners = self._write_epoch(row["epoch"], row["started"], row["ended"])
            old = row["epoch"] <= epoch - _SETTLED_AFTER or now - row["ended"] > _SETTLED_AFTER_S
            if not old:
                continue
            for owner, samples in owners.items():
                label, known = self._label(owner)
                self._store.credit(owner, label, known, samples, row["ended"] - row["started"])
            self._store.settle(row["epoch"])
            credited = True
        if credited:
            self._store.colour()
            self._set_leaders()

    def _set_leaders(self) -> None:
        if self._leaders is not None:
            self._store.set_leaders([_plain(leader) for leader in self._leaders()])

    def _label(self, owner: str) -> tuple[str, bool]:
        kind, _, name = owner.partition(" ")
        if kind == "user":
            return shown(name, _NAME_COLUMNS), True
        found = self._store.rows("SELECT name FROM peers WHERE peer_id = ?", name)
        return (found[0]["name"] if found else short_id(name)), False

    def _write_epoch(self, epoch: int, started: float, ended: float) -> dict[str, int]:
        """Write an epoch's row from what is known of it; gives samples by owner."""
        work = self._store.rows("SELECT * FROM work WHERE epoch = ? AND samples > 0", epoch)
        told = [row for row in work if row["loss"] is not None]
        weight = sum(row["samples"] for row in told)
        owners: Counter[str] = Counter()
        for row in work:
            owners[row["owner"]] += row["samples"]
        best = self._store.rows(
            "SELECT max(fraction) AS fraction FROM rounds WHERE epoch = ? GROUP BY reporter", epoch
        )
        groups = self._store.rows(
            "SELECT min(complete) AS complete FROM rounds WHERE epoch = ? GROUP BY group_id", epoch
        )
        seconds = self._store.rows("SELECT group_id, seconds FROM rounds WHERE epoch = ?", epoch)
        loss = sum(row["loss"] * row["samples"] for row in told) / weight if told else None
        self._store.write_epoch(
            {
                "epoch": epoch,
                "started": started,
                "ended": ended,
                "samples": sum(owners.values()),
                "loss": loss,
                "peers": len(work),
                "owners": json.dumps(dict(owners)),
                "fraction": min((row["fraction"] for row in best), default=None),
                "round_s": max(_medians(seconds), default=None),
                "failed_rounds": sum(not row["complete"] for row in groups),
            }
        )
        return dict(owners)

    def _look(
        self, active: Sequence[Mapping[str, Any]], epoch: int | None, no_number: list[str],
        now: float,
    ) -> alarms.Look:  # fmt: skip
        ended = self._store.rows("SELECT * FROM epochs ORDER BY epoch DESC LIMIT 20")
        rounds = self._store.rows(
            "SELECT min(complete) AS complete FROM rounds WHERE epoch >= ? "
            "GROUP BY epoch, group_id ORDER BY max(time) DESC LIMIT 20",
            (epoch or 0) - 20,
        )
        averaged = next((row for row in ended if row["fraction"] is not None), None)
        last = max((row["ended"] for row in ended), default=0.0)
        planned = self._facts.epochs
        return alarms.Look(
            active=len(active),
            most_active=max((count for _, count in self._active), default=0),
            epoch=epoch,
            highest=self._store.fact("highest"),
            since_epoch_s=now - max(last, self._began),
            epoch_s=[row["ended"] - row["started"] for row in ended],
            fraction=averaged["fraction"] if averaged else None,
            fraction_epoch=averaged["epoch"] if averaged else None,
            failed=sum(not row["complete"] for row in rounds),
            rounds=len(rounds),
            no_number=sorted(no_number),
            clock_s={_named(peer): peer["clock_s"] for peer in active},
            other_weights=_minority(active, epoch),
            matchmaking_s=self._facts.matchmaking_s,
            delayed=self._facts.mode == "delayed",
            finished=self._store.fact("finished") is not None
            or (planned is not None and epoch is not None and epoch >= planned),
        )


def _loss(one: Announcement) -> float | None:
    """The loss where it is a number that can be: sums of larger ones would be infinite."""
    return float(one.loss) if _number(one.loss, -_MOST_LOSS, _MOST_LOSS) else None  # type: ignore[arg-type]


def _medians(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of each round: the median of its members' words, since one may lie."""
    by_group: dict[str, list[float]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], []).append(row["seconds"])
    return [statistics.median_low(found) for found in by_group.values()]


def shown(text: str, most: int) -> str:
    """A peer's text in which nothing hides, cut to `most` columns."""
    kept, marks = [], 0
    for character in text[: 4 * most]:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if marks <= _MARKS:
            kept.append(character)
    return cut_columns(_CONTROL.sub("\ufffd", visible("".join(kept))), most)


def short_id(peer_id: str) -> str:
    """The end of a peer id, as a person tells peers apart by it."""
    return f"…{peer_id[-6:]}" if len(peer_id) > 6 else peer_id


def _named(peer: Mapping[str, Any]) -> str:
    return f"{peer['name']} ({short_id(peer['peer_id'])})"


def _minority(active: Sequence[Mapping[str, Any]], epoch: int | None) -> list[str]:
    """Peers of this epoch with other weights than more than half of them."""
    here = [peer for peer in active if peer["epoch"] == epoch and peer["state_hash"]]
    votes = Counter(peer["state_hash"] for peer in here).most_common(1)
    if not votes or votes[0][1] * 2 <= len(here):
        return []
    return sorted(_named(peer) for peer in here if peer["state_hash"] != votes[0][0])


def _plain(leader: Leader) -> Leader:
    hours = leader.hours if _number(leader.hours, 0, _LARGEST) else 0.0
    return Leader(
        shown(leader.owner, _ID_CHARS), shown(leader.label, _NAME_COLUMNS), leader.samples,
        leader.rounds, hours,
    )  # fmt: skip


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _number(value: Any, low: float, high: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and low <= value <= high
