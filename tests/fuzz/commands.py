"""Runs `trope` commands for the fuzzers, and says what is wrong with how one ended."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
HANG = 30.0  # seconds; more is a finding. On idle cores 10 are enough; CI has no idle cores
_PATIENCE = 120.0  # the first command imports torch, and the machine may be busy


@dataclass(frozen=True)
class Outcome:
    """How a command ended. code: None when it was stopped for taking too long. result: of `load`."""

    code: int | None
    out: str = ""
    err: str = ""
    trace: str = ""
    seconds: float = 0.0
    result: Any = None

    @property
    def problem(self) -> str | None:
        """What is wrong with the way it ended: anything but success, or exit code 2 with one line that says why."""
        if self.code is None:
            return f"it hung: no answer in {self.seconds:.0f} s"
        if self.trace or "Traceback (most recent call last)" in self.err:
            lines = (self.trace or self.err).strip().splitlines()
            place = next((line.strip() for line in reversed(lines) if "/trope/" in line), "")
            return f"traceback: {shortened(lines[-1])} ({re.sub('.*/trope/', 'trope/', place)})"
        if self.code == 0:
            return None
        if self.code != 2:
            return f"exit code {self.code}: {shortened(self.err)}"
        if "Usage:" in self.err:  # the command line's own word about an option
            return None
        last = self.err.rpartition("trope: ")[2] if "trope: " in self.err else ""
        if not last.strip():
            return f"exit code 2 without a line that says why: {shortened(self.err)}"
        if len(last.strip().splitlines()) > 1:
            return f"the error has {len(last.strip().splitlines())} lines: {shortened(last)}"
        return None

    @property
    def refused(self) -> bool:
        """Whether it ended with exit code 2."""
        return self.code == 2

    @property
    def line(self) -> str:
        """The error, for a finding."""
        return shortened(self.err.rpartition("trope: ")[2])


def shortened(text: str, most: int = 200) -> str:
    """The end of a text in one line."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())[-most:]


def environment(code: Path) -> dict[str, str]:
    """One thread, so that two runs give the same bytes, and the package of `code`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FORCE_COLOR")}
    return {**kept, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}


def fresh(code: Path, words: list[str], timeout: float = 300.0) -> Outcome:
    """Run a command in a process of its own."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trope", *words], env=environment(code), cwd=code, text=True, errors="replace",
            capture_output=True, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(None, seconds=timeout)
    return Outcome(done.returncode, done.stdout, done.stderr, seconds=time.monotonic() - begun)


class Worker:
    """A process that runs one command after the other; it is started again after a hang or a crash."""

    def __init__(self, code: Path, spark: bool = False) -> None:
        self._code = code
        self._arguments = ["spark"] if spark else []
        self._process: subprocess.Popen[bytes] | None = None
        self._warm = False

    def run(self, *words: str | Path, timeout: float = HANG) -> Outcome:
        """Run `trope WORDS`."""
        return self._ask({"words": [str(word) for word in words]}, timeout)

    def load(self, folder: Path, timeout: float = HANG) -> Outcome:
        """`Sequences.load`; see `worker._load` for the result."""
        return self._ask({"load": str(folder)}, timeout)

    def close(self) -> None:
        """Stop the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self._warm = None, False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], timeout: float) -> Outcome:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), *self._arguments], env=environment(self._code), cwd=self._code,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        begun = time.monotonic()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            ready = selector.select(timeout if self._warm else _PATIENCE)
        answer = stdout.readline() if ready else b""
        if not answer:
            status = self._process.poll()
            self.close()
            seconds = time.monotonic() - begun
            return Outcome(None if not ready else 1, err=f"the process died with status {status}", seconds=seconds)
        self._warm = True
        return Outcome(**json.loads(answer))
