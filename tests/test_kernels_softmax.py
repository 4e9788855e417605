"""The sampled softmax and the drawing of negatives: reference against autograd, kernel against the reference.

`torch.empty` is filled with NaN here, so an output element that no program wrote fails the comparison. Tolerances come
from the float64 run: a small multiple of what the torch reference in the same dtype is off. Scores magnify the rounding
of `out` to bf16, which the interpreter does by truncation; so bf16 outputs here have directions bf16 holds exactly.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from trope.kernels.softmax import draw_uniform, sampled_softmax

TEMPERATURE = 0.05
SHAPES = [  # T, E, V, negatives
    (1, 64, 3, 1),
    (7, 50, 40, 11),
    (5, 64, 30, 128),
    (9, 128, 500, 37),
    (2, 512, 20, 9),
    (2, 1024, 20, 6),
    (3, 2, 9, 5),
]


class Problem:
    """Inputs that are exactly representable in `dtype`, with everything that may go wrong in the candidates."""

    def __init__(self, shape, dtype, device, temperature=TEMPERATURE, seed=0):
        T, E, V, N = shape
        rng = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device
        self.x = 3 * torch.randn(T, E, generator=rng).double()
        if dtype == torch.bfloat16:
            signs = torch.randint(0, 2, (T, 4 ** int(math.log(E, 4))), generator=rng) * 2.0 - 1
            self.x = F.pad(signs, (0, E - signs.shape[1])).double()[:, torch.randperm(E, generator=rng)]
        self.unit = F.normalize(torch.randn(V + 1, E, generator=rng), dim=1).to(dtype).double()
        self.unit[0] = math.nan  # nobody may read the padding row
        self.candidates = torch.randint(1, V + 1, (T, N + 1), generator=rng, dtype=torch.int32)
        if N >= 5:
            self.candidates[0, 3] = self.candidates[0, 0]  # a negative that is the target
            self.candidates[0, 4:6] = self.candidates[0, 1]  # one item three times
            self.candidates[-1, 2] = 0  # no negative here
        if T >= 3:
            self.candidates[T // 2, 0] = 0  # padding
            if dtype != torch.bfloat16:
                self.x[1] *= 0.7e-6 / self.x[1].norm()  # shorter than the length that is divided by
        self.x = self.x.to(dtype).double()
        self.weight = torch.tensor([0.3])
        self.temperature = temperature

    def run(self, backend, dtype=None, candidates=None):
        dtype = dtype or self.dtype
        candidates = (self.candidates if candidates is None else candidates).to(self.device)
        unit = self.unit.nan_to_num(0) if backend == "torch" else self.unit
        x = self.x.to(self.device, dtype, copy=True).requires_grad_()
        result = sampled_softmax(
            x, candidates, unit.to(self.device, dtype), self.weight.to(self.device), self.temperature, backend
        )
        assert result.out_TE.dtype == dtype and not any(part.requires_grad for part in result)
        assert {part.dtype for part in result if part is not result.out_TE} == {max(dtype, torch.float32, key=bits)}
        return [part.double().cpu() for part in result]


def bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def assert_as_good_as_reference(problem: Problem) -> None:
    exact = problem.run("torch", torch.float64)
    reference = problem.run("torch")
    kernel = problem.run("triton")
    for name, want, ref, got in zip(("loss", "grad", "out", "coefs"), exact, reference, kernel, strict=True):
        assert got.shape == want.shape
        # Row by row: the gradient of a short output is a million times the others'.
        off, ref_off, size = ((part.view(len(part), -1)).norm(dim=1) for part in (got - want, ref - want, want))
        assert (off <= 3 * ref_off + 2e-6 * size + 1e-7).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple, dtype: torch.dtype, device: str) -> None:
    assert_as_good_as_reference(Problem(shape, dtype, device))


def test_outputs_are_rounded_to_the_vectors_dtype(device: str, rng: torch.Generator) -> None:
    problem = Problem((3, 50, 9, 5), torch.bfloat16, device)
    problem.x = torch.randn(3, 50, generator=rng).bfloat16().double()
    loss, _, out, _ = problem.run("triton")
    torch.testing.assert_close(out, F.normalize(problem.x, dim=1), rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    target, *negatives = problem.candidates[0].tolist()
    kept = [target] + [item for item in negatives if item != target]
    score = problem.unit[kept] @ out[0] / TEMPERATURE
    assert loss[0].item() == pytest.approx((score.logsumexp(0) - score[0]).item(), rel=1e-5)


def test_the_reference_is_what_autograd_says() -> None:
    problem = Problem((7, 50, 40, 11), torch.float64, "cpu")
    loss, grad_x, out, coefs = problem.run("torch")
    x = problem.x.clone().requires_grad_()
    unit = problem.unit.nan_to_num(0).requires_grad_()
    losses = torch.zeros(7, dtype=torch.float64)
    for t, (target, *negatives) in enumerate(problem.candidates.tolist()):
        kept = [target] + [v for v in negatives if v not in (target, 0)]
        if target == 0:
            continue
        logits = F.normalize(x[t], dim=0, eps=1e-6) @ unit[kept].T / TEMPERATURE
        losses[t] = F.cross_entropy(logits, torch.tensor(0))
    (problem.weight.double() * losses.sum()).backward()
    tolerance = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(loss, losses.detach(), **tolerance)
    torch.testing.assert_close(grad_x, x.grad, **tolerance)
    torch.testing.assert_close(out, F.normalize(problem.x, dim=1, eps=1e-6), **tolerance)
    grad_unit = torch.zeros_like(unit).index_add_(
        0, problem.candidates.flatten().long(), (coefs[..., None] * out[:, None]).flatten(0, 1)
    )
    torch.testing.assert_close(grad_unit[1:], unit.grad[1:], **tolerance)


def test_left_out_candidates_and_padding_are_exactly_zero(device: str) -> None:
    problem = Problem((7, 50, 40, 11), torch.bfloat16, device)
    loss, grad, out, coefs = problem.run("triton")
    assert coefs[0, 3] == 0 and coefs[-1, 2] == 0
    assert loss[3] == 0 and not grad[3].any() and not coefs[3].any() and out[3].isfinite().all()
    is_kept = torch.ones(7, dtype=torch.bool)
    is_kept[3] = False
    assert (loss[is_kept] > 0).all() and (coefs[is_kept, 0] < 0).all()


def test_all_negatives_left_out(device: str) -> None:
    problem = Problem((2, 64, 5, 7), torch.float32, device)
    problem.candidates[0] = problem.candidates[0, 0]
    loss, grad, _, coefs = problem.run("triton")
    assert loss[0].abs() < 1e-6 and not grad[0].any() and not coefs[0].any()


def test_int64_strided_candidates_and_far_scores(device: str) -> None:
    """A small temperature puts scores far from zero: the softmax must not overflow."""
    problem = Problem((7, 50, 40, 11), torch.float32, device, temperature=5e-4)
    wide = torch.zeros(7, 30, dtype=torch.int64)
    wide[:, 4:16] = problem.candidates
    got = problem.run("triton", candidates=wide[:, 4:16])
    for want, part in zip(problem.run("torch"), got, strict=True):
        torch.testing.assert_close(part, want, rtol=1e-4, atol=1e-5)


def test_many_candidates_are_turned_to_coefficients_in_blocks(device: str) -> None:
    assert_as_good_as_reference(Problem((2, 4, 50, 300), torch.float32, device))


def test_reference_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from trope.kernels.softmax import reference as softmax_reference

    problem = Problem((7, 50, 40, 11), torch.float64, "cpu")
    whole = problem.run("torch")
    monkeypatch.setattr(softmax_reference, "_PIECE", 2 * 12 * 50)
    for want, got in zip(whole, problem.run("torch"), strict=True):
        torch.testing.assert_close(got, want)


def draw(num_items, seed, shape, backend, device, dtype=torch.int32):
    candidates = torch.ones(shape, dtype=dtype, device=device)
    candidates[::5, 0] = 0
    draw_uniform(num_items, torch.tensor([seed], device=device), candidates, backend)
    return candidates.cpu()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("negatives", [1, 7, 128])
def test_draws_are_in_range_and_leave_the_targets_and_padding(negatives: int, backend: str, device: str) -> None:
    drawn = draw(3, 1, (33, negatives + 1), backend, device)
    is_padding = torch.arange(33) % 5 == 0
    assert torch.equal(drawn[:, 0] == 0, is_padding)
    assert not drawn[is_padding].any()
    assert drawn[~is_padding, 1:].unique().tolist() == [1, 2, 3]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_draws_are_uniform_and_follow_the_seed(backend: str, device: str) -> None:
    shape = (500, 129)
    drawn = draw(50, 2**40 + 3, shape, backend, device)[1:5, 1:]
    full = draw(50, 2**40 + 3, shape, backend, device)
    assert torch.equal(full[1:5, 1:], drawn)
    assert not torch.equal(draw(50, 2**40 + 4, shape, backend, device), full)
    if backend == "triton":  # torch's generator on the CPU has 32 bits of seed
        assert not torch.equal(draw(50, 3, shape, backend, device), full)
    live = full[full[:, 0] == 1, 1:]
    counts = torch.bincount(live.flatten(), minlength=51)[1:].double()
    expected = live.numel() / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-square, 49 degrees of freedom: p = 2e-5
    # Neither the rows nor the four columns of one call repeat each other.
    assert (live[:-1] == live[1:]).double().mean() < 0.03
    assert (live[:, :32] == live[:, 32:64]).double().mean() < 0.03


def test_draws_into_int64_and_from_large_catalogues(device: str) -> None:
    items = 2**31 - 2
    drawn = draw(items, 5, (100, 129), "triton", device, torch.int64)
    live = drawn[drawn[:, 0] == 1, 1:].double()
    assert live.min() >= 1 and live.max() <= items
    assert abs(live.mean() / items - 0.5) < 0.02
