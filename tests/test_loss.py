"""The losses against a plain Python version, values and gradients, on every path."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trope.config import TrainConfig
from trope.train import loss as losses
from trope.train.loss import Negatives, draw_negatives, token_losses

V, E, T, N = 40, 6, 11, 5
TEMPERATURE = 0.05


@pytest.fixture
def table(rng: torch.Generator) -> Tensor:
    vectors = F.normalize(torch.randn(V + 1, E, generator=rng, dtype=torch.float64), dim=-1)
    vectors[0] = 0
    return vectors.requires_grad_()


@pytest.fixture
def out(rng: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(T, E, generator=rng, dtype=torch.float64), dim=-1).requires_grad_()


@pytest.fixture
def targets(rng: torch.Generator) -> Tensor:
    targets = torch.randint(1, V + 1, (T,), generator=rng)
    targets[3] = 0
    return targets


def naive(out: Tensor, targets: Tensor, table: Tensor, negatives: Negatives | None) -> Tensor:
    """One token, one candidate at a time."""
    result = []
    for token, target in enumerate(targets.tolist()):
        if target == 0:
            result.append(out.new_zeros(()))
            continue
        positive = out[token] @ table[target] / TEMPERATURE
        total = positive.exp()
        if negatives is None:
            others = [item for item in range(1, V + 1) if item != target]
        else:
            own = negatives.items if negatives.items.dim() == 1 else negatives.items[token]
            others = [item for item in own.tolist() if item != target]
        for item in others:
            score = out[token] @ table[item] / TEMPERATURE
            if negatives is not None and negatives.log_expected_V is not None:
                score = score - negatives.log_expected_V[item]
            total = total + score.exp()
        result.append(total.log() - positive)
    return torch.stack(result)


@pytest.mark.parametrize("path", ["dense", "gathered", "pieces"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("source", ["uniform", "batch"])
@pytest.mark.parametrize("logq", [False, True])
def test_sampled_softmax_equals_a_plain_loop(
    path: str, shared: bool, source: str, logq: bool, out: Tensor, targets: Tensor, table: Tensor,
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if path != "dense":
        monkeypatch.setattr(losses, "_DENSE", 0)
    if path == "pieces":
        monkeypatch.setattr(losses, "_PIECE", 3 * (N + 1) * E)
    config = TrainConfig(negatives=N, shared_negatives=shared, negative_source=source, logq=logq)
    share = torch.full((V + 1,), 1 / V, dtype=torch.float64)
    negatives = draw_negatives(targets, V, config, rng, share)
    assert negatives is not None
    assert (negatives.log_expected_V is not None) == logq
    _same(token_losses, naive, out, targets, table, negatives)


@pytest.mark.parametrize("piece", [1 << 28, 3 * V])
def test_full_softmax_equals_a_plain_loop(
    piece: int, out: Tensor, targets: Tensor, table: Tensor, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_PIECE", piece)
    assert draw_negatives(targets, V, TrainConfig(loss="full"), rng) is None
    _same(token_losses, naive, out, targets, table, None)


def _same(ours, reference, out: Tensor, targets: Tensor, table: Tensor, negatives: Negatives | None) -> None:
    weights = torch.arange(1.0, T + 1)
    found = ours(out, targets, table, negatives, TEMPERATURE)
    expected = reference(out, targets, table, negatives)
    # Scores leave the product as float32, so that bf16 products sum safely.
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)
    assert found[targets == 0].eq(0).all()
    for mine, wanted in zip(
        torch.autograd.grad((found * weights).sum(), (out, table)),
        torch.autograd.grad((expected * weights).sum(), (out, table)),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted, atol=2e-4, rtol=1e-5)
        assert mine.isfinite().all()


def test_a_negative_equal_to_the_target_is_left_out(out: Tensor, targets: Tensor, table: Tensor) -> None:
    targets = targets.clamp(min=1)
    negatives = Negatives(targets[:, None].expand(T, N).contiguous(), None)
    found = token_losses(out, targets, table, negatives, TEMPERATURE)
    torch.testing.assert_close(found, torch.zeros(T), atol=1e-6, rtol=0)


def test_padding_changes_nothing(out: Tensor, targets: Tensor, table: Tensor, rng: torch.Generator) -> None:
    """A padded token has no loss, no gradient, and its id is never drawn from the batch."""
    config = TrainConfig(negatives=1000, negative_source="batch")
    negatives = draw_negatives(targets, V, config, rng)
    assert negatives is not None
    assert negatives.items.unique().tolist() == sorted(set(targets.tolist()) - {0})
    token_losses(out, targets, table, negatives, TEMPERATURE).sum().backward()
    assert out.grad is not None and out.grad[targets == 0].eq(0).all()
    assert table.grad is not None and table.grad[0].eq(0).all()


def test_negatives_are_uniform_over_the_catalogue_and_over_the_batchs_items(rng: torch.Generator) -> None:
    for source, items in (("uniform", list(range(1, V + 1))), ("batch", [2, 7, 9])):
        config = TrainConfig(negatives=4000, negative_source=source)
        negatives = draw_negatives(torch.tensor([7, 7, 2, 9, 7, 0]), V, config, rng)
        assert negatives is not None and negatives.items.shape == (6, 4000)
        counts = torch.bincount(negatives.items.flatten(), minlength=V + 1)
        assert counts.nonzero().flatten().tolist() == items
        expected = 24000 / len(items)
        assert (counts[items] - expected).abs().max() < 5 * math.sqrt(expected)


def test_the_same_generator_state_gives_the_same_negatives_and_rows_are_a_slice_of_them() -> None:
    config = TrainConfig(negatives=N)
    targets = torch.arange(1, T + 1)
    first, second = (draw_negatives(targets, V, config, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first is not None and second is not None
    assert torch.equal(first.items, second.items)
    assert torch.equal(first.rows(2, 5).items, first.items[2:5])
    shared = draw_negatives(targets, V, replace(config, shared_negatives=True), torch.Generator())
    assert shared is not None and shared.items.shape == (N,) and shared.rows(2, 5) is shared


def test_logq_makes_the_sampled_sum_estimate_the_full_one(out: Tensor, table: Tensor, rng: torch.Generator) -> None:
    """With very many draws, corrected sampling is the full softmax; without the correction it is not."""
    targets = torch.arange(1, T + 1)
    full = token_losses(out, targets, table, None, 0.5)
    for logq, close in ((True, True), (False, False)):
        config = TrainConfig(negatives=200_000, shared_negatives=True, logq=logq)
        sampled = token_losses(out, targets, table, draw_negatives(targets, V, config, rng), 0.5)
        assert torch.allclose(sampled, full, atol=0.02) == close


def test_logq_of_the_batch_is_the_items_chance_to_be_drawn() -> None:
    """By simulation: batches of 6 events from known shares, one negative each."""
    rng = torch.Generator().manual_seed(1)
    share = torch.tensor([0, 0.6, 0.25, 0.1, 0.05])
    config = TrainConfig(negatives=1, negative_source="batch", logq=True, shared_negatives=True)
    drawn, expected = torch.zeros(5), torch.zeros(5)
    rounds = 4000
    for _ in range(rounds):
        targets = torch.multinomial(share, 6, replacement=True, generator=rng)
        negatives = draw_negatives(targets, 4, config, rng, share)
        assert negatives is not None and negatives.log_expected_V is not None
        drawn[negatives.items] += 1 / rounds
        expected += negatives.log_expected_V.exp() / rounds
    # The number of unique items goes with which ones they are; the formula takes the two for independent.
    torch.testing.assert_close(drawn, expected, atol=0.03, rtol=0.25)


def test_logq_of_the_batch_does_not_count_padding(rng: torch.Generator) -> None:
    config = TrainConfig(negatives=N, negative_source="batch", logq=True, shared_negatives=True)
    share = torch.tensor([0, 0.6, 0.25, 0.1, 0.05])
    short, long = (
        draw_negatives(torch.tensor(targets), 4, config, rng, share) for targets in ([3, 1, 1], [3, 0, 1, 1, 0, 0])
    )
    assert short is not None and long is not None
    assert short.log_expected_V is not None and long.log_expected_V is not None
    assert torch.equal(short.log_expected_V, long.log_expected_V)


def test_logq_from_the_batch_without_shares_is_refused(rng: torch.Generator) -> None:
    with pytest.raises(ValueError, match="pass share_V"):
        draw_negatives(torch.tensor([1, 2]), 4, TrainConfig(negative_source="batch", logq=True), rng)
