"""Training: what it leaves behind, that it learns, and that it stops, resumes and divides as it promises."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from data_logs import START, prepared, write_parquet
from patience import PATIENCE
from safetensors.torch import load_file
from torch.optim.lr_scheduler import ReduceLROnPlateau
from training import SIZE, in_background, last_step, one_thread, tiny, tiny_data, weights
from typer.testing import CliRunner

from trope.cli.main import app
from trope.cli.train import resolve_config
from trope.config import Config
from trope.data.sequences import Sequences
from trope.evaluate.metrics import Places
from trope.models.recommender import SequentialRecommender
from trope.rotary import frequency_parameters
from trope.runs import read_metrics
from trope.settings import preset, read_toml, without_effect
from trope.train import loop as training
from trope.train import optimizer as train_optimizer
from trope.train import stepper
from trope.train.checkpoint import TrainState
from trope.train.distributed import Group, process_group
from trope.train.divergence import Diverged
from trope.train.log import RunLog
from trope.train.loop import Interrupted, Trainer, train
from trope.train.optimizer import make_optimizer
from trope.train.process import stop_signals
from trope.train.step import Feed

__all__ = ["one_thread"]  # a fixture for every test in here
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def undisturbed(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs from end to end."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(data, tiny(), run, "cpu", progress=False)
    return run


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def untimed(log: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in log]


def test_a_run_folder_has_everything_and_is_quiet_to_the_callers_random_numbers(
    data: Sequences, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    metrics = train(data, tiny("train.epochs=4"), run, "cpu", progress=False)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()
    assert {path.name for path in run.iterdir()} >= {
        "config.toml", "env.json", "data.json", "log.jsonl", "metrics.json", "best", "catalogue", "checkpoints",
    }  # fmt: skip
    assert read_toml(run / "config.toml") == tiny("train.epochs=4").resolved  # no auto is left to mean another number
    assert read_metrics(run) == metrics
    assert 0 <= metrics["test"]["HR@10"] <= 1 and metrics["epochs"] == 4
    assert [row["epoch"] for row in rows(run)] == [1, 2, 3, 4]
    assert metrics["valid"]["HR@10"] == max(row["HR@10"] for row in rows(run))
    assert len(list((run / "checkpoints").iterdir())) == 2
    assert SequentialRecommender.from_pretrained(run / "best").num_items == data.num_items
    assert not list(run.rglob("*partial*"))


@pytest.mark.parametrize(
    "settings",
    [
        ("train.negative_source=batch",),
        ("train.shared_negatives=true", "train.clip=0.5"),
        ("train.loss=full", "train.stride=3"),
        ("train.precision=bf16", "train.eval_every=2"),
        ("train.table_state=row",),
        ("train.table_state=row", "train.loss=full", "train.clip=0.5"),
    ],
)
def test_every_way_to_train_learns(data: Sequences, tmp_path: Path, settings: tuple[str, ...]) -> None:
    train(data, tiny("train.lr=0.01", "train.epochs=6", *settings), tmp_path / "run", "cpu", progress=False)
    losses = [row["epoch_loss"] for row in rows(tmp_path / "run") if "epoch_loss" in row]
    assert losses[-1] < losses[0] - 0.1


def test_frequencies_have_a_group_without_decay(data: Sequences) -> None:
    config = tiny("train.lr=0.003", "train.weight_decay=0.1")
    model = SequentialRecommender(config, data.num_items, data.time_span)
    decayed, frequencies = make_optimizer(model, config).param_groups
    assert [id(p) for p in frequencies["params"]] == [id(p) for p in frequency_parameters(model)]
    assert (frequencies["lr"], frequencies["weight_decay"]) == (0.003, 0.0)
    assert (decayed["lr"], decayed["weight_decay"]) == (0.003, 0.1)
    assert len(decayed["params"]) + len(frequencies["params"]) == len(list(model.parameters()))
    assert len(make_optimizer(SequentialRecommender(tiny(model="hstu"), 5, (1, 2)), tiny()).param_groups) == 1


def test_a_table_with_one_second_moment_a_row_has_a_group_of_its_own(data: Sequences) -> None:
    config = tiny("train.weight_decay=0.1", "train.table_state=row")
    model = SequentialRecommender(config, data.num_items, data.time_span)
    optimizer = make_optimizer(model, config)
    *others, table = optimizer.param_groups
    assert len(others) == 2 and table["params"] == [model.items.weight]
    assert (table["lr"], table["weight_decay"], table["betas"]) == (0.001, 0.1, (0.9, 0.98))
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(2):
        plateau.step(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0005] * 3


def test_a_table_updated_in_pieces_is_the_same(data: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tables = tiny("train.table_state=row"), []
    for piece in (1 << 26, 3 * 8):  # all rows, three rows
        monkeypatch.setattr(train_optimizer, "_PIECE", piece)
        torch.manual_seed(0)
        model = SequentialRecommender(config, data.num_items, data.time_span)
        optimizer = make_optimizer(model, config)
        model.items.weight.grad = torch.randn_like(model.items.weight)
        for _ in range(2):
            optimizer.step()
        tables.append(model.items.weight.detach())
    assert torch.equal(*tables)


def test_an_epoch_has_every_window_once_in_an_order_of_its_own(data: Sequences) -> None:
    feed = Feed(data, tiny(), Group(0, 1, CPU))
    whole = data.training_batch(feed.windows, 8)
    orders = []
    for epoch in (0, 1):
        batches = [feed(epoch, index, index).batch for index in range(feed.steps)]
        seen = torch.cat([torch.cat((b.items, b.target_times), dim=1) for b in batches])
        orders.append(seen)
        assert sorted(seen.tolist()) == sorted(torch.cat((whole.items, whole.target_times), dim=1).tolist())
    assert not torch.equal(*orders)


@pytest.mark.parametrize(("criterion", "other"), [("HR@10", "Recall@10"), ("NDCG@10", "HR@10")])
def test_the_learning_rate_falls_on_a_plateau_and_training_stops_early(
    criterion: str, other: str, data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation is best in epoch 2 of at most 30; patience 2 reduces at the third stalled one, and stops after 5.

    The metric that is not the criterion rises all the time, and is not asked.
    """
    scores, rising = iter([0.1, 0.3, *[0.2] * 40]), iter(np.linspace(0, 1, 50))

    class Fixed:
        users, offsets, ranks = np.array([0]), np.array([0, 1]), np.array([1.0])
        places = Places(np.array([0]), np.array([0]), offsets)

        def __init__(self, split: str) -> None:
            self.metrics = {criterion: next(scores) if split == "valid" else 0.0, other: float(next(rising))}

    monkeypatch.setattr(training, "evaluate", lambda model, data, split, *rest, **options: Fixed(split))
    settings = ("train.epochs=30", "train.patience=2", "train.early_stop=5")
    settings = (*settings, f"train.criterion={criterion}")
    monkeypatch.setattr(training, "LEAST_EPOCHS", 1)
    metrics = train(data, tiny(*settings), tmp_path / "run", "cpu", progress=False)
    assert (metrics["best_epoch"], metrics["epochs"]) == (2, 7)
    assert [row["lr"] for row in rows(tmp_path / "run")] == pytest.approx([1e-3] * 4 + [1e-4] * 3)


