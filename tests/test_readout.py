"""The readout by time: by its definition, at every width, in the model, and what it can learn that attention cannot."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import draw_times

from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.recommender import SequentialRecommender
from trope.rotary import frequency_parameters
from trope.rotary.readout import FASTEST, SLOWEST, TimeReadout
from trope.settings import preset

SPAN = (1_500_000_000, 1_600_000_000)
SMALL = ["model.width=16", "model.heads=2", "model.head_dim=8", "model.max_len=12", "model.dropout=0.0"]


def test_it_turns_what_the_blocks_added_and_leaves_the_rest(rng: torch.Generator) -> None:
    """Against complex numbers in float64; the fastest and the slowest plane are where the docs say."""
    readout = TimeReadout(16, SPAN, 0.5)
    with torch.no_grad():
        readout.turn.get_parameter("delta_q").normal_(generator=rng)
    out, given = (torch.randn(7, 16, generator=rng, dtype=torch.float64) for _ in range(2))
    moments = draw_times((7,), rng)
    y = readout(out, moments, given)
    assert torch.equal(y[:, 8:], out[:, 8:])
    span, t0 = SPAN[1] - SPAN[0], sum(SPAN) // 2
    betas = torch.logspace(math.log10(span / FASTEST), math.log10(span / SLOWEST), 4, dtype=torch.float64)
    speed = 1 / betas + 8.0 / span * readout.turn.get_parameter("delta_q").double()
    turned = torch.view_as_complex((out - given)[:, :8].reshape(7, 4, 2)) * torch.exp(
        1j * speed * (moments - t0)[:, None]
    )
    assert torch.allclose(torch.view_as_real(turned).flatten(1), y[:, :8], atol=1e-6)
    assert torch.allclose(y[:, :8].norm(dim=1), (out - given)[:, :8].norm(dim=1))


@pytest.mark.parametrize("learnable", [True, False])
def test_of_a_sum_it_is_the_same_with_its_gradients(learnable: bool, device: str, rng: torch.Generator) -> None:
    """Also at moments before and after the training data, and where frequencies have moved."""
    readout = TimeReadout(16, SPAN, 0.5, learnable=learnable).to(device)
    parameters = list(readout.parameters())
    assert len(parameters) == learnable
    for parameter in parameters:
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    x, delta, start, up = (torch.randn(7, 16, generator=rng).to(device) for _ in range(4))
    moments = torch.cat((draw_times((5,), rng), torch.tensor([SPAN[0] - 10**7, SPAN[1] + 10**7]))).to(device)
    inputs = [each.requires_grad_() for each in (x, delta, start)] + parameters
    both = (readout(x + delta, moments, start), readout.of_sum(x, delta, start, moments))
    found = [(y, *torch.autograd.grad(y, inputs, up)) for y in both]
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert not learnable or found[0][-1].abs().min() > 1e-3


def test_a_checkpoint_brings_its_time_span_along(rng: torch.Generator) -> None:
    """Bank and ends follow from it, in a module that was made for another one and in a model around it."""
    one, other = TimeReadout(16, SPAN), TimeReadout(16, (1_000_000_000, 1_010_000_001))
    out, moments = torch.randn(9, 16, generator=rng), draw_times((9,), rng)
    moments[0], moments[-1] = SPAN[0] - 5, SPAN[1] + 5
    assert not torch.allclose(one(out, moments), other(out, moments), atol=1e-2)
    torch.nn.ModuleList([other]).load_state_dict(torch.nn.ModuleList([one]).state_dict())
    assert torch.equal(one(out, moments), other(out, moments))
    assert torch.equal(one.of_sum(out, out, out, moments), other.of_sum(out, out, out, moments))


def test_it_keeps_the_dtype_of_the_output(rng: torch.Generator) -> None:
    readout, moments = TimeReadout(8, SPAN), draw_times((3,), rng)
    out, start = torch.randn(3, 8, generator=rng).bfloat16(), torch.randn(3, 8, generator=rng)
    assert readout(out, moments, start).dtype == readout.of_sum(out, start, start, moments).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["trope", "none"])
def test_a_model_with_it_is_exported_and_loaded_in_inference_mode(
    kind: str, tmp_path: Path, rng: torch.Generator
) -> None:
    model = SequentialRecommender(preset("hstu-trope", [*SMALL, f"rotary.kind={kind}"]), 9, SPAN).eval()
    model.save_pretrained(tmp_path)
    items, times = torch.randint(1, 10, (2, 5), generator=rng), draw_times((2, 5), rng)
    inputs = (items, times, torch.tensor([5, 3]), times[:, -1] + 60)
    want = model.encode_last(*inputs)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return self.model.encode_last(*inputs)

    assert torch.allclose(torch.export.export(Encoder(), inputs).module()(*inputs), want, atol=1e-6)
    with torch.inference_mode():
        loaded = SequentialRecommender.from_pretrained(tmp_path).eval()
        assert torch.allclose(loaded.encode_last(*inputs), want, atol=1e-6)


@pytest.mark.parametrize(("width", "setting", "dims"), [
    (512, "auto", 128), (128, "auto", 8), (50, "auto", 4), (4, "auto", 4), (2, "auto", 2), (2048, "auto", 2048),
    (128, "0.25", 32), (128, "1.0", 128),
])  # fmt: skip
def test_how_many_planes_turn(width: int, setting: str, dims: int) -> None:
    config = preset("hstu-trope", [f"model.width={width}", f"rotary.readout={setting}"])
    assert TimeReadout(width, SPAN, config.readout_share).turn.head_dim == dims


def test_auto_is_a_number_by_width() -> None:
    config = preset("hstu-trope", ["model.width=128"])
    assert (config.model.floor, config.readout_share) == (0.25, 0.0625)
    said = preset("hstu-trope", ["model.width=128", "model.gate_floor=0.25", "rotary.readout=0.0625"])
    assert said != config and said.resolved == config.resolved != preset("hstu-trope").resolved
    assert preset("hstu-time").model.floor is None and preset("hstu-time").readout_share == 0


def test_without_it_the_model_is_what_it_was() -> None:
    """The drawn weights are the same, so that a comparison with and without it begins at the same place."""
    models = []
    for share in ("0", "0.5"):
        torch.manual_seed(3)
        models.append(SequentialRecommender(preset("hstu-trope", [*SMALL, f"rotary.readout={share}"]), 9, SPAN))
    with_it = models[1].state_dict()
    assert all(torch.equal(with_it[name], x) for name, x in models[0].state_dict().items())
    assert {name for name in with_it if name not in models[0].state_dict()} == {
        f"readout.turn.{name}" for name in ("t0", "span", "alpha0_q", "delta_q")
    }
    assert len(list(frequency_parameters(models[1]))) == len(list(frequency_parameters(models[0]))) + 1


def test_outside_the_training_data_it_says_what_it_said_at_their_ends(rng: torch.Generator) -> None:
    readout, out = TimeReadout(16, SPAN), torch.randn(16, generator=rng)
    first, last = (readout(out, torch.tensor(t)) for t in SPAN)
    assert torch.equal(readout(out, torch.tensor(SPAN[1] + 10**7)), last)
    assert torch.equal(readout(out, torch.tensor(SPAN[0] - 10**7)), first)
    assert not torch.allclose(readout(out, torch.tensor(SPAN[1] - 10**5)), last, atol=1e-4)
    assert not torch.allclose(first, last, atol=1e-2)


def test_gradients_by_differences(rng: torch.Generator) -> None:
    readout = TimeReadout(8, SPAN, 1.0)
    out, given, up = (torch.randn(5, 8, generator=rng, dtype=torch.float64) for _ in range(3))
    moments, delta = draw_times((5,), rng), readout.turn.get_parameter("delta_q")
    out.requires_grad_(), given.requires_grad_()
    (readout(out, moments, given) * up).sum().backward()
    assert given.grad is not None and torch.allclose(given.grad, -out.grad)  # type: ignore[arg-type]
    for plane in range(4):
        values = []
        for move in (1e-3, -1e-3):
            with torch.no_grad():
                delta[plane] += move
                values.append((readout(out, moments, given) * up).sum())
                delta[plane] -= move
        assert delta.grad is not None and delta.grad[plane].item() == pytest.approx(
            (values[0] - values[1]).item() / 2e-3, rel=1e-3, abs=1e-4
        )


def test_what_is_popular_when_is_learned_by_the_readout_alone(rng: torch.Generator) -> None:
    """Everyone takes item 1 in the first half of the span and item 2 in the second, whatever they had before.

    A model without any time cannot tell which; the readout can, and says the right one at moments it was not shown.
    """

    def accuracy(share: str) -> float:
        torch.manual_seed(0)
        settings = ["model.time_bias=false", "rotary.kind=none", f"rotary.readout={share}"]
        model = SequentialRecommender(preset("hstu-trope", [*SMALL, *settings]), 20, SPAN)
        middle = sum(SPAN) // 2

        def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            items = torch.randint(3, 21, (rows, 4), generator=rng)
            t_now = torch.randint(*SPAN, (rows,), generator=rng)
            ago = torch.randint(1, 10**6, (rows, 4), generator=rng).sort(dim=1, descending=True).values
            return items, t_now[:, None] - ago, t_now, (t_now > middle).long()

        lengths = torch.full((64,), 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(60):
            items, times, t_now, late = batch(64)
            scores = model.encode_last(items, times, lengths, t_now) @ model.item_vectors()[1:].T / 0.05
            optimizer.zero_grad()
            F.cross_entropy(scores, late).backward()
            optimizer.step()
        items, times, t_now, late = batch(64)
        away = (t_now - middle).abs() > (SPAN[1] - SPAN[0]) / 20  # not at the turn itself
        found = (model.encode_last(items, times, lengths, t_now) @ model.item_vectors()[1:].T).argmax(1)
        return (found == late)[away].float().mean().item()

    assert accuracy("0.5") >= 0.95
    assert accuracy("0") < 0.75


def test_as_a_drop_in_it_takes_any_shape_and_refuses_what_ruins_it(rng: torch.Generator) -> None:
    readout = TimeReadout(6, SPAN, 0.4)
    out, moments = torch.randn(2, 3, 6, generator=rng), draw_times((2, 3), rng)
    turned = readout(out, moments)
    assert torch.equal(turned.flatten(0, 1), readout(out.flatten(0, 1), moments.flatten()))
    assert torch.equal(turned[1, 2], readout(out[1, 2], moments[1, 2]))
    dims = readout.turn.head_dim
    assert torch.allclose(turned[..., :dims], readout(2 * out, moments, start=out)[..., :dims])
    for wrong, message in (
        (lambda: readout(out, moments.float()), "moments must be int64 Unix seconds"),
        (lambda: readout(out, moments * 1000), "looks like milliseconds"),
        (lambda: readout(out, moments[0]), r"a moment for each vector, got \(2, 3, 6\) and moments \(3,\)"),
        (lambda: readout(out, moments, out[0]), r"start must be of out's shape \(2, 3, 6\), got \(3, 6\)"),
        (lambda: TimeReadout(6, (SPAN[0] * 1000, SPAN[1] * 1000)), "is it in milliseconds"),
        (lambda: TimeReadout(6, SPAN, 0.0), r"a share in \(0, 1\], got 6 and 0.0"),
        (lambda: TimeReadout(6, (5, 5)), "first < last"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_outputs_that_cannot_hold_a_rotation_are_refused(dtype: torch.dtype) -> None:
    """Integers were rotated and then cut back to integers: other scores, without a word."""
    out, moments = torch.ones(2, 16, dtype=dtype), torch.full((2,), SPAN[0])
    with pytest.raises(ValueError, match=rf"out must be bfloat16, float16, float32 or float64, got {dtype}; cast"):
        TimeReadout(16, SPAN)(out, moments)
    with pytest.raises(ValueError, match=rf"start must be bfloat16, .* got {dtype}; cast"):
        TimeReadout(16, SPAN)(torch.ones(2, 16), moments, out)


def test_the_gradient_of_the_beginning_may_be_apart(rng: torch.Generator) -> None:
    """With the turning dims as an input of their own the model says the same, and both gradients add up."""
    model = SequentialRecommender(preset("hstu-trope", [*SMALL, "rotary.readout=0.5"]), 9, SPAN)
    assert model.start_dims == 8
    times, index = draw_times((5,), rng), torch.arange(5)
    where = (SequenceBounds.jagged(torch.tensor([0, 5]), 12), times, times + 60, index)
    x, up = (torch.randn(5, 16, generator=rng) for _ in range(2))
    x.requires_grad_()
    whole = model.run(x, *where)
    (want,) = torch.autograd.grad(whole, x, up)
    start = x.detach()[:, :8].requires_grad_()
    apart = model.run(x, *where, start=start)
    assert torch.equal(apart, whole)
    of_x, of_start = torch.autograd.grad(apart, (x, start), up)
    assert of_start.abs().min() > 0 and of_start.shape == (5, 8)
    assert torch.allclose(of_x + F.pad(of_start, (0, 8)), want, atol=1e-6)


def test_what_subtracts_no_beginning_says_so() -> None:
    """Without a readout, and behind a final norm."""
    for name, readout in (("hstu", "0"), ("sasrec", "0.5")):
        config = preset(name, [*SMALL, f"rotary.readout={readout}"])
        assert SequentialRecommender(config, 9, SPAN).start_dims == 0


def test_a_share_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"auto or a share of the planes, from 0 to 1, got 1\.5"):
        preset("hstu-trope", ["rotary.readout=1.5"])
    with pytest.raises(ValueError, match=r"rotary\.readout must be a number or 'auto', got 'some'"):
        preset("hstu-trope", ["rotary.readout=some"])


@pytest.mark.parametrize("name", ["sasrec", "sasrec-trope", "tisasrec", "transformer", "hstu", "hstu-trope"])
def test_every_block_has_it(name: str, rng: torch.Generator) -> None:
    """The moment reaches the output of every block, as the readout says it does, and its frequencies learn."""
    settings = ["model.width=8", "model.heads=2", "model.head_dim=4", "model.max_len=6", "model.dropout=0"]
    torch.manual_seed(0)
    model = SequentialRecommender(preset(name, [*settings, "rotary.readout=0.5"]), 20, SPAN)
    assert model.readout is not None
    items, times = torch.randint(1, 21, (3, 6), generator=rng), draw_times((3, 6), rng)
    lengths = torch.tensor([6, 4, 6])
    early, late = (model.encode_last(items, times, lengths, times[:, -1] + later) for later in (60, 86_400 * 40))
    assert not torch.allclose(early, late, atol=1e-3)
    (late * torch.randn(3, 8, generator=rng)).sum().backward()
    gradient = model.readout.turn.delta_q.grad
    assert gradient is not None and gradient.abs().min() > 0
