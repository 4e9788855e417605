"""A real server makes the slates: `trope serve --arm ...` in a process of its own, asked over loopback HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trope.online.assignment import Experiment
from trope.online.exposures import write_experiment
from trope.online.simulation.population import Ints
from trope.serve.histories import Histories

_QUESTIONS, _EVENTS = 256, 10_000
_SECONDS = 120.0


class OverHttp:
    """Asks a server. Histories are not sent: the server knows its dataset and the events it was told.

    url: of a server on this machine. k: places of a slate.
    """

    def __init__(self, url: str, k: int) -> None:
        self.url, self.k = url, k
        self.arms: dict[int, str] = {}  # of each user that was answered

    def answer(self, users: Ints, histories: Histories, moments: Ints) -> Ints:
        """See `Answers`."""
        slates = np.full((len(users), self.k), -1)
        pairs = list(zip(users.tolist(), moments.tolist(), strict=True))
        for first in range(0, len(pairs), _QUESTIONS):
            asked = pairs[first : first + _QUESTIONS]
            body = [{"user_id": str(user), "moment": moment, "k": self.k} for user, moment in asked]
            for place, said in enumerate(self._post("/recommend", body)):
                items = [entry["item_id"] for entry in said["items"]]
                slates[first + place, : len(items)] = items
                self.arms[asked[place][0]] = said["arm"]
        return slates

    def observe(self, users: Ints, items: Ints, times: Ints) -> None:
        """See `Answers`."""
        rows = [
            {"user_id": str(user), "item_id": item, "timestamp": time}
            for user, item, time in zip(users.tolist(), items.tolist(), times.tolist(), strict=True)
        ]
        for first in range(0, len(rows), _EVENTS):
            self._post("/events", {"events": rows[first : first + _EVENTS]})

    def _post(self, path: str, content: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(content).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ValueError(f"the server refused {path}: {json.loads(error.read()).get('error')}") from None


@contextmanager
def serving(experiment: Experiment, runs: Mapping[str, str], exposures: Path, k: int) -> Iterator[OverHttp]:
    """Run a server with the experiment's arms; on leaving it is ended gently, so that `exposures` is whole.

    The server goes on with an experiment that began at the shop's time, not at the clock's.
    """
    write_experiment(exposures, experiment, dict.fromkeys(experiment.arms, ""))
    with tempfile.TemporaryDirectory(prefix="trope-rehearsal-") as folder:
        # Floats as Python writes them come back the same, so the server finds the shares of experiment.json.
        arms = [f"--arm={arm}={runs[arm]}:{share!r}" for arm, share in experiment.arms.items()]
        command = [
            sys.executable, "-m", "trope", "serve", *arms, "--experiment", experiment.name, "--port", "0", "--quiet",
            "--exposures", str(exposures), "--store", str(Path(folder) / "events.sqlite"), "--device", "cpu",
        ]  # fmt: skip
        errors = Path(folder) / "stderr"
        with errors.open("wb") as file:
            process = subprocess.Popen(command, stderr=file, stdin=subprocess.DEVNULL, env=dict(os.environ))
        try:
            yield OverHttp(_address(process, errors), k)
        finally:
            process.terminate()
            process.wait(timeout=_SECONDS)


def _address(process: subprocess.Popen[bytes], errors: Path) -> str:
    """Wait until the server answers; returns its address."""
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        text = errors.read_text(encoding="utf-8", errors="replace")
        if process.poll() is not None:
            lines = [line for line in text.splitlines() if line.strip() and not line.startswith("{")]
            raise ValueError(f"the server did not start: {lines[-1] if lines else f'code {process.returncode}'}")
        found = re.search(r"^trope: serving \S+ at (\S+)$", text, re.MULTILINE)
        if found is not None and _is_ready(found[1]):
            return found[1]
        time.sleep(0.1)
    raise ValueError(f"the server did not answer within {_SECONDS:.0f} seconds")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:  # it does not listen yet
        return False
