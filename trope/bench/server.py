"""`trope serve`, or another server, as a process of its own, and what the process costs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path


class Server:
    """A server process that answers `GET /health`.

    ready: what it prints on stderr with its address as the first group. threads: of its products; None: its own choice.
    """

    def __init__(
        self, command: list[str], ready: str = r"trope: serving \S+ at (\S+)", threads: int | None = None
    ) -> None:
        started = time.perf_counter()
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # A group of its own: some servers leave their workers behind when they alone are ended.
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        assert self.process.stderr is not None
        self.url = ""
        self.lines: list[str] = []
        try:
            for raw in self.process.stderr:
                self.lines.append(raw.decode())
                if found := re.search(ready, self.lines[-1]):
                    self.url = found[1]
                    break
            if not self.url:
                raise ValueError("the server ended: " + "".join(self.lines).strip())
            threading.Thread(target=self._drain, daemon=True).start()
            wait_until_answering(self.url)
        except BaseException:  # also Ctrl-C, which does not reach the group of the server
            self.end()
            raise
        self.start_seconds = time.perf_counter() - started

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            self.lines.append(raw.decode())
            del self.lines[:-1000]

    def memory(self) -> int:
        """Bytes in memory that the process allocated.

        Pages of files are left out: whether those of a library count as the process's own depends on which other
        processes use it at the moment, and the kernel drops them at will.
        """
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        found = re.search(r"^Anonymous:\s+(\d+)", text, re.MULTILINE)
        assert found is not None, text
        return 1024 * int(found[1])

    def cpu_seconds(self) -> float:
        """Of the process and all that it started, so far; 0 where there is no /proc."""
        total = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()  # from the third field on
                if int(fields[2]) == self.process.pid:  # its process group
                    total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def end(self, seconds: float = 40) -> int:
        """Ask the server to end, and wait so long; returns its exit code. Nothing that it started is left."""
        self.process.terminate()
        try:
            return self.process.wait(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def serve(run: Path, *arguments: str, device: str = "cpu", threads: int | None = 1) -> Server:
    """`trope serve` on a free port."""
    command = [sys.executable, "-m", "trope", "serve", str(run), "--port", "0", "--device", device, *arguments]
    return Server(command, threads=threads)


def wait_until_answering(url: str, seconds: float = 120) -> None:
    """Return once `GET /health` is answered."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).read()
            return
        except OSError:  # also an HTTPError: some answer 503 until their workers are ready
            time.sleep(0.02)
    raise RuntimeError(f"{url} does not answer")
