"""What the page shows, read from a run's `MetricsStore`: plain values that JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from training.swarm.curve import MOST_BINS, Bin, Bins, of_epoch
from training.swarm.metrics_store import MetricsStore

ACTIVE_S = 30.0
_GONE_SHOWN_S = 900.0
_PEERS_SHOWN = 200
_LEADERS_SHOWN = 100
_PAST_ALARMS = 50
_CHECKPOINTS_SHOWN = 20
_SPEED_EPOCHS = 20
OTHERS = "others"


class Views:
    """The views of one run; what a long run needs is kept between calls. One thread calls it."""

    def __init__(self, store: MetricsStore, *, active_s: float = ACTIVE_S) -> None:
        self._store, self._active_s = store, active_s
        self._all = Bins()
        self._folded = -1  # epochs up to this one are settled and in `_all`
        self._counted = -1  # and up to this one in these
        self._samples = self._epochs_seen = 0

    def status(self, now: float) -> dict[str, Any]:
        """The run at this moment."""
        store = self._store
        with store.looking():
            colours = self._colours()
            ended = store.rows("SELECT * FROM epochs ORDER BY epoch DESC LIMIT ?", _SPEED_EPOCHS)
            peers = self._peers(now, colours)
            active = [peer for peer in peers if peer["active"]]
            epoch = store.fact("epoch")
            run = store.fact("run") or {}
            progress = self._progress(epoch, run, colours)
            rate = sum(peer["rate"] for peer in active)
            left = max(0, progress["target"] - progress["samples"])
            seconds = sum(row["ended"] - row["started"] for row in ended)
            samples, epochs = self._totals()
            return {
                "run": run,
                "now": now,
                "began": store.fact("began"),
                "looked": store.fact("looked"),
                "finished": store.fact("finished"),
                "epoch": epoch,
                "progress": progress | {"left_s": left / rate if rate > 0 else None},
                "loss": next((row["loss"] for row in ended if row["loss"] is not None), None),
                "ended": ended[0]["ended"] if ended else None,
                "last_epoch": ended[0]["epoch"] if ended else None,
                "fraction": next(
                    (row["fraction"] for row in ended if row["fraction"] is not None), None
                ),
                "rate": rate,
                "measured_rate": (
                    sum(row["samples"] for row in ended) / seconds if seconds > 0 else None
                ),
                "epoch_s": seconds / len(ended) if ended else None,
                "samples": samples,
                "epochs_seen": epochs,
                "roles": {
                    role: sum(peer["role"] == role for peer in active)
                    for role in ("node", "client", "auxiliary")
                },
                "peers": peers[:_PEERS_SHOWN],
                "peers_left_out": max(0, len(peers) - _PEERS_SHOWN),
                "refused": store.fact("refused", 0),
                "alarms": store.rows(
                    "SELECT key, level, text, since FROM alarms WHERE until IS NULL "
                    "ORDER BY level, number"
                ),
            }

    def board(self) -> dict[str, Any]:
        """What changes with an epoch: the leaderboard, checkpoints, alarms that are over."""
        store = self._store
        with store.looking():
            colours = self._colours()
            by_receipts = store.fact("board") == "receipts"
            leaders = store.rows(
                "SELECT owner, label, samples, rounds, hours FROM leaders ORDER BY place LIMIT ?"
                if by_receipts
                else "SELECT owner, label, samples, epochs AS rounds, seconds / 3600 AS hours "
                "FROM owners WHERE samples > 0 ORDER BY samples DESC, owner LIMIT ?",
                _LEADERS_SHOWN,
            )
            table = "leaders" if by_receipts else "owners"
            total = store.rows(f"SELECT sum(samples) AS samples, count(*) AS n FROM {table}")[0]
            return {
                "source": "receipts" if by_receipts else "announcements",
                "contributors": total["n"],
                "leaders": [
                    leader
                    | {
                        "part": leader["samples"] / total["samples"] if total["samples"] else 0.0,
                        "colour": colours.get(leader["owner"], {}).get("colour"),
                    }
                    for leader in leaders
                ],
                "checkpoints": store.rows(
                    "SELECT * FROM checkpoints ORDER BY epoch DESC LIMIT ?", _CHECKPOINTS_SHOWN
                ),
                "past_alarms": store.rows(
                    "SELECT key, level, text, since, until FROM alarms WHERE until IS NOT NULL "
                    "ORDER BY number DESC LIMIT ?",
                    _PAST_ALARMS,
                ),
            }

    def history(self, span: str) -> dict[str, Any]:
        """The curve: of the last MOST_BINS epochs ("recent"), or of the whole run in bins."""
        with self._store.looking():
            colours = self._colours()
            if span == "recent":
                found = Bins()
                rows = self._epochs("ORDER BY epoch DESC LIMIT ?", MOST_BINS)
                for one in sorted(rows, key=lambda one: one.first):
                    found.add(one)
            else:
                for one in self._epochs("WHERE settled AND epoch > ? ORDER BY epoch", self._folded):
                    self._all.add(one)
                    self._folded = one.last
                found = self._all.copy()
                for one in self._epochs("WHERE epoch > ? ORDER BY epoch", self._folded):
                    found.add(one)
        bins = found.bins()
        return {
            "span": span,
            "width": found.width,
            "owners": _legend(bins, colours),
            "bins": [_as_json(one, colours) for one in bins],
        }

    def _epochs(self, clause: str, value: int) -> Iterator[Bin]:
        for row in self._store.rows(f"SELECT * FROM epochs {clause}", value):
            yield of_epoch(row, json.loads(row["owners"]))

    def _totals(self) -> tuple[int, int]:
        """Samples and epochs of the run; those of settled epochs are added up once."""
        query = "SELECT max(epoch) AS last, sum(samples) AS samples, count(*) AS n FROM epochs"
        settled = self._store.rows(f"{query} WHERE settled AND epoch > ?", self._counted)[0]
        if settled["n"]:
            self._counted = settled["last"]
            self._samples += settled["samples"]
            self._epochs_seen += settled["n"]
        rest = self._store.rows(f"{query} WHERE epoch > ?", self._counted)[0]
        return self._samples + (rest["samples"] or 0), self._epochs_seen + rest["n"]

    def _colours(self) -> dict[str, dict[str, Any]]:
        """Contributors with a colour, by owner."""
        rows = self._store.rows(
            "SELECT owner, label, known, colour FROM owners WHERE colour IS NOT NULL"
        )
        return {row["owner"]: row for row in rows}

    def _peers(self, now: float, colours: Mapping[str, Any]) -> list[dict[str, Any]]:
        epoch = self._store.fact("epoch") or 0
        rows = self._store.rows(
            "SELECT p.*, (SELECT sum(samples) FROM work w WHERE w.peer_id = p.peer_id "
            "AND w.epoch >= ?) AS lately FROM peers p WHERE last_seen >= ? ORDER BY rate DESC",
            epoch - _SPEED_EPOCHS, now - _GONE_SHOWN_S,
        )  # fmt: skip
        total = sum(row["lately"] or 0 for row in rows)
        majority = _majority(
            [row["state_hash"] for row in rows
             if row["epoch"] == epoch and row["state_hash"]
             and now - row["last_seen"] <= self._active_s]
        )  # fmt: skip
        found = [
            {
                "peer_id": row["peer_id"],
                "name": row["name"],
                "user": _user(row["owner"]),
                "role": row["role"],
                "device": row["device"],
                "epoch": row["epoch"],
                "samples": row["samples"],
                "rate": row["rate"],
                "loss": row["loss"],
                "share": (row["lately"] or 0) / total if total else 0.0,
                "part": row["part"],
                "link_bytes_s": row["link_bytes_s"],
                "rss_bytes": row["rss_bytes"],
                "clock_s": row["clock_s"],
                "state_hash": row["state_hash"],
                "agrees": (
                    row["state_hash"] == majority
                    if majority and row["state_hash"] and row["epoch"] == epoch
                    else None
                ),
                "first_seen": row["first_seen"],
                "last_seen": row["last_seen"],
                "active": now - row["last_seen"] <= self._active_s,
                "colour": colours.get(row["owner"], {}).get("colour"),
            }
            for row in rows
        ]
        return sorted(found, key=lambda peer: (not peer["active"], -peer["share"], peer["peer_id"]))

    def _progress(
        self, epoch: int | None, run: Mapping[str, Any], colours: Mapping[str, Any]
    ) -> dict[str, Any]:
        rows = self._store.rows(
            "SELECT owner, sum(samples) AS samples FROM work WHERE epoch = ? GROUP BY owner",
            -1 if epoch is None else epoch,
        )
        split = _split({row["owner"]: row["samples"] for row in rows}, colours)
        return {
            "samples": sum(row["samples"] for row in rows),
            "target": int(run.get("target_batch", 0)),
            "by_colour": split,
        }


def _user(owner: str) -> str | None:
    return owner.removeprefix("user ") if owner.startswith("user ") else None


def _legend(bins: list[Bin], colours: Mapping[str, Any]) -> list[dict[str, Any]]:
    totals: dict[str, int] = {}
    for one in bins:
        for owner, samples in one.owners.items():
            totals[owner] = totals.get(owner, 0) + samples
    everything = sum(totals.values())
    legend = [
        {
            "colour": colours[owner]["colour"],
            "label": colours[owner]["label"],
            "owner": owner,
            "part": samples / everything,
        }
        for owner, samples in totals.items()
        if owner in colours and samples
    ]
    rest = {owner: samples for owner, samples in totals.items() if owner not in colours}
    legend.sort(key=lambda entry: entry["colour"])
    if sum(rest.values()):
        label = "1 other" if len(rest) == 1 else f"{len(rest)} others"
        part = sum(rest.values()) / everything
        legend.append({"colour": None, "label": label, "owner": None, "part": part})
    return legend


def _as_json(one: Bin, colours: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "first": one.first,
        "last": one.last,
        "ended": one.ended,
        "loss": one.loss,
        "low": one.loss_low,
        "high": one.loss_high,
        "samples": one.samples,
        "rate": one.samples / one.seconds if one.seconds > 0 else None,
        "peers": one.peers,
        "fraction": one.fraction,
        "round_s": one.round_s,
        "by_colour": _split(one.owners, colours),
    }


def _split(samples: Mapping[str, int], colours: Mapping[str, Any]) -> dict[str, int]:
    """Samples by number of the colour; the rest under OTHERS."""
    found: dict[str, int] = {}
    for owner, count in samples.items():
        key = str(colours[owner]["colour"]) if owner in colours else OTHERS
        found[key] = found.get(key, 0) + count
    return found


def _majority(hashes: list[str]) -> str | None:
    for one in set(hashes):
        if hashes.count(one) * 2 > len(hashes):
            return one
    return None
