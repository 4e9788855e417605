"""A batch in parts: any number of processes trains the same model to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import ALONE, CPU, curve, losses, on_ranks, train_run
from safetensors.torch import load_file
from streams import same_work
from training import SIZE, one_thread, tiny, tiny_data  # noqa: F401, an automatic fixture

from trope.data.sequences import Sequences
from trope.runs import BEST, WEIGHTS
from trope.train import loop
from trope.train.distributed import Group
from trope.train.fit import fit
from trope.train.parts import for_device, parts_of
from trope.train.process import threads_for
from trope.train.step import Feed
from trope.train.update import retrain

FOUR = "train.parts=4"
RESUMED = [*SIZE, FOUR, "train.epochs=4", "train.early_stop=9", "train.batch=7", "model.pulse=false"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("parts"), items=41)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("trope", ["train.batch=7"]),
        ("hstu-time", ["train.table_state=row", "train.shared_negatives=true"]),
        ("hstu-trope", ["train.precision=bf16"]),
        # A width at which torch's fused AdamW rounds some rows otherwise than others.
        ("sasrec-trope", ["train.clip=0.5", "train.negative_source=batch", "model.width=12", "model.head_dim=6"]),
        ("transformer-trope", ["train.loss=full"]),
    ],
)
def test_parts_make_the_number_of_processes_change_no_bit(data: Sequences, model: str, settings: list[str]) -> None:
    """With dropout, and with batches of which some parts are empty."""
    chosen = [*SIZE, *settings, FOUR]
    one = curve(ALONE, data.path, model, chosen)
    assert one is not None
    assert one["steps"][-1, 0] < one["steps"][0, 0], "it learns"
    for size in (2, 4):
        first = on_ranks(size, curve, data.path, model, chosen)[0]
        for what in ("steps", "table", "ranks"):
            assert torch.equal(first[what], one[what]), what


def sums(group: Group, values_N: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Each process has some of the values; and two tensors of which it has its own."""
    mine = values_N.tensor_split(group.size)[group.rank]
    parts = [values_N[:7] * (group.rank + 1), values_N[7:13].view(2, 3) / (group.rank + 3)]
    group.sum_by_twos(parts)
    return float(group.sum_exactly(mine)), parts


def test_sums_of_any_processes(data: Sequences, rng: torch.Generator) -> None:
    """An exact sum is one for any order and division; by twos, ranks are added as a tree."""
    for values_N in torch.rand(10, 1001, generator=rng) ** 8:  # a plain sum would hide its order in half of the draws
        wanted = float(ALONE.sum_exactly(values_N))
        assert wanted == pytest.approx(float(values_N.double().sum()), rel=1e-9)
        assert wanted == float(ALONE.sum_exactly(values_N.flip(0)))
    for found, (flat, table) in on_ranks(4, sums, values_N):
        assert found == wanted
        one, two, three, four = (values_N[:7] * count for count in (1, 2, 3, 4))
        assert torch.equal(flat, (one + two) + (three + four))
        one, two, three, four = (values_N[7:13].view(2, 3) / count for count in (3, 4, 5, 6))
        assert torch.equal(table, (one + two) + (three + four))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sum_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    for values in ([bad], [1.0, bad], [bad, bad, 3.0]):
        assert not ALONE.sum_exactly(torch.tensor(values)).isfinite()
    assert float(ALONE.sum_exactly(torch.zeros(3))) == float(ALONE.sum_exactly(torch.zeros(0))) == 0


