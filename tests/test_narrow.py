"""The attention kernels in CUDA C++ against the reference: a CPU plays the GPU (tests/emulator)."""

from __future__ import annotations

import pytest
import torch
from conftest import on_gpu
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trope.kernels import nvrtc
from trope.kernels.attention import hstu_attention, narrow, reference, time_gaps
from trope.kernels.attention.arguments import Bias, row_stride
from trope.kernels.attention.gaps import Gaps
from trope.kernels.attention.triton import with_sheet
from trope.kernels.limits import HOPPER
from trope.kernels.sequence_bounds import SequenceBounds

emulated = pytest.mark.usefixtures("emulated")

LAST = 128
HIDDEN = -16384.0


def sheet_of(total_BLL: Tensor, lengths: list[int]) -> Tensor:
    """Half of the bias as the kernels keep it: tiles up to the diagonal, everything else not written (NaN)."""
    B, L, _ = total_BLL.shape
    S = row_stride(L)
    sheet = torch.full((B, S, S), float("nan"))
    for b, length in enumerate(lengths):
        rows = -(-length // 64) * 64
        sheet[b, :rows, :rows] = HIDDEN
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        sheet[b, :length, :length] = total_BLL[b, :length, :length].masked_fill(~causal, HIDDEN)
        for m in range(0, rows, 64):
            sheet[b, m : m + 64, m + 64 :] = float("nan")
    return (0.5 * sheet).bfloat16()


class Case:
    """Random inputs of one attention, and its reference in float32 of the same bf16 numbers."""

    def __init__(self, lengths: list[int], H: int, has_position: bool, has_time: bool, sorted_times: bool = True):
        generator = torch.Generator().manual_seed(len(lengths) * 1000 + H)
        B, L, T = len(lengths), max(lengths) + 3, sum(lengths)
        self.bounds = SequenceBounds.jagged(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]), L)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.joint = random(T, 3, H, 32).bfloat16()
        self.dy, self.n = random(T, H, 32).bfloat16(), L
        self.position = random(2 * (L + 2) - 1).bfloat16().float() if has_position else None
        self.time = random(LAST + 1).bfloat16().float() if has_time else None
        self.gaps, buckets = None, None
        if has_time:
            steps = (torch.rand(T + 1, generator=generator) * 14).exp().long()
            times = 1_500_000_000 + (steps.cumsum(0) if sorted_times else steps)
            places, exists = self.bounds.places()
            buckets = reference.time_buckets(times[1:][places], times[:-1][places], LAST)
            kept = torch.full((B, L, row_stride(L)), 255, dtype=torch.uint8)  # what is beyond a sequence is not written
            kept[:, :, :L] = torch.where(exists[:, :, None], buckets, 255).to(torch.uint8)
            self.gaps = Gaps(times[:-1], times[1:], LAST, kept)
        self.buckets = buckets
        total = reference.bias(L, self.position, self.time, buckets)
        assert total is not None
        # The sheet is rounded to bf16; the reference gets the same rounded numbers.
        self.rounding = total.bfloat16().float() - total
        sheet = sheet_of(total.expand(B, L, L), lengths) if has_time else sheet_of(total[None], [L])
        self.bias = Bias(self.position, self.time, self.gaps, sheet)

    def expected(self) -> list[Tensor | None]:
        joint = self.joint.float().requires_grad_()
        weights = [None if w is None else w.clone().requires_grad_() for w in (self.position, self.time)]
        q, k, v = joint.unbind(1)
        places, exists = self.bounds.places()
        L = self.bounds.max_len
        total = reference.bias(L, *weights, self.buckets)
        scores = q[places].transpose(1, 2) @ k[places].permute(0, 2, 3, 1)
        added = (total + self.rounding).expand(len(places), L, L)[:, None]
        causal = torch.ones(L, L, dtype=torch.bool).tril()
        attention = (torch.nn.functional.silu(scores + added) / self.n).masked_fill(~causal, 0.0)
        y = (attention @ v[places].transpose(1, 2)).transpose(1, 2)[exists]
        learned = [joint, *(w for w in weights if w is not None)]
        d_joint, *d_weights = torch.autograd.grad(y, learned, self.dy.float())
        found = iter(d_weights)
        return [y.detach(), *d_joint.unbind(1), *(None if w is None else next(found) for w in weights)]

    def found(self, device: str) -> list[Tensor | None]:
        """By narrow.cu, returned on the CPU."""
        inputs = (self.joint, self.dy, self.bounds, self.bias)
        joint, dy, bounds, bias = tree_map_only(Tensor, lambda x: x.to(device), inputs)
        q, k, v = joint.unbind(1)
        written = with_sheet(bias._replace(sheet=None), bounds, q, 1 << 30, narrow.write_sheet).sheet
        is_defined = ~bias.sheet.isnan()
        assert torch.equal(written[is_defined], bias.sheet[is_defined])
        y = narrow.forward(q, k, v, bounds, self.n, bias)
        found = [y, *narrow.backward(dy, q, k, v, bounds, self.n, bias)]
        return [None if x is None else x.cpu() for x in found]


def check(case: Case, device: str = "cpu") -> None:
    names = ["y", "dq", "dk", "dv", "d position", "d time"]
    for name, x, expected in zip(names, case.found(device), case.expected(), strict=True):
        assert (x is None) == (expected is None), name
        if x is not None and expected is not None:
            # bf16 rounds probabilities and gradients of scores to 2^-9 of their own; their sums are off by less.
            off = (x.float() - expected).norm() / expected.norm()
            assert off < 4e-3, f"{name} is off by {off:.1e}"


