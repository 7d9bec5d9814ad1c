"""The ledger: who contributed how much to a run, in one SQLite file, from receipts.

Everything that is put in may come twice, late and in any order: the figures are the same. Receipts
of an epoch are tallied anew whenever one more comes, so that a contribution stands once a majority
of its group has reported it (`training.swarm.receipts`).

A contributor is credited with what majorities reported, but with no more than SLACK times the
samples that its announced speed allows in the minutes in which it was seen, the whole run together:
an epoch may last for hours, and its receipts come at its end. Presence alone earns nothing, and
work that was never announced earns nothing.

Receipts are kept for `kept_epochs`, what they added up to for ever. One process writes, any number
read (WAL).
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import files
from models.errors import UserError
from training.swarm import receipts
from training.swarm.keys import Untrusted
from training.swarm.metrics_store import Leader
from training.swarm.receipts import Receipt

FILE = "ledger.sqlite"
VERSION = 1
SLACK = 1.5
"""How much faster than it announced a peer may have been."""
_KEPT_MINUTES = 120
LATE_EPOCHS = 16
"""How far the epoch of a receipt may lie from the run's, behind or ahead."""
_GROUPS = 8  # of one signer in one epoch: one for each try
_MOST_RATE = 1e9

_SCHEMA = """
CREATE TABLE IF NOT EXISTS users (peer TEXT PRIMARY KEY, user TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS receipts (
    run TEXT NOT NULL, epoch INTEGER NOT NULL, signer TEXT NOT NULL, grp TEXT NOT NULL,
    text TEXT NOT NULL, came REAL NOT NULL, PRIMARY KEY (run, epoch, signer, grp)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contributions (
    run TEXT NOT NULL, epoch INTEGER NOT NULL, peer TEXT NOT NULL, grp TEXT NOT NULL,
    samples REAL NOT NULL, witnesses INTEGER NOT NULL, members INTEGER NOT NULL,
    hour INTEGER NOT NULL, PRIMARY KEY (run, epoch, peer)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seen (
    run TEXT NOT NULL, peer TEXT NOT NULL, minute INTEGER NOT NULL, rate REAL NOT NULL,
    PRIMARY KEY (run, peer, minute)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS hours (
    run TEXT NOT NULL, peer TEXT NOT NULL, hour INTEGER NOT NULL, samples REAL NOT NULL DEFAULT 0,
    rounds INTEGER NOT NULL DEFAULT 0, minutes INTEGER NOT NULL DEFAULT 0,
    possible REAL NOT NULL DEFAULT 0, PRIMARY KEY (run, peer, hour)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS counted AFTER INSERT ON contributions BEGIN
    INSERT OR IGNORE INTO hours (run, peer, hour) VALUES (new.run, new.peer, new.hour);
    UPDATE hours SET samples = samples + new.samples, rounds = rounds + 1
    WHERE run = new.run AND peer = new.peer AND hour = new.hour;
END;
CREATE TRIGGER IF NOT EXISTS uncounted AFTER DELETE ON contributions BEGIN
    UPDATE hours SET samples = samples - old.samples, rounds = rounds - 1
    WHERE run = old.run AND peer = old.peer AND hour = old.hour;
END;
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON seen BEGIN
    INSERT OR IGNORE INTO hours (run, peer, hour) VALUES (new.run, new.peer, new.minute / 60);
    UPDATE hours SET minutes = minutes + 1, possible = possible + 60 * new.rate
    WHERE run = new.run AND peer = new.peer AND hour = new.minute / 60;
END;
CREATE TRIGGER IF NOT EXISTS faster AFTER UPDATE ON seen BEGIN
    UPDATE hours SET possible = possible + 60 * (new.rate - old.rate)
    WHERE run = new.run AND peer = new.peer AND hour = new.minute / 60;
END;
"""

_BOARD = """
WITH sums AS (
    SELECT peer, sum(samples) AS samples, sum(possible) AS possible, sum(rounds) AS rounds,
        sum(minutes) AS minutes
    FROM hours WHERE run = ? GROUP BY peer
)
SELECT coalesce('user ' || user, 'peer ' || sums.peer) AS owner,
    coalesce(user, sums.peer) AS label,
    sum(min(samples, ? * possible)) AS samples, sum(samples) AS reported, sum(rounds) AS rounds,
    sum(minutes) / 60.0 AS hours, count(*) AS peers
FROM sums LEFT JOIN users ON users.peer = sums.peer GROUP BY owner
HAVING sum(rounds) > 0 ORDER BY samples DESC, rounds DESC, owner
"""


@dataclass(frozen=True)
class Standing:
    """A row of the leaderboard.

    owner: "user NAME" of a token, or "peer ID" without one; samples: credited, after the cap;
    reported: before it; rounds: epochs with a counted contribution, an auxiliary's included;
    hours: of presence, of all the owner's peers together.
    """

    owner: str
    label: str
    samples: float
    reported: float
    rounds: int
    hours: float
    peers: int


