"""The curl lines of docs/serving.md, executed against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_logs import START, prepared, random_log, write_parquet
from patience import PATIENCE
from serving import Process, make_run

PAGE = Path(__file__).parent.parent / "docs/serving.md"
LINES = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("curl ")]
pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, which is not installed"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("guide")
    shift = 1_513_000_000 - START  # before the page's events
    log = [(f"user {user}", item, time + shift) for user, item, time in random_log()]
    data = prepared(write_parquet(folder / "log.parquet", log), folder / "data")
    server = Process(make_run(data, folder / "run"), "--store", str(folder / "events.sqlite"), "--quiet")
    yield server
    server.end()


def test_the_page_has_lines() -> None:
    named = {match[1] for line in LINES if (match := re.search(r"localhost:8000/(\w+)", line))}
    assert named == {"events", "recommend", "users", "items", "model"}


def test_they_run_in_their_order(server: Process) -> None:
    answers = [_run(line, server.url) for line in LINES]
    assert not [answer for answer in answers if "error" in answer], answers
    at_once, swept, several = answers[1:4]
    assert len(at_once["items"]) == 3 and at_once["from"] == "model"
    listed = [item for each in swept["moments"] for item in each["items"]]
    assert len(listed) == 6 and all(item["item_id"] != 7 and "why" in item for item in listed)
    assert [answer["from"] for answer in several] == ["model", "model", "counts"]


def _run(line: str, url: str) -> Any:
    """What a line prints, with the address of the server in it."""
    command = line.replace("localhost:8000", url.removeprefix("http://"))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE, check=True)
    return json.loads(done.stdout)