@pytest.mark.parametrize(("every", "ends"), [(1, 15), (3, 15), (5, 15), (10, 20)])
def test_a_run_stops_early_only_where_it_has_validated(every: int, ends: int, data: Sequences, tmp_path: Path) -> None:
    """Validation was best in epoch 10, or in the last validated one before it."""
    config = tiny("train.epochs=40", f"train.eval_every={every}", "train.early_stop=5")
    with process_group("cpu") as group:
        trainer = Trainer(data, config, tmp_path / "run", group, resume=False)
        trainer.state.best, trainer.state.best_epoch = 0.5, 10 // every * every
        ended = []
        for epoch in range(10, 40):
            trainer.state.epoch = epoch
            if trainer.is_finished:
                ended.append(epoch)
    assert ended[0] == ends


def test_killed_ten_times_at_random_moments_a_run_ends_with_the_same_bytes(data: Sequences, tmp_path: Path) -> None:
    """SIGKILL while steps, validations and checkpoints are under way, then resumed, ten times over."""
    settings = ("train.epochs=40", "train.early_stop=40")
    reference, run = tmp_path / "reference", tmp_path / "run"
    process = in_background(data.path, settings, reference)
    process.join(PATIENCE)
    assert process.exitcode == 0
    moments = random.Random(7)
    steps = [0]
    for life in range(10):
        process = in_background(data.path, settings, run, checkpoint_seconds=0.01)
        # The first life may end before anything is saved; the others get a little further, however slow the machine.
        while life and process.is_alive() and last_step(run) <= steps[-1]:
            time.sleep(0.005)
        process.join(moments.uniform(0, 0.06))
        assert process.exitcode is None, f"the run ended after {life} kills; make it longer"
        process.kill()
        process.join()
        steps.append(last_step(run))
    assert 0 < steps[-1] < last_step(reference)
    process = in_background(data.path, settings, run)
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert weights(run) == weights(reference)
    assert untimed(rows(run)) == untimed(rows(reference))
    assert not list(run.rglob("*partial*"))


