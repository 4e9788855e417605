"""The exact top-k: against sorting, in any tiles, with ties and items left out, and in bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trope.evaluate.ranking import Cells, dot_scores, top_k, topk
from trope.evaluate.ranking.topk import keys

# Small whole numbers and halves: they tie, and no order of summation changes a dot product.
LEVELS = torch.tensor([-1.0, -0.5, -0.0, 0.0, 0.5, 1.0])


def naive(users: torch.Tensor, items: torch.Tensor, k: int, gone: set[tuple[int, int]]) -> list[list[tuple]]:
    """By sorting: item and score of each user's best, padded with item 0."""
    found = []
    for row, user in enumerate(users):
        scores = [(item, float(user @ items[item])) for item in range(1, len(items)) if (row, item) not in gone]
        best = sorted(scores, key=lambda pair: -pair[1])[:k]
        found.append(best + [(0, -torch.inf)] * (k - len(best)))
    return found


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6), users=st.integers(1, 5), items=st.integers(1, 30), k=st.integers(1, 32),
    tile=st.sampled_from([1, 64, 192, 640, 1 << 20]), share=st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_it_equals_sorting_whatever_the_tile(
    seed: int, users: int, items: int, k: int, tile: int, share: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    users_BE, items_VE = (LEVELS[torch.randint(6, (rows, 2), generator=random)] for rows in (users, items + 1))
    items_VE[0] = 100  # padding would win every ranking
    gone = torch.nonzero(torch.rand(users, items + 1, generator=random) < share)
    gone = torch.cat((gone, gone))  # a pair may come twice
    found = top_k(users_BE, items_VE, k, Cells(*gone.T), tile)
    expected = naive(users_BE, items_VE, k, set(map(tuple, gone.tolist())))
    rows = zip(found.items_BK.tolist(), found.scores_BK.tolist(), strict=True)
    assert [list(zip(*row, strict=True)) for row in rows] == expected


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6), users=st.integers(1, 5), items=st.integers(1, 90), k=st.integers(1, 6),
    block=st.sampled_from([1, 3, 4]), share=st.sampled_from([0.0, 0.3, 1.0]), levels=st.sampled_from([2, 6, 10**6]),
)  # fmt: skip
def test_the_best_blocks_hold_the_best_items(
    seed: int, users: int, items: int, k: int, block: int, share: float, levels: int
) -> None:
    """As a GPU ranks: in tiles and blocks, with ties between blocks and without."""
    random = torch.Generator().manual_seed(seed)
    users_BE, items_VE = (torch.randint(levels, (rows, 1), generator=random).float() for rows in (users, items + 1))
    items_VE[0] = 10**8
    gone = torch.nonzero(torch.rand(users, items + 1, generator=random) < share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "BLOCK", block)
        scores = dot_scores(users_BE, items_VE)
        found = topk.top_k_by_blocks(scores, users, items, k, Cells(*gone.T), tile=1)
    expected = naive(users_BE, items_VE, k, set(map(tuple, gone.tolist())))
    rows = zip(found.items_BK.tolist(), found.scores_BK.tolist(), strict=True)
    assert [list(zip(*row, strict=True)) for row in rows] == expected


@pytest.mark.parametrize(("users", "by_blocks"), [(0, True), (4, True), (40, False)])
def test_many_users_with_a_large_k_take_no_more_memory(
    users: int, by_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU looks at blocks of large tiles only where those tiles fit; the tensors here are on the CPU."""
    room, items, k = 4 * 4 * 6 * 4, 500, 6
    monkeypatch.setattr(topk, "BLOCK", 4)
    monkeypatch.setattr(topk, "GPU_TILE", 300)
    monkeypatch.setattr(topk, "_blocks_tile", lambda device: room)
    users_BE, items_VE = torch.randn(users, 3), torch.randn(items + 1, 3)
    dots, held = dot_scores(users_BE, items_VE), []

    def scores(first: int, last: int) -> torch.Tensor:
        held.append(users * (last - first))
        return dots(first, last)

    found = topk.top_k_of(scores, users, items, torch.device("cuda"), k)
    assert found.items_BK.shape == (users, k)
    assert torch.equal(found.items_BK, top_k(users_BE, items_VE, k).items_BK)
    assert max(held) <= (room if by_blocks else 300)


@pytest.mark.parametrize("order", [1, -1], ids=["rising scores", "falling scores"])
def test_scores_in_order_of_id(order: int) -> None:
    """Every tile replaces the whole list, or no tile does."""
    items_VE = (order * torch.arange(301.0))[:, None]
    found = top_k(torch.tensor([[1.0], [-1.0]]), items_VE, 3, tile=640)
    assert found.items_BK[0 if order == 1 else 1].tolist() == [300, 299, 298]
    assert found.items_BK[1 if order == 1 else 0].tolist() == [1, 2, 3]


def test_real_vectors_give_what_sorting_gives(device: str) -> None:
    torch.manual_seed(0)
    users_BE, items_VE = (torch.nn.functional.normalize(torch.randn(n, 16), dim=1).to(device) for n in (70, 5001))
    scores_BV = users_BE.double() @ items_VE[1:].double().T
    best = scores_BV.sort(dim=1, descending=True)
    found = top_k(users_BE, items_VE, 20, tile=1 << 14)
    torch.testing.assert_close(found.scores_BK, best.values[:, :20].float(), atol=1e-6, rtol=0)
    apart = best.values[:, :-1] - best.values[:, 1:] > 1e-6  # neighbours that rounding cannot swap
    apart = apart[:, :20] & torch.nn.functional.pad(apart[:, :19], (1, 0), value=True)
    assert apart.float().mean() > 0.9
    assert torch.equal(found.items_BK[apart], best.indices[:, :20][apart] + 1)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_keys_sort_as_score_then_item(row: list[float]) -> None:
    expected = sorted(range(len(row)), key=lambda column: -row[column])
    assert keys(torch.tensor([row], dtype=torch.float32), 1)[0].argsort(descending=True).tolist() == expected


MEASURE = """
import resource
import numpy as np
import torch
from trope.settings import preset
from trope.data.catalogue import Catalogue
from trope.data.folder import Ids
from trope.models.recommender import SequentialRecommender
from trope.serve.recommender import Histories, Recommender

USERS, ITEMS, EVENTS, START = 512, 1_000_000, 20, 1_500_000_000
size = ("model.width=64", "model.heads=2", "model.head_dim=32", "model.blocks=1", "model.max_len=20")
model = SequentialRecommender(preset("hstu-trope", size), ITEMS, (START, START + 10**7))
recommender = Recommender(model, Catalogue(Ids(np.arange(ITEMS)), None), "cpu")
items = np.random.default_rng(0).integers(1, ITEMS + 1, USERS * EVENTS)
times = START + np.arange(USERS * EVENTS)
histories = Histories(items, times, EVENTS * np.arange(USERS + 1))
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
ranking = recommender.rank(histories, np.full(USERS, START + 10**7), k=10, filter_seen="history")
assert len(ranking.items) == 10 * USERS
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads /proc")
def test_a_million_items_for_512_users_take_less_than_2_gib() -> None:
    """Above the tables, in a process of its own: the largest memory ever held, less what it held before ranking."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # on a busy machine threads wait for each other
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, env=one_thread)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 << 30
