"""Checkpoints: whole or not there, the last two and the best, and nothing in them is ever run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from training import one_thread, tiny, tiny_data, weights

from trope.data.sequences import Sequences
from trope.models import tensors
from trope.models.recommender import SequentialRecommender
from trope.train import checkpoint
from trope.train.checkpoint import Checkpoints, TrainState
from trope.train.loop import train
from trope.train.optimizer import make_optimizer

__all__ = ["one_thread"]  # a fixture for every test in here
SPAN = (1_500_000_000, 1_600_000_000)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("checkpoint"))


def make(items: int = 9, *settings: str) -> tuple[SequentialRecommender, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = SequentialRecommender(tiny(*settings), items, SPAN)
    optimizer = make_optimizer(model, tiny(*settings))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("table_state", ["full", "row"])
def test_what_is_saved_comes_back_to_the_bit(tmp_path: Path, table_state: str) -> None:
    config = tiny(f"train.table_state={table_state}")
    model, optimizer = make(9, f"train.table_state={table_state}")
    optimizer.param_groups[1]["lr"] = 1 / 3
    state = TrainState(2, 3, 17, loss_sum=0.1 + 0.2, best=1 / 7, best_epoch=1, best_metrics={"HR@10": 1 / 7}, stalled=1)
    Checkpoints(tmp_path).save(model, optimizer, state)
    torch.manual_seed(5)
    fresh = SequentialRecommender(config, 9, SPAN)
    fresh_optimizer = make_optimizer(fresh, config)
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    assert checkpoint.load(latest, fresh, fresh_optimizer) == state
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert optimizer.state[mine].keys() == fresh_optimizer.state[theirs].keys()
        for moment, value in optimizer.state[mine].items():
            assert torch.equal(fresh_optimizer.state[theirs][moment], value)
    assert [group["lr"] for group in fresh_optimizer.param_groups][:2] == [1e-3, 1 / 3]


def test_the_fused_steps_count_is_read_as_torchs(tmp_path: Path) -> None:
    """The fused step counts in float64; torch's own AdamW would misread that on a GPU."""
    model, optimizer = make()
    network = [parameter for parameter in model.parameters() if parameter is not model.items.weight]
    for parameter in network:
        optimizer.state[parameter]["step"] = torch.tensor(3.0, dtype=torch.float64)
    Checkpoints(tmp_path).save(model, optimizer, TrainState(step=3))
    (path,) = (tmp_path / "checkpoints").iterdir()
    fresh, fresh_optimizer = make()
    fresh_optimizer.state.clear()
    checkpoint.load(path, fresh, fresh_optimizer)
    counts = [fresh_optimizer.state[parameter]["step"] for parameter in fresh.parameters()]
    assert [count.dtype for count in counts] == [torch.float32] * len(counts) and 3 in map(float, counts)


