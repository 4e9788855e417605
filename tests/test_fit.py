"""trope fit: every event is training, as a finished run's validation chose; its lineage; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from data_logs import loose, prepared, random_log, write_parquet
from training import one_thread, tiny, tiny_data
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.folder import sha256_of
from trope.data.sequences import Sequences
from trope.data.views import all_training, asked_at, trained_until
from trope.models.recommender import SequentialRecommender
from trope.runs import LINEAGE, PULSE, RunLock, read_lineage
from trope.serve.recommender import Recommender
from trope.train.distributed import process_group
from trope.train.fit import descend, fit, match_items, read_recipe
from trope.train.loop import Trainer, train
from trope.train.results import measured_in, say_measured, say_result

__all__ = ["one_thread"]  # a fixture for every test in here
# So impatient that the learning rate falls during the run.
SETTINGS = ("train.patience=0", "train.epochs=4")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("fit"), "holdout")


@pytest.fixture(scope="module")
def run(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(data, tiny(*SETTINGS, model="trope"), folder, "cpu", progress=False)
    return folder


@pytest.fixture(scope="module")
def fitted(data: Sequences, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted") / "fitted"
    fit(data, run, folder, "cpu", progress=False)
    return folder


def invoke(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        return 2, str(found.exception)
    return found.exit_code, found.output


def weights(folder: Path) -> bytes:
    return (folder / "best" / "model.safetensors").read_bytes()


def test_every_event_is_training(data: Sequences) -> None:
    every = all_training(data)
    assert int(every.train_end.sum()) == data.num_events
    assert len(every.eval_users("valid")) == len(every.eval_users("test")) == 0
    assert every.time_span == (int(data.times.min()), int(data.times.max()))
    assert every.describe() == data.describe()


def test_a_tick_asks_at_its_start_with_all_that_was_before(data: Sequences) -> None:
    start, end = sorted(data.times.tolist())[200], sorted(data.times.tolist())[260]
    tick = asked_at(data, start, end)
    batch = tick.eval_batch("test", tick.eval_users("test"), 50)
    assert batch.t_now.unique().tolist() == [start]
    assert int(batch.times.max()) < start <= int(batch.positive_times.min()) <= int(batch.positive_times.max()) < end
    before = data.times < start
    assert tick.time_span == (int(data.times.min()), int(data.times[before].max()))
    assert int(tick.train_end.sum()) == int(before.sum()) == int(trained_until(data, start).train_end.sum())


def test_the_model_is_that_of_a_training_on_everything(
    data: Sequences, run: Path, fitted: Path, tmp_path: Path
) -> None:
    recipe = read_recipe(run)
    latest = sorted((run / "checkpoints").iterdir())[-1]
    state = json.loads((latest / "state.json").read_text())
    assert recipe.factors == state["factors"][: state["best_epoch"]]
    with process_group("cpu") as group:
        trainer = Trainer(all_training(data), recipe.config, tmp_path / "by-hand", group, True, recipe.factors)
        for factor in recipe.factors:
            assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(factor * recipe.config.train.lr)
            for _ in range(trainer.feed.steps):
                trainer.step()
            trainer.state.epoch, trainer.state.index = trainer.state.epoch + 1, 0
            trainer._follow_factors()
    found = SequentialRecommender.from_pretrained(fitted / "best")
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), value, rtol=0, atol=0, msg=name)
    assert found.time_span == (int(data.times.min()), int(data.times.max()))


def test_the_pulse_has_the_runs_weights_and_everybodys_counts(data: Sequences, run: Path, fitted: Path) -> None:
    pulse = SequentialRecommender.from_pretrained(fitted / "best").pulse
    assert pulse is not None
    assert json.loads((fitted / PULSE).read_text()) == json.loads((run / PULSE).read_text())
    torch.testing.assert_close(
        pulse.get_buffer("own"), torch.tensor(json.loads((run / PULSE).read_text())["weights"]["own"])
    )
    last = int(data.times.max())
    assert int(pulse.get_buffer("counted_until")) == last + 1 and pulse.time_span[1] == last
    longest = 2.0 ** (-(last + 1 - data.times).double() / float(pulse.half_lives[-1]))
    by_hand = torch.zeros(data.num_items + 1, dtype=torch.float64).index_add_(0, data.items.long(), longest)
    torch.testing.assert_close(pulse.get_buffer("counts")[-1].double(), by_hand, rtol=1e-5, atol=1e-5)


def test_it_knows_where_it_comes_from(data: Sequences, run: Path, fitted: Path, tmp_path: Path) -> None:
    lineage = read_lineage(fitted)
    assert lineage is not None
    assert lineage["kind"] == "fit" and lineage["events_added"] == 0 and lineage["data"] == data.meta["checksum"]
    assert lineage["parent"]["path"] == str(run) and lineage["parent"]["kind"] == "train"
    assert lineage["parent"]["sha256"] == sha256_of(run / "best" / "config.json")
    assert lineage["ancestors"] == [] and lineage["steps"] > 0
    again = descend("update", fitted, read_recipe(fitted), data, 3)  # a fitted run hands on what it follows
    assert again["recipe"] == lineage["recipe"] and again["ancestors"] == [lineage["parent"]]
    assert again["parent"]["kind"] == "fit"
    second = tmp_path / "second"
    fit(data, fitted, second, "cpu", progress=False)
    assert weights(second) == weights(fitted)


def test_a_killed_fit_resumes_to_the_same_bytes(data: Sequences, run: Path, fitted: Path, tmp_path: Path) -> None:
    recipe = read_recipe(run)
    with process_group("cpu") as group, RunLock() as lock:
        lineage = descend("fit", run, recipe, data, 0)
        stopped = Trainer(
            all_training(data), recipe.config, tmp_path / "run", group, False, recipe.factors, lock, lineage
        )
        for _ in range(3):
            stopped.step()
        stopped.save()
        with pytest.raises(BlockingIOError, match="another process"):
            fit(data, run, tmp_path / "run", "cpu", resume=True, progress=False)
    with pytest.raises(FileExistsError, match="--resume"):
        fit(data, run, tmp_path / "run", "cpu", progress=False)
    fit(data, run, tmp_path / "run", "cpu", resume=True, progress=False)
    assert weights(tmp_path / "run") == weights(fitted)
    assert not (tmp_path / "run" / "metrics.json").exists()
    fit(data, run, tmp_path / "run", "cpu", resume=True, progress=False)  # a finished one stays as it is
    assert weights(tmp_path / "run") == weights(fitted)


def test_the_command_says_what_to_expect_and_the_run_serves(data: Sequences, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = invoke("fit", data.path, "--like", run, "--out", out, "--device", "cpu", "--no-progress")
    assert code == 0, said
    metrics = json.loads((run / "metrics.json").read_text())
    assert f"test HR@10 {metrics['test']['HR@10']:.4f}" in said and f"{data.num_events:,}" in said
    assert f"expect what {run} measured" in said
    served = Recommender.from_pretrained(out, "cpu")
    history = pd.DataFrame({"user_id": ["u"], "item_id": [1], "timestamp": [int(data.times.max())]})
    assert len(served.recommend(history, int(data.times.max()) + 60, k=3)) == 3
    code, said = invoke("recommend", out, "--user", 1, "--at", int(data.times.max()) + 60)
    assert code == 0, said
    code, said = invoke("evaluate", out, "--device", "cpu")
    assert code == 2 and "nothing to test" in said and str(run) in said
    code, said = invoke("fit", data.path, "--like", run, "--out", out, "--device", "cpu")
    assert code == 2 and "is not empty" in said
    assert "every event" not in said, "a folder that is taken is refused before anything is promised"


def test_a_fit_like_a_fit_names_the_run_that_measured(data: Sequences, run: Path, fitted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = invoke("fit", data.path, "--like", fitted, "--out", out, "--device", "cpu", "--no-progress")
    assert code == 0, said
    assert f"as the validation of {run} chose" in said and f"expect what {run} measured" in said
    assert measured_in(out) == measured_in(run) == run
    code, said = invoke("evaluate", out, "--device", "cpu")
    assert code == 2 and f"evaluate {run}, or" in said  # not `fitted`, which has no test either


def test_which_numbers_have_the_pulse_is_said(run: Path) -> None:
    fitted = {"exponent": 0.2, "criterion": "HR@10", "users": 2_800, "cosine": 0.023, "pulse": 0.217}
    valid, test = {"HR@10": 0.026}, {"HR@10": 0.1967}
    assert say_measured("HR@10", valid, test, fitted) == (
        "validation HR@10 0.0260 (network alone), test HR@10 0.1967 (with the pulse, which raised HR@10 from 0.0230 "
        "to 0.2170 on the 2,800 validation requests it was fitted to)"
    )
    for without in (None, {**fitted, "exponent": None}):
        assert say_measured("HR@10", valid, test, without) == "validation HR@10 0.0260, test HR@10 0.1967"
    metrics, pulse = (json.loads((run / name).read_text()) for name in ("metrics.json", PULSE))
    said = say_result(metrics, "HR@10", run)  # as `trope train` ends
    assert ("network alone" in said) == (pulse["exponent"] is not None)
    assert f"best epoch {metrics['best_epoch']} of" in said and f"HR@10 {metrics['valid']['HR@10']:.4f}" in said


def test_a_later_preparation_may_have_more_items(data: Sequences, run: Path, tmp_path: Path) -> None:
    rows = random_log(rows=400, users=30, items=20, seed=0)
    last = max(row[2] for row in rows)
    more = [(user, item, last + 60 * user) for user in range(1, 41) for item in (21, 22, 7)]
    later = prepared(write_parquet(tmp_path / "log.parquet", rows + more), tmp_path / "data", loose())
    found = match_items(run, later)
    assert (found.known, found.new, found.gone) == (data.num_items, 2, 0)
    lineage = fit(later, run, tmp_path / "run", "cpu", progress=False)
    assert lineage["events_added"] == len(more)
    assert SequentialRecommender.from_pretrained(tmp_path / "run" / "best").num_items == data.num_items + 2


def test_what_is_refused_is_refused_in_a_line(data: Sequences, run: Path, fitted: Path, tmp_path: Path) -> None:
    other = prepared(
        write_parquet(tmp_path / "log.parquet", [(u, f"x{i}", t) for u, i, t in random_log()]), tmp_path / "data"
    )
    with pytest.raises(ValueError, match=r"0 of the 20 items.*not a later preparation"):
        fit(other, run, tmp_path / "out", "cpu", progress=False)
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    (unfinished / "metrics.json").unlink()
    with pytest.raises(ValueError, match="not finished"):
        fit(data, unfinished, tmp_path / "out", "cpu", progress=False)
    with pytest.raises(FileNotFoundError, match="no trained model"):
        fit(data, tmp_path, tmp_path / "out", "cpu", progress=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="was made by `trope fit`, not by `trope train`"):
        train(data, read_recipe(run).config, fitted, "cpu", resume=True, progress=False)
    with pytest.raises(ValueError, match="was made by `trope train`, not by `trope fit`"):
        fit(data, run, run, "cpu", resume=True, progress=False)
    another = tmp_path / "another"
    train(data, tiny(*SETTINGS, "train.seed=1", model="trope"), another, "cpu", progress=False)
    with pytest.raises(ValueError, match="was begun from the model of"):
        fit(data, another, fitted, "cpu", resume=True, progress=False)
    changed = tmp_path / "changed"
    shutil.copytree(fitted, changed)
    path = changed / LINEAGE
    path.write_text(path.read_text().replace('"events_added": 0', '"events_added": 1'))
    with pytest.raises(ValueError, match=r"lineage\.json is damaged"):
        read_recipe(changed)
