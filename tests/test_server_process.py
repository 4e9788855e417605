"""`trope serve` as a process: killed under load, ended gently, swapped under load, started wrongly."""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE, wait_until
from serving import NOW, Process, make_data, make_run

from trope.data.sequences import Sequences
from trope.server.sqlite_store import SqliteStore

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return make_data(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def run(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(data, tmp_path_factory.mktemp("run"))


class Load:
    """Threads that call something again and again, until they are told to stop; what they raise is raised there."""

    def __init__(self, call: Callable[[int], None], threads: int = 6) -> None:
        self._stop = threading.Event()
        self._raised: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(call, place)) for place in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, call: Callable[[int], None], place: int) -> None:
        while not self._stop.is_set():
            try:
                call(place)
            except Exception as error:
                self._raised.append(error)
                return

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._raised:
            raise self._raised[0]


def test_no_acknowledged_event_is_lost_by_a_kill(run: Path, tmp_path: Path) -> None:
    acknowledged: list[str] = []
    numbers = itertools.count()
    for _ in range(3):
        server = Process(run, "--store", str(tmp_path / "s"), "--quiet")

        def post(place: int, server: Process = server) -> None:
            names = [f"e{next(numbers)}" for _ in range(3)]
            rows = [{"user_id": f"k{place}", "item_id": "item 1", "timestamp": NOW, "event_id": n} for n in names]
            try:
                if server.post("/events", {"events": rows})[0] == 200:
                    acknowledged.extend(names)
            except (OSError, ValueError, http.client.HTTPException):  # killed before it had answered
                time.sleep(0.01)

        load = Load(post)
        known = len(acknowledged)
        wait_until(lambda known=known: len(acknowledged) > known + 100)
        server.end(signal.SIGKILL)
        load.stop()
    store = SqliteStore(tmp_path / "s")
    stored = {row[0] for row in store._reader.execute("SELECT event_id FROM events")}
    assert set(acknowledged) <= stored


def test_a_gentle_end_answers_what_waits(run: Path, tmp_path: Path) -> None:
    server = Process(run, "--store", str(tmp_path / "s"))
    answered: list[int] = []
    broken: list[Any] = []
    ending = threading.Event()

    def ask(place: int) -> None:
        try:
            status, _ = server.post("/recommend", {"user_id": f"u{place:02}"})
            (answered if status == 200 else broken).append(status)
        except ConnectionRefusedError:
            ending.wait(0.05)
        except OSError as error:
            if "refused" not in str(error):
                broken.append(error)

    load = Load(ask)
    wait_until(lambda: answered)
    code = server.end(signal.SIGTERM)
    load.stop()
    assert code in (0, -signal.SIGTERM), code
    assert not [each for each in broken if isinstance(each, int)], broken[:3]
    assert len(broken) <= 6, broken[:3]  # at most the one that each thread had just begun
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert lines[-1]["event"] == "stopped"
    requests = [line for line in lines if line["event"] == "request"]
    assert requests and set(requests[0]) == {"time", "event", "method", "route", "status", "ms", "bytes"}
    assert not any("u01" in line for line in server.lines), "no ids in the log"
    assert not (tmp_path / "s-wal").exists(), "the store was closed"


def test_a_swap_under_load_fails_nobody(run: Path, data: Sequences, tmp_path: Path) -> None:
    watched = tmp_path / "run"
    shutil.copytree(run, watched)
    others = [make_run(data, tmp_path / f"other{seed}", seed=seed) for seed in (1, 2)]
    server = Process(watched, "--quiet", "--watch")
    failed: list[Any] = []
    versions: set[str] = set()

    def ask(place: int) -> None:
        status, answer = server.post("/recommend", {"user_id": f"u{place:02}"})
        versions.add(answer.get("model"))
        if status != 200:
            failed.append(answer)

    load = Load(ask)
    for place in range(6):
        status, answer = server.post("/model", {"path": str(others[place % 2])})
        assert status == 200, answer
    swapped = len(versions)
    for name in ("best", "catalogue"):
        shutil.rmtree(watched / name)
        shutil.copytree(make_run(data, tmp_path / f"new-{name}", seed=3) / name, watched / name)
    wait_until(lambda: len(versions) > swapped)
    load.stop()
    server.end()
    assert not failed, failed[:3]
    assert len(versions) >= 4, versions


def test_a_header_does_not_get_around_the_rate(run: Path, tmp_path: Path) -> None:
    server = Process(run, "--store", str(tmp_path / "s"), "--quiet", "--rate", "0.05")
    codes = [server.get("/health", **{"X-Forwarded-For": f"10.0.0.{place}"})[0] for place in range(8)]
    server.end()
    assert 429 in codes


def start(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "trope", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, done.stderr


def test_wrong_starts_are_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("short\n")
    server = Process(run, "--store", str(tmp_path / "s"))
    port = server.url.rpartition(":")[2]
    for arguments, said in (
        ((str(run), "--host", "0.0.0.0"), "give --api-key-file, or say --no-key"),
        ((str(run), "--port", port), "cannot listen on 127.0.0.1 port"),
        ((str(tmp_path / "nowhere"),), "there is no folder"),
        ((str(tmp_path), "--port", "0"), "holds no config.json"),
        ((str(run), "--api-key-file", str(tmp_path / "keys")), "at least 16 characters"),
        ((str(run), "--store", "postgres://x", "--port", "0"), "--store must be a file or a redis:// URL"),
    ):
        code, output = start(*arguments)
        assert code == 2 and said in output and "Traceback" not in output, output
    server.end()
