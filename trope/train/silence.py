"""A machine that falls silent is noticed within a minute: limits on this process's connections (Linux).

A cable that is cut tells nobody. TCP goes on sending for a quarter of an hour by default, and a process that only waits
for data would wait for ever. gloo and torch's store leave their sockets at these defaults and offer no setting, so the
limits are set on the sockets themselves.

A process that is stopped (Ctrl-Z, a paused container) may be lost too. Its machine still answers, but Linux also ends a
connection that was full for so long.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

SECONDS = 60
"""How long another machine may be silent. A switch that restarts, or a cable that is out for a moment, takes less."""
_PROBE_SECONDS = 15  # between two questions whether the other machine is there, where nothing else is sent


def limit_silence(seconds: int = SECONDS) -> int:
    """End every TCP connection of this process that has no answer for so long; returns how many there are.

    The one who waits on a connection that ended gets an error. Connections made later are not limited.
    """
    if sys.platform != "linux":
        return 0
    # With a default, Python makes each socket that it looks at non-blocking, for torch's store as well.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        return sum(_limit(int(entry.name), seconds) for entry in Path("/proc/self/fd").iterdir())
    finally:
        socket.setdefaulttimeout(before)


def _limit(number: int, seconds: int) -> bool:
    """Limit one open file if it is a TCP connection."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        # A second name for the same socket: options are the socket's, and closing this name leaves it open.
        with socket.socket(fileno=os.dup(number)) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                return False
            found.getpeername()  # one that listens has none
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, _PROBE_SECONDS),
                (socket.TCP_KEEPINTVL, _PROBE_SECONDS),
                (socket.TCP_KEEPCNT, max(1, seconds // _PROBE_SECONDS - 1)),
                (socket.TCP_USER_TIMEOUT, 1000 * seconds),
            ):
                found.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:  # it is not connected, or has been closed since it was listed
        return False
    return True
