"""The ranking kernel against the exact reference, and the reference against plain Python: counts are equal, not close.

`torch.empty` is filled with NaN (or the largest integer) here, so a count that no program wrote fails.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from trope.kernels.ranking import Catalogue, places
from trope.kernels.ranking import triton as ranking_triton
from trope.kernels.ranking.reference import scaled


class Problem:
    """Unit vectors, positives in user order (at least one each), items left out, and the near and exact duplicates."""

    def __init__(self, users, items, width, device, positives=1, left_out=0, seed=0):
        rng = torch.Generator().manual_seed(seed)
        self.device = device
        self.users = torch.nn.functional.normalize(torch.randn(users, width, generator=rng), dim=1)
        self.items = torch.nn.functional.normalize(torch.randn(items + 1, width, generator=rng), dim=1)
        self.items[0] = self.users.mean(0) * 100  # padding would win every ranking
        chosen = [torch.randperm(items, generator=rng)[: positives + left_out] + 1 for _ in range(users)]
        counts = [1 + user % positives for user in range(users)]
        self.rows = torch.repeat_interleave(torch.tensor(counts))
        self.positives = torch.cat([row[:count] for row, count in zip(chosen, counts, strict=True)])
        gone = [row[positives : positives + left_out - user % 2] for user, row in enumerate(chosen)]
        self.offsets = torch.tensor([0, *np.cumsum([len(row) for row in gone])])
        self.left_out = torch.cat(gone)

    def run(self, backend):
        catalogue = Catalogue.of(self.items.to(self.device), backend)
        assert catalogue.backend == backend
        inputs = [x.to(self.device) for x in (self.rows, self.positives, self.left_out, self.offsets)]
        better, ties = places(self.users.to(self.device), catalogue, *inputs)
        assert better.dtype == ties.dtype == torch.int32
        return better.cpu(), ties.cpu()

    def check(self):
        better, ties = self.run("triton")
        expected_better, expected_ties = self.run("torch")
        assert better.tolist() == expected_better.tolist()
        assert ties.tolist() == expected_ties.tolist()
        return better, ties


@pytest.mark.parametrize(
    ("users", "items", "width", "positives", "left_out"),
    [(1, 1, 1, 1, 0), (3, 64, 16, 1, 0), (5, 65, 50, 1, 3), (17, 70, 50, 3, 5), (2, 130, 64, 2, 1), (7, 200, 8, 1, 9)],
)
def test_counts_equal_the_reference(users, items, width, positives, left_out, device):
    Problem(users, items, width, device, positives, left_out).check()


@on_gpu
@pytest.mark.parametrize(("items", "width"), [(5_000, 512), (20_001, 128), (3_000, 50)])
def test_counts_equal_the_reference_on_tensor_cores(items, width):
    """At full size and in full tiles; the random model's positives have hundreds of near items each."""
    problem = Problem(300, items, width, "cuda", positives=2, left_out=40)
    problem.items[7] = problem.items[3]
    problem.check()


def test_the_reference_is_the_float64_score_rounded_to_float32(device):
    problem = Problem(6, 40, 50, device, positives=2, left_out=4)
    problem.items[5:9] = problem.items[4]
    better, ties = problem.run("torch")
    for row, (user, item) in enumerate(zip(problem.rows.tolist(), problem.positives.tolist(), strict=True)):
        score = {i: np.float32(problem.items[i].double() @ problem.users[user].double()) for i in range(1, 41)}
        gone = set(problem.left_out[problem.offsets[user] : problem.offsets[user + 1]].tolist())
        others = [s for i, s in score.items() if i != item and i not in gone]
        assert better[row] == sum(s > score[item] for s in others)
        assert ties[row] == sum(s == score[item] for s in others)


def test_exact_duplicates_of_the_positive_tie(device):
    problem = Problem(4, 90, 50, device)
    for row, item in enumerate(problem.positives.tolist()):
        copies = [i for i in range(1, 91) if i % 4 == row and i not in problem.positives][:7]
        problem.items[copies] = problem.items[item].clone()
    _, ties = problem.check()
    assert ties.tolist() == [7, 7, 7, 7]


def test_near_duplicates_within_the_margin_are_told_apart(device):
    problem = Problem(1, 40, 50, device)
    item = int(problem.positives[0])
    others = [i for i in range(1, 41) if i != item]
    user = problem.users[0]
    # Larger along the user by a few units in the last place: far below what two bf16 parts can tell.
    for n, other in enumerate(others[:20]):
        problem.items[other] = problem.items[item] + (n - 9.5) * 2e-7 * user
    better, _ = problem.check()
    assert 10 <= better[0] < 40
    gap = (problem.items[others[19]] - problem.items[item]) @ user
    assert gap < ranking_triton.margin(64) * problem.items[item].norm() * user.norm()


