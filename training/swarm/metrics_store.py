"""What the coordinator knows of a run, in one SQLite file: peers, epochs, rounds, alarms.

One process writes (`training.swarm.collector`), any number read (`training.swarm.views`); in WAL
mode nobody waits for the other. Texts and numbers come from peers and were made harmless by the
collector before they get here. What was seen of single peers and rounds is kept for the last
`KEPT_EPOCHS` epochs; older epochs keep their one row.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.errors import UserError

FILE = "metrics.sqlite"
VERSION = 1
KEPT_EPOCHS = 1000
KEPT_PEERS = 10_000
COLOURS = 8
"""Contributors that have a colour of their own; the others share grey."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS peers (
    peer_id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, role TEXT NOT NULL,
    device TEXT NOT NULL, first_seen REAL NOT NULL, last_seen REAL NOT NULL, said REAL NOT NULL,
    epoch INTEGER NOT NULL, samples INTEGER NOT NULL, rate REAL NOT NULL,
    state_hash TEXT NOT NULL, loss REAL, rss_bytes INTEGER NOT NULL, clock_s REAL NOT NULL,
    link_bytes_s REAL, part REAL
);
CREATE TABLE IF NOT EXISTS work (
    epoch INTEGER NOT NULL, peer_id TEXT NOT NULL, owner TEXT NOT NULL, samples INTEGER NOT NULL,
    loss REAL, averaged INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (epoch, peer_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (
    epoch INTEGER NOT NULL, group_id TEXT NOT NULL, reporter TEXT NOT NULL,
    members INTEGER NOT NULL, fraction REAL NOT NULL, seconds REAL NOT NULL,
    complete INTEGER NOT NULL, time REAL NOT NULL, PRIMARY KEY (epoch, group_id, reporter)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS epochs (
    epoch INTEGER PRIMARY KEY, started REAL NOT NULL, ended REAL NOT NULL, samples INTEGER NOT NULL,
    loss REAL, peers INTEGER NOT NULL, owners TEXT NOT NULL, fraction REAL, round_s REAL,
    failed_rounds INTEGER NOT NULL, settled INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS unsettled ON epochs (epoch) WHERE NOT settled;
CREATE TABLE IF NOT EXISTS owners (
    owner TEXT PRIMARY KEY, label TEXT NOT NULL, known INTEGER NOT NULL, samples INTEGER NOT NULL,
    epochs INTEGER NOT NULL, seconds REAL NOT NULL, colour INTEGER
);
CREATE TABLE IF NOT EXISTS leaders (
    place INTEGER PRIMARY KEY, owner TEXT NOT NULL, label TEXT NOT NULL, samples REAL NOT NULL,
    rounds INTEGER NOT NULL, hours REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS alarms (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, level TEXT NOT NULL, text TEXT NOT NULL,
    since REAL NOT NULL, until REAL
);
CREATE TABLE IF NOT EXISTS checkpoints (
    epoch INTEGER PRIMARY KEY, state_hash TEXT NOT NULL, votes INTEGER NOT NULL,
    active INTEGER NOT NULL, bytes INTEGER NOT NULL, time REAL NOT NULL, path TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class RunFacts:
    """What does not change in a run. epochs: planned; None for no end. matchmaking_s: window of a
    round; None where nobody knows."""

    name: str
    target_batch: int
    epochs: int | None = None
    mode: str = "sync"
    recipe_digest: str = ""
    parameters: int | None = None
    matchmaking_s: float | None = None


@dataclass(frozen=True)
class PeerRow:
    """A peer as it was last heard. owner: who its work is credited to. said: `time` of the
    announcement; clock_s: seconds its clock is ahead (+) of the coordinator's."""

    peer_id: str
    owner: str
    name: str
    role: str
    device: str
    said: float
    epoch: int
    samples: int
    rate: float
    state_hash: str
    loss: float | None
    rss_bytes: int
    clock_s: float


@dataclass(frozen=True)
class WorkRow:
    """Samples that a peer gathered in an epoch, with their mean loss where it told one."""

    epoch: int
    peer_id: str
    owner: str
    samples: int
    loss: float | None = None


@dataclass(frozen=True)
class RoundRow:
    """How a round went at the peer `reporter`. complete: all members hold the same average."""

    epoch: int
    group_id: str
    reporter: str
    members: int
    fraction: float
    seconds: float
    complete: bool
    time: float


@dataclass(frozen=True)
class Leader:
    """A row of the leaderboard, from receipts. samples: weight that majorities reported."""

    owner: str
    label: str
    samples: float
    rounds: int
    hours: float


@dataclass(frozen=True)
class Alarm:
    """Something a person should look at. key: one alarm of each key is open at a time."""

    key: str
    level: str
    text: str


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint that was written: `votes` of `active` peers announced its hash."""

    epoch: int
    state_hash: str
    votes: int
    active: int
    bytes: int
    time: float
    path: str


class MetricsStore:
    """The file `path`. Threads of one process may share it."""

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        """Open it; made when it is not there. Raises UserError."""
        self.path = Path(path)
        self._lock = threading.RLock()
        if read_only and not self.path.is_file():
            raise UserError(
                f"'{path}' is not there: give the {FILE} of a run of `gristmill swarm start`"
            )
        try:
            if not read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
                uri=True, isolation_level=None, check_same_thread=False, timeout=10,
            )  # fmt: skip
            self._db.row_factory = sqlite3.Row
            self._prepare(read_only)
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"'{path}' is no store of a run's metrics: {error}") from None

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> MetricsStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """What is written in the block is written whole or not at all."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """What is read in the block is of one moment."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """The rows of a query."""
        with self._lock:
            return [dict(row) for row in self._db.execute(query, values)]

    def fact(self, name: str, otherwise: Any = None) -> Any:
        """A value that `set_fact` left."""
        found = self.rows("SELECT value FROM facts WHERE name = ?", name)
        return json.loads(found[0]["value"]) if found else otherwise

    def set_fact(self, name: str, value: Any) -> None:
        """Keep a value that JSON can hold."""
        text = json.dumps(value, allow_nan=False)
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?)", name, text)

    def set_run(self, facts: RunFacts, now: float) -> None:
        """Say what run it is. Raises UserError when the file is of another one."""
        before = self.fact("run")
        if before is not None and before["recipe_digest"] != facts.recipe_digest:
            raise UserError(
                f"'{self.path}' is of a run with the recipe digest '{before['recipe_digest']}', "
                f"this one has '{facts.recipe_digest}': give another folder"
            )
        with self.changing():
            self.set_fact("run", asdict(facts))
            if before is None:
                self.set_fact("began", now)

    def see_peer(self, peer: PeerRow, now: float) -> None:
        """A peer has said something new."""
        values = asdict(peer) | {"now": now}
        names = [name for name in asdict(peer) if name != "peer_id"]
        self._db_write(
            f"INSERT INTO peers (peer_id, {', '.join(names)}, first_seen, last_seen) "
            f"VALUES (:peer_id, {', '.join(':' + name for name in names)}, :now, :now) "
            "ON CONFLICT (peer_id) DO UPDATE SET last_seen = :now, "
            + ", ".join(f"{name} = :{name}" for name in names),
            values,
        )

    def forget_peers(self) -> None:
        """Keep the `KEPT_PEERS` that were heard last: names may come without end."""
        self._write(
            "DELETE FROM peers WHERE peer_id IN (SELECT peer_id FROM peers "
            "ORDER BY last_seen DESC, peer_id LIMIT -1 OFFSET ?)",
            KEPT_PEERS,
        )  # fmt: skip

    def see_link(self, peer_id: str, bytes_s: float | None, part: float | None) -> None:
        """A peer's link as a round measured it, and its part of the averaging."""
        self._write(
            "UPDATE peers SET link_bytes_s = coalesce(?, link_bytes_s), part = coalesce(?, part) "
            "WHERE peer_id = ?",
            bytes_s, part, peer_id,
        )  # fmt: skip

    def see_work(self, row: WorkRow, *, averaged: bool) -> None:
        """Samples of a peer in an epoch. averaged: the number that a whole round weighed it with,
        which no announcement changes any more; announcements only grow it until then."""
        self._write(
            "INSERT INTO work VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (epoch, peer_id) DO UPDATE SET "
            "samples = CASE WHEN excluded.averaged THEN excluded.samples WHEN averaged THEN samples"
            " ELSE max(samples, excluded.samples) END, "
            "loss = CASE WHEN excluded.loss IS NULL THEN loss ELSE excluded.loss END, "
            "averaged = max(averaged, excluded.averaged)",
            *asdict(row).values(), int(averaged),
        )  # fmt: skip

    def see_round(self, row: RoundRow) -> None:
        """A round as one of its members saw it; said twice it counts once."""
        self._write(
            "INSERT OR IGNORE INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *asdict(row).values()
        )

    def write_epoch(self, row: Mapping[str, Any]) -> None:
        """The row of an epoch that ended, unless it is settled."""
        names = list(row)
        self._db_write(
            f"INSERT INTO epochs ({', '.join(names)}, settled) "
            f"VALUES ({', '.join(':' + name for name in names)}, 0) "
            "ON CONFLICT (epoch) DO UPDATE SET "
            + ", ".join(f"{name} = :{name}" for name in names if name not in ("started", "ended"))
            + " WHERE NOT settled",
            row,
        )

    def credit(self, owner: str, label: str, known: bool, samples: int, seconds: float) -> None:
        """Add the work of one settled epoch to its owner. known: the label is from a token."""
        self._write(
            "INSERT INTO owners VALUES (?, ?, ?, ?, 1, ?, NULL) ON CONFLICT (owner) DO UPDATE SET "
            "label = excluded.label, known = excluded.known, samples = samples + excluded.samples, "
            "epochs = epochs + 1, seconds = seconds + excluded.seconds",
            owner, label, int(known), samples, seconds,
        )  # fmt: skip

    def settle(self, epoch: int) -> None:
        """Nothing changes in the row of this epoch any more; forget what is long past."""
        self._write("UPDATE epochs SET settled = 1 WHERE epoch = ?", epoch)
        for table in ("work", "rounds"):
            self._write(f"DELETE FROM {table} WHERE epoch < ?", epoch - KEPT_EPOCHS)

    def colour(self) -> None:
        """Give the largest contributors a colour; who has one and still is large keeps it."""
        with self.changing():
            largest = self.rows(
                "SELECT owner, colour FROM owners WHERE samples > 0 "
                "ORDER BY samples DESC, owner LIMIT ?",
                COLOURS,
            )
            kept = {row["colour"] for row in largest} - {None}
            free = iter(sorted(set(range(COLOURS)) - kept))
            self._write("UPDATE owners SET colour = NULL")
            for row in largest:
                colour = next(free) if row["colour"] is None else row["colour"]
                self._write("UPDATE owners SET colour = ? WHERE owner = ?", colour, row["owner"])

    def set_leaders(self, leaders: Sequence[Leader]) -> None:
        """The leaderboard in place of the one before."""
        with self.changing():
            self._write("DELETE FROM leaders")
            for place, leader in enumerate(leaders, start=1):
                values = (leader.owner, leader.label, leader.samples, leader.rounds, leader.hours)
                self._write("INSERT INTO leaders VALUES (?, ?, ?, ?, ?, ?)", place, *values)

    def set_alarms(self, alarms: Sequence[Alarm], now: float) -> list[Alarm]:
        """Open the alarms that are new, close those that are gone; gives the new ones."""
        fresh = []
        with self.changing():
            ringing = self.rows("SELECT key FROM alarms WHERE until IS NULL")
            open_keys = {row["key"] for row in ringing}
            for key in open_keys - {alarm.key for alarm in alarms}:
                self._write("UPDATE alarms SET until = ? WHERE key = ? AND until IS NULL", now, key)
            for alarm in alarms:
                if alarm.key in open_keys:
                    self._write(
                        "UPDATE alarms SET text = ?, level = ? WHERE key = ? AND until IS NULL",
                        alarm.text, alarm.level, alarm.key,
                    )  # fmt: skip
                else:
                    fresh.append(alarm)
                    self._write(
                        "INSERT INTO alarms (key, level, text, since) VALUES (?, ?, ?, ?)",
                        alarm.key, alarm.level, alarm.text, now,
                    )  # fmt: skip
        return fresh

    def add_checkpoint(self, row: CheckpointRow) -> None:
        """A checkpoint was written."""
        self._write(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?)",
            *asdict(row).values(),
        )

    def _write(self, statement: str, *values: Any) -> None:
        self._db_write(statement, values)

    def _db_write(self, statement: str, values: Any) -> None:
        with self._lock:
            self._db.execute(statement, values)

    def _prepare(self, read_only: bool) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION) or (read_only and found == 0):
            raise UserError(f"'{self.path}' is no store of a run's metrics of version {VERSION}")
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {VERSION}")
