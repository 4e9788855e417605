"""Several machines on this one, with a network of their own: network namespaces on a bridge that leads nowhere else.

Each machine has an address, a host name and its own /etc/hosts. All see the same disk. Needs root and iproute2 (Linux).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO


def why_not() -> str | None:
    """Why there can be no machines here; None where there can."""
    if sys.platform != "linux":
        return "network namespaces are of Linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [name for name in ("ip", "unshare", "mount", "hostname") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is missing"
    probe = f"probe{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespace can be made here: {done.stderr.strip()}"
    _ip("netns", "delete", probe)
    return None


class Host:
    """One machine. name: its host name. address: the one that the others reach."""

    def __init__(self, number: int, network: str, folder: Path) -> None:
        self.name, self.address = f"machine{number}", f"10.77.0.{number}"
        self._namespace, self._switch = f"{network}-{number}", f"{network}-0"
        self.hosts_file = folder / f"hosts-{self.name}"

    def plug_in(self) -> None:
        """Make the machine and connect it to the switch."""
        _ip("netns", "add", self._namespace)
        _ip("-n", self._switch, "link", "add", self.name, "type", "veth", "peer", "eth0", "netns", self._namespace)
        _ip("-n", self._switch, "link", "set", self.name, "master", "switch", "up")
        _ip("-n", self._namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self._namespace, "link", "set", device, "up")

    def start(self, words: Sequence[str], output: IO[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command on this machine, in a session of its own."""
        inside = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        isolated = ["ip", "netns", "exec", self._namespace, "unshare", "--uts", "sh", "-c", inside]
        return subprocess.Popen(
            [*isolated, self.name, str(self.hosts_file), *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, env=dict(env), start_new_session=True,
        )  # fmt: skip

    def configure(self, name: str, value: int) -> None:
        """Set a number of /proc/sys on this machine, such as `net/ipv4/tcp_retries2`."""
        _ip("netns", "exec", self._namespace, "sh", "-c", f"echo {value} > /proc/sys/{name}")

    def processes(self) -> list[int]:
        return list(map(int, _ip("netns", "pids", self._namespace).split()))

    def kill(self) -> None:
        """`kill -9` of everything that runs on this machine. The kernel still closes the connections."""
        until = time.monotonic() + 30
        while found := self.processes():
            for number in found:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            assert time.monotonic() < until, f"{self.name} still runs {found}"
            time.sleep(0.05)

    def cut(self) -> None:
        """Pull the cable: no packet comes or goes, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self.name, "down")

    def mend(self) -> None:
        _ip("-n", self._switch, "link", "set", self.name, "up")

    def remove(self) -> None:
        """Its network card goes with its last process."""
        self.kill()
        _ip("netns", "delete", self._namespace)


class Hosts:
    """So many machines, inside `with`; at its end they are gone, with everything that runs on them.

    folder: for each machine's /etc/hosts. has_own_name: whether a machine finds its own name at its address; otherwise
    at 127.0.1.1, as Debian's installer writes it.
    """

    def __init__(self, count: int, folder: Path, has_own_name: bool = True) -> None:
        network = f"trope{os.getpid()}"
        self._switch = f"{network}-0"
        self.all = [Host(number, network, folder) for number in range(1, count + 1)]
        for host in self.all:
            others = {each.name: each.address for each in self.all}
            lines = {"localhost": "127.0.0.1", **others, **({} if has_own_name else {host.name: "127.0.1.1"})}
            host.hosts_file.write_text("".join(f"{address} {name}\n" for name, address in lines.items()))
        self._made: list[Host] = []

    def __enter__(self) -> list[Host]:
        _ip("netns", "add", self._switch)
        try:
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for host in self.all:
                self._made.append(host)
                host.plug_in()
        except BaseException:
            self._remove()
            raise
        return self.all

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for host in self._made:
            host.remove()
        _ip("netns", "delete", self._switch)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
