"""The formulas of many GPUs agree with what is counted at a small size, and with one GPU's measurement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trope.bench.scale import (
    GIB,
    ROWS_HELD,
    Links,
    Measured,
    estimate,
    exchanged_bytes,
    pulse_bytes,
    rows_asked,
    table_bytes,
)  # fmt: skip
from trope.bench.shapes import find_shape
from trope.models.items import ItemTable
from trope.models.recommender import SequentialRecommender
from trope.times import DAY
from trope.train.loss import token_losses
from trope.train.optimizer import make_optimizer, table_hyper

SHOP = find_shape("shop")
STEP = Measured(step_ms=20.0, table_ms=3.0, peak_GiB=12.0, tokens=65_536)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_asked_are_the_different_items_of_a_batch(shared: bool, rng: torch.Generator) -> None:
    config = SHOP.config("hstu-trope", "train.negatives=7", f"train.shared_negatives={str(shared).lower()}")
    items, tokens = 3_000, 500
    draws = 2 * tokens + 7 * (1 if shared else tokens)
    found = len(torch.randint(items, (draws,), generator=rng).unique())
    assert rows_asked(config, items, tokens) == pytest.approx(found, rel=0.05)
    assert rows_asked(config, 1, tokens) == 1


@pytest.mark.parametrize("state", ["full", "row"])
def test_a_tables_bytes_are_those_of_its_tensors(state: str) -> None:
    config = find_shape("tiny").config("hstu-trope", f"train.table_state={state}")
    model = SequentialRecommender(config, 50, (0, 10), shard=(0, 1))
    optimizer = make_optimizer(model, config)
    table_hyper(optimizer, model.items.weight, 0, holds_moments=True)
    moments = optimizer.state[model.items.weight]
    tensors = [model.items.weight, moments["exp_avg"], moments["exp_avg_sq"], model.items.unit_copy(torch.bfloat16)]
    # Each rank has a row of padding besides.
    assert sum(x.nbytes for x in tensors) == table_bytes(config, 51)


@pytest.mark.parametrize(("days", "seasons", "each"), [(1, 0, 40), (30, 2, 296), (800, 3, 424)])
def test_a_pulses_bytes_are_those_of_its_counts(days: int, seasons: int, each: int) -> None:
    config = find_shape("tiny").config("trope")
    pulse = SequentialRecommender(config, 50, (0, days * DAY), shard=(0, 2)).pulse
    assert pulse is not None
    counts = [pulse.get_buffer(name) for name in ("counts", "seasons")]
    # A row of padding besides.
    assert sum(x.nbytes for x in counts) == pulse_bytes(config, 51, seasons) == 51 * each
    assert pulse_bytes(find_shape("tiny").config("hstu-trope"), 51) == 0


def test_one_gpu_is_what_was_measured() -> None:
    found = estimate(SHOP.config("hstu-trope"), SHOP.items, 1, STEP)
    assert found.step_ms == pytest.approx(20) and found.memory_GiB == pytest.approx(12)
    assert found.sent_GiB == found.exchange_ms == found.reduce_ms == 0
    assert found.tokens_per_s == pytest.approx(65_536 / 0.02)


def test_more_gpus_hold_less_and_shared_negatives_send_less() -> None:
    own, shared = (SHOP.config("hstu-trope", f"train.shared_negatives={value}") for value in ("false", "true"))
    few, many = (estimate(own, SHOP.items, gpus, STEP) for gpus in (8, 64))
    assert many.table_GiB < few.table_GiB / 7 and many.sent_GiB == few.sent_GiB
    assert many.exchange_ms > few.exchange_ms, "a network is slower than a node"
    less = estimate(shared, SHOP.items, 64, STEP)
    assert less.sent_GiB < many.sent_GiB / 20 and less.step_ms < many.step_ms
    assert less.sent_GiB * GIB == pytest.approx(exchanged_bytes(shared, rows_asked(shared, SHOP.items, STEP.tokens)))


def test_links_send_nothing_to_themselves() -> None:
    links = Links(node=4, inside=100.0, outside=10.0)
    assert links.seconds(80.0, 1) == 0
    assert links.seconds(80.0, 4) == pytest.approx(80 * 3 / 4 / 100)
    assert links.seconds(80.0, 8) == pytest.approx(80 * 4 / 8 / 10)


class _Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make inside, as long as something holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._held = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._held = {at: (ref, size) for at, (ref, size) in self._held.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return made


def test_the_rows_of_a_batch_are_held_so_many_times() -> None:
    U, E = 5_000, 64
    rows_VE = torch.randn(U + 1, E)
    items, negatives = torch.arange(1, 9), torch.arange(1, 65).view(8, 8)
    with _Live() as live:
        table = ItemTable.of_rows(rows_VE)
        out_TE = torch.nn.functional.normalize(table.embed(items), dim=-1)
        token_losses(out_TE, items.roll(1), table.vectors(), negatives, 0.05).sum().backward()
    held = live.peak / (4 * U * E)
    assert ROWS_HELD - 1.5 < held + 1 <= ROWS_HELD + 0.1  # and the rows themselves