@pytest.mark.parametrize("model", ["sasrec", "tisasrec", "hstu-time", "hstu-torope"])
def test_each_model_resumes_to_the_same_bytes(data: Sequences, tmp_path: Path, model: str) -> None:
    config = tiny(model=model) if model.startswith("hstu") else tiny("train.epochs=2", model=model)
    resumes_to_the_same_bytes(data, tmp_path, config)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_one_second_moment_a_row_resumes_to_the_same_bytes(data: Sequences, tmp_path: Path, clip: float) -> None:
    resumes_to_the_same_bytes(data, tmp_path, tiny("train.table_state=row", f"train.clip={clip}"))
    last = sorted((tmp_path / "parts" / "checkpoints").iterdir())[-1]
    assert load_file(last / "optimizer.safetensors")["items.weight/exp_avg_sq"].shape == (data.num_items + 1,)


def resumes_to_the_same_bytes(data: Sequences, tmp_path: Path, config: Config) -> None:
    train(data, config, tmp_path / "whole", "cpu", progress=False)
    with process_group("cpu") as group:
        trainer = Trainer(data, config, tmp_path / "parts", group, resume=False)
        for _ in range(2):
            trainer.step()
        trainer.save()
    train(data, config, tmp_path / "parts", "cpu", resume=True, progress=False)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_several_threads_add_in_one_order(data: Sequences, tmp_path: Path) -> None:
    """Large enough for torch to divide the sums in the gradient of the time bias over two threads."""
    torch.set_num_threads(2)
    config = tiny("model.max_len=50", "train.batch=30", "train.epochs=2", model="hstu-time")
    for name in ("first", "second"):
        train(data, config, tmp_path / name, "cpu", progress=False)
    torch.set_num_threads(1)
    assert weights(tmp_path / "first") == weights(tmp_path / "second")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits_with_its_code(
    data: Sequences, undisturbed: Path, tmp_path: Path, signum: signal.Signals, code: int, monkeypatch
) -> None:
    """The signal arrives in the middle of the third step; that step is finished, saved, and not done again."""
    step = Trainer.step

    def interrupted_step(self: Trainer):
        if self.state.step == 2:
            os.kill(os.getpid(), signum)
        return step(self)

    before = signal.getsignal(signum)
    monkeypatch.setattr(Trainer, "step", interrupted_step)
    arguments = ["train", str(data.path), "--out", str(tmp_path / "run"), "--device", "cpu", "--no-progress"]
    chosen = ["--model", "hstu-trope", *(part for setting in SIZE for part in ("--set", setting))]
    result = CliRunner().invoke(app, [*arguments, *chosen])
    assert result.exit_code == code, result.output
    assert "--resume" in result.output
    assert signal.getsignal(signum) is before
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["epoch0000-step00000003"]
    monkeypatch.undo()
    result = CliRunner().invoke(app, [*arguments, "--resume"])  # the run knows its own config
    assert result.exit_code == 0, result.output
    assert f"next: `trope evaluate {tmp_path / 'run'}`" in result.output
    assert weights(tmp_path / "run") == weights(undisturbed)