@pytest.mark.parametrize("value", [1 / 3, 0.0])
def test_a_collapsed_model_ties_everywhere_though_its_lists_overflow(value, device, monkeypatch):
    monkeypatch.setattr(ranking_triton, "list_words", lambda items: 2)
    problem = Problem(3, 150, 50, device, positives=2, left_out=5)
    problem.items[:] = value
    better, ties = problem.check()
    gone = problem.offsets.diff()[problem.rows]
    assert better.tolist() == [0] * len(better)
    assert ties.tolist() == (149 - gone).tolist()


def test_rows_whose_list_overflows_and_rows_whose_list_does_not(device, monkeypatch):
    monkeypatch.setattr(ranking_triton, "list_words", lambda items: 2)
    problem = Problem(6, 200, 16, device)
    problem.items[1:170:2] = problem.items[int(problem.positives[0])].clone()
    _, ties = problem.check()
    assert ties[0] >= 80
    assert (ties < 80).any()


def test_rows_in_several_launches_give_the_same(device, monkeypatch):
    problem = Problem(18 if device == "cpu" else 200, 70, 16, device, positives=3, left_out=2)
    expected = problem.check()
    monkeypatch.setattr(ranking_triton, "LISTS", 0)  # as few rows at a time as there are in a tile
    found = problem.run("triton")
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


def test_one_program_or_many_give_the_same(device, monkeypatch):
    problem = Problem(20, 300, 16, device)
    expected = problem.check()
    monkeypatch.setattr(ranking_triton, "PROGRAMS", 1)
    assert [x.tolist() for x in problem.run("triton")] == [x.tolist() for x in expected]


def test_zeros_among_the_items_left_out_are_skipped(device):
    problem = Problem(4, 50, 16, device, left_out=4)
    expected = problem.check()
    order = torch.arange(len(problem.left_out)).repeat_interleave(2)
    problem.left_out = problem.left_out[order] * torch.tensor([1, 0]).repeat(len(problem.left_out))
    problem.offsets = problem.offsets * 2
    found = problem.check()
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


def test_the_length_of_vectors_changes_nothing(device):
    problem = Problem(5, 80, 50, device, positives=2)
    expected = problem.check()
    problem.users *= torch.tensor([1e-20, 1e-3, 1.0, 3e5, 1e20])[:, None]
    problem.items *= 2.0**30
    found = problem.check()
    assert found[0].tolist() == expected[0].tolist()


def test_counted_scores_stay_within_the_margin(device):
    """Of the three products alone, in float32: the largest error of many is below the bound, and not absurdly so."""
    problem = Problem(64, 500, 50, device)
    users, items = scaled(problem.users), scaled(problem.items[1:], common=True)
    (u_hi, u_lo), (v_hi, v_lo) = (ranking_triton.split(x).float().chunk(2, dim=1) for x in (users, items))
    counted = (u_lo @ v_hi.T + u_hi @ v_lo.T) + u_hi @ v_hi.T
    error = (counted.double() - users.double() @ items.double().T).abs()
    bound = ranking_triton.margin(u_hi.shape[1]) * users.norm(dim=1)[:, None] * items.norm(dim=1).max()
    assert (error < bound).all()
    assert (error > bound / 1000).any()


@settings(max_examples=25)
@given(
    scores=st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=1, max_size=80),
    user=st.lists(st.integers(-2, 2), min_size=3, max_size=3),
    data=st.data(),
)
def test_small_whole_numbers_rank_as_fractions_do(scores, user, data):
    """Ties are everywhere, and every score is known exactly."""
    positive = data.draw(st.integers(1, len(scores)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    items = torch.tensor([[9, 9, 9], *scores]).float()
    exact = [sum(Fraction(a) * b for a, b in zip(user, row, strict=True)) for row in scores]
    expected = sum(s > exact[positive - 1] for s in exact), sum(s == exact[positive - 1] for s in exact) - 1
    for backend in ("torch", "triton"):
        better, ties = places(
            torch.tensor([user]).float().to(device),
            Catalogue.of(items.to(device), backend),
            torch.tensor([0]).to(device),
            torch.tensor([positive]).to(device),
        )
        assert (int(better), int(ties)) == expected, backend


@on_gpu
def test_more_items_than_32_bit_offsets_reach():
    items = torch.zeros(2**22 + 3, 512, device="cuda")
    items[-1, 0] = items[-2, 1] = 1
    better, ties = places(
        torch.eye(2, 512, device="cuda"), Catalogue.of(items), torch.tensor([0, 1], device="cuda"),
        torch.tensor([len(items) - 1, len(items) - 1], device="cuda"),
    )  # fmt: skip
    assert better.tolist() == [0, 1]
    assert ties.tolist() == [0, len(items) - 3]
