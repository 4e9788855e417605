"""Items over several processes: losses, gradients, tables, rankings and checkpoints are those of one process."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from patience import PATIENCE
from ranks import ALONE, curve, fail_in_group, losses, on_ranks, outlive, train_run
from safetensors.torch import load_file
from torch.distributed import HashStore
from training import SIZE, one_thread, tiny_data  # noqa: F401, an automatic fixture

from trope.data.sequences import Sequences
from trope.evaluate.ranking import Cells, top_k
from trope.evaluate.ranking.shards import ShardRanking
from trope.kernels.adamw import factors_of
from trope.kernels.table import update_table
from trope.models import items as item_tables
from trope.models.exchange import Shard
from trope.models.items import ItemTable, first_rows, row_entries
from trope.models.sharded_items import ShardedItemTable
from trope.runs import BEST, CHECKPOINTS, WEIGHTS
from trope.train.distributed import Group, agree_on_name
from trope.train.same_dropout import SameDropout

CPU = torch.device("cpu")
RESUMED = [*SIZE, "train.epochs=4", "train.early_stop=9", "train.batch=7", "model.pulse=false"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("ranks"), items=41)


@pytest.mark.parametrize(("items", "size"), [(1, 1), (7, 2), (3, 4), (1000, 7)])
def test_every_item_has_one_rank(items: int, size: int) -> None:
    shards = [Shard(rank, size, items) for rank in range(size)]
    assert [item for shard in shards for item in range(shard.first, shard.last)] == list(range(1, items + 1))
    assert max(s.last - s.first for s in shards) - min(s.last - s.first for s in shards) <= 1


@pytest.mark.parametrize(("items", "width"), [(20, 8), (1000, 24), (5, 2)])
def test_rows_of_a_shard_are_drawn_as_in_a_whole_table(items: int, width: int, monkeypatch) -> None:
    monkeypatch.setattr(item_tables, "_PIECE", 16 * 32)  # several pieces
    torch.manual_seed(3)
    whole, after = ItemTable(items, width).weight, torch.rand(1)
    for rank in range(3):
        shard = Shard(rank, 3, items)
        torch.manual_seed(3)
        rows = first_rows(items, width, shard.first, shard.last)
        assert torch.equal(rows[1:], whole[shard.first : shard.last]) and not rows[0].any()
        assert torch.rand(1) == after, "the rest of the model is drawn from what follows"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("is_rowwise", [False, True])
def test_gradients_of_rows_update_a_table_as_a_dense_gradient_does(
    backend: Any, is_rowwise: bool, rng: torch.Generator
) -> None:
    items, width = 9, 8
    rows_G = torch.tensor([4, 1, 9, 4, 4])  # of several ranks: some rows twice, some not at all
    grad_GE = torch.randn(5, width, generator=rng)
    table = F.pad(torch.randn(items, width, generator=rng), (0, 0, 1, 0))
    moments = torch.rand(items + 1, width, generator=rng), torch.rand(items + 1, width, generator=rng)
    moments = (moments[0], moments[1][:, 0].clone()) if is_rowwise else moments
    hyper = torch.tensor([0.1, 0.9, 0.98, 1e-8, 0.01, 3.0], dtype=torch.float64)
    dense = torch.zeros_like(table).index_add_(0, rows_G, grad_GE)
    wanted, moved = table.clone(), tuple(moment.clone() for moment in moments)
    item_tables_adamw(wanted, moved, dense, hyper)
    entries, factors = row_entries(rows_G, grad_GE, items, backend), factors_of(hyper, backend)
    norm_sq = update_table(table, *moments, table.clone(), *entries, factors, backend)
    torch.testing.assert_close(table[1:], wanted[1:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments[1][1:], moved[1][1:], rtol=1e-5, atol=1e-7)
    assert float(norm_sq.sum()) == pytest.approx(float(dense.square().sum()), rel=1e-5)
    assert not table[0].any()


def item_tables_adamw(table: torch.Tensor, moments: tuple, grad: torch.Tensor, hyper: torch.Tensor) -> None:
    """AdamW as in its paper, with decoupled decay."""
    lr, beta1, beta2, eps, decay, step = hyper.tolist()
    first, second = moments
    square = grad.square() if second.ndim == 2 else grad.square().mean(1)
    first.copy_(beta1 * first + (1 - beta1) * grad)
    second.copy_(beta2 * second + (1 - beta2) * square)
    by = (second / (1 - beta2**step)).sqrt() + eps
    by = by if by.ndim == 2 else by[:, None]
    table.copy_(table * (1 - lr * decay) - lr * first / (1 - beta1**step) / by)


@pytest.mark.parametrize("parts", [[(0, 5)], [(0, 2), (2, 5)], [(0, 1), (1, 1), (1, 5)]])
def test_parts_drop_what_the_whole_batch_drops(parts: list[tuple[int, int]], rng: torch.Generator) -> None:
    """By module and inside attention, in this order; an empty part computes one row, which counts nothing."""
    x, q = torch.randn(5 * 3, 4, generator=rng), torch.randn(5, 2, 3, 4, generator=rng)

    def dropped(x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        return F.dropout(x, 0.4), F.scaled_dot_product_attention(q, q, q + 1, dropout_p=0.4, is_causal=True)

    wanted = dropped(x, q)
    assert (wanted[0] == 0).any()
    for first, last in parts:
        end = max(last, first + 1)
        with SameDropout(first, end - first, 5):
            found = dropped(x[3 * first : 3 * end], q[first:end])
        assert torch.equal(found[0], wanted[0][3 * first : 3 * end])
        torch.testing.assert_close(found[1], wanted[1][first:end])
    with SameDropout(0, 5, 5):
        assert torch.equal(F.dropout(x, 0.4, training=False), x)


@pytest.mark.parametrize(
    ("model", "size", "settings"),
    [
        ("trope", 2, []),
        ("trope", 4, ["train.batch=7"]),  # a batch of 7 for 4 processes
        ("hstu-time", 2, ["train.table_state=row", "train.shared_negatives=true"]),
        ("transformer-trope", 2, ["train.clip=0.5", "train.negative_source=batch"]),
        ("sasrec", 2, ["train.loss=full"]),  # every process has a whole table
    ],
)
def test_the_number_of_processes_changes_nothing(data: Sequences, model: str, size: int, settings: list[str]) -> None:
    """With dropout. A gradient that is 0 but for rounding moves its weight by lr: tables are compared less closely."""
    chosen = [*SIZE, *settings]
    one = curve(ALONE, data.path, model, chosen)
    first, *others = on_ranks(size, curve, data.path, model, chosen)
    assert one is not None and first is not None
    torch.testing.assert_close(first["steps"], one["steps"], rtol=1e-5, atol=1e-5)
    assert one["steps"][-1, 0] < one["steps"][0, 0], "it learns"
    torch.testing.assert_close(first["table"], one["table"], rtol=1e-4, atol=1e-4)
    assert torch.equal(first["ranks"], one["ranks"])
    if "train.loss=full" not in settings:
        assert others == [None] * (size - 1)
        assert first["moments"][0] < one["moments"][0], "no process has all rows"


def rankings(group: Group, path: Path, items_VE: torch.Tensor, users_BE: torch.Tensor, cells: Cells) -> tuple:
    """Places and top lists by a table over processes; every one of them gets all."""
    num_items = len(items_VE) - 1
    table = ShardedItemTable(num_items, items_VE.shape[1], group.rank, group.size)
    table.weight[1:] = items_VE[table.shard.first : table.shard.last]
    ranking = ShardRanking(table)
    nothing = Cells(cells.rows[:0], cells.items[:0])
    scores = ranking.scores(users_BE)
    places = ranking.count_places(scores, num_items, cells, nothing, len(users_BE), tile=16)
    return places, ranking.top_k(users_BE, 6), ranking.top_k(users_BE, 6, cells, tile=16)


@pytest.mark.parametrize(("num_items", "size"), [(41, 2), (3, 4)])
def test_rankings_over_shards_are_exact(data: Sequences, num_items: int, size: int, rng: torch.Generator) -> None:
    """With equal scores on different ranks, and with ranks that have no item."""
    items_VE = F.pad(torch.randint(1, 3, (num_items, 4), generator=rng).float(), (0, 0, 1, 0))
    items_VE[1:] = F.normalize(items_VE[1:], dim=1)
    users_BE = torch.randn(5, 4, generator=rng)
    cells = Cells(torch.arange(5), torch.randint(1, num_items + 1, (5,), generator=rng))
    score_BV = users_BE @ items_VE[1:].T
    own_B1 = score_BV.gather(1, cells.items[:, None] - 1)
    for places, best, others in on_ranks(size, rankings, data.path, items_VE, users_BE, cells):
        assert torch.equal(places[0], (score_BV > own_B1 + 1e-6).sum(1))
        assert torch.equal(places[1], ((score_BV - own_B1).abs() < 1e-6).sum(1) - 1)
        for found, left_out in ((best, None), (others, cells)):
            wanted = top_k(users_BE, items_VE, 6, left_out)
            assert torch.equal(found.items_BK, wanted.items_BK)
            torch.testing.assert_close(found.scores_BK, wanted.scores_BK)


@pytest.fixture(scope="module")
def four(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 processes that stopped after two of four epochs."""
    run = tmp_path_factory.mktemp("four") / "run"
    short = [*RESUMED, "train.epochs=2"]
    on_ranks(4, train_run, data.path, "hstu-trope", short, run)
    return run


