"""The log of what was shown: nothing twice, nothing lost that can be kept, files whole or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from patience import wait_until

from trope.online import exposure_log, exposures
from trope.online.assignment import Experiment
from trope.online.exposure_log import ExposureLog, finish_journals
from trope.online.exposures import (
    EXPERIMENT,
    Exposure,
    begin_experiment,
    open_experiment,
    read_experiment,
    schema,
    write_experiment,
)

ARMS = {"control": 50.0, "trope": 50.0}


def exposure(number: int, **other: Any) -> Exposure:
    items = [f"item {number}", 'quote " and \\ and ü'] if number % 3 else []
    row = Exposure(f"r{number}", "trial", f"user {number}", "trope", 1_700_000_000 + number, 1.5, items, "abc", False)
    return row._replace(**other)


def read(folder: Path) -> list[Exposure]:
    rows: list[Exposure] = []
    for path in sorted(folder.glob("exposures-*.parquet")):
        table = pq.read_table(path)
        assert table.schema.equals(schema()), table.schema
        rows += [Exposure(**row) for row in table.to_pylist()]
    return rows


def test_rows_come_back_as_they_went(tmp_path: Path) -> None:
    rows = [exposure(number, forced=number == 4) for number in range(500)]
    kept: list[int] = []
    log = ExposureLog(tmp_path / "a" / "b", on_kept=kept.append)
    for first in range(0, 500, 7):
        log.add(rows[first : first + 7])
    log.close()
    assert read(tmp_path / "a" / "b") == rows
    assert sum(kept) == 500
    assert len(list((tmp_path / "a" / "b").iterdir())) == 1, "no journal is left"


def test_the_schema_is_the_contract() -> None:
    assert schema().equals(
        pa.schema([
            ("request_id", pa.string()), ("experiment", pa.string()), ("user_id", pa.string()), ("arm", pa.string()),
            ("moment", pa.int64()), ("answered", pa.float64()), ("items", pa.list_(pa.string())),
            ("model", pa.string()), ("forced", pa.bool_()),
        ])
    )  # fmt: skip


def test_files_are_turned_by_rows_and_by_seconds(tmp_path: Path) -> None:
    log = ExposureLog(tmp_path / "rows", rows=10, seconds=1e6)
    for number in range(25):
        log.add([exposure(number)])
        wait_until(lambda: not log._queue)
    wait_until(lambda: len(read(tmp_path / "rows")) == 20)
    log.close()
    assert len(list((tmp_path / "rows").glob("*.parquet"))) == 3
    log = ExposureLog(tmp_path / "seconds", seconds=0.05)
    log.add([exposure(1)])
    wait_until(lambda: read(tmp_path / "seconds") == [exposure(1)])
    log.add([exposure(2)])
    wait_until(lambda: len(read(tmp_path / "seconds")) == 2)
    log.close()
    assert len(list((tmp_path / "seconds").iterdir())) == 2, "an idle log makes no files"


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_exposures import exposure
from trope.online.exposure_log import ExposureLog
kept = 0
def count(rows):
    global kept
    kept += rows
log = ExposureLog(Path(sys.argv[1]), rows=50, on_kept=count)
for number in range(100_000):
    log.add([exposure(number)])
    print(kept, flush=True)
    time.sleep(0.001)
"""


def test_a_kill_loses_nothing_that_was_taken(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 120:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob(".exposures-*.jsonl")), "its journal is there"
    ExposureLog(tmp_path).close()
    found = read(tmp_path)
    assert len(found) >= 120
    assert found == [exposure(number) for number in range(len(found))], "each once, in order"
    assert not list(tmp_path.glob(".exposures-*"))


def test_a_torn_last_line_is_left_out_and_done_once(tmp_path: Path) -> None:
    whole = [json.dumps(exposure(number)._asdict()) + "\n" for number in range(3)]
    (tmp_path / ".exposures-1-a.jsonl").write_text("".join(whole) + whole[0][:40])
    (tmp_path / ".exposures-2-b.jsonl").write_text(whole[0][:40])
    assert finish_journals(tmp_path) == 2
    assert read(tmp_path) == [exposure(number) for number in range(3)]
    # Killed between the Parquet file and the removal of its journal.
    (tmp_path / ".exposures-1-a.jsonl").write_text("".join(whole))
    assert finish_journals(tmp_path) == 1
    assert len(read(tmp_path)) == 3
    (tmp_path / ".exposures-3-c.jsonl").write_text("no json\n")
    with pytest.raises(ValueError, match=r"exposures-3-c.jsonl is damaged .*; move it away"):
        finish_journals(tmp_path)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize(("where", "name"), [(Path, "glob"), (exposure_log, "_lock")])
def test_servers_that_begin_together_finish_each_journal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, rows: int
) -> None:
    """One has listed, or opened, a journal that the other one then finishes and removes."""
    journal = tmp_path / ".exposures-1-a.jsonl"
    journal.write_text("".join(json.dumps(exposure(number)._asdict()) + "\n" for number in range(rows)))
    own = getattr(where, name)

    def slower(*arguments: Any) -> Any:
        if name == "glob":
            found = list(own(*arguments))
        monkeypatch.undo()
        exposure_log._to_parquet(journal)
        journal.unlink()
        return found if name == "glob" else own(*arguments)

    monkeypatch.setattr(where, name, slower)
    assert finish_journals(tmp_path) == 0
    assert read(tmp_path) == [exposure(number) for number in range(rows)]
    assert not list(tmp_path.glob(".*"))


