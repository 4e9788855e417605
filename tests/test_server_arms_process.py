"""`trope serve --arm ...` as a process: ended gently, killed, started again, started wrongly."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from data_logs import prepared
from patience import PATIENCE, wait_until
from serving import Process, make_data, make_run

from trope.data.synthetic import CalendarShop, write_events

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("arms")
    data = make_data(folder)
    one, other = make_run(data, folder / "a", "hstu-trope"), make_run(data, folder / "b", "trope")
    return ["--arm", f"control={one}:50", "--arm", f"trope={other}:50", "--experiment", "spring"]


def begin(arms: list[str], folder: Path) -> Process:
    # `Process` puts a run first; an option does no harm there.
    return Process(Path("--quiet"), *arms, "--exposures", str(folder / "shown"), "--store", str(folder / "s"))


def ask(server: Process, users: range) -> dict[str, Any]:
    found = {}
    for user in users:
        status, answer = server.post("/recommend", {"user_id": f"u{user:02}"})
        assert status == 200, answer
        found[answer["request_id"]] = answer
    return found


def kept(server: Process) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as answer:
        return float(re.findall(r"^trope_exposures_total (\S+)", answer.read().decode(), re.MULTILINE)[0])


def test_nothing_shown_is_lost_by_a_gentle_end_or_a_kill(arms: list[str], tmp_path: Path) -> None:
    server = begin(arms, tmp_path)
    answers = ask(server, range(1, 21))
    assert any("experiment spring: control 50.0%" in line for line in server.lines)
    assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)
    assert len(list((tmp_path / "shown").glob("exposures-*.parquet"))) == 1
    server = begin(arms, tmp_path)
    again = ask(server, range(1, 21))
    wait_until(lambda: kept(server) == len(again), "a thread writes them")
    server.end(signal.SIGKILL)
    assert len(list((tmp_path / "shown").glob("exposures-*.parquet"))) == 1, "its rows are in the journal"
    server = begin(arms, tmp_path)
    server.end()
    rows = [row for file in (tmp_path / "shown").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert sorted(row["request_id"] for row in rows) == sorted([*answers, *again])
    assert {(row["user_id"], row["arm"]) for row in rows} == {(a["user_id"], a["arm"]) for a in answers.values()}
    assert json.loads((tmp_path / "shown" / "experiment.json").read_text())["arms"].keys() == {"control", "trope"}


def test_a_rehearsal_with_a_real_server(tmp_path: Path) -> None:
    """`trope abtest simulate`: server, exposures, outcomes, analysis and the true effect."""
    shop = CalendarShop.only("yearly", users=60, items=120, mean_events=60, years=2)
    write_events(tmp_path / "shop.parquet", shop, progress=False)
    data = prepared(tmp_path / "shop.parquet", tmp_path / "data")
    runs = [make_run(data, tmp_path / name, name) for name in ("hstu-trope", "trope")]
    command = [
        sys.executable, "-m", "trope", "abtest", "simulate", f"--arm=control={runs[0]}", f"--arm=trope={runs[1]}",
        "--shop", str(tmp_path / "shop.truth.json"), "--days", "30", "--repetitions", "2",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "No winner" in done.stdout or "Winner" in done.stdout
    assert "Holds the truth" in done.stdout
    visits = int(done.stdout.split(" visits")[0].replace(",", ""))
    files = list((tmp_path / "out" / "exposures").glob("exposures-*.parquet"))
    assert sum(pq.read_table(file).num_rows for file in files) == visits > 50
    models = json.loads((tmp_path / "out" / "exposures" / "experiment.json").read_text())["arms"]
    assert len({arm["model"] for arm in models.values()}) == 2, "the server wrote the versions of its weights"


def test_wrong_starts_are_one_line(arms: list[str], tmp_path: Path) -> None:
    for arguments, said in (
        (["--arm", f"{arms[1][:-3]}:0", *arms[2:]], "the share of arm control must be a positive number, got 0.0"),
        (["--arm", f"control={tmp_path / 'nowhere'}:1", *arms[2:]], "there is no folder"),
    ):
        command = [sys.executable, "-m", "trope", "serve", *arguments, "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
