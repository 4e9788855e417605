"""Run a command under a real limit on its memory, and measure what it took.

The limit is a memory cgroup where one can be made (Linux, root): the kernel kills what goes over it. Elsewhere it is
RLIMIT_DATA, which refuses allocations. Page cache counts in a cgroup but is given back when memory is short; what is
reported as `peak_anonymous_gib` is memory that cannot be given back, seen every tenth of a second.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Limit(NamedTuple):
    """A limit that a process joins before it starts. folder: of its cgroup, None without one."""

    kind: str
    folder: Path | None
    most: int

    def join(self) -> None:
        """Called in the new process."""
        if self.folder is None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.most, self.most))
        else:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def anonymous(self, pid: int) -> int:
        """Bytes of memory that cannot be given back, now."""
        with contextlib.suppress(OSError):
            if self.folder is not None:
                stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
                return int(stat["rss"] if "rss" in stat else stat["anon"])
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
        return 0


@contextlib.contextmanager
def limit(most: int) -> Iterator[Limit]:
    """The strongest limit that this machine allows."""
    name = f"trope-{os.getpid()}"
    for folder, file in ((_V1 / name, "memory.limit_in_bytes"), (_V2 / name, "memory.max")):
        if not folder.parent.is_dir() or (folder.parent == _V2 and not (_V2 / "cgroup.controllers").is_file()):
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / file).write_text(str(most))
            yield Limit(f"memory cgroup ({file})", folder, most)
        finally:
            folder.rmdir()
        return
    yield Limit("RLIMIT_DATA", None, most)


def run(command: Sequence[str], most: int, **options: Any) -> dict[str, Any]:
    """Run a command within `most` bytes; returns its exit code, time and memory."""
    with limit(most) as limited:
        started = time.perf_counter()
        process = subprocess.Popen(command, preexec_fn=limited.join, **options)
        peak, over = [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                peak[0] = max(peak[0], limited.anonymous(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            _, status, used = os.wait4(process.pid, 0)  # of this child alone, unlike getrusage
        except BaseException:  # this process was interrupted
            process.kill()
            process.wait()
            raise
        finally:
            wall = time.perf_counter() - started
            over.set()
            watcher.join()
    code = process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "limit": limited.kind,
        "limit_gib": round(most / GIB, 3),
        "exit_code": code,
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_anonymous_gib": round(peak[0] / GIB, 3),
        "peak_resident_gib": round(used.ru_maxrss * 1024 / GIB, 3),
    }
