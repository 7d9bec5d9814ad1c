"""Whether a port can be had, told before the daemon is started.

p2pd cannot be left to find out: it shares its port (SO_REUSEPORT) with another p2pd of the same
user, and each of the two would then be called for the other.
"""

from __future__ import annotations

import errno
import socket
import time

from models.errors import UserError

_ENDS_S = 5.0
"""A process that was killed takes so long at most until its daemon has gone."""
_RETRY_S = 0.25


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens at `port` of `host`, an address of this machine. Raises OSError when
    it cannot be listened at for another reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
            tried.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def check(host: str, port: int) -> None:
    """Raises UserError when a peer cannot listen at `port` of `host`; 0 is any free one."""
    if not port:
        return
    until_s = time.monotonic() + _ENDS_S
    try:
        while not is_free(host, port):
            if time.monotonic() > until_s:
                raise UserError(
                    f"peer.port = '{port}' is in use at '{host}': end what listens there, or give "
                    "another one with --set peer.port=N (0: any free one)"
                )
            time.sleep(_RETRY_S)
    except OSError as error:
        raise UserError(
            f"peer.host = '{host}', peer.port = '{port}' cannot be listened at "
            f"({error.strerror}): give an address of this machine with --set peer.host=..., and "
            "a port from 1024 on"
        ) from error
