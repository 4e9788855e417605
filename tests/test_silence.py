"""The limits on connections that fall silent; `tests/test_cluster.py` cuts real cables."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trope.train.silence import limit_silence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process list its connections")


@pytest.mark.parametrize("default", [None, 9.0])
def test_connections_are_limited_and_nothing_else_is_touched(default: float | None) -> None:
    """Also where the program that trains has set a default for Python's own sockets."""
    with default_timeout(default):
        check_limits()
        assert socket.getdefaulttimeout() == default


@contextmanager
def default_timeout(seconds: float | None) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def check_limits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        one, other = socket.socketpair()
        with accepted, one, other, open(os.devnull) as file:
            client.setblocking(True)
            before = os.listdir("/proc/self/fd")
            assert limit_silence(45) >= 2
            assert os.listdir("/proc/self/fd") == before, "no file is left open, none is closed"
            assert os.get_blocking(client.fileno()), "torch waits in its reads"
            for end in (client, accepted):
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 45_000
                idle, every, count = (
                    end.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + every * count == 45, "who only waits is told as early as who sends"
            assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
            assert not file.closed
            client.sendall(b"still there")
            assert accepted.recv(11) == b"still there"


def test_a_connection_that_is_gone_is_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        others = limit_silence()
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client:
            assert limit_silence() == others + 2
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a goodbye
            accepted.close()
            assert limit_silence() == others