BIASES = [(4, True, True), (8, True, True), (2, True, False), (2, False, True)]


@emulated
@pytest.mark.parametrize("lengths", [[66], [130, 1, 70], [64, 63], [257, 200]])
def test_values_and_gradients(lengths: list[int]) -> None:
    check(Case(lengths, 2, has_position=True, has_time=True))


@emulated
@pytest.mark.parametrize(("H", "has_position", "has_time"), BIASES)
def test_heads_and_biases(H: int, has_position: bool, has_time: bool) -> None:
    check(Case([100, 5], H, has_position, has_time))


@emulated
def test_times_out_of_order() -> None:
    check(Case([90], 2, has_position=True, has_time=True, sorted_times=False))


@emulated
def test_gradients_that_lie_anywhere_in_memory() -> None:
    case = Case([100], 2, has_position=True, has_time=True)
    expected = case.found("cpu")
    inside = torch.zeros(case.dy.numel() + 1, dtype=torch.bfloat16)[1:].view(case.dy.shape)
    case.dy = inside.copy_(case.dy)  # contiguous, but not from a multiple of 16 bytes on
    assert case.dy.data_ptr() % 16
    assert all(torch.equal(x, y) for x, y in zip(case.found("cpu"), expected, strict=True) if x is not None)


def test_what_these_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "is_made_for", lambda *_: True)
    case = Case([100], 2, has_position=True, has_time=True)
    q, k, v = case.joint.unbind(1)
    assert narrow.is_narrow(q, k, v, case.bounds, case.bias)
    assert not narrow.is_narrow(q, k, v.float(), case.bounds, case.bias)
    longer = case.bias._replace(time=torch.zeros(LAST + 2))
    assert not narrow.is_narrow(q, k, v, case.bounds, longer)
    with pytest.raises(AssertionError, match="longer than the position weights"):
        narrow.forward(q, k, v, case.bounds, case.n, case.bias._replace(position=torch.zeros(101)))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_they_are_for_hopper_only(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Blackwell GPU has as much shared memory, but not the same products: it takes Triton's kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(narrow, "shared_memory", lambda device: HOPPER)
    monkeypatch.setattr(nvrtc, "is_available", lambda device: True)

    def is_made_for(L: int) -> bool:
        bounds = SequenceBounds.jagged(torch.tensor([0, 1]), L)
        return narrow.is_made_for(8, 32, torch.bfloat16, torch.device("cuda"), bounds, LAST)

    assert is_made_for(512) == (capability == (9, 0))
    assert not is_made_for(64) and not is_made_for(1 << 16)  # a tile is enough; distances do not fit


@pytest.mark.parametrize("most_bytes", [1 << 28, 1 << 14], ids=["sheet kept", "sheet written again"])
def test_attention_takes_these_kernels(most_bytes: int, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Hopper GPU runs, from `hstu_attention` on: the same as the kernels by themselves."""
    import trope.kernels.attention as attention

    case = Case([100, 70], 2, has_position=True, has_time=True)
    monkeypatch.setattr(narrow, "is_made_for", lambda *_: True)
    monkeypatch.setattr(attention, "CACHE_BYTES", most_bytes)
    joint = case.joint.clone().requires_grad_()
    weights = [w.clone().requires_grad_() for w in (case.position, case.time) if w is not None]
    y = hstu_attention(*joint.unbind(1), case.bounds, case.n, *weights, case.gaps, backend="triton")
    d_joint, *d_weights = torch.autograd.grad(y, [joint, *weights], case.dy)
    again = ["narrow_sheet"] if most_bytes < 1 << 20 else []
    assert launched == ["narrow_sheet", "narrow_forward", *again, "narrow_keys", "narrow_queries"]
    found = [y.detach(), *d_joint.unbind(1), *d_weights]
    for mine, expected in zip(found, case.found("cpu"), strict=True):
        assert expected is not None and torch.equal(mine, expected)


def test_runs_of_buckets_are_prepared_only_for_who_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from trope.kernels.attention import arguments

    case = Case([70], 2, has_position=False, has_time=True)
    assert case.gaps is not None
    given = (case.gaps.times_T, case.gaps.query_times_T, case.bounds, LAST, case.joint, "triton")
    assert time_gaps(*given, heads=(2, 32)).runs is not None  # a CPU is not what these kernels are made for
    monkeypatch.setattr(narrow, "is_made_for", lambda heads, head_dim, *_: (heads, head_dim) == (2, 32))
    assert time_gaps(*given, heads=(2, 32)).runs is None
    assert time_gaps(*given, heads=(2, 64)).runs is not None and time_gaps(*given).runs is not None
    monkeypatch.setattr(arguments, "PASSING", 0)  # no room for the gradient of the scores, which these kernels keep
    assert time_gaps(*given, heads=(2, 32)).runs is not None
    with torch.no_grad():
        assert time_gaps(*given, heads=(2, 32)).runs is None


@on_gpu
@pytest.mark.parametrize("lengths", [[66], [130, 1, 70], [64, 63], [257, 200], [700, 512, 3]])
@pytest.mark.parametrize(("H", "has_position", "has_time"), BIASES)
def test_on_a_gpu(lengths: list[int], H: int, has_position: bool, has_time: bool) -> None:
    check(Case(lengths, H, has_position, has_time), "cuda")
