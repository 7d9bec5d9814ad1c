"""Which alarms ring, as pure functions of what the collector saw: when a person should look.

A rule rings while its condition holds and falls silent by itself. The thresholds are chosen so
that one peer that leaves a large swarm is no alarm, and a stop of the whole swarm always is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from training.swarm.metrics_store import Alarm

PEERS_WINDOW_S = 600.0
"""The number of peers is compared with the most in this time."""
_FALL = 0.75
_SLOW = 3.0  # times the median epoch
_SHORTEST_STALL_S = 30.0
_FIRST_EPOCH_S = 900.0
_MEDIAN_OF = 3  # epochs that a median needs
_CLOCK_S = 2.0  # hivemind refuses a peer at 3 s
_ROUNDS = 10
_SHORT_OF = 10  # epochs, so that a start with few samples is no alarm
_WINDOWS = 3  # as in training.swarm.sizing
_NAMES = 3


@dataclass(frozen=True)
class Look:
    """The run at one moment.

    active, most_active: peers heard lately, and the most within PEERS_WINDOW_S. epoch, highest:
    now and ever. since_epoch_s: since the last epoch ended, or the collector began. epoch_s: how
    long the last epochs took. fraction: really averaged in the newest epoch that a round told of.
    failed, rounds: of the last rounds those that were not whole. no_number: peers whose loss is
    NaN or infinite. clock_s: by peer, ahead (+). other_weights: peers whose hash differs from the
    majority's. matchmaking_s: of the recipe. delayed: peers compute while they
    average.
    """

    active: int = 0
    most_active: int = 0
    epoch: int | None = None
    highest: int | None = None
    since_epoch_s: float = 0.0
    epoch_s: Sequence[float] = ()
    fraction: float | None = None
    fraction_epoch: int | None = None
    failed: int = 0
    rounds: int = 0
    no_number: Sequence[str] = ()
    clock_s: Mapping[str, float] = field(default_factory=dict)
    other_weights: Sequence[str] = ()
    matchmaking_s: float | None = None
    delayed: bool = False
    finished: bool = False


def find(look: Look) -> list[Alarm]:
    """Alarms that ring, the gravest first."""
    found = [alarm for rule in _RULES if (alarm := rule(look)) is not None]
    return sorted(found, key=lambda alarm: alarm.level != "grave")


def _peers(look: Look) -> Alarm | None:
    if look.finished or look.most_active == 0 or look.active >= _FALL * look.most_active:
        return None
    now = f"{_peers_are(look.active)} heard" if look.active else "No peer is heard any more"
    text = f"{now}; there were {look.most_active} in the last {PEERS_WINDOW_S / 60:.0f} min"
    return Alarm("peers", "warning" if look.active else "grave", text)


def _stalled(look: Look) -> Alarm | None:
    if look.finished:
        return None
    if len(look.epoch_s) < _MEDIAN_OF:
        if look.since_epoch_s <= _FIRST_EPOCH_S or look.active == 0:
            return None
        return Alarm("stalled", "grave", f"No epoch has ended for {_time(look.since_epoch_s)}")
    median = statistics.median(look.epoch_s)
    if look.since_epoch_s <= max(_SLOW * median, _SHORTEST_STALL_S):
        return None
    text = f"No epoch has ended for {_time(look.since_epoch_s)}; one takes {_time(median)}"
    return Alarm("stalled", "grave", text)


def _loss(look: Look) -> Alarm | None:
    if not look.no_number:
        return None
    return Alarm("loss", "grave", f"The loss is not a number at {_names(look.no_number)}")


def _partial(look: Look) -> Alarm | None:
    if look.fraction is None or look.fraction >= 1:
        return None
    text = f"Only {_percent(look.fraction)} was averaged in epoch {look.fraction_epoch:,}"
    return Alarm("partial", "grave", text)


def _retried(look: Look) -> Alarm | None:
    if look.rounds < _ROUNDS or look.failed * 4 < look.rounds:
        return None
    text = f"{look.failed} of the last {look.rounds} rounds were not whole and were tried again"
    return Alarm("retried", "warning", text)


def _split(look: Look) -> Alarm | None:
    if not look.other_weights:
        return None
    text = f"Other weights than the majority's at {_names(look.other_weights)}"
    return Alarm("split", "warning", text)


def _back(look: Look) -> Alarm | None:
    if look.epoch is None or look.highest is None or look.epoch >= look.highest:
        return None
    text = f"The swarm is at epoch {look.epoch:,} and was at {look.highest:,} before"
    return Alarm("back", "warning", text)


def _short(look: Look) -> Alarm | None:
    """Epochs that hold hardly more than their matchmaking window; SWARM 1.3: peers got stuck."""
    if look.finished or not look.matchmaking_s or len(look.epoch_s) < _SHORT_OF:
        return None
    waiting = 0.0 if look.delayed else look.matchmaking_s
    computing = statistics.median(look.epoch_s) - waiting
    if computing >= _WINDOWS * look.matchmaking_s:
        return None
    text = (
        f"An epoch computes for {_time(max(0.0, computing))}, less than {_WINDOWS} matchmaking "
        f"windows of {look.matchmaking_s:g} s: see gristmill swarm size"
    )
    return Alarm("short", "warning", text)


def _clock(look: Look) -> Alarm | None:
    wrong = {name: clock for name, clock in look.clock_s.items() if abs(clock) >= _CLOCK_S}
    if not wrong:
        return None
    middle = statistics.median(look.clock_s.values())
    if len(look.clock_s) > 1 and abs(middle) >= _CLOCK_S:
        text = f"The clock of this machine differs by {abs(middle):.1f} s from most peers' clocks"
        return Alarm("clock", "warning", text)
    worst = max(wrong, key=lambda name: abs(wrong[name]))
    how = f"{abs(wrong[worst]):.1f} s {'ahead' if wrong[worst] > 0 else 'behind'}"
    rest = f"; {len(wrong) - 1} more clocks are wrong" if len(wrong) > 1 else ""
    return Alarm("clock", "warning", f"The clock of {worst} is {how}{rest}")


_RULES: tuple[Callable[[Look], Alarm | None], ...] = (
    _peers, _stalled, _loss, _partial, _split, _back, _retried, _short, _clock,
)  # fmt: skip


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return shown if len(names) <= _NAMES else f"{shown} and {len(names) - _NAMES} more"


def _peers_are(count: int) -> str:
    return "1 peer is" if count == 1 else f"{count} peers are"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _percent(part: float) -> str:
    """Never "100.0 %" for less than all."""
    return f"{min(part * 100, 99.9):.1f} %"
