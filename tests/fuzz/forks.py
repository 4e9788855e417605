"""Starts each `trope` command as a fork of one process that has imported everything: 10 times as many kills a minute.

As a script it is that process; `Forks` speaks JSON lines to it. A command can be killed by SIGKILL at any time, or
right before its Nth change of a name on disk: moments between two renames are too short for a random clock. Names
are changed by the calls of `CALLS`; pathlib, shutil and tempfile use these too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

CALLS = ("rename", "replace", "mkdir", "unlink", "rmdir", "link")
_IMPORTED = (
    "torch",
    "ibis",
    "duckdb",
    "pyarrow.parquet",
    "pyarrow.compute",
    "rich.progress",
    "safetensors.torch",
    "trope",
)


class Forks:
    """Commands of the checkout `code`, each in a process of its own."""

    def __init__(self, code: Path) -> None:
        # Not at the top: the script runs without the package `tests`, whatever the checkout.
        from tests.fuzz.commands import environment

        self._logs = tempfile.TemporaryDirectory(prefix="trope-fuzz-")
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment(code), cwd=code, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, words: list[str], watched: Path, kill_at: int = 0) -> int:
        """Start `trope WORDS`; returns its process id. kill_at: kill it before its Nth rename in `watched`."""
        self._count += 1
        log = f"{self._logs.name}/{self._count}"
        return self._ask({"words": words, "watched": str(watched), "kill_at": kill_at, "log": log})["pid"]

    def wait(self, pid: int, timeout: float) -> dict[str, Any]:
        """Wait for a command: `code` (None if it was stopped after `timeout`), `text`, and `names` that it changed."""
        return self._ask({"wait": pid, "timeout": timeout})

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.wait()
        self._logs.cleanup()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        return json.loads(stdout.readline())


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _IMPORTED:
        importlib.import_module(name)
    logs: dict[int, str] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid = request["wait"]
            answer = {"code": _wait(pid, request["timeout"]), **_read(logs.pop(pid))}
        else:
            pid = os.fork()
            if pid == 0:
                answers.close()
                _run(**request)
            logs[pid] = request["log"]
            answer = {"pid": pid}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _wait(pid: int, timeout: float) -> int | None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _read(log: str) -> dict[str, Any]:
    text = Path(log).read_text(errors="replace") if os.path.exists(log) else ""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return {"text": text, "names": json.loads(Path(f"{log}.names").read_text())}
    return {"text": text, "names": []}


def _run(words: list[str], watched: str, kill_at: int, log: str) -> None:
    """The child: never returns."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    names: list[str] = []
    for name in CALLS:
        setattr(os, name, _counted(name, getattr(os, name), names, watched, kill_at))
    code = 1
    try:
        try:
            from trope.cli.main import main as trope
        except ModuleNotFoundError:  # before it was a package
            from trope.cli import main as trope
        sys.argv = ["trope", *words]
        trope()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # a user would see it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with open(f"{log}.names", "w") as file:
            json.dump(names, file)
        os._exit(code)


def _counted(name: str, call: Any, names: list[str], watched: str, kill_at: int) -> Any:
    def counts(path: Any, *rest: Any, **settings: Any) -> Any:
        if isinstance(path, str | os.PathLike) and str(path).startswith(watched):
            names.append(name)
            if len(names) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return call(path, *rest, **settings)

    return counts


if __name__ == "__main__":
    main()
