"""What surrounds the rotation: switches, conditioning, banks, checkpoints, casts, compilers."""

import copy
import logging
import math

import numpy as np
import pytest
import torch
from conftest import SECONDS, draw_times
from torch import nn

from trope import IndexRoPE, TORoPE, TRoPE, frequency_bank, frequency_parameters
from trope.kernels import backend as backend_module
from trope.rotary import NEUTRAL_SPAN, TimeReadout, calendar_bank
from trope.times import DAY, WEEK, YEAR

ENCODINGS = [TRoPE, TORoPE, IndexRoPE]


@pytest.fixture
def inputs(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k = (torch.randn(2, 5, 3, 8, generator=rng) for _ in range(2))
    return q, k, draw_times((2, 5), rng)


def test_frequency_bank_is_geometric() -> None:
    """eq. geomspace: beta_d from 1e2 to 1e8 seconds, equal ratios; one plane takes beta_min."""
    bank = frequency_bank(64)
    assert bank.dtype == torch.float64
    assert bank[0].item() == pytest.approx(1e2) and bank[-1].item() == pytest.approx(1e8)
    ratios = bank[1:] / bank[:-1]
    assert torch.allclose(ratios, ratios[0].expand_as(ratios))
    assert frequency_bank(1).tolist() == [100.0]


def test_calendar_bank_holds_harmonics_once() -> None:
    periods = calendar_bank(32) * 2 * torch.pi
    assert torch.allclose(periods[:6], torch.tensor([YEAR, WEEK, DAY, YEAR / 2, WEEK / 2, DAY / 2]).double())
    assert len({round(p, 3) for p in periods.tolist()}) == 32  # week / 7 is the day and appears once


def test_parameters_are_the_papers_count() -> None:
    """2P = D coefficients a layer (appendix B.2)."""
    for conditioning in ("span", "paper"):
        assert sum(p.numel() for p in TRoPE(128, conditioning=conditioning).parameters()) == 128
    assert sum(p.numel() for p in TRoPE(128, share_alpha=True).parameters()) == 64
    assert sum(p.numel() for p in TRoPE(128, rotate_key=False).parameters()) == 64
    assert sum(p.numel() for p in TRoPE(128, bank="calendar").parameters()) == 32
    assert not list(TRoPE(128, learnable=False).parameters())


def test_one_optimiser_step_moves_phases_gently() -> None:
    """The measured reason for conditioning: the same AdamW step under both parametrisations, real timestamps."""
    moved = {}
    for conditioning in ("span", "paper"):
        torch.manual_seed(0)
        rope = TRoPE(128, conditioning=conditioning, **({"time_span": SECONDS} if conditioning == "span" else {}))
        times = torch.tensor([[SECONDS[0], SECONDS[1]]])
        coords, _ = rope.coordinates(times.shape, times, None, None, None)
        before = rope.frequencies()[0].detach().clone()
        optimizer = torch.optim.AdamW(rope.parameters(), lr=1e-3, weight_decay=0.0)
        (rope.frequencies()[0].sum() + rope.frequencies()[1].sum()).backward()
        optimizer.step()
        turns = coords[0].abs().max() * (rope.frequencies()[0] - before).abs()
        moved[conditioning] = (turns * 2 * torch.pi).max().item()
    assert moved["span"] < 0.01
    assert moved["paper"] > 1e3


def test_conditioning_starts_from_the_same_family() -> None:
    """At delta = 0 the conditioned module is the paper's with alpha = alpha0, up to the origin of time."""
    rope = TRoPE(8)
    assert torch.equal(rope.alpha("q"), rope.alpha0_q.double())
    with torch.no_grad():
        rope.delta_q.fill_(0.5)
    span = NEUTRAL_SPAN[1] - NEUTRAL_SPAN[0]
    assert torch.allclose(rope.alpha("q"), rope.alpha0_q.double() + 8 * 0.5 * rope.betas / span)


def test_stationary_and_absolute_planes_of_the_calendar_bank() -> None:
    rope = TRoPE(16, bank="calendar", time_span=(1_500_000_000, 1_500_000_000 + 30 * 86_400))
    freq_q, freq_k = (f[0] for f in rope.frequencies())
    assert torch.equal(freq_q[:4], freq_k[:4])  # query and key turn together: only gaps matter
    assert torch.equal(freq_q[4:], -freq_k[4:])  # and against each other: the calendar matters
    assert torch.allclose(1 / freq_q[4:], torch.tensor([YEAR, WEEK, DAY, YEAR / 2]).double())
    assert rope.betas[3].item() == pytest.approx(30 * 86_400)  # nothing slower than the data is long


def test_multiscale_off_is_one_scale() -> None:
    assert torch.allclose(TRoPE(8, multiscale=False).betas, torch.full((4,), 1e5, dtype=torch.float64))


def test_single_sided_rotations(inputs: tuple) -> None:
    q, k, times = inputs
    y_q, y_k = TRoPE(8, rotate_key=False)(q, k, times)
    assert torch.equal(y_k, k) and not torch.equal(y_q, q)
    y_q, y_k = TRoPE(8, rotate_query=False)(q, k, times)
    assert torch.equal(y_q, q) and not torch.equal(y_k, k)


def test_position_index_ignores_times(inputs: tuple, rng: torch.Generator) -> None:
    q, k, times = inputs
    rope = TRoPE(8, position="index")
    assert all(map(torch.equal, rope(q, k, times), rope(q, k, draw_times((2, 5), rng))))


def test_torope_matches_its_formula(rng: torch.Generator) -> None:
    """angle_p(i) = (1 - g) a_p i w_p + g a_t tau v_p with g = 1 for time planes and 0 for others, for one head."""
    rope = TORoPE(8, time_share=0.5, unit="hours", index_base=100.0, time_base=10.0)
    with torch.no_grad():
        rope.gains.copy_(torch.tensor([2.0, 3.0]))
    times = draw_times((1, 3), rng)
    x = torch.tensor([1.0, 0.0] * 4, dtype=torch.float64).expand(1, 3, 1, 8)
    q, _ = rope(x, x, times)
    for i in range(3):
        for p in range(2):
            tau = (times[0, i].item() - 1_420_070_400) / 3600
            by_time, by_index = 2 * tau * 10 ** -(p / 2), 3 * i * 100 ** -(p / 2)
            for plane, angle in ((p, by_time), (2 + p, by_index)):
                want = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
                assert torch.allclose(q[0, i, 0, 2 * plane : 2 * plane + 2], want, atol=1e-8)


def test_torope_splits_planes_by_dimension(inputs: tuple, rng: torch.Generator) -> None:
    """Planes given to the index do not change with the times; the others do."""
    q, k, times = inputs
    other = draw_times((2, 5), rng)
    rope = TORoPE(8, time_share=0.5)
    same = torch.isclose(rope(q, k, times)[0], rope(q, k, other)[0]).all(0).all(0).all(0)
    assert same.tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_deepcopy_and_state_dict_round_trip(encoding: type, inputs: tuple) -> None:
    rope = encoding(8)
    twin = copy.deepcopy(rope)
    fresh = encoding(8)
    fresh.load_state_dict(rope.state_dict())
    for other in (twin, fresh):
        assert all(map(torch.equal, rope(*inputs), other(*inputs)))


def test_time_span_travels_with_the_checkpoint(inputs: tuple) -> None:
    """Also what depends on it: the calendar bank ends at the span."""
    rope = TRoPE(8, bank="calendar", time_span=(1_500_000_000, 1_501_000_000))
    fresh = TRoPE(8, bank="calendar")
    assert not torch.equal(fresh.betas, rope.betas)
    fresh.load_state_dict(rope.state_dict())
    assert fresh.t0 == rope.t0 and fresh.span == rope.span
    assert torch.equal(fresh.betas, rope.betas)
    assert all(map(torch.equal, rope(*inputs), fresh(*inputs)))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_casting_the_model_leaves_the_frequencies_alone(encoding: type, cast: str, inputs: tuple) -> None:
    q, k, times = inputs
    rope = encoding(8)
    before = [f.clone() for f in rope.frequencies()]
    model = getattr(torch.nn.Sequential(rope), cast)()
    assert all(map(torch.equal, before, model[0].frequencies()))
    dtype = getattr(torch, "float16" if cast == "half" else "float64" if cast == "double" else cast)
    y_q, _ = model[0](q.to(dtype), k.to(dtype), times)
    assert y_q.dtype == dtype


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_float64_state(encoding: type) -> None:
    """Apple's MPS has no float64: neither parameters nor buffers may need it."""
    rope = encoding(8)
    assert all(x.dtype != torch.float64 for x in (*rope.parameters(), *rope.buffers()))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_autocast_changes_nothing(encoding: type, inputs: tuple) -> None:
    rope = encoding(8)
    plain = rope(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = rope(*inputs)
    assert all(map(torch.equal, plain, under))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_compile_fullgraph(encoding: type, inputs: tuple) -> None:
    """Values and gradients under torch.compile without a graph break, lengths and t_now included."""
    q, k, times = inputs
    lengths, t_now = torch.tensor([3, 5]), torch.tensor([1_700_000_000, 1_700_000_001])
    rope = encoding(8)
    compiled = torch.compile(rope, fullgraph=True)
    results = []
    for f in (rope, compiled):
        x = q.clone().requires_grad_()
        y = f(x, k, times, lengths, t_now)
        results.append(
            (*y, *torch.autograd.grad(sum((z * z.detach().roll(1)).sum() for z in y), [x, *rope.parameters()]))
        )
    for want, got in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_export(encoding: type, inputs: tuple) -> None:
    q, k, times = inputs
    lengths, t_now = torch.tensor([3, 5]), torch.tensor([1_700_000_000, 1_700_000_001])
    rope = encoding(8)
    program = torch.export.export(rope, (q, k, times, lengths, t_now))
    assert all(map(torch.equal, program.module()(q, k, times, lengths, t_now), rope(q, k, times, lengths, t_now)))


def test_frequency_parameters_finds_every_encoding() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), TRoPE(8), torch.nn.Sequential(TORoPE(8)), IndexRoPE(8)])
    assert [p.shape for p in frequency_parameters(model)] == [(4,), (4,), (2,)]


