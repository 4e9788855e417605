"""What only a GPU can show: compiled, captured and autocast use of the fused kernel."""

import pytest
import torch
from conftest import draw_times

from trope import IndexRoPE, TORoPE, TRoPE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ENCODINGS = [TRoPE, TORoPE, IndexRoPE]


@pytest.fixture
def inputs(rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    q, k = (torch.randn(4, 33, 4, 64, generator=rng).cuda().bfloat16() for _ in range(2))
    return q, k, draw_times((4, 33), rng).cuda()


def with_gradients(rope: torch.nn.Module, call: object, q: torch.Tensor, k: torch.Tensor, *rest: object) -> list:
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    y = call(q, k, *rest)
    loss = sum((x.float() * x.float().detach().roll(1, -1)).sum() for x in y)
    return [*y, *torch.autograd.grad(loss, [q, k, *rope.parameters()])]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_auto_takes_triton_also_when_compiled(encoding: type, inputs: tuple) -> None:
    rope = encoding(64).cuda()
    compiled = torch.compile(rope, fullgraph=True)
    eager = with_gradients(rope, rope, *inputs)
    fused = with_gradients(rope, compiled, *inputs)
    for a, b in zip(eager, fused, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2)
    names = [e.key for e in profile(lambda: compiled(*inputs))]
    assert any("_forward_kernel" in name for name in names), names


def profile(f: object) -> list:
    f()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as result:
        f()
        torch.cuda.synchronize()
    return result.key_averages()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_autocast_and_export(encoding: type, inputs: tuple) -> None:
    rope = encoding(64).cuda()
    plain = rope(*inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert all(map(torch.equal, rope(*inputs), plain))
    program = torch.export.export(rope, inputs)
    assert all(map(torch.equal, program.module()(*inputs), plain))


def test_cuda_graph_capture_skips_the_value_checks(inputs: tuple) -> None:
    rope = TRoPE(64).cuda()
    plain = rope(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rope(*inputs)
    graph.replay()
    assert all(map(torch.equal, captured, plain))


def test_bad_values_are_refused_on_the_device(inputs: tuple) -> None:
    q, k, times = inputs
    with pytest.raises(ValueError, match="milliseconds"):
        TRoPE(64).cuda()(q, k, times * 1000)


def test_large_batches_reach_past_32_bit_offsets() -> None:
    """More than 2^31 elements: offsets must be 64 bits wide."""
    q = torch.zeros(1, 2**20 + 1, 16, 128, dtype=torch.bfloat16, device="cuda")
    q[0, -1] = 1.0
    times = torch.full((1, 2**20 + 1), 1_500_000_000, device="cuda")
    y, _ = TRoPE(128, shifted=False).cuda()(q, q, times)
    assert not y[0, :-1].any()
    assert y[0, -1].float().norm().item() == pytest.approx((16 * 128) ** 0.5, rel=1e-2)
