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
from trope.train.loss import draw_negatives, token_losses

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


def naive(out: Tensor, targets: Tensor, table: Tensor, negatives: Tensor | None) -> Tensor:
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
            own = negatives if negatives.dim() == 1 else negatives[token]
            others = [item for item in own.tolist() if item != target]
        for item in others:
            total = total + (out[token] @ table[item] / TEMPERATURE).exp()
        result.append(total.log() - positive)
    return torch.stack(result)


@pytest.mark.parametrize("path", ["dense", "gathered", "pieces"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("source", ["uniform", "batch"])
def test_sampled_softmax_equals_a_plain_loop(
    path: str, shared: bool, source: str, out: Tensor, targets: Tensor, table: Tensor,
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if path != "dense":
        monkeypatch.setattr(losses, "_DENSE", 0)
    if path == "pieces":
        monkeypatch.setattr(losses, "_PIECE", 3 * (N + 1) * E)
    config = TrainConfig(negatives=N, shared_negatives=shared, negative_source=source)
    negatives = draw_negatives(targets, V, config, rng)
    assert negatives is not None
    _same(token_losses, naive, out, targets, table, negatives)


@pytest.mark.parametrize("piece", [1 << 28, 3 * V])
def test_full_softmax_equals_a_plain_loop(
    piece: int, out: Tensor, targets: Tensor, table: Tensor, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_PIECE", piece)
    assert draw_negatives(targets, V, TrainConfig(loss="full"), rng) is None
    _same(token_losses, naive, out, targets, table, None)


def _same(ours, reference, out: Tensor, targets: Tensor, table: Tensor, negatives: Tensor | None) -> None:
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
    negatives = targets[:, None].expand(T, N).contiguous()
    found = token_losses(out, targets, table, negatives, TEMPERATURE)
    torch.testing.assert_close(found, torch.zeros(T), atol=1e-6, rtol=0)


def test_padding_changes_nothing(out: Tensor, targets: Tensor, table: Tensor, rng: torch.Generator) -> None:
    """A padded token has no loss, no gradient, and its id is never drawn from the batch."""
    config = TrainConfig(negatives=1000, negative_source="batch")
    negatives = draw_negatives(targets, V, config, rng)
    assert negatives is not None
    assert negatives.unique().tolist() == sorted(set(targets.tolist()) - {0})
    token_losses(out, targets, table, negatives, TEMPERATURE).sum().backward()
    assert out.grad is not None and out.grad[targets == 0].eq(0).all()
    assert table.grad is not None and table.grad[0].eq(0).all()


def test_negatives_are_uniform_over_the_catalogue_and_over_the_batchs_items(rng: torch.Generator) -> None:
    for source, items in (("uniform", list(range(1, V + 1))), ("batch", [2, 7, 9])):
        config = TrainConfig(negatives=4000, negative_source=source)
        negatives = draw_negatives(torch.tensor([7, 7, 2, 9, 7, 0]), V, config, rng)
        assert negatives is not None and negatives.shape == (6, 4000)
        counts = torch.bincount(negatives.flatten(), minlength=V + 1)
        assert counts.nonzero().flatten().tolist() == items
        expected = 24000 / len(items)
        assert (counts[items] - expected).abs().max() < 5 * math.sqrt(expected)


def test_the_same_generator_state_gives_the_same_negatives_and_rows_are_a_slice_of_them() -> None:
    config = TrainConfig(negatives=N)
    targets = torch.arange(1, T + 1)
    first, second = (draw_negatives(targets, V, config, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first is not None and second is not None
    assert torch.equal(first, second)
    shared = draw_negatives(targets, V, replace(config, shared_negatives=True), torch.Generator())
    assert shared is not None and shared.shape == (N,)