def test_auto_says_once_which_backend_it_took(inputs: tuple, caplog: pytest.LogCaptureFixture) -> None:
    backend_module._say_once.cache_clear()
    rope = TRoPE(8)
    with caplog.at_level(logging.INFO, logger="trope"):
        rope(*inputs)
        rope(*inputs)
    assert [r.getMessage() for r in caplog.records] == ["backend='auto' took torch for cpu tensors"]


def test_training_moves_the_frequencies(inputs: tuple) -> None:
    q, k, times = inputs
    rope = TRoPE(8)
    optimizer = torch.optim.AdamW([{"params": list(frequency_parameters(rope)), "weight_decay": 0.0}], lr=1e-2)
    losses = []
    for _ in range(30):
        y_q, y_k = rope(q, k, times)
        loss = -(y_q * y_k).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_repr_says_what_it_is(encoding: type) -> None:
    assert "head_dim=8" in repr(encoding(8))
    assert "without shifted" in repr(TRoPE(8, shifted=False))


@pytest.mark.parametrize("conditioning", ["span", "paper"])
def test_linear_frequencies_are_the_frequencies(conditioning: str) -> None:
    """What the fused kernel is given is what the module turns by, gradients too."""
    torch.manual_seed(1)
    options = {"time_span": (1_500_000_000, 1_600_000_000)} if conditioning == "span" else {}
    for shared in (False, True):
        module = TRoPE(16, conditioning=conditioning, share_alpha=shared, **options)  # type: ignore[arg-type]
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


