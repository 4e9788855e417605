"""`trope compare`: its table, its marks, and what it refuses to compare."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bootstrap import paired_bootstrap
from typer.testing import CliRunner

from trope.cli.main import app
from trope.evaluate import saved_ranks
from trope.evaluate.compare import compare_runs, compare_values
from trope.evaluate.evaluation import EvalResult
from trope.evaluate.metrics import Places, per_user
from trope.figures.run_files import NAMES
from trope.runs import ranks_path, write_json

ABOUT = saved_ranks.About("abc", "loo-strict", "test", "none", 50)
USERS = 400


def save(run: Path, better: np.ndarray, about: saved_ranks.About = ABOUT, first_user: int = 0) -> Path:
    run.mkdir(parents=True)
    places = Places(better, np.zeros_like(better), np.arange(len(better) + 1))
    saved_ranks.save(run, EvalResult(first_user + np.arange(len(better)), places), about)
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A reference, its equal up to noise, and a clearly better one."""
    random = np.random.default_rng(0)
    base = random.integers(0, 300, USERS)
    equal = np.maximum(base + random.integers(-3, 4, USERS), 0)
    return [save(tmp_path / "base", base), save(tmp_path / "equal", equal), save(tmp_path / "good", base // 3)]


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_numbers_are_the_paired_bootstraps(runs: list[Path]) -> None:
    comparison = compare_runs(runs, resamples=300, seed=4)
    values = [per_user(saved_ranks.load(run, "test")[0].places) for run in runs]
    assert comparison.users == USERS
    assert comparison.systems[0].difference is None
    for system, value in zip(comparison.systems[1:], values[1:], strict=True):
        assert system.difference is not None
        for column, metric in enumerate(comparison.metrics):
            expected = paired_bootstrap(value[metric], values[0][metric], 300, seed=4)
            found = [part[column] for part in system.difference]
            np.testing.assert_allclose(found, list(expected), rtol=0, atol=1e-12)
            assert system.values.mean[column] == pytest.approx(value[metric].mean())


def test_the_command_marks_what_is_significant(runs: list[Path], tmp_path: Path) -> None:
    said = command(*runs, "--json", tmp_path / "out.json", "--resamples", 1000)
    first = next(row for row, line in enumerate(said.splitlines()) if line.strip().startswith("HR@50"))
    base, equal, good = said.splitlines()[first : first + 3]
    assert "base" in base and "equal" in equal and "*" not in base + equal
    assert "good" in good and good.rstrip().endswith("*")
    assert "difference: from base; *" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["reference"] == "base" and written["users"] == USERS
    apart = written["systems"]["good"]["minus_first"]["HR@50"]
    assert 0 < apart["low"] < apart["mean"] < apart["high"]
    assert f"{100 * apart['mean']:+.2f}" in good
    assert "minus_first" not in written["systems"]["base"]


def test_any_per_user_values_can_be_compared() -> None:
    values = np.random.default_rng(1).random(50)
    comparison = compare_values({"a": {"x": values}, "b": {"x": values + 1}}, resamples=100)
    difference = comparison.systems[1].difference
    assert difference is not None and difference.significant.all()
    np.testing.assert_allclose([difference.low[0], difference.high[0]], 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"checksum": "xyz"}, "checksum abc and xyz"),
        ({"filter_seen": "history"}, "filter_seen none and history"),
    ],
)
def test_unlike_evaluations_are_refused(runs: list[Path], tmp_path: Path, change: dict[str, str], reason: str) -> None:
    other = save(tmp_path / "other", np.arange(USERS), replace(ABOUT, **change))
    with pytest.raises(ValueError, match=f"cannot be compared: {reason}"):
        command(runs[0], other)


def test_the_window_matters_only_where_it_is_filtered(tmp_path: Path) -> None:
    windowed = replace(ABOUT, filter_seen="window")
    assert ABOUT.difference(replace(ABOUT, max_len=9)) is None
    assert windowed.difference(replace(windowed, max_len=9)) == "max_len 50 and 9"


def test_other_splits_users_and_lonely_runs_are_refused(runs: list[Path], tmp_path: Path) -> None:
    shifted = save(tmp_path / "shifted", np.arange(USERS), first_user=1)
    with pytest.raises(ValueError, match="different users"):
        command(runs[0], shifted)
    with pytest.raises(FileNotFoundError, match=r"no ranks of split 'valid'; run `trope evaluate"):
        command(*runs, "--split", "valid")
    with pytest.raises(ValueError, match="at least two runs"):
        command(runs[0])
    with pytest.raises(ValueError, match="compared with itself"):
        command(runs[0], runs[0])


def test_damaged_or_pickled_ranks_are_refused(runs: list[Path]) -> None:
    path = ranks_path(runs[1], "test")
    whole = path.read_bytes()
    middle = len(whole) // 3
    for bad in (whole[:middle], whole[:middle] + b"\0" * 40 + whole[middle + 40 :], b"", b"not a zip"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="damaged or foreign"):
            compare_runs(runs)
    with np.load(ranks_path(runs[0], "test")) as arrays:
        good = dict(arrays)
    for change in ({"users": np.array([{}], dtype=object)}, {"ties": good["ties"][1:]}, {"about": np.array("{}")}):
        np.savez(path, **(good | change))
        with pytest.raises(ValueError, match="damaged or foreign"):
            compare_runs(runs)


