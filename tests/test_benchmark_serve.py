"""`trope bench serve`: a real server, a real load, and numbers that are those of the load."""

import csv
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.serving import make_data, make_run
from trope.bench.load import load
from trope.bench.serve import warm_up
from trope.bench.server import Server, serve
from trope.cli.main import app

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(make_data(tmp_path_factory.mktemp("shop")), tmp_path_factory.mktemp("run"))


def test_each_number_of_clients_has_a_row(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "serve.csv"
    asked = ["--clients", "1", "--clients", "3", "--seconds", "0.5", "-k", "4", "--device", "cpu", "--csv", str(out)]
    done = CliRunner().invoke(app, ["bench", "serve", str(run), *asked])
    assert done.exit_code == 0, done.output
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["clients"], row["k"]) for row in rows] == [("1", "4"), ("3", "4")]
    for row in rows:
        # Each client has one request under way, so so many clients answer so many in the time of one.
        rate, mean = float(row["requests_per_s"]), float(row["p50_ms"]) / 1e3
        assert 0.2 < rate * mean / int(row["clients"]) < 2
        assert float(row["p50_ms"]) <= float(row["p99_ms"]) and float(row["cpu_ms"]) > 0
        assert f"{rate:,.0f}" in done.output


def test_a_load_that_fails_says_why(run: Path, tmp_path: Path) -> None:
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text('{"user_id": "nobody", "k": 1}\n')
    server = serve(run, "--quiet", "--store", str(tmp_path / "s"))
    try:
        assert load(server.url, "/nowhere", bodies, 1, 0.2)["statuses"].keys() == {"404"}
        bodies.write_text("no JSON\n")
        with pytest.raises(RuntimeError, match="JSONDecodeError"):
            load(server.url, "/recommend", bodies, 1, 0.2)
    finally:
        server.end()
    with pytest.raises(ValueError, match="the server ended"):
        Server(["false"])


def test_the_warm_up_asks_for_no_more_than_a_server_takes(run: Path, tmp_path: Path) -> None:
    server = serve(run, "--quiet", "--store", str(tmp_path / "s"))
    try:
        warm_up(server.url, [{"user_id": "u01", "k": 300}] * 100)
        with pytest.raises(ValueError, match=r"the server refused a question: question 0\.k must be"):
            warm_up(server.url, [{"user_id": "u01", "k": 1_000_000}])
    finally:
        server.end()


def test_a_server_that_is_interrupted_while_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while its lines are read."""
    started = []

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(Popen(*arguments, **options))
        started[0].stderr = interrupted()
        return started[0]

    def interrupted() -> Iterator[bytes]:
        yield b"loading\n"
        raise KeyboardInterrupt

    Popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(KeyboardInterrupt):
        Server(["sleep", "60"])
    assert started[0].poll() is not None


def test_what_is_refused_is_one_line(run: Path) -> None:
    for asked, reason in (
        (["-k", "16"], f"{run} has 15 items, fewer than -k 16"),
        (["--device", "mps"], "the server ended: trope: "),
    ):
        done = CliRunner().invoke(app, ["bench", "serve", str(run), "--seconds", "0.1", *asked])
        assert isinstance(done.exception, ValueError) and str(done.exception).startswith(reason)