def test_a_cast_behind_its_back_is_refused() -> None:
    """.to() keeps TRoPE's dtypes. A library that replaces tensors itself may round seconds or frequencies."""
    times = torch.tensor([[1_500_000_000]])
    q = torch.randn(1, 1, 1, 8)
    for name, dtype in (("t0", torch.float32), ("span", torch.float32), ("alpha0_q", torch.bfloat16)):
        rope = TRoPE(8)
        rope._buffers[name] = rope.get_buffer(name).to(dtype)
        with pytest.raises(ValueError, match=rf"{name} of this TRoPE was cast to {dtype}"):
            rope(q, q, times)
    TRoPE(8).to(torch.bfloat16)(q, q, times)


SPAN = (1_500_000_000, 1_520_000_000)
MADE = {
    "trope": lambda: TRoPE(8, time_span=SPAN),
    "calendar": lambda: TRoPE(8, bank="calendar", time_span=SPAN),
    "torope": lambda: TORoPE(8),
    "index": lambda: IndexRoPE(8),
    "readout": lambda: TimeReadout(8, SPAN),
}


def arguments(module: nn.Module) -> tuple[torch.Tensor, ...]:
    times = torch.tensor([[1_500_000_000, 1_510_000_000]])
    q = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(0))
    return (q[0, :, 0], times[0]) if isinstance(module, TimeReadout) else (q, q, times)


