"""Many trainings: `trope compare --models`, what it leaves, what it does not do twice, and how it is stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from finished_runs import finish
from patience import wait_until
from training import SIZE, last_step, tiny, tiny_data
from typer.testing import CliRunner, Result

from trope.cli import main as cli
from trope.data.sequences import Sequences
from trope.experiments import pool as experiments
from trope.experiments import train_many
from trope.experiments.pool import Outcome, Run, Variant, plan, run_all
from trope.experiments.variants import choose
from trope.runs import write_json, write_text
from trope.settings import to_toml

MODELS, SEEDS = ("hstu", "sasrec"), (0, 1)
SETTINGS = (*SIZE, "train.epochs=1")
# What stands for a training where only processes matter; argv[1] is the run folder.
FINISHES = "import sys; [open(f'{sys.argv[1]}/{name}', 'w') for name in ('metrics.json', 'ranks-test.npz')]"
# As `trope train` does: the first signal asks to save, which takes a moment; a second one ends the process at once.
SAVES_WHEN_ASKED = """
import pathlib, signal, sys, time
def save(signum, frame):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    time.sleep(0.5)
    (run / "saved").touch()
    sys.exit(1)
run = pathlib.Path(sys.argv[1])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
(run / "ready").touch()
time.sleep(30)
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread_each() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("experiments"))


def arguments(data: Path, out: Path, *more: object, settings: tuple[str, ...] = SETTINGS) -> list[str]:
    chosen = [part for setting in settings for part in ("--set", setting)]
    fixed = ["--models", ",".join(MODELS), "--device", "cpu", "--resamples", "50"]
    return ["compare", str(data), "--out", str(out), *fixed, *chosen, *map(str, more)]


def compare(data: Path, out: Path, *more: object, settings: tuple[str, ...] = SETTINGS) -> Result:
    return CliRunner().invoke(cli.app, arguments(data, out, *more, settings=settings), catch_exceptions=False)