def test_a_file_gets_few_frames_of_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, TrainState(), total=1_000, progress=True) as log:
        for _ in range(1_000):
            log.advance(1, 1)
            time.sleep(0.0005)
    frames = capsys.readouterr().err.count("\r")
    assert 1 <= frames <= 3, "the first and the last"


def test_a_loss_that_is_not_finite_stops_and_says_where(data: Sequences, tmp_path: Path) -> None:
    """A weight is broken after a good checkpoint; the message has step and tensor, and the checkpoint stays."""
    with process_group("cpu") as group:
        trainer = Trainer(data, tiny(), tmp_path / "run", group, resume=False)
        trainer.step()
        trainer.save()
        name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if "blocks" in n)
        parameter.register_hook(lambda gradient: gradient * math.nan)
        trainer.step()
        trainer.step()
        with pytest.raises(Diverged, match=rf"step 2: .*{name}.* good checkpoint is .*epoch0000-step00000001.*lr"):
            trainer.save()
    left = list((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in left] == ["epoch0000-step00000001"]
    assert all(tensor.isfinite().all() for tensor in load_file(left[0] / "model" / "model.safetensors").values())


def test_a_diverged_run_ends_with_exit_code_1(data: Sequences, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        stepper, "Objective", lambda model, temperature: lambda work: model.items.weight.sum() * math.nan
    )
    chosen = [part for setting in SIZE for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["train", str(data.path), "--out", str(tmp_path / "r"), "--no-progress", *chosen])
    assert result.exit_code == 1
    assert "step 1" in result.output and "items.weight" in result.output and "loss was nan" in result.output


@pytest.mark.parametrize(("state", "refit"), [("full", "true"), ("row", "false")])
def test_two_processes_give_the_result_of_one(data: Sequences, tmp_path: Path, state: str, refit: str) -> None:
    """torchrun with two CPU processes, the same global batch; a last batch of one row leaves a process without any."""
    batch = len(data.train_windows(8).starts) - 1
    settings = (
        *SIZE, f"train.batch={batch}", "model.dropout=0.0", "train.negative_source=batch", "train.epochs=2",
        f"train.table_state={state}", f"train.refit={refit}",
    )  # fmt: skip
    chosen = [part for setting in settings for part in ("--set", setting)]
    chosen += ["--model", "hstu-trope", "--device", "cpu", "--no-progress"]
    command = ["-m", "trope", "train", str(data.path), *chosen]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, launcher in (("one", []), ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"])):
        done = subprocess.run(
            [sys.executable, *launcher, *command, "--out", str(tmp_path / name)], env=environment,
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    one, two = (load_file(tmp_path / name / "best" / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    for first, second in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert first["epoch_loss"] == pytest.approx(second["epoch_loss"], rel=1e-5)


def test_a_run_is_not_overwritten_and_not_resumed_as_another(
    data: Sequences, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    with pytest.raises(FileExistsError, match="--resume"):
        train(data, tiny(), run, "cpu", progress=False)
    with pytest.raises(
        ValueError, match=r"train.lr was 0.001, now 0.1.*model.width was 8, now 16|model.width.*train.lr"
    ):
        train(data, tiny("train.lr=0.1", "model.width=16"), run, "cpu", resume=True, progress=False)
    with pytest.raises(ValueError, match=r"train.table_state was 'full', now 'row'"):
        train(data, tiny("train.table_state=row"), run, "cpu", resume=True, progress=False)
    with pytest.raises(ValueError, match=r"protocol is loo-paper, the run's loo-strict; resume with"):
        train(tiny_data(tmp_path / "p", "loo-paper"), tiny(), run, "cpu", resume=True, progress=False)
    with pytest.raises(ValueError, match=r"protocol is holdout, 1 day from \d{4}-\d\d-\d\d .*, the run's loo-strict;"):
        train(tiny_data(tmp_path / "h", "holdout"), tiny(), run, "cpu", resume=True, progress=False)
    with pytest.raises(ValueError, match="number of items is 12, the run's 20"):
        train(tiny_data(tmp_path / "i", items=12), tiny(), run, "cpu", resume=True, progress=False)
    with pytest.raises(ValueError, match="its checksum is"):
        train(tiny_data(tmp_path / "s", seed=1), tiny(), run, "cpu", resume=True, progress=False)
    # A number in place of the auto that it stands for is the same config.
    assert train(data, tiny("model.gate_floor=0.015625"), run, "cpu", resume=True, progress=False)["epochs"] == 3
    with pytest.raises(ValueError, match=r"model\.gate_floor was 0\.015625, now 1\.0"):
        train(data, tiny("model.gate_floor=1.0"), run, "cpu", resume=True, progress=False)
    # A finished run resumed is a finished run; with more epochs it goes on.
    assert train(data, tiny(), run, "cpu", resume=True, progress=False)["epochs"] == 3
    assert train(data, tiny("train.epochs=4"), run, "cpu", resume=True, progress=False)["epochs"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "train.lr=fast"], "train.lr must be a number"),
        (["--model", "hstu", "--config", "x.toml"], "no config file x.toml"),
        (["--config", "nowhere.toml"], "no config file nowhere.toml"),
        (["--device", "abacus"], "device must be"),
        (["--model", "gru4rec"], "unknown model 'gru4rec'"),
        (["--set", "model.width=0"], "model.width must lie between 1 and 65536, got 0"),
        (["--set", "model.width=1"], "model.width of at least 2, got 1"),
        (["--set", "train.factor=2"], "train.factor was removed after b687b81"),
        (["--set", "train.stride=1000"], "train.stride must be at most model.max_len"),
    ],
)
def test_mistakes_on_the_command_line(data: Sequences, tmp_path: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["train", str(data.path), "--out", str(tmp_path / "run"), *arguments])
    assert isinstance(result.exception, (ValueError, FileNotFoundError))
    assert words in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_log_of_one_moment_is_refused_by_rotations(tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", [(user, item, START) for user in range(6) for item in range(6)])
    data = prepared(log, tmp_path / "data")
    with pytest.raises(ValueError, match=r"all training events of .* have one time, .*, or train --model sasrec"):
        train(data, tiny("train.epochs=1"), tmp_path / "run", "cpu", progress=False)
    assert not (tmp_path / "run").exists()
    train(data, tiny("train.epochs=1", model="sasrec"), tmp_path / "run", "cpu", progress=False)


def test_the_command_knows_variants_by_name_and_settings_have_the_last_word() -> None:
    attention = resolve_config("hstu-trope-attention", None, ["model.width=32"], None)
    assert attention == preset("hstu-trope", ["rotary.readout=0", "model.width=32"])
    assert resolve_config("hstu-trope-paper", None, ["rotary.phase=exact"], None).rotary.phase == "exact"


def test_settings_without_effect_are_named() -> None:
    def notes(model: str, *settings: str) -> list[str]:
        return list(without_effect(preset(model, settings), settings))

    assert not notes("hstu-trope", "rotary.shifted=false", "model.gate_floor=1", "train.lr=0.1")
    assert notes("hstu-time", "rotary.shifted=false") == [
        "rotary.shifted has no effect on a model without a rotary encoding (rotary.kind is none)"
    ]
    assert notes("hstu-trope", "rotary.rotate_query=false", "rotary.shifted=false") == [
        "rotary.shifted has no effect where queries are not rotated (rotary.rotate_query is false)"
    ]
    assert not notes("hstu-time", "rotary.readout=0.5", "rotary.learnable=false")
    assert notes("sasrec", "model.gate_floor=1") == [
        "model.gate_floor has no effect on block sasrec, which has no gate"
    ]


def test_an_interrupted_run_tells_its_caller(data: Sequences, tmp_path: Path, monkeypatch, capsys) -> None:
    """From Python the signal is an exception that says which, after the save."""
    monkeypatch.setattr(training.StopRequest, "signum", int(signal.SIGTERM))
    with pytest.raises(Interrupted) as caught:
        train(data, tiny(), tmp_path / "run", "cpu", progress=False)
    assert caught.value.signum == signal.SIGTERM
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("*/state.json")).read_text())
    assert state["step"] == 1 and set(state) >= set(TrainState.__dataclass_fields__) - {"cursor"}
    monkeypatch.undo()
    assert "goes on" not in capsys.readouterr().out
    train(data, tiny(), tmp_path / "run", "cpu", resume=True)
    assert f"{tmp_path / 'run'} goes on in epoch 1 of 3, after step 1\n" in capsys.readouterr().out
    train(data, tiny(), tmp_path / "run", "cpu", resume=True)
    assert "goes on" not in capsys.readouterr().out, "it was finished"


@pytest.mark.parametrize(("during", "before"), [("fit_pulse", "choose_counting"), ("choose_counting", "publish")])
def test_a_signal_during_the_pulse_or_the_control_is_seen_at_its_end(
    data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str, before: str
) -> None:
    work = getattr(Trainer, during)

    def work_and_be_asked(self: Trainer, say: Callable[[str], None]) -> None:
        work(self, say)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, during, work_and_be_asked)
    monkeypatch.setattr(Trainer, before, lambda *_: pytest.fail("the training went on"))
    settings = ("model.pulse=true", "train.epochs=1")
    with pytest.raises(Interrupted, match="SIGTERM"):
        train(data, tiny(*settings), tmp_path / "run", "cpu", progress=False)
    assert not (tmp_path / "run" / "metrics.json").exists()
    monkeypatch.undo()
    train(data, tiny(*settings), tmp_path / "run", "cpu", resume=True, progress=False)
    assert (tmp_path / "run" / "metrics.json").is_file()


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """SIGINT does what it does in a terminal. In the background of a shell it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_the_second_signal_acts_at_once_but_not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun passes on the signal that a batch system has sent to everybody."""
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signum == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert stop.signum == signal.SIGINT


def test_tensorboard_gets_the_logs_numbers_where_it_is_installed(data: Sequences, tmp_path: Path, monkeypatch) -> None:
    written: dict[str, list[int]] = {}

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "run" / "tensorboard"), 0)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert math.isfinite(value)
            written.setdefault(name, []).append(step)

        def close(self) -> None:
            written["closed"] = []

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(training, "LOG_EVERY", 5)
    metrics = train(data, tiny(), tmp_path / "run", "cpu", progress=False)
    assert written["loss"] == list(range(5, metrics["steps"] + 1, 5))
    assert len(written["HR@10"]) == len(written["epoch_loss"]) == 3 and "closed" in written


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("source", ["uniform", "batch"])
def test_a_step_never_waits_for_the_gpu(data: Sequences, tmp_path: Path, source: str) -> None:
    with process_group("cuda") as group:
        config = tiny(f"train.negative_source={source}", "train.clip=1.0")
        trainer = Trainer(data, config, tmp_path / "run", group, resume=False)
        trainer.step()  # compiles kernels and fills the optimiser's state
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
