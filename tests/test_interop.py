"""cos_sin: what other libraries' rotary functions expect, checked with Hugging Face's own and with flash-attention's
definition; and the examples, which are run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import draw_times
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from trope import IndexRoPE, TORoPE, TRoPE, frequency_parameters

EXAMPLES = Path(__file__).parent.parent / "examples"


def flash_apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """flash-attention's documented rotary: x [B, S, H, D], cos and sin [S, rotary_dim / 2]."""
    planes = cos.shape[-1]
    index = torch.arange(2 * planes).view(-1, 2) if interleaved else torch.arange(2 * planes).view(2, -1).T
    x0, x1 = x[..., index[:, 0]], x[..., index[:, 1]]
    cos, sin = cos[:, None], sin[:, None]
    y = x.clone()
    y[..., index[:, 0]], y[..., index[:, 1]] = x0 * cos - x1 * sin, x1 * cos + x0 * sin
    return y


@pytest.mark.parametrize("make", [TRoPE, lambda *a, **k: TRoPE(*a, phase="fp32", **k), TORoPE, IndexRoPE])
def test_hugging_face(make: object, rng: torch.Generator) -> None:
    rope = make(8, layout="halves")
    q, k = (torch.randn(2, 5, 3, 8, generator=rng) for _ in range(2))
    times, lengths = draw_times((2, 5), rng), torch.tensor([3, 5])
    t_now = torch.tensor([1_700_000_000] * 2)
    tables = rope.cos_sin(times, lengths, t_now)
    heads_first = [x.transpose(1, 2) for x in (q, k)]
    got_q, _ = apply_rotary_pos_emb(*heads_first, tables.cos_q, tables.sin_q)
    _, got_k = apply_rotary_pos_emb(*heads_first, tables.cos_k, tables.sin_k)
    for got, want in zip((got_q, got_k), rope(q, k, times, lengths, t_now), strict=True):
        assert torch.allclose(got.transpose(1, 2), want, atol=1e-6)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("encoding", [TRoPE, TORoPE, IndexRoPE])
def test_flash_attention(encoding: type, layout: str, rng: torch.Generator) -> None:
    rope = encoding(8, layout=layout, rotary_dim=6)
    q, k = (torch.randn(2, 5, 3, 8, generator=rng) for _ in range(2))
    times = draw_times((2, 5), rng)
    tables = rope.cos_sin(times, style="flash")
    want_q, want_k = rope(q, k, times)
    interleaved = layout == "interleaved"
    got_q = flash_apply(q.reshape(1, 10, 3, 8), tables.cos_q, tables.sin_q, interleaved)
    got_k = flash_apply(k.reshape(1, 10, 3, 8), tables.cos_k, tables.sin_k, interleaved)
    assert torch.allclose(got_q.view_as(q), want_q, atol=1e-6)
    assert torch.allclose(got_k.view_as(k), want_k, atol=1e-6)


def test_jagged_tables(rng: torch.Generator) -> None:
    rope = TRoPE(8, layout="halves")
    times, offsets = draw_times((7,), rng), torch.tensor([0, 3, 7])
    assert rope.cos_sin(times, offsets=offsets).cos_q.shape == (7, 8)
    assert rope.cos_sin(times, offsets=offsets, style="flash", dtype=torch.bfloat16).cos_q.shape == (7, 4)


def test_what_does_not_fit_is_said() -> None:
    times = torch.tensor([[1_500_000_000]])
    with pytest.raises(ValueError, match='needs layout="halves"'):
        TRoPE(8).cos_sin(times)
    with pytest.raises(ValueError, match="style must be one of"):
        TRoPE(8).cos_sin(times, style="liger")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_example_dropin_finds_the_season() -> None:
    example = load("dropin")
    torch.manual_seed(0)
    span = (example.FIRST, example.FIRST + example.YEARS * example.YEAR)
    assert example.train(TRoPE(32, time_span=span), steps=60) > example.train(IndexRoPE(32), steps=60) + 0.1


def test_example_huggingface_trains() -> None:
    losses, model = load("huggingface").train(steps=25)
    assert losses[-1] < losses[0] - 1
    assert all(p.grad is not None and p.abs().max() > 0 for p in frequency_parameters(model))