@pytest.fixture(scope="module")
def trained(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with two seeds each; not to be changed."""
    out = tmp_path_factory.mktemp("trained") / "runs"
    result = compare(data.path, out, "--seeds", 2, "--jobs", 2, "--json", out.parent / "comparison.json")
    assert result.exit_code == 0, result.output
    assert "4 runs in" in result.output and "0 finished before" in result.output and "4/4" in result.output
    return out


def metrics_of(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())


def fake_runs(out: Path, count: int = 3) -> list[Run]:
    return plan([Variant(f"m{number}", "hstu") for number in range(count)], [0], out)


def fake_command(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    """Runs m0, m1, … do these instead of training, the last script for all that follow."""

    def command(self: Run, data: Path, device: str, memory: int | None) -> list[str]:
        script = scripts[min(int(self.variant.name[1:]), len(scripts) - 1)]
        return [sys.executable, "-S", "-c", script, str(self.folder)]

    monkeypatch.setattr(Run, "command", command)


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a file for every process that was started, named by its id, in it how many there were then.

    A process that has ended is there until it was waited for. None outlives the test.
    """
    folder, start = tmp_path / "pids", experiments._start
    folder.mkdir()

    def recorded(*arguments) -> subprocess.Popen[bytes]:
        process = start(*arguments)
        (folder / str(process.pid)).write_text(str(1 + len(alive(folder))))
        return process

    monkeypatch.setattr(experiments, "_start", recorded)
    yield folder
    for pid in alive(folder):
        os.kill(pid, signal.SIGKILL)


def alive(pids: Path) -> list[int]:
    """Those of the recorded processes that are still there."""

    def is_there(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    return [pid for pid in map(int, os.listdir(pids)) if is_there(pid)]


@contextmanager
def forked(target: Callable[..., None], *arguments: object) -> Iterator[BaseProcess]:
    """A process with our imports and patches, first of a process group as a shell makes one for each command."""
    process = multiprocessing.get_context("fork").Process(target=_lead_group, args=(target, *arguments))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _lead_group(target: Callable[..., None], *arguments: object) -> None:
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    target(*arguments)


def command_line(line: list[str]) -> None:
    sys.argv = ["trope", *line]
    cli.main()


def test_each_run_has_a_line_with_metrics_seed_and_environment_and_without_paths(
    trained: Path, data: Sequences
) -> None:
    text = (trained / "results.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["name"], line["seed"]) for line in lines] == [(model, seed) for seed in SEEDS for model in MODELS]
    for line in lines:
        run = trained / f"{line['name']}-seed{line['seed']}"
        assert line["model"] == line["name"] and line["settings"] == list(SETTINGS)
        assert line["test"] == metrics_of(run)["test"] and line["valid"] == metrics_of(run)["valid"]
        assert line["data"]["checksum"] == data.meta["checksum"]
        assert line["environment"] == json.loads((run / "env.json").read_text())
        assert {"device", "torch", "commit", "date"} <= set(line["environment"])
        assert f"seed = {line['seed']}\n" in (run / "config.toml").read_text()
    assert str(data.path.parent) not in text and str(trained.parent) not in text and '"path"' not in text
    weights = {(trained / f"hstu-seed{seed}" / "best" / "model.safetensors").read_bytes() for seed in SEEDS}
    assert len(weights) == 2


def test_what_is_trained_is_not_trained_again(trained: Path, data: Sequences, pids: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    shutil.copytree(trained, out)
    files = sorted(out.glob("*/metrics.json"))
    before = [path.stat().st_mtime_ns for path in files]
    result = compare(data.path, out, "--seeds", 2, "--json", tmp_path / "again.json")
    assert result.exit_code == 0 and "4 finished before" in result.output
    assert len(files) == 4 and [path.stat().st_mtime_ns for path in files] == before
    assert not list(pids.iterdir())
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(
        (trained.parent / "comparison.json").read_text()
    )
    assert (out / "results.jsonl").read_bytes() == (trained / "results.jsonl").read_bytes()


def test_a_models_metric_is_the_mean_over_its_seeds(trained: Path) -> None:
    written = json.loads((trained.parent / "comparison.json").read_text())
    assert written["reference"] == "hstu" and written["seeds"] == 2 and written["split"] == "test"
    means = {}
    for model in MODELS:
        tested = [metrics_of(trained / f"{model}-seed{seed}")["test"] for seed in SEEDS]
        assert tested[0] != tested[1]
        for metric in ("HR@10", "NDCG@10", "MRR"):
            means[model, metric] = (tested[0][metric] + tested[1][metric]) / 2
            assert abs(written["systems"][model][metric]["mean"] - means[model, metric]) <= 1e-12
    difference = written["systems"]["sasrec"]["minus_first"]["NDCG@10"]["mean"]
    assert abs(difference - (means["sasrec", "NDCG@10"] - means["hstu", "NDCG@10"])) <= 1e-12


def test_a_run_that_fails_is_reported_and_the_others_finish(
    trained: Path, data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder holds the beginning of another run, one is a file; the third run is trained, the fourth was before."""
    out, command = tmp_path / "runs", Run.command

    def quick_command(self: Run, data: Path, device: str, memory: int | None) -> list[str]:
        if self.folder.name == "hstu-seed1":  # a training of which we know the end
            return ["cp", "-r", f"{trained / self.folder.name}/.", str(self.folder)]
        return command(self, data, device, memory)

    monkeypatch.setattr(Run, "command", quick_command)
    shutil.copytree(trained / "sasrec-seed0", out / "sasrec-seed0")
    (out / "hstu-seed0").mkdir()
    write_text(out / "hstu-seed0" / "config.toml", to_toml(tiny("train.epochs=1", "train.lr=0.5", model="hstu")))
    write_json(out / "hstu-seed0" / "data.json", data.describe())
    (out / "sasrec-seed1").write_text("mine")
    result = compare(data.path, out, "--seeds", 2, "--jobs", 2, "--json", tmp_path / "comparison.json")
    assert result.exit_code == 1, result.output
    said = {name: line for line in result.output.splitlines() for name in line.split()[1:2]}  # 1/4  NAME  words
    assert "exit code 2: trope: " in said["hstu-seed0"] and "train.lr was 0.5, now 0.001" in said["hstu-seed0"]
    assert "could not be started" in said["sasrec-seed1"] and "File exists" in said["sasrec-seed1"]
    assert said["hstu-seed1"].rstrip().endswith(" s") and "sasrec-seed0" not in said
    assert (out / "sasrec-seed1").read_text() == "mine"
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(line["name"], line["seed"]) for line in lines] == [("sasrec", 0), ("hstu", 1)]
    written = json.loads((tmp_path / "comparison.json").read_text())["systems"]
    assert written["hstu"]["HR@10"]["mean"] == pytest.approx(metrics_of(trained / "hstu-seed1")["test"]["HR@10"])


def test_without_two_models_left_there_is_no_comparison(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "command", lambda self, *_: [sys.executable, "-S", "-c", "raise SystemExit(3)"])
    with pytest.raises(
        ValueError, match=r"needs two models, but 0 could be trained; the reasons are in .*runs/\*/output.txt"
    ):
        compare(data.path, tmp_path / "runs")


def test_the_reason_is_the_last_line_of_this_attempt(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a process is killed without a word after an attempt that had said something, or ends with 0 early."""
    runs = fake_runs(tmp_path)
    says = "print('first'); print('the reason'); print(); raise SystemExit(3)"
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    for script, reason in ((says, "exit code 3: the reason"), (killed, "exit code -9: it printed nothing")):
        fake_command(monkeypatch, script)
        assert [outcome.failure for outcome in run_all(runs[:1], data.path, 1)] == [reason]
    fake_command(monkeypatch, says, FINISHES, "print('early')")
    heard: list[Outcome] = []
    assert run_all(runs, data.path, 1, ended=heard.append) == heard
    failures = {outcome.run.variant.name: outcome.failure for outcome in heard}
    assert failures == {"m0": "exit code 3: the reason", "m1": None, "m2": "exit code 0: early"}


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_no_more_than_so_many_at_a_time(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pids: Path, jobs: int
) -> None:
    fake_command(monkeypatch, FINISHES)
    runs = fake_runs(tmp_path / "runs", 4)
    assert [outcome.failure for outcome in run_all(runs, data.path, jobs)] == [None] * 4
    assert max(int(path.read_text()) for path in pids.iterdir()) == min(jobs, 4)


def test_side_by_side_they_share_the_cores_but_parts_take_one(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `train.parts` a training has the bits of one that runs by itself, whatever --jobs is."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    says = "import os, sys; open(f'{sys.argv[1]}/threads', 'w').write(os.environ.get('OMP_NUM_THREADS', 'its own'))"
    fake_command(monkeypatch, f"{says}; {FINISHES}")
    variants = [Variant("m0", "hstu"), Variant("m1", "hstu", ("train.parts=4",))]
    for jobs, wanted in ((1, ["its own", "its own"]), (2, ["4", "its own"])):
        runs = plan(variants, [0], tmp_path / f"jobs{jobs}")
        assert [outcome.failure for outcome in run_all(runs, data.path, jobs)] == [None] * 2
        assert [(run.folder / "threads").read_text() for run in runs] == wanted


def test_seeds_come_one_after_another() -> None:
    names = [run.folder.name for run in plan([Variant("a", "hstu"), Variant("b", "hstu")], range(2), Path("out"))]
    assert names == ["a-seed0", "b-seed0", "a-seed1", "b-seed1"]
    with pytest.raises(ValueError, match="different names, got a, a"):
        plan([Variant("a", "hstu"), Variant("a", "sasrec")], [0], Path("out"))


@pytest.mark.parametrize(
    ("signum", "to_group"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, False)],
)
def test_a_signal_lets_the_runs_save_and_leaves_none_behind(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pids: Path, signum: signal.Signals, to_group: bool
) -> None:
    """The first run has ended, two are under way and one waits; a terminal sends its Ctrl-C to the whole group."""
    fake_command(monkeypatch, FINISHES, SAVES_WHEN_ASKED)
    runs = fake_runs(tmp_path / "runs", 4)
    with forked(run_all, runs, data.path, 2) as process:
        assert process.pid is not None
        wait_until(lambda: all((run.folder / "ready").exists() for run in runs[1:3]))
        (os.killpg if to_group else os.kill)(process.pid, signum)
        process.join(60)
        assert process.exitcode == (1 if signum == signal.SIGINT else 128 + signum)  # 1: KeyboardInterrupt, uncaught
    assert not alive(pids)
    assert [(run.folder / "saved").exists() for run in runs] == [False, True, True, False]
    assert len(list(pids.iterdir())) == 3 and runs[0].is_finished


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_destructor_is_not_lost(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pids: Path, signum: signal.Signals
) -> None:
    """Python ignores what is raised in a `__del__`, also by a signal's handler."""

    class Asks:
        def __del__(self) -> None:
            os.kill(os.getpid(), signum)

    fake_command(monkeypatch, SAVES_WHEN_ASKED)
    runs = fake_runs(tmp_path / "runs", 2)
    (tmp_path / "ask").touch()

    def tick() -> None:
        if (tmp_path / "ask").exists() and (runs[0].folder / "ready").exists():
            (tmp_path / "ask").unlink()
            Asks()  # and is gone

    with forked(run_all, runs, data.path, 1, "auto", None, None, tick) as process:
        process.join(60)
        assert process.exitcode == (1 if signum == signal.SIGINT else 128 + signum)
    assert not alive(pids)


def test_handlers_of_signals_are_put_back(data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    fake_command(monkeypatch, FINISHES)
    run_all(fake_runs(tmp_path), data.path, 3)
    assert [signal.getsignal(number) for number in numbers] == before


def test_results_are_written_as_each_run_ends(
    trained: Path, data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(runs: list[Run], data: Path, jobs: int, device: str, ended, *_: object) -> None:
        shutil.copytree(trained / runs[0].folder.name, runs[0].folder)
        ended(Outcome(runs[0], 1.0, None))
        raise KeyboardInterrupt

    monkeypatch.setattr(train_many, "run_all", interrupted)
    variants = [Variant(name, name, SETTINGS) for name in ("hstu", "sasrec")]
    with pytest.raises(KeyboardInterrupt):
        train_many.train_many(data.path, variants, 1, 1, tmp_path / "runs", "cpu")
    (line,) = (tmp_path / "runs" / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["name"] == "hstu"


def test_an_interrupted_comparison_continues_where_it_was(
    trained: Path, data: Sequences, tmp_path: Path, pids: Path
) -> None:
    """Ctrl-C in a training that would be long; with fewer epochs than it has done, it only needs its test."""
    out = tmp_path / "runs"
    run, long = out / "hstu-seed0", (*SETTINGS, "train.epochs=3000", "train.early_stop=3000")
    with forked(command_line, arguments(data.path, out, settings=long)) as process:
        assert process.pid is not None
        wait_until(lambda: last_step(run) >= 12)  # three epochs
        os.killpg(process.pid, signal.SIGINT)
        process.join(30)
        assert process.exitcode == 130
    assert not alive(pids) and len(list(pids.iterdir())) == 1
    assert "stopped by SIGTERM; the run is saved" in (run / "output.txt").read_text()
    assert not (run / "metrics.json").exists() and not (out / "sasrec-seed0").exists()
    shutil.copytree(trained / "sasrec-seed0", out / "sasrec-seed0")  # one training less to wait for
    result = compare(data.path, out)
    assert result.exit_code == 0 and "1 finished before" in result.output, result.output
    assert metrics_of(run)["epochs"] >= 3 and len(list(pids.iterdir())) == 2
    assert len((out / "results.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--models", "hstu,gru4rec"], "unknown model 'gru4rec'"),
        (["--models", "hstu"], "needs two models, got --models hstu"),
        (["--models", "hstu,hstu"], "different names, got hstu, hstu"),
        (["--set", "train.lr=fast"], "train.lr must be a number"),
        (["--set", "train.speed=1"], "speed"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--split", "valid"], "--models compares on test, got --split valid"),
        (["another"], "--models trains on one dataset, got 2 paths"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(
    data: Sequences, tmp_path: Path, pids: Path, capsys: pytest.CaptureFixture[str], monkeypatch, more, words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["trope", *arguments(data.path, tmp_path / "runs", *more)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
    assert not list(pids.iterdir()) and not (tmp_path / "runs").exists()


def test_models_need_a_folder_for_their_runs_and_a_dataset(data: Sequences, tmp_path: Path, pids: Path) -> None:
    with pytest.raises(ValueError, match="--models needs a folder for its runs; add --out FOLDER"):
        CliRunner().invoke(cli.app, ["compare", str(data.path), "--models", "hstu,sasrec"], catch_exceptions=False)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        compare(tmp_path / "nowhere", tmp_path / "runs")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file exists and is not a folder; choose another --out"):
        compare(data.path, tmp_path / "file")
    assert not list(pids.iterdir()) and not (tmp_path / "runs").exists()


def test_finished_runs_are_not_taken_for_others(trained: Path, data: Sequences, tmp_path: Path, pids: Path) -> None:
    """Else the metrics of one config or dataset would be given as those of another."""
    before = (trained / "results.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"hstu-seed0 was trained with another config, see its config.toml"):
        compare(data.path, trained, settings=(*SETTINGS, "train.lr=0.01"))
    with pytest.raises(ValueError, match=r"hstu-seed0 was trained on another dataset than .*other"):
        compare(tiny_data(tmp_path / "other", seed=1).path, trained)
    assert not list(pids.iterdir()) and (trained / "results.jsonl").read_bytes() == before


def test_what_is_there_can_be_reported_without_training(data: Sequences, tmp_path: Path) -> None:
    chosen = choose(["hstu", "hstu-time"], [], SIZE)
    finish(data, chosen, 2, tmp_path, lambda run, count: np.full(count, 3.0))
    shutil.rmtree(tmp_path / "hstu-time-seed1")
    trained = train_many.train_many(data.path, chosen, 2, 1, tmp_path, "cpu", is_training=False)
    assert [line["name"] for line in trained.lines] == ["hstu", "hstu-time", "hstu"] and not trained.failures
    assert not (tmp_path / "hstu-time-seed1").exists()
    with pytest.raises(ValueError, match=r"nowhere has no finished run of these models, and --no-train trains none"):
        train_many.train_many(data.path, chosen, 2, 1, tmp_path / "nowhere", "cpu", is_training=False)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_killed_comparison_takes_its_trainings_along() -> None:
    """Left behind, they would hold their runs' locks, and the comparison started again would find them busy."""
    training = (
        "import time; from trope.train.process import die_with_parent; "
        "die_with_parent(); print(1, flush=True); time.sleep(600)"
    )
    starts = (
        "import os, subprocess, sys; from trope.train.process import PARENT; "
        f"p = subprocess.Popen([sys.executable, '-c', {training!r}], env={{**os.environ, PARENT: str(os.getpid())}}, "
        "stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        child = int(comparison.stdout.readline())
        os.kill(child, 0)  # it runs
        comparison.kill()
    wait_until(lambda: _ended(child), "the training outlived the comparison")


def _ended(process: int) -> bool:
    """Gone, or a zombie that nobody has buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