@pytest.fixture(scope="module")
def undisturbed(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same four epochs in one process."""
    run = tmp_path_factory.mktemp("one") / "run"
    train_run(data.path, "hstu-trope", RESUMED, run)
    return run


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_checkpoint_of_four_processes_goes_on_with_any_number(
    data: Sequences, four: Path, undisturbed: Path, tmp_path: Path, size: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(four, run)
    if size == 1:
        train_run(data.path, "hstu-trope", RESUMED, run)
    else:
        on_ranks(size, train_run, data.path, "hstu-trope", RESUMED, run)
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)
    files = sorted(path.name for path in sorted((run / CHECKPOINTS).iterdir())[-1].glob("items-*"))
    assert files == [f"items-{rank:05d}-of-{size:05d}.safetensors" for rank in range(size)] * (size > 1)
    found, wanted = (load_file(each / BEST / WEIGHTS) for each in (run, undisturbed))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    one, other = (json.loads((each / "metrics.json").read_text())["test"] for each in (run, undisturbed))
    assert one == other


def test_a_checkpoint_of_one_process_goes_on_with_two(data: Sequences, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_run(data.path, "hstu-trope", [*RESUMED, "train.epochs=2"], run)
    on_ranks(2, train_run, data.path, "hstu-trope", RESUMED, run)
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda last: (last / "items-00002-of-00004.safetensors").unlink(), "items-00002.*|No such file"),
        (lambda last: (last / "items-00002-of-00004.safetensors").write_bytes(b"no tensors"), "SHA-256"),
    ],
)
def test_missing_and_damaged_rows_are_refused(
    data: Sequences, four: Path, tmp_path: Path, damage: Any, words: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(four, run)
    last = sorted((run / CHECKPOINTS).iterdir())[-1]
    damage(last)
    with pytest.raises(ValueError, match=words) as caught:
        train_run(data.path, "hstu-trope", RESUMED, run)
    assert f"remove {last}" in str(caught.value) and "\n" not in str(caught.value)


def test_restarted_processes_agree_on_a_new_name() -> None:
    """In a store that holds what all earlier attempts left, one that ended half-way among them."""
    store, size, names = HashStore(), 4, set[str]()
    store.set("ask/1", "a process that died before it was answered")
    with ThreadPoolExecutor(size) as pool:
        for _ in range(3):
            wait = timedelta(seconds=PATIENCE)
            found = {job.result() for job in [pool.submit(agree_on_name, store, r, size, wait) for r in range(size)]}
            assert len(found) == 1 and not found & names
            names |= found


def test_processes_that_do_not_come_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"processes \[1, 2\] of 3 did not come"):
        agree_on_name(HashStore(), 0, 3, timedelta(0))


def test_a_process_that_failed_does_not_wait_for_the_others() -> None:
    """NCCL would: it is left to the end of the process, as torchrun ends all of them."""
    assert on_ranks(2, fail_in_group, 1) == [False, True]


def test_a_lost_process_is_named_in_a_line() -> None:
    """By its address, where the others have a traceback of gloo."""
    said, _ = on_ranks(2, outlive, 1)
    assert said.startswith("another process was lost: ") and "127.0.0.1" in said
    assert "\n" not in said and "gloo" not in said
