"""Attention of new tokens to remembered keys: the last rows of the whole attention, for any shape and padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trope.kernels.attention import reference
from trope.kernels.look import KeysValues, look_silu, look_softmax, step_silu
from trope.kernels.sequence_bounds import SequenceBounds

SHAPES = [(1, 1, 1, 0), (1, 5, 1, 7), (2, 3, 1, 4), (1, 1, 3, 5), (2, 2, 4, 3), (3, 2, 2, 0)]  # B, M, G, S
H, D, N = 3, 6, 10


def case(B: int, M: int, G: int, S: int, dtype: torch.dtype) -> tuple[Tensor, KeysValues, KeysValues, Tensor, Tensor]:
    """Queries, own and remembered keys and values, how many of these exist, and biases of all pairs."""
    rng = torch.Generator().manual_seed(B * 1000 + M * 100 + G * 10 + S)
    q, k, v = (torch.randn(B * M * G, H, D, generator=rng, dtype=torch.float64).to(dtype) for _ in range(3))
    past = (torch.randn(B, H, S, D, generator=rng, dtype=torch.float64).to(dtype) for _ in range(2))
    counts = torch.arange(S, S - B, -1).clamp(min=0)
    bias = torch.randn(B, M, G, S + G, generator=rng, dtype=torch.float64).to(dtype)
    return q, KeysValues(k, v), KeysValues(*past), counts, bias


def seen(counts: Tensor, G: int, S: int) -> Tensor | None:
    """What `Memory` says of which keys are seen."""
    if G == 1 and bool((counts == S).all()):
        return None
    past = (torch.arange(S) < counts[:, None])[:, None].expand(-1, G, -1)
    return torch.cat((past, torch.ones(G, G, dtype=torch.bool).tril().expand(len(counts), -1, -1)), dim=2)


def whole(x_THD: Tensor, past_BHSD: Tensor, count: int, row: slice, history: int) -> Tensor:
    """One sequence, [1, H, count + G, D]: the remembered places that exist, and the new tokens."""
    return torch.cat((past_BHSD[history, :, :count], x_THD[row].transpose(0, 1)), dim=1)[None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("B", "M", "G", "S"), SHAPES)
def test_silu(B: int, M: int, G: int, S: int, with_bias: bool, dtype: torch.dtype) -> None:
    q, own, past, counts, bias = case(B, M, G, S, dtype)
    got = look_silu(q, own, past, (B, M, G), seen(counts, G, S), N, bias if with_bias else None)
    for b in range(B):
        for m in range(M):
            count, row = int(counts[b]), slice((b * M + m) * G, (b * M + m + 1) * G)
            k, v = (whole(x, kept, count, row, b)[0] for x, kept in zip(own, past, strict=True))
            scores = q[row].transpose(0, 1) @ k.transpose(1, 2)
            if with_bias:
                kept = torch.cat((torch.arange(count), torch.arange(S, S + G)))
                scores = scores + bias[b, m][:, kept]
            causal = torch.ones(G, count + G, dtype=torch.bool).tril(count)
            wanted = (F.silu(scores) / N).masked_fill(~causal, 0) @ v
            torch.testing.assert_close(got[row], wanted.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("B", "M", "G", "S"), SHAPES)
def test_softmax(B: int, M: int, G: int, S: int, dtype: torch.dtype) -> None:
    q, own, past, counts, _ = case(B, M, G, S, dtype)
    got = look_softmax(q, own, past, (B, M, G), seen(counts, G, S))
    for b in range(B):
        for m in range(M):
            count, row = int(counts[b]), slice((b * M + m) * G, (b * M + m + 1) * G)
            k, v = (whole(x, kept, count, row, b) for x, kept in zip(own, past, strict=True))
            causal = torch.ones(G, count + G, dtype=torch.bool).tril(count)
            wanted = F.scaled_dot_product_attention(q[row].transpose(0, 1)[None], k, v, attn_mask=causal)
            torch.testing.assert_close(got[row], wanted[0].transpose(0, 1))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("B", "S"), [(1, 0), (1, 5), (3, 4)])
def test_a_step_is_a_look_of_one_token(B: int, S: int, with_bias: bool) -> None:
    q, own, past, _, bias = case(B, 1, 1, S, torch.float64)
    wanted = look_silu(q, own, past, (B, 1, 1), None, N, bias if with_bias else None)
    kept = KeysValues(*(torch.cat((old, new[:, :, None]), dim=2) for old, new in zip(past, own, strict=True)))
    torch.testing.assert_close(step_silu(q, kept, N, bias.view(B, -1) if with_bias else None), wanted)


def test_it_is_the_end_of_hstus_attention() -> None:
    """The same as the reference that training uses, with its own biases, over one sequence."""
    torch.manual_seed(0)
    L, G, last = 9, 2, 4
    S = L - G
    q, k, v = (torch.randn(L, H, D, dtype=torch.float64) for _ in range(3))
    position, time = torch.randn(2 * L - 1, dtype=torch.float64), torch.randn(last + 1, dtype=torch.float64)
    buckets = torch.randint(0, last + 1, (1, L, L))
    bounds = SequenceBounds.padded(torch.tensor([L]), L)
    wanted = reference.attention(q, k, v, bounds, N, position, time, buckets)[S:]
    bias = reference.bias(L, position, time, buckets)
    assert bias is not None
    past = KeysValues(*(x[:S].transpose(0, 1)[None] for x in (k, v)))
    counts = torch.tensor([S])
    got = look_silu(q[S:], KeysValues(k[S:], v[S:]), past, (1, 1, G), seen(counts, G, S), N, bias[:, None, S:])
    torch.testing.assert_close(got, wanted)