@pytest.mark.parametrize("table_state", ["full", "row"])
def test_a_process_without_items_goes_on(tmp_path: Path, table_state: str) -> None:
    """With train.clip AdamW updates the table too, which needs moments of the row of padding."""
    config = tiny(f"train.table_state={table_state}").resolved

    def made(shard: tuple[int, int] | None):
        model = SequentialRecommender(config, 3, (0, 10), shard)
        return model, make_optimizer(model, config)

    def step(model, optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    model, optimizer = made(None)
    step(model, optimizer)
    Checkpoints(tmp_path).save(model, optimizer, TrainState(step=1))
    (path,) = (tmp_path / "checkpoints").iterdir()
    model, optimizer = made((0, 4))
    assert len(model.items.weight) == 1, "padding alone"
    checkpoint.load(path, model, optimizer)
    step(model, optimizer)
    assert float(optimizer.state[model.items.weight]["step"]) == 2


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path)
    for epoch, best_epoch in ((1, 1), (2, 2), (3, 2), (10, 2)):
        with torch.no_grad():
            model.items.weight.fill_(epoch)
        checkpoints.save(model, optimizer, TrainState(epoch, 0, 5 * epoch, best=0.5, best_epoch=best_epoch))
    assert names(tmp_path) == ["epoch0003-step00000015", "epoch0010-step00000050"]
    assert SequentialRecommender.from_pretrained(tmp_path / "best").items.weight[1, 0] == 2
    # Of the same step, the one in which the epoch is over comes later.
    checkpoints.save(model, optimizer, TrainState(11, 0, 50))
    assert checkpoints.latest() == tmp_path / "checkpoints" / "epoch0011-step00000050"


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on NFS while another process has one of its files open. The next save tries again."""
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path)

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as busy:
        busy.setattr(shutil, "rmtree", refuse)
        for epoch in (1, 2, 3):
            checkpoints.save(model, optimizer, TrainState(epoch, 0, epoch))
    assert len(names(tmp_path)) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "epoch0001-step00000001 could not be removed: " in line and "Directory not empty" in line
    checkpoints.save(model, optimizer, TrainState(4, 0, 4))
    assert names(tmp_path) == ["epoch0003-step00000003", "epoch0004-step00000004"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists what a process has mapped")
@pytest.mark.parametrize("table_state", ["full", "row"])
def test_a_resumed_run_has_no_file_of_its_checkpoint_mapped(tmp_path: Path, table_state: str) -> None:
    """Mapped, a removed checkpoint would keep its place on the disk until the run ends."""
    model, optimizer = make(9, f"train.table_state={table_state}")
    Checkpoints(tmp_path).save(model, optimizer, TrainState(1, 0, 5, best=0.5, best_epoch=1))
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    model, optimizer = make(9, f"train.table_state={table_state}")
    checkpoint.load(latest, model, optimizer)
    best = SequentialRecommender.from_pretrained(tmp_path / "best")
    assert torch.equal(best.items.weight, model.items.weight)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    Checkpoints(tmp_path).save(model, optimizer, TrainState(1, 0, 5))

    def full(*arguments: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        Checkpoints(tmp_path).save(model, optimizer, TrainState(2, 0, 10))
    assert names(tmp_path) == ["epoch0001-step00000005"]


def test_a_best_model_lost_to_a_kill_is_published_again_on_resume(data: Sequences, tmp_path: Path) -> None:
    """Killed between the checkpoint and best/; leftovers of other kills lie around."""
    run = tmp_path / "run"
    train(data, tiny("train.epochs=1"), run, "cpu", progress=False)
    expected, before = weights(run), [names(run), sorted(path.name for path in run.iterdir())]
    shutil.rmtree(run / "best")
    last = run / "checkpoints" / ".epoch0001-step00000001"
    for leftover in (
        run / ".best.partial-0a1b2c3d",
        run / ".best.draft",
        run / "..best.draft.partial-0a1b2c3d",
        last.with_name(f"{last.name}.partial-0a1b2c3d"),
        last.with_name(f"{last.name}.partial-items"),
    ):
        leftover.mkdir()
        (leftover / "half").touch()
    train(data, tiny("train.epochs=1"), run, "cpu", resume=True, progress=False)
    assert weights(run) == expected
    assert [names(run), sorted(path.name for path in run.iterdir())] == before


def test_the_best_model_survives_a_kill_while_it_is_replaced(data: Sequences, tmp_path: Path) -> None:
    """Of an earlier epoch than the last, and with a pulse to publish: no checkpoint has this model any more.

    Without an exchange of names, as on NFS, a kill leaves it under a hidden name alone.
    """
    run, config = tmp_path / "run", tiny("model.pulse=true", "train.epochs=4", "train.lr=0.05", "train.early_stop=9")
    done = train(data, config, run, "cpu", progress=False)
    assert done["best_epoch"] <= done["epochs"] - checkpoint.KEEP, "else a checkpoint would still have the best model"
    expected = weights(run)
    for later in ("pulse.json", "metrics.json"):
        (run / later).unlink()
    (run / "best").rename(run / ".best.old-0a1b2c3d")
    again = train(data, config, run, "cpu", resume=True, progress=False)
    assert weights(run) == expected
    assert again["test"] == done["test"]
    assert not list(run.glob(".best*"))


class Malice:
    """Unpickled, it leaves a file; harmless as long as nobody does."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