class Ledger:
    """The ledger in the file `path`. Threads of one process may share it."""

    def __init__(self, path: str | Path, *, kept_epochs: int = 1000) -> None:
        """Open it; made when it is not there. Raises UserError."""
        self.path, self._kept_epochs = Path(path), max(kept_epochs, LATE_EPOCHS)
        self._lock = threading.RLock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=10
            )
            self._db.row_factory = sqlite3.Row
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"'{path}' is no ledger of a swarm: {error}") from None

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise UserError(
                f"'{self.path}' is a ledger of version {version}, this program writes {VERSION}: "
                "give another file"
            )
        self._db.executescript(f"{_SCHEMA} PRAGMA user_version = {VERSION};")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, text: str | bytes, *, run: str, epoch: int, now: float) -> bool:
        """Take in a receipt of `run`, which is at `epoch`; False when it was here before.

        Raises Untrusted when it is not a receipt, of another run, of an epoch too far from
        `epoch`, or contradicts what its signer signed before.
        """
        receipt = receipts.read(text)
        if receipt.run != run:
            raise Untrusted(f"the receipt is of the run '{receipt.run}', not of '{run}'")
        if abs(receipt.epoch - epoch) > LATE_EPOCHS:
            raise Untrusted(f"the receipt is of epoch {receipt.epoch}, the run is at {epoch}")
        with self._changing():
            if not self._is_new(receipt):
                return False
            self._db.execute(
                "INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?)",
                (run, receipt.epoch, receipt.signer, receipt.group, receipt.text, now),
            )
            self._settle(run, receipt.epoch)
            self._db.execute(
                "DELETE FROM receipts WHERE run = ? AND epoch < ?", (run, epoch - self._kept_epochs)
            )
        return True

    def see(self, run: str, peer_id: str, rate: float, now: float) -> None:
        """`peer_id` announced itself, with `rate` samples/s; the highest of a minute counts."""
        if not (math.isfinite(rate) and 0 <= rate <= _MOST_RATE):
            rate = 0.0
        with self._changing():
            self._db.execute(
                "INSERT INTO seen VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET rate = excluded.rate WHERE excluded.rate > seen.rate",
                (run, peer_id, int(now // 60), rate),
            )
            # What they add up to is in `hours` already.
            self._db.execute(
                "DELETE FROM seen WHERE run = ? AND peer = ? AND minute < ?",
                (run, peer_id, int(now // 60) - _KEPT_MINUTES),
            )

    def know(self, peer_id: str, user: str) -> None:
        """A checked token says that `peer_id` is `user`'s; all its work is credited to the user."""
        with self._changing():
            self._db.execute("INSERT OR REPLACE INTO users VALUES (?, ?)", (peer_id, user))

    def standings(self, run: str) -> list[Standing]:
        """The leaderboard: the most samples first."""
        with self._lock:
            return [Standing(**row) for row in self._db.execute(_BOARD, (run, SLACK))]

    def leaders(self, run: str) -> list[Leader]:
        """The leaderboard as the dashboard shows it."""
        return [
            Leader(one.owner, one.label, one.samples, one.rounds, one.hours)
            for one in self.standings(run)
        ]

    def contributions(self, run: str, epoch: int) -> list[receipts.Contribution]:
        """What majorities reported of an epoch, in order of the peers."""
        query = (
            "SELECT grp, peer, samples, witnesses, members FROM contributions "
            "WHERE run = ? AND epoch = ? ORDER BY peer"
        )
        with self._lock:
            found = self._db.execute(query, (run, epoch))
            return [receipts.Contribution(*row) for row in found]

    def export(self, run: str, path: str | Path) -> dict[str, Any]:
        """Write the leaderboard of `run` to `path` as JSON; gives what was written."""
        query = (
            "SELECT count(DISTINCT epoch) AS epochs, min(epoch) AS first, max(epoch) AS last "
            "FROM contributions WHERE run = ?"
        )
        with self._lock:
            counted = dict(self._db.execute(query, (run,)).fetchone())
        board = {
            "run": run,
            "epochs": counted,
            "cap": {"slack": SLACK, "of": "announced samples/s x minutes present"},
            "contributors": [asdict(one) for one in self.standings(run)],
        }
        files.write_atomic(path, json.dumps(board, indent=2, ensure_ascii=False) + "\n")
        return board

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _is_new(self, receipt: Receipt) -> bool:
        """Whether nothing is here of its signer about its group. Raises Untrusted."""
        query = "SELECT grp, text FROM receipts WHERE run = ? AND epoch = ? AND signer = ?"
        key = (receipt.run, receipt.epoch, receipt.signer)
        before = {row["grp"]: row["text"] for row in self._db.execute(query, key)}
        if receipt.group not in before:
            if len(before) >= _GROUPS:
                raise Untrusted(
                    f"'{receipt.signer}' signed receipts of {len(before)} groups before"
                )
            return True
        known = json.loads(before[receipt.group])
        if known["weights"] != [list(pair) for pair in receipt.weights]:
            raise Untrusted(f"'{receipt.signer}' signed other weights of this group before")
        if known["fraction"] != receipt.fraction:
            raise Untrusted(f"'{receipt.signer}' signed another fraction of this group before")
        return False

    def _settle(self, run: str, epoch: int) -> None:
        """Tally the receipts of an epoch anew. Stored ones were checked when they came.

        A majority of a group stays one when more of it sign, so that nothing has to be taken back.
        """
        rows = self._db.execute(
            "SELECT signer, text, came FROM receipts WHERE run = ? AND epoch = ? "
            "ORDER BY came, signer, grp",
            (run, epoch),
        ).fetchall()
        hour = int(rows[0]["came"] // 3600)
        before = {one.peer_id: one for one in self.contributions(run, epoch)}
        for one in receipts.tally(receipts.stored(row["text"], row["signer"]) for row in rows):
            if before.get(one.peer_id) == one:
                continue
            self._db.execute(
                "DELETE FROM contributions WHERE run = ? AND epoch = ? AND peer = ?",
                (run, epoch, one.peer_id),
            )
            self._db.execute(
                "INSERT INTO contributions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (run, epoch, one.peer_id, one.group, one.weight, one.witnesses, one.members, hour),
            )
