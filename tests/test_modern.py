"""The Transformer block: its kernels against plain PyTorch, padded, jagged and full tokens, dropout."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from conftest import draw_times
from torch import Tensor, nn

import trope.kernels.backend
from trope.config import Config
from trope.experiments.variants import configure
from trope.kernels.random.reference import keep_mask
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models import context as contexts
from trope.models.context import Context
from trope.models.modern import ModernBlock
from trope.models.recommender import SequentialRecommender

SPAN = (1_500_000_000, 1_600_000_000)
OPERATORS = ("norm", "project", "swiglu", "split_rotate", "readout")
B, L, E, V = 3, 5, 12, 30
SIZE = ("model.width=12", "model.heads=2", "model.head_dim=6", f"model.max_len={L}", "model.blocks=2")


def config_of(model: str, *settings: str) -> Config:
    return configure(model, [*SIZE, "model.dropout=0", *settings])


def take_kernels(monkeypatch: pytest.MonkeyPatch, *modules: object) -> None:
    """From now on these operators run their kernels, in the interpreter where there is no GPU."""
    for module in modules:
        monkeypatch.setattr(module, "resolve_backend", lambda backend, x: "triton")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    modules = [__import__(f"trope.kernels.{name}", fromlist=["resolve_backend"]) for name in OPERATORS]
    return lambda: take_kernels(monkeypatch, *modules)


def make(config: Config, device: str) -> SequentialRecommender:
    torch.manual_seed(0)
    model = SequentialRecommender(config, V, SPAN).to(device)
    for name, parameter in model.named_parameters():
        if ".rotary." in name or "readout." in name:  # coefficients begin at 0
            nn.init.normal_(parameter)
    return model


def tokens(lengths: list[int], device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Items, times and offsets of jagged histories, and the moment after each."""
    rng = torch.Generator().manual_seed(1)
    items = torch.randint(1, V + 1, (sum(lengths),), generator=rng)
    times = torch.cat([draw_times((length,), rng) for length in lengths])
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    return items.to(device), times.to(device), offsets.to(device), torch.full((len(lengths),), SPAN[1]).to(device)


def values_and_gradients(model: SequentialRecommender, given: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    out_TE = model.encode_jagged(*given)
    up = torch.randn(out_TE.shape, generator=torch.Generator().manual_seed(2)).to(out_TE.device)
    (out_TE * up).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.detach().clone() for x in (out_TE, *grads)]


@pytest.mark.parametrize("lengths", [[L] * B, [3, 0, L], [1]], ids=["full", "jagged", "one"])
@pytest.mark.parametrize("name", ["transformer", "transformer-trope"])
def test_kernels_agree_with_the_reference(
    name: str, lengths: list[int], device: str, kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = make(config_of(name), device), tokens(lengths, device)
    with trope.kernels.backend.prefer("torch"):
        want = values_and_gradients(model, given)
    kernels()
    got = values_and_gradients(model, given)
    assert len(want) == len(got) == 1 + sum(1 for _ in model.parameters())
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-5


@pytest.mark.parametrize("name", ["transformer", "transformer-trope", "sasrec", "sasrec-trope"])
def test_full_rows_are_not_padded(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as places: a view, and the same outputs to the last bit as through the copies of padding."""
    model, given = make(config_of(name), device).eval(), tokens([L] * B, device)
    got = model.encode_jagged(*given)
    assert context_of([L] * B).slots() is None and context_of([L, L, L - 1]).slots() is not None
    copied = []

    def slots(self: Context) -> Tensor:
        copied.append(self)
        return self.bounds.row_of(torch.arange(len(self.times_T), device=device)) * L + self.index_T

    monkeypatch.setattr(Context, "slots", slots)
    assert torch.equal(model.encode_jagged(*given), got) and copied


def context_of(lengths: list[int]) -> Context:
    _, times, offsets, _ = tokens(lengths, "cpu")
    index = torch.cat([torch.arange(length) for length in lengths])
    return Context(SequenceBounds.jagged(offsets, L), times, times, index, like=torch.zeros(1))


def test_a_full_count_of_tokens_outside_of_sequences_is_not_taken_for_full_rows() -> None:
    """Only where every token belongs to a sequence does their number say that rows are full."""
    times, index = torch.zeros(2 * L, dtype=torch.int64), torch.arange(2 * L) % L
    bounds = SequenceBounds(torch.tensor([0, L]), torch.tensor([L, 1]), L)
    assert Context(bounds, times, times, index, like=torch.zeros(1)).slots() is not None


def test_padding_and_back_gives_every_token_its_own_gradient() -> None:
    context, x_TE = context_of([3, 0, L]), torch.randn(3 + L, 4, requires_grad=True)
    again = context.flat(context.padded(x_TE))
    assert torch.equal(again, x_TE)
    up = torch.randn_like(x_TE)
    assert torch.equal(torch.autograd.grad(again, x_TE, up)[0], up)
    padded = context.padded(x_TE).detach().requires_grad_()
    want = torch.autograd.grad(padded.flatten(0, 1)[context.slots()], padded, up)[0]
    assert torch.equal(torch.autograd.grad(context.flat(padded), padded, up)[0], want)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_norm_behind_a_branch_drops_it(
    backend: str, device: str, kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each branch has a mask of its own, from the seed and the branch's place; the final norm drops the last."""
    config = config_of("transformer", "model.dropout=0.5")
    model = make(config, device).train()
    for block in model.blocks:
        assert isinstance(block, ModernBlock)
        block.attention.dropout = 0.0  # torch's own, which draws from its generator
    take_kernels(monkeypatch, contexts)  # so that there is a seed
    if backend == "triton":
        kernels()
    _, times, offsets, _ = tokens([L] * B, device)
    index, seed = torch.arange(L).repeat(B).to(device), torch.tensor([5], device=device)
    x_TE = torch.randn(B * L, E, generator=torch.Generator().manual_seed(3)).to(device)
    bounds = SequenceBounds.jagged(offsets, L)
    got = model.run(x_TE, bounds, times, times, index, seed)
    # The same by hand.
    context, want, place = Context(bounds, times, times, index, like=x_TE), x_TE, 0
    for block in model.blocks:
        for branch in (lambda x, block=block: block.attention(x, context), block.feed_forward):
            place += 1
            keep = keep_mask(seed, place, (B * L, E), 0.5)
            want = want + branch(nn.functional.rms_norm(want, (E,), eps=1e-6)) * keep * 2
    torch.testing.assert_close(got, nn.functional.rms_norm(want, (E,), eps=1e-6), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, model.run(x_TE, bounds, times, times, index, seed + 1), atol=0.01)


def test_it_drops_without_a_kernel_and_not_when_evaluated() -> None:
    model, given = make(config_of("transformer", "model.dropout=0.5"), "cpu"), tokens([L] * B, "cpu")
    assert not torch.equal(model.encode_jagged(*given), model.encode_jagged(*given))
    model.eval()
    assert torch.equal(model.encode_jagged(*given), model.encode_jagged(*given))


def test_it_exports() -> None:
    model = make(config_of("transformer-trope"), "cpu").eval()
    items, times, _, now = tokens([L] * B, "cpu")
    given = items.view(B, L), times.view(B, L), torch.tensor([L, 1, 3]), now

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Tensor) -> Tensor:
            return self.model.encode_last(*given)

    torch.testing.assert_close(torch.export.export(Encoder(), given).module()(*given), model.encode_last(*given))