def test_the_journal_of_a_living_server_is_left_alone(tmp_path: Path) -> None:
    one = ExposureLog(tmp_path)
    one.add([exposure(1)])
    wait_until(lambda: not one._queue and one._journal)
    other = ExposureLog(tmp_path)
    other.add([exposure(2)])
    other.close()
    assert read(tmp_path) == [exposure(2)]
    one.close()
    assert len(read(tmp_path)) == 2


def test_a_failing_disk_is_said_and_rows_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure_log, "_RETRY", 0.01)
    lost: list[int] = []
    log = ExposureLog(tmp_path, waiting=10, on_lost=lost.append)
    real = os.write

    def half(descriptor: int, data: bytes) -> int:
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(exposure_log.os, "write", half)
    log.add([exposure(0)])
    wait_until(lambda: log.failure)
    assert log.failure is not None and "no space left" in log.failure
    log.add([exposure(number) for number in range(1, 15)])
    assert lost == [5], "ten wait, the rest is counted"
    monkeypatch.setattr(exposure_log.os, "write", real)
    wait_until(lambda: log.failure is None and not log._queue)
    log.close()
    assert read(tmp_path) == [exposure(number) for number in range(10)]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("malloc of size 4 failed")])
def test_a_file_that_cannot_be_written_keeps_its_journal(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(exposure_log, "_RETRY", 0.01)
    monkeypatch.setattr(exposure_log, "write_parquet", full)
    log = ExposureLog(tmp_path, rows=1)
    log.add([exposure(1)])
    wait_until(lambda: log.failure)
    assert type(error).__name__ in str(log.failure)
    log.close()
    assert not list(tmp_path.glob("*.parquet"))
    monkeypatch.undo()
    assert finish_journals(tmp_path) == 1
    assert read(tmp_path) == [exposure(1)]


def test_an_experiment_goes_on_where_it_was(tmp_path: Path) -> None:
    first = open_experiment(tmp_path, "spring", {"a": 1, "b": 3}, now=100)
    assert (first.started, first.salt) == (100, "spring")
    write_experiment(tmp_path, first, {"a": "v1", "b": "v2"})
    said = json.loads((tmp_path / EXPERIMENT).read_text())
    assert said == {
        "format": 1, "name": "spring", "salt": "spring", "started": 100,
        "control": "a",
        "arms": {"a": {"share": 0.25, "model": "v1"}, "b": {"share": 0.75, "model": "v2"}},
    }  # fmt: skip
    again = open_experiment(tmp_path, "spring", {"a": 25, "b": 75}, now=999)
    assert again.started == 100
    assert read_experiment(tmp_path) == Experiment("spring", {"a": 0.25, "b": 0.75}, 100, "spring")
    assert [again.arm_of(str(user)) for user in range(50)] == [first.arm_of(str(user)) for user in range(50)]
    assert open_experiment(tmp_path, "spring", {"b": 3, "a": 1}, now=999).control == "a"


def test_servers_that_begin_together_agree_on_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server that saw no experiment.json yet must not move the start of the first."""
    first = begin_experiment(tmp_path, "spring", ARMS, 100, dict.fromkeys(ARMS, "v1"))
    real, seen = exposures.read_experiment, list[int]()

    def late(folder: Path) -> Experiment | None:
        seen.append(1)
        return None if len(seen) == 1 else real(folder)

    monkeypatch.setattr(exposures, "read_experiment", late)
    second = begin_experiment(tmp_path, "spring", ARMS, 107, dict.fromkeys(ARMS, "v2"))
    assert (first.started, second.started) == (100, 100)
    assert json.loads((tmp_path / EXPERIMENT).read_text())["arms"]["trope"]["model"] == "v2"
    assert [path.name for path in tmp_path.iterdir()] == [EXPERIMENT]
    with pytest.raises(NotADirectoryError, match="is a file; name a folder with --exposures"):
        begin_experiment(tmp_path / EXPERIMENT, "spring", ARMS, 100, {})


def test_another_experiment_does_not_mix_in(tmp_path: Path) -> None:
    write_experiment(tmp_path, Experiment("spring", ARMS, 100, "s"), dict.fromkeys(ARMS, "v"))
    with pytest.raises(ValueError, match="holds the exposures of experiment spring; name another folder"):
        open_experiment(tmp_path, "autumn", ARMS, 100)
    with pytest.raises(ValueError, match=r"has the shares control 0.5, trope 0.5, got control 0.3333"):
        open_experiment(tmp_path, "spring", {**ARMS, "new": 50}, 100)
    for text in ("", "[]", '{"format": 2}', '{"format": 1, "name": "x", "arms": {"a": 1}}'):
        (tmp_path / EXPERIMENT).write_text(text)
        with pytest.raises(ValueError, match="is not an experiment that this version of trope knows"):
            read_experiment(tmp_path)


def test_without_pyarrow_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'trope\[data\]'"):
        ExposureLog(tmp_path)