def same(one: object, other: object) -> bool:
    one, other = (x if isinstance(x, tuple) else (x,) for x in (one, other))
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_made_without_values_and_loaded(kind: str, assign: bool) -> None:
    """On the device meta, as Transformers and FSDP make modules."""
    made = MADE[kind]()
    with torch.device("meta"):
        empty = MADE[kind]()
    if not assign:
        empty = empty.to_empty(device="cpu")
        for buffer in empty.buffers():  # what is in memory by chance
            buffer.fill_(-1)
    empty.load_state_dict(made.state_dict(), assign=assign)
    assert not any(x.is_meta for x in (*empty.parameters(), *empty.buffers()))
    assert same(empty(*arguments(empty)), made(*arguments(made)))


@pytest.mark.parametrize("kind", MADE)
def test_called_with_plain_tensors_for_its_parameters(kind: str) -> None:
    """As FSDP, DataParallel and torch.func put there."""
    made = MADE[kind]()
    state = {name: x.detach() + 0.1 for name, x in made.named_parameters()}
    replaced = torch.func.functional_call(made, state, arguments(made))
    made.load_state_dict({**made.state_dict(), **state})
    assert same(replaced, made(*arguments(made)))


def test_weights_loaded_in_inference_mode_are_used() -> None:
    with torch.inference_mode():
        one, other = TRoPE(8, time_span=SPAN), TRoPE(8, time_span=(1_400_000_000, 1_520_000_000))
        one(*arguments(one))  # forms what it keeps
        one.load_state_dict(other.state_dict())
        assert same(one(*arguments(one)), other(*arguments(other)))


def test_shared_coefficients_are_in_the_optimiser_once() -> None:
    layers = nn.ModuleList([TRoPE(8, share_alpha=True), TRoPE(8, share_alpha=True)])
    layers[1].delta_q = layers[0].delta_q
    assert len(list(frequency_parameters(layers))) == 1


def test_numbers_that_are_no_sizes_are_refused() -> None:
    for wrong in (8.0, "8"):
        with pytest.raises(ValueError, match="head_dim must be a whole number"):
            TRoPE(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width must be a whole number"):
        TimeReadout(8.0, SPAN)  # type: ignore[arg-type]
    assert TimeReadout(np.int64(16), np.array(SPAN)).turn.head_dim == TimeReadout(16, SPAN).turn.head_dim  # type: ignore[arg-type]
    for span in ((1, 2, 3), (1,), None):
        with pytest.raises(ValueError, match="time_span must be two whole Unix seconds"):
            TimeReadout(8, span)  # type: ignore[arg-type]
