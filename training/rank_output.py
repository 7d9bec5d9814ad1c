"""What a rank says on stderr, passed on or kept by its launcher.

Rank 0 is heard at once, on a pseudo-terminal where the launcher has a terminal, so that its live
line works; the others are kept, for the case that they fail. A traceback is held back: one
failing rank makes all others fail too, and only the launcher learns which one was first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import threading

_TRACEBACK = b"Traceback (most recent call last):"
_KEPT_BYTES = 1 << 16
_READ_BYTES = 1 << 14


class RankOutput:
    """The stderr of one rank. shown: pass it on to stderr at once."""

    def __init__(self, rank: int, *, shown: bool) -> None:
        self._marks = (_TRACEBACK, f"[rank{rank}]: ".encode() + _TRACEBACK)  # torch puts it first
        self._shown = shown
        self.held = b""
        self._line = b""
        self._may_begin = True
        self._in_traceback = False
        if shown and os.isatty(2):
            self._ours, self.end_for_rank = os.openpty()
            window = fcntl.ioctl(2, termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
            fcntl.ioctl(self.end_for_rank, termios.TIOCSWINSZ, window)
        else:
            self._ours, self.end_for_rank = os.pipe()
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def start(self) -> None:
        """Begin to read; call it when the rank has its end."""
        os.close(self.end_for_rank)
        self._thread.start()

    def kept(self) -> str:
        """What has not been passed on, once the rank has ended; its last 64 KiB."""
        self._thread.join(timeout=1.0)
        return self.held.decode(errors="replace").replace("\r\n", "\n").strip()

    def _relay(self) -> None:
        # A pseudo-terminal says EIO at its end.
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, _READ_BYTES):
                self.take(data)
        if self._line:
            self._pass_on(self._line)
        os.close(self._ours)

    def take(self, data: bytes) -> None:
        """One piece of the stream, cut anywhere."""
        while data and not self._in_traceback:
            # `_line`: what the current line has so far, while it may still begin a traceback.
            start, self._line = self._line + data, b""
            if self._may_begin and any(mark.startswith(start[: len(mark)]) for mark in self._marks):
                self._in_traceback = start.startswith(self._marks)
                if not self._in_traceback:
                    self._line = start
                    return
                data = start
                break
            head, newline, data = start.partition(b"\n")
            self._pass_on(head + newline)
            self._may_begin = bool(newline)
        if data:
            self._keep(data)

    def _pass_on(self, data: bytes) -> None:
        if self._shown:
            with contextlib.suppress(OSError):
                os.write(2, data)
        else:
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self.held = (self.held + data)[-_KEPT_BYTES:]
