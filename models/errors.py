"""Errors by consequence: what the person at the keyboard, or the run, has to do next."""

from __future__ import annotations


class GristmillError(Exception):
    """Base of every error that Gristmill raises on purpose."""


class UserError(GristmillError):
    """A mistake that the user can repair: shown as one line, without a traceback, exit code 2.

    The message says what is wrong, quotes the offending value, names what is valid and
    how to repair it.
    """


class DamagedInput(GristmillError):
    """Input that cannot be used. The run goes on without it and counts it under `reason`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Fault(GristmillError):
    """A fault of ours, or of the machine: the run stops, the staging files stay for a resume."""