def test_a_malicious_pickle_in_a_checkpoint_stays_harmless(data: Sequences, tmp_path: Path) -> None:
    """Beside the files, under every name that some loader would take; and in place of each of them."""
    run, mark = tmp_path / "run", tmp_path / "mark"
    train(data, tiny("train.epochs=1"), run, "cpu", progress=False)
    bomb = pickle.dumps(Malice(mark))
    pickle.loads(bomb)
    assert mark.exists()
    mark.unlink()
    last = next((run / "checkpoints").iterdir())
    for folder in (run, run / "best", last, last / "model"):
        for name in ("pytorch_model.bin", "model.pt", "optimizer.pt", "state.pkl", "data.pkl", "model.ckpt"):
            (folder / name).write_bytes(bomb)
    train(data, tiny("train.epochs=2"), run, "cpu", resume=True, progress=False)
    last = sorted((run / "checkpoints").iterdir())[-1]
    for file in ("model/model.safetensors", "model/config.json", "optimizer.safetensors", "state.json"):
        copy = tmp_path / "copy"
        shutil.copytree(run, copy)
        (copy / "checkpoints" / last.name / file).write_bytes(bomb)
        with pytest.raises(ValueError, match=Path(file).name):
            train(data, tiny("train.epochs=3"), copy, "cpu", resume=True, progress=False)
        shutil.rmtree(copy)
    assert not mark.exists()


def test_a_checkpoint_with_another_catalogue_or_of_another_model_is_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(*make(), TrainState(1, 0, 5))
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    with pytest.raises(ValueError, match="knows 9 items, the data have 10"):
        checkpoint.load(latest, *make(10))
    with pytest.raises(ValueError, match="of another model"):
        checkpoint.load(latest, *make(9, "model.width=16"))


@pytest.mark.parametrize(("stored", "shape"), [("full", r"\[10, 8\]"), ("row", r"\[10\]")])
def test_a_checkpoint_with_another_state_of_the_table_is_refused(tmp_path: Path, stored: str, shape: str) -> None:
    given = {"full": "row", "row": "full"}[stored]
    Checkpoints(tmp_path).save(*make(9, f"train.table_state={stored}"), TrainState(1, 0, 5))
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    with pytest.raises(ValueError, match=f"train.table_state was '{stored}', now '{given}'"):
        checkpoint.load(latest, *make(9, f"train.table_state={given}"))
    model, _ = make(9, f"train.table_state={stored}")
    optimizer = make_optimizer(model, tiny(f"train.table_state={given}"))
    optimizer.step()
    with pytest.raises(ValueError, match=f"items.weight/exp_avg_sq {shape}, which model and optimiser have not"):
        checkpoint.load(latest, model, optimizer)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("state.json", "{", "damaged or foreign"),
        ("state.json", '{"format": 99}', "format 99"),
        ("state.json", '{"format": 1, "mood": "good"}', "it has no epoch"),
        ("optimizer.safetensors", "truncated", "optimizer.safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_advice(tmp_path: Path, file: str, content: str, words: str) -> None:
    model, optimizer = make()
    Checkpoints(tmp_path).save(model, optimizer, TrainState(1, 0, 5))
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    (latest / file).write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        checkpoint.load(latest, model, optimizer)
    assert "remove" in str(caught.value)


def test_a_state_file_is_plain_json(tmp_path: Path) -> None:
    """Strict JSON: other tools read it too, and a best of minus infinity would not be."""
    Checkpoints(tmp_path).save(*make(), TrainState())
    text = next(tmp_path.glob("checkpoints/*/state.json")).read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
