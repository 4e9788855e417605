"""cos_sin: what other libraries' rotary functions expect, checked with Hugging Face's own and with flash-attention's
definition; and the examples, which are run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import draw_times
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
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


@pytest.fixture(scope="module")
def llama() -> tuple[ModuleType, torch.nn.Module, list[float]]:
    example = load("huggingface")
    losses, model = example.train(steps=25)
    return example, model.eval(), losses


def test_example_huggingface_trains(llama: tuple) -> None:
    _, model, losses = llama
    assert losses[-1] < losses[0] - 1
    assert all(p.grad is not None and p.abs().max() > 0 for p in frequency_parameters(model))


def test_example_huggingface_reloads_with_trope(llama: tuple, tmp_path: Path) -> None:
    example, model, _ = llama
    model.save_pretrained(tmp_path)
    items, times = example.draw(3, torch.Generator().manual_seed(1))
    again = example.LlamaTRoPEForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(items, times=times).logits, model(items, times=times).logits)
        assert not torch.equal(again(items, times=times + 9 * example.DAY).logits, model(items, times=times).logits)
    # In half precision the angles stay what they were.
    half = example.LlamaTRoPEForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.allclose(half(items, times=times).logits.float(), model(items, times=times).logits, atol=0.1)
    for a, b in zip(half.model.layers, model.model.layers, strict=True):
        ours, theirs = (x.self_attn.trope.cos_sin(times) for x in (a, b))
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("plain", [LlamaForCausalLM, LlamaModel, AutoModelForCausalLM])
def test_example_huggingface_is_refused_by_a_plain_llama(llama: tuple, plain: type, tmp_path: Path) -> None:
    """With the example's file loaded, and without."""
    example, model, _ = llama
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"saved with T-RoPE; load it with LlamaTRoPEFor|model type `llama-trope`"):
        plain.from_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(ROPE_INIT_FUNCTIONS, "trope")
        with pytest.raises((ValueError, KeyError), match="trope"):
            plain.from_pretrained(tmp_path)
    # And the other way round: a plain Llama's weights have no T-RoPE.
    LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "rope_parameters": None})).save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match=r"saved without T-RoPE: it lacks .*trope"):
        example.LlamaTRoPEForCausalLM.from_pretrained(tmp_path / "b", config=model.config)


def test_example_huggingface_generates_for_moments(llama: tuple) -> None:
    example, model, _ = llama
    items, times = example.draw(3, torch.Generator().manual_seed(1))
    moments = times[:, -1:] + example.DAY * torch.arange(1, 6)
    greedy = {"max_new_tokens": 5, "do_sample": False}
    got = model.generate(items, times=times, t_now=moments, **greedy)
    # By hand: each event is predicted for its moment, and then happened at it.
    for step in range(5):
        with torch.no_grad():
            logits = model(items, times=times, t_now=moments[:, step]).logits[:, -1]
        items = torch.cat((items, logits.argmax(-1, keepdim=True)), dim=1)
        times = torch.cat((times, moments[:, step : step + 1]), dim=1)
    assert torch.equal(got, items)
    start, begun = items[:, :-5], times[:, :-5]
    assert torch.equal(model.generate(start, times=begun, t_now=moments, use_cache=False, **greedy), got)
    assert model.generate(start, times=begun, t_now=moments, num_beams=2, **greedy).shape == got.shape
    # Padding on the left is masked, whatever stands there.
    pad = torch.full((3, 2), 9)
    mask = torch.cat((torch.zeros_like(pad), torch.ones_like(start)), dim=1)
    padded = torch.cat((pad, start), dim=1), torch.cat((begun[:, :1].expand(3, 2), begun), dim=1)
    out = model.generate(padded[0], times=padded[1], attention_mask=mask, t_now=moments, **greedy)
    assert torch.equal(out[:, 2:], got)


def test_example_huggingface_refuses_to_guess_moments(llama: tuple) -> None:
    example, model, _ = llama
    items, times = example.draw(2, torch.Generator().manual_seed(1))
    moments = times[:, -1:] + example.DAY * torch.arange(1, 4)
    said = r"generate needs times \[B, L\] and t_now \[B, new events\], a moment for each"
    for given in ({}, {"times": times}, {"times": times, "t_now": moments[:, 0]}, {"times": times, "t_now": moments}):
        with pytest.raises(ValueError, match=said):
            model.generate(items, max_new_tokens=4, do_sample=False, **given)
    with pytest.raises(ValueError, match="times must have one entry for each of 24 events"):
        model(items)
    with pytest.raises(ValueError, match="t_now must not lie before the last event"):
        model.generate(items, times=times, t_now=moments - 9 * example.DAY, max_new_tokens=2, do_sample=False)
