"""The command trope update: what it refuses, a moved run, and a signal at any moment."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from data_logs import write_csv, write_parquet
from test_fit import invoke
from training import one_thread
from updates import LAST, NEW, ROWS, command, data, run, updated

import trope.atomic
import trope.train.update_run
from trope.data.sequences import Sequences
from trope.times import say_moment

__all__ = ["data", "one_thread", "run", "updated"]  # fixtures


def test_a_moved_run_finds_its_dataset(updated: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(updated, moved)
    found = Sequences.of_run(updated)
    updated.rename(tmp_path / "gone")
    try:
        assert Sequences.of_run(moved).meta["checksum"] == found.meta["checksum"]
        with pytest.raises(FileNotFoundError, match="mistyped"):
            Sequences.of_run(moved, tmp_path / "mistyped")
    finally:
        (tmp_path / "gone").rename(updated)


def test_what_is_refused_is_refused_in_a_line_and_writes_nothing(run: Path, updated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    new = write_parquet(tmp_path / "new.parquet", NEW)
    text = write_csv(tmp_path / "text.csv", [(1, "abc", LAST + 1), (1, "abd", LAST + 2)])
    for arguments, words in [
        (command(run, text, out), "all items of the dataset are integers"),
        (command(run, write_parquet(tmp_path / "known.parquet", ROWS[:9]), out), "nothing to learn"),
        (
            command(updated, write_parquet(tmp_path / "alone.parquet", [(1_000, 1, LAST + 1)]), out),
            "alone.parquet has no new event that follows another one of its user; there is nothing to learn",
        ),
        (command(run, tmp_path / "none.parquet", out), "none.parquet"),
        (command(run, new, run), "not empty"),
        (command(run, new, out, "--user-col", "who"), "who"),
        (command(tmp_path, new, out), "no trained model"),
        (command(run, write_csv(tmp_path / "ms.csv", [(1, 2, LAST * 1_000)]), out), "--time-unit ms"),
    ]:
        code, said = invoke(*arguments)
        assert code == 2 and words in said and "\n" not in said.strip(), said
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_events_from_before_the_last_one_are_pointed_out(run: Path, data: Sequences, tmp_path: Path) -> None:
    """They may be late, or of another log, or in another time zone."""
    for name, new, words in [
        ("late", [(3, 7, LAST - 9), (3, 9, LAST - 8)], "all of them are earlier than the last event of"),
        ("one", [(3, 7, LAST - 9)], "trope: it is earlier than the last event of"),
        ("some", [(3, 7, LAST - 9), (3, 9, LAST - 8), (3, 9, LAST + 8)], "2 of them are earlier than"),
        ("none", [(3, 7, LAST), (3, 9, LAST + 8)], None),
    ]:
        code, said = invoke(*command(run, write_parquet(tmp_path / f"{name}.parquet", new), tmp_path / name))
        assert code == 0, said
        assert words in said and f"{say_moment(LAST)}; each is" in said if words else "earlier" not in said


def test_a_file_gets_few_frames_of_the_bar(run: Path, tmp_path: Path) -> None:
    words = command(run, write_parquet(tmp_path / "new.parquet", NEW), tmp_path / "out", "--steps", 100)
    code, said = invoke(*(word for word in words if word != "--no-progress"))
    assert code == 0, said
    assert "100/100" in said and said.count("\rupdate:") <= 2, said


@pytest.mark.parametrize(("signum", "ended"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_update_can_be_started_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, ended: int
) -> None:
    """Also with a dataset beside the run, which is whole before the network learns."""
    whole, new = tmp_path / "whole", write_parquet(tmp_path / "new.parquet", NEW)
    arguments = command(run, new, tmp_path / "out", "--steps", 1, "--data-out", whole)

    def stop(*_: Any) -> None:
        assert (whole / "meta.json").is_file()
        if signum == signal.SIGINT:
            raise KeyboardInterrupt  # the signal itself does nothing where tests run in the background of a shell
        signal.raise_signal(signum)

    with monkeypatch.context() as patch:
        patch.setattr(trope.train.update_run, "update", stop)
        code, said = invoke(*arguments)
        assert code == ended and "no run was written" in said
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert sorted(tmp_path.iterdir()) == [new]
    code, said = invoke(*arguments)
    assert code == 0 and Sequences.of_run(tmp_path / "out").path == whole, said


@pytest.mark.parametrize("late", [False, True])
def test_a_signal_while_the_run_gets_its_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Before it has, nothing stays; after it has, run and dataset do, and the command says so."""
    out, whole, new = tmp_path / "out", tmp_path / "whole", write_parquet(tmp_path / "new.parquet", NEW)
    take = trope.atomic._take_name

    def take_and_be_asked(partial: Path, path: Path, may_replace: Any) -> None:
        if path != out or late:
            take(partial, path, may_replace)
        if path == out:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(trope.atomic, "_take_name", take_and_be_asked)
    code, said = invoke(*command(run, new, out, "--steps", 1, "--data-out", whole))
    assert code == 143 and ("is whole" if late else "no run was written") in said, said
    assert sorted(tmp_path.iterdir()) == ([new, out, whole] if late else [new])
    if late:
        assert Sequences.of_run(out).path == whole