def test_ranks_of_another_run_are_refused(tmp_path: Path) -> None:
    """Swapped by mistake, they fit in everything but the model."""
    first, second = tmp_path / "first", tmp_path / "second"
    for run, better in ((first, 1), (second, 2)):
        (run / "best").mkdir(parents=True)
        (run / "best" / "config.json").write_text(f'{{"model": {better}}}')
        places = Places(np.full(USERS, better), np.zeros(USERS, np.int64), np.arange(USERS + 1))
        saved_ranks.save(run, EvalResult(np.arange(USERS), places), ABOUT)
    assert compare_runs([first, second]).users == USERS
    kept = ranks_path(first, "test").read_bytes()
    ranks_path(first, "test").write_bytes(ranks_path(second, "test").read_bytes())
    with pytest.raises(
        ValueError, match=r"ranks-test\.npz has the ranks of another model than .*best; run `trope eval"
    ):
        compare_runs([first, second])
    ranks_path(first, "test").write_bytes(kept)
    (first / "best" / "config.json").unlink()
    assert compare_runs([first, second]).users == USERS, "runs may be copied without their models"


def test_runs_that_may_be_undertrained_are_named(runs: list[Path], tmp_path: Path) -> None:
    """One training each is always said; the epoch where a run has its metrics.json; HR@10 by the ranks themselves."""
    bad = save(tmp_path / "bad", np.full(USERS, 1_000))
    values = dict.fromkeys(NAMES, 0.5)
    metrics = {"valid": values, "test": values, "best_epoch": 1, "epochs": 9, "steps": 3, "seconds": 2.5, "data": {}}
    write_json(runs[0] / "metrics.json", {**metrics, "filter_seen": "none"})
    said = " ".join(command(runs[0], bad, "--resamples", 50, "--json", tmp_path / "out.json").split())
    assert "Warning: each run is one training, so these numbers do not show" in said
    assert "Warning: validation chose one of the first 2 epochs for base (1 of 9): it may be undertrained" in said
    assert "Warning: HR@10 is near zero for bad (0.00 %)" in said and len(NAMES) == 10
    assert "Warning: bad has no metrics.json: the run has not ended, and may be undertrained" in said
    assert len(json.loads((tmp_path / "out.json").read_text())["warnings"]) == 4
    (runs[0] / "metrics.json").write_text("{")
    with pytest.raises(ValueError, match=r"metrics\.json is damaged or foreign"):
        command(*runs)


def test_controls_and_several_commits_of_runs_are_shown(runs: list[Path], tmp_path: Path) -> None:
    for run, commit in zip(runs, ("abc1234", "abc1234", "def5678"), strict=True):
        test = saved_ranks.load(run, "test")[0].metrics
        metrics = {"valid": test, "test": test, "best_epoch": 5, "epochs": 9, "steps": 3, "seconds": 2.5, "data": {}}
        counted = {name: (value + 1) / 2 for name, value in test.items()}
        write_json(run / "metrics.json", {**metrics, "filter_seen": "none", "test_with_counting": counted})
        write_json(run / "env.json", {"commit": commit})
    said = command(*runs, "--resamples", 50, "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written["with_counting"]) == ["base", "equal", "good"]
    (line,) = [line for line in said.splitlines() if "equal + counting" in line and "MRR" not in line][-1:]
    assert f"{100 * written['with_counting']['equal']['MRR']:.2f}" in line
    assert "rows come from several commits: base, equal at abc1234; good at def5678" in " ".join(said.split())
    assert any(each.startswith("the control 'base + counting' is better than") for each in written["warnings"])
    # Ranks that were made anew, such as with another filter, are not those of metrics.json.
    shutil.rmtree(runs[1])
    save(runs[1], np.arange(USERS))
    write_json(runs[1] / "metrics.json", {**metrics, "filter_seen": "none", "test_with_counting": counted})
    assert "equal + counting" not in command(*runs, "--resamples", 50)


def test_names_of_runs_are_text_and_nothing_else(tmp_path: Path) -> None:
    for name in ("[red]a[", "\x1b[31mb"):
        save(tmp_path / name, np.arange(USERS))
    said = command(*sorted(tmp_path.iterdir()), "--resamples", 50)
    assert "[red]a[" in said and "\x1b" not in said and "difference: from \\x1b[31mb; *" in said


def test_of_many_runs_the_main_metrics_are_shown(runs: list[Path], tmp_path: Path) -> None:
    more = [*runs, save(tmp_path / "other", np.arange(USERS))]
    few, many = command(*runs, "--resamples", 50), command(*more, "--resamples", 50)
    assert "Recall@200" in few and "--json writes all" not in few
    assert "Recall@200" not in many and "NDCG@10" in many and "4 of 10 metrics are shown; --json writes all" in many
