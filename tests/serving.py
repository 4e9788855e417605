"""A small run to serve, with and without a pulse, and a server around it in this process or in one of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from data_logs import START, prepared, random_log, write_parquet
from patience import PATIENCE
from starlette.testclient import TestClient

from trope.data.sequences import Sequences
from trope.models.recommender import SequentialRecommender
from trope.runs import open_run
from trope.server.app import Options, make_app
from trope.server.logs import Log
from trope.server.open_store import open_store
from trope.server.served import Served
from trope.server.store import Store
from trope.settings import preset

MAX_LEN = 8
TINY = [f"model.max_len={MAX_LEN}", "model.width=16", "model.heads=2", "model.head_dim=8", "model.blocks=1"]
END = START + 10**6
"""After the last event of the dataset."""
NOW = END + 86_400
HISTORY = 10_000


def make_data(folder: Path) -> Sequences:
    """Users u01 .. u20 and items "item 1" .. "item 15"."""
    log = [(f"u{user:02}", f"item {item}", time) for user, item, time in random_log()]
    return prepared(write_parquet(folder / "log.parquet", log), folder / "data")


def make_run(data: Sequences, run: Path, model: str = "trope", seed: int = 0) -> Path:
    """A run folder as training leaves it, with a model that has learned nothing, and a pulse with random weights."""
    torch.manual_seed(seed)
    config = preset(model, TINY)
    open_run(run, data, config, resume=False)
    network = SequentialRecommender(config, data.num_items, data.time_span)
    if network.pulse is not None:
        for name in ("everybody", "own"):
            network.pulse.get_buffer(name).normal_(std=0.2)
        stream = network.pulse.count(data.items, data.times)
        list(stream.at(torch.tensor([END])))
        network.pulse.keep(stream)
    network.save_pretrained(run / "best")
    return run


@contextlib.contextmanager
def client_of(run: Path, store: str | Path | Store, **options: Any) -> Iterator[TestClient]:
    """The real application, in this process."""
    opened = open_store(store) if isinstance(store, str | Path) else store
    data = options.get("data")
    served = Served.open(run, data, opened, HISTORY, "cpu")
    app = make_app({"": served}, opened, Options(device="cpu", **options), Log(requests=False))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=True) as client:
        yield client


class Process:
    """`trope serve` in a process of its own, on a free port of the loopback interface."""

    def __init__(self, run: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "trope", "serve", str(run), "--port", "0", "--device", "cpu", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
        assert self.process.stderr is not None
        self.lines: list[str] = []
        self.url = ""
        while not self.url:
            line = self.process.stderr.readline().decode()
            assert line, f"the server ended: {self.lines}"
            self.lines.append(line)
            found = re.match(r"trope: serving \S+ at (\S+)", line)
            self.url = found[1] if found else ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        while True:  # the socket listens before the application is ready to answer
            with contextlib.suppress(OSError):
                if self.get("/ready")[0] == 200:
                    return

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(line.decode() for line in self.process.stderr)

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return _fetch(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, content: Any) -> tuple[int, Any]:
        body = json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        return _fetch(urllib.request.Request(self.url + path, body, headers, method="POST"))

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(how)
        code = self.process.wait(timeout=PATIENCE)
        self._reading.join(timeout=PATIENCE)
        return code


def _fetch(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
