"""A signal ends what the main thread waits for, a second later; cleaning up is not disturbed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from training.stopping import StopRequest
from training.swarm.leaving import Leave, disarm, interrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_long_wait_ends(number: signal.Signals) -> None:
    with StopRequest() as stop, pytest.raises(Leave), interrupted(stop):
        os.kill(os.getpid(), number)
        assert stop.name == number.name  # the loop's own look comes first
        threading.Event().wait(30)
    assert stop.requested


def test_who_leaves_in_time_is_not_interrupted() -> None:
    with StopRequest() as stop, interrupted(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        disarm()
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat it
        time.sleep(1.3)
    assert stop.requested


def test_the_first_signal_may_come_late() -> None:
    with StopRequest() as stop, interrupted(stop):
        disarm()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.3)
    assert stop.requested


def test_a_signal_of_before() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Leave), interrupted(stop):
            threading.Event().wait(30)


def test_nothing_stays() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]
    with StopRequest() as stop, interrupted(stop):
        pass
    after = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]
    assert before == after
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
