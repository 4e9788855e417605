"""T-RoPE's further choices: stationary planes, calendar periods to begin with, the step, moved histories."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import draw_times, scores

from trope import TRoPE
from trope.config import preset
from trope.kernels.sequence_bounds import SequenceBounds
from trope.kernels.silu_rotate import silu_rotate
from trope.models.recommender import PERIODS, SequentialRecommender
from trope.rotary.trope import CALENDAR_PERIODS, calendar_bank

DAY = 86_400


def rope(**options: object) -> TRoPE:
    torch.manual_seed(0)
    return TRoPE(16, time_span=(1_500_000_000, 1_600_000_000), **options).double()  # type: ignore[arg-type]


def qk(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k = (torch.randn(2, 6, 1, 16, generator=rng, dtype=torch.float64) for _ in range(2))
    return q, k, draw_times((2, 6), rng)


def test_stationary_planes_do_not_know_the_date(rng: torch.Generator) -> None:
    q, k, times = qk(rng)
    moved = times + 12_345_678
    all_of_them = rope(stationary=1.0)
    torch.testing.assert_close(scores(all_of_them, q, k, times), scores(all_of_them, q, k, moved), rtol=0, atol=1e-5)
    half = rope(stationary=0.5)
    assert half.absolute == 4
    assert not torch.allclose(scores(half, q, k, times), scores(half, q, k, moved), atol=1e-2)
    # Without their content the absolute planes, the fastest ones, are silent, and the date is again unknown.
    q[..., :8] = 0
    torch.testing.assert_close(scores(half, q, k, times), scores(half, q, k, moved), rtol=0, atol=1e-5)


def test_which_planes_are_stationary() -> None:
    slow, fast = rope(stationary=0.25), rope(stationary=0.25, stationary_planes="fast")
    assert slow.absolute == fast.absolute == 6
    assert slow.betas[6:].min() > slow.betas[:6].max() and fast.betas[6:].max() < fast.betas[:6].min()
    torch.testing.assert_close(fast.betas.flip(0), slow.betas)
    assert torch.equal(fast.frequencies()[0][0, 6:], fast.frequencies()[1][0, 6:])
    torch.testing.assert_close(rope(stationary_planes="fast").betas, rope().betas)  # none are, so nothing changes


@pytest.mark.parametrize("conditioning", ["span", "paper"])
def test_linear_frequencies_are_the_frequencies(conditioning: str) -> None:
    """What the fused kernel is given is what the module turns by, stationary planes included, gradients too."""
    torch.manual_seed(1)
    options = {"time_span": (1_500_000_000, 1_600_000_000)} if conditioning == "span" else {}
    for stationary in (0.0, 0.25, 1.0):
        module = TRoPE(16, conditioning=conditioning, stationary=stationary, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter))
        assert module.is_linear
        given, own = module.turns().frequencies(), module.frequencies()
        for ours, theirs in zip(given, own, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-24)
        weights = [torch.randn_like(f) for f in own]
        gradients = [
            torch.autograd.grad(sum((f * w).sum() for f, w in zip(fs, weights, strict=True)), list(module.parameters()))
            for fs in (given, own)
        ]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_stationary_planes_through_the_kernel(rng: torch.Generator, device: str) -> None:
    torch.manual_seed(2)
    module = TRoPE(16, time_span=(1_500_000_000, 1_600_000_000), stationary=0.5).to(device)
    pre = torch.randn(5, 4 * 16, generator=rng).to(device)
    times = draw_times((5,), rng).to(device)
    coords = (times[None] + 60, times[None])
    results = []
    for backend in ("torch", "triton"):
        x = pre.clone().requires_grad_()
        out = silu_rotate(x, 1, *coords, module.turns(), backend=backend)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(sum(part.sum() for part in out), [x, *module.parameters()])
        results.append([*out, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_calendar_periods_to_begin_with() -> None:
    module = TRoPE(128, time_span=(1_300_000_000, 1_600_000_000), alpha_init="calendar")
    known = 2 * math.pi * calendar_bank(CALENDAR_PERIODS)
    for side in ("q", "k"):
        periods = 2 * math.pi * module.betas / module.alpha(side).abs()  # type: ignore[arg-type]
        inside = periods[(periods > known.min() * 0.99) & (periods < known.max() * 1.01)]
        assert len(inside) > 5
        nearest = (inside[:, None] / known - 1).abs().min(dim=1).values
        assert nearest.max() < 1e-5
        assert {round(float(p) / DAY) for p in inside} >= {1, 365}
    assert (module.alpha("q") < 0).any() and (module.alpha("q") > 0).any()


def test_the_step_scales_what_a_unit_of_delta_does() -> None:
    one, eight = rope(step=1.0), rope()
    for module in (one, eight):
        with torch.no_grad():
            module.delta_q.fill_(1.0)
    moved = [module.alpha("q") - module.alpha0_q.double() for module in (one, eight)]
    torch.testing.assert_close(8 * moved[0], moved[1])


@pytest.mark.parametrize("period", ["day", "week", "year"])
def test_jitter_moves_histories_by_whole_periods_in_training_only(period: str, rng: torch.Generator) -> None:
    sizes = ("model.width=8", "model.heads=1", "model.head_dim=8", "model.max_len=6", "model.blocks=1")
    torch.manual_seed(0)
    span, settings = (
        (1_300_000_000, 1_600_000_000),
        [*sizes, "model.dropout=0", "model.gate_floor=none", f"rotary.jitter={period}"],
    )
    model = SequentialRecommender(preset("hstu-trope", settings), 50, span)
    items, times = torch.randint(1, 51, (3, 6), generator=rng), draw_times((3, 6), rng)
    lengths, t_now = torch.tensor([6, 4, 6]), times[:, -1] + 60

    def encode() -> torch.Tensor:
        with torch.no_grad():
            return model.encode(items, times, lengths, t_now)

    assert not torch.allclose(encode(), encode(), atol=1e-4)
    model.eval()
    assert torch.equal(encode(), encode())
    offsets = torch.tensor([0, 6, 10, 16])
    for bounds, tokens in ((SequenceBounds.padded(lengths, 6), 18), (SequenceBounds.jagged(offsets, 6), 16)):
        found = [model._moved(bounds, torch.zeros(tokens, dtype=torch.int64)) for _ in range(20)]
        for moved in found:  # all events of a history alike
            for start, length in zip(bounds.starts_B, bounds.lengths_B, strict=True):
                assert len(moved[start : start + length].unique()) == 1
        moves = torch.cat(found).double() / PERIODS[period]
        assert (moves - moves.round()).abs().max() < 1e-4
        assert len(moves.round().unique()) > 3 and moves.abs().max() <= (span[1] - span[0]) / 2 / PERIODS[period] + 1


def test_blur_moves_each_history_by_a_share_of_the_span_and_only_in_training() -> None:
    span = (1_300_000_000, 1_600_000_000)
    settings = ("model.width=8", "model.heads=1", "model.head_dim=8", "model.max_len=6", "model.dropout=0")
    model = SequentialRecommender(
        preset("hstu-trope", [*settings, "model.gate_floor=none", "rotary.blur=0.01"]), 50, span
    )
    bounds = SequenceBounds.padded(torch.full((4096,), 6), 6)
    moved = model._moved(bounds, torch.zeros(4096 * 6, dtype=torch.int64)).view(4096, 6)
    assert (moved == moved[:, :1]).all(), "gaps stay"
    shares = moved[:, 0].double() / (span[1] - span[0])
    assert abs(float(shares.mean())) < 0.001 and 0.0095 < float(shares.std()) < 0.0105
    items, times = torch.arange(1, 7)[None], 1_400_000_000 + 86_400 * torch.arange(6)[None]
    with torch.no_grad():
        trained, again = (model.encode(items, times, torch.tensor([6])) for _ in range(2))
        model.eval()
        served = [model.encode(items, times, torch.tensor([6])) for _ in range(2)]
    assert not torch.allclose(trained, again, atol=1e-4)
    assert torch.equal(*served)


def test_blur_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"rotary.blur must not be negative"):
        preset("hstu-trope", ["rotary.blur=-0.1"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stationary": 1.5}, "stationary must be a share"),
        ({"stationary_planes": "both"}, "stationary_planes must be"),
        ({"stationary": 0.5, "bank": "calendar"}, "has its own stationary half"),
        ({"stationary": 0.5, "rotate_key": False}, "rotate both"),
        ({"step": 0.0}, "step must be greater than 0"),
        ({"alpha_init": "zeros"}, "alpha_init"),
    ],
)
def test_wrong_choices_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TRoPE(16, **options)  # type: ignore[arg-type]