def test_parts_find_what_the_whole_batch_does(data: Sequences) -> None:
    """To rounding, without dropout."""
    chosen = [*SIZE, "model.dropout=0"]
    whole, parts = (curve(ALONE, data.path, "trope", [*chosen, f"train.parts={count}"]) for count in (1, 8))
    torch.testing.assert_close(parts["steps"], whole["steps"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts["table"], whole["table"], rtol=1e-4, atol=1e-4)


def test_a_whole_table_is_trained_in_parts_too(data: Sequences) -> None:
    """As `trope update` and `trope replay` do, which have one process."""
    one, other = (retrain(data, tiny("model.dropout=0", f"train.parts={n}"), [1.0, 0.5], ALONE)[0] for n in (1, 4))
    for name, found in other.state_dict().items():
        torch.testing.assert_close(found, one.state_dict()[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("settings", [[], ["train.negative_source=batch"], ["train.shared_negatives=true"]])
def test_any_processes_compute_the_same_parts(data: Sequences, settings: list[str]) -> None:
    """Of every batch of an epoch: the same rows with the same negatives. A last batch has fewer rows than parts."""
    config = tiny(*settings, FOUR, "train.batch=9")
    alone = Feed(data, config, ALONE)
    for size in (2, 4):
        feeds = [Feed(data, config, Group(rank, size, CPU)) for rank in range(size)]
        for index in range(alone.steps):
            works = [work for feed in feeds for work in feed.works(1, index, index)]
            wanted = alone.works(1, index, index)
            assert len(works) == len(wanted) == 4
            assert all(same_work(*pair) for pair in zip(works, wanted, strict=True))
            shares = sum(work.share * len(work.places_T) for work in wanted)
            assert shares == pytest.approx(1), "each target counts once"


@pytest.fixture(scope="module")
def undisturbed(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs in one process."""
    run = tmp_path_factory.mktemp("one") / "run"
    train_run(data.path, "hstu-trope", RESUMED, run)
    return run


@pytest.fixture(scope="module")
def four(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 processes that stopped after two of these epochs."""
    run = tmp_path_factory.mktemp("four") / "run"
    on_ranks(4, train_run, data.path, "hstu-trope", [*RESUMED, "train.epochs=2"], run)
    return run


def same_runs(one: Path, other: Path) -> bool:
    """To the bit: the loss of each epoch, all weights of the best and of the last model, all ranks' metrics."""
    found, wanted = (load_file(run / BEST / WEIGHTS) for run in (one, other))
    tests = [json.loads((run / "metrics.json").read_text())["test"] for run in (one, other)]
    same = found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    return same and losses(one) == losses(other) and tests[0] == tests[1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_checkpoint_goes_on_to_the_same_bits(
    data: Sequences, four: Path, undisturbed: Path, tmp_path: Path, size: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(four, run)
    on_ranks(size, train_run, data.path, "hstu-trope", RESUMED, run)
    assert len(losses(run)) == 4 and same_runs(run, undisturbed)


def test_a_run_goes_on_with_the_parts_that_it_began_with(data: Sequences, four: Path, tmp_path: Path) -> None:
    shutil.copytree(four, tmp_path / "run")
    with pytest.raises(ValueError, match=r"train\.parts was 4, now 1"):
        train_run(data.path, "hstu-trope", [*RESUMED, "train.parts=1"], tmp_path / "run")


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.parts must be a power of two, got 6"):
        tiny("train.parts=6")
    assert [parts_of(tiny(FOUR), Group(rank, 2, CPU)).mine for rank in (0, 1)] == [range(2), range(2, 4)]
    for size in (3, 8):
        with pytest.raises(ValueError, match=f"over {size} processes; start 1, 2 or 4 of them$"):
            parts_of(tiny(FOUR), Group(0, size, CPU))
    with pytest.raises(ValueError, match="was not tried on a GPU"):
        parts_of(tiny(FOUR), Group(0, 1, torch.device("cuda")))


def test_a_run_of_parts_is_continued_on_a_gpu_without_them() -> None:
    """`trope fit` and `trope update` take a run's settings, which nobody can change there."""
    config = tiny(FOUR)
    assert for_device(config, CPU) is config
    on_gpu = for_device(config, torch.device("cuda"))
    assert on_gpu == tiny() and parts_of(on_gpu, Group(0, 1, torch.device("cuda"))).total == 1


def test_parts_are_computed_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the environment says otherwise; afterwards there are as many as before."""
    torch.set_num_threads(2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with threads_for(tiny(FOUR)):
        assert torch.get_num_threads() == 1
    with threads_for(tiny()):
        assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with threads_for(tiny(FOUR)):
        assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_trainings_take_one_thread(
    data: Sequences, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trope train` with validation and test, and `trope fit`."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    step, score, seen = loop.Trainer.step, loop.score_test, []
    monkeypatch.setattr(loop.Trainer, "step", lambda self: [seen.append(torch.get_num_threads()), step(self)][1])
    monkeypatch.setattr(loop, "score_test", lambda *given: [seen.append(torch.get_num_threads()), score(*given)][1])
    torch.set_num_threads(2)
    try:
        train_run(data.path, "hstu-trope", [*RESUMED, "train.epochs=1"], tmp_path / "trained")
        trained = len(seen)
        fit(data, undisturbed, tmp_path / "fitted", "cpu", progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert 1 < trained < len(seen) and set(seen) == {1}
