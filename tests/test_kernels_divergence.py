"""The watch over a training's numbers: the kernel against plain PyTorch, step by step."""

from __future__ import annotations

import math

import pytest
import torch

from trope.kernels.adamw import Parts
from trope.kernels.backend import Backend
from trope.kernels.divergence import Squares, Watched, watch

divergence_triton = pytest.importorskip("trope.kernels.divergence.triton", reason="needs the package triton")

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("steps", "bad_step", "bad_loss", "bad_norms"),
    [
        ([(1.0, [3.0, 4.0, 0.0]), (2.0, [0.0, 0.0, 0.0])], -1, 0.0, [0.0, 0.0, 0.0]),
        ([(1.0, [1.0, 2.0, 3.0]), (NAN, [1.0, 0.0, 5.0]), (NAN, [NAN, 1.0, 1.0])], 12, NAN, [1.0, 0.0, 5.0]),
        ([(7.0, [1.0, NAN, 3.0]), (1.0, [1.0, 1.0, 1.0])], 11, 7.0, [1.0, NAN, 3.0]),
        ([(7.0, [1.0, 2.0, INF])], 11, 7.0, [1.0, 2.0, INF]),
        ([(-INF, [1.0, 2.0, 2.0])], 11, -INF, [1.0, 2.0, 2.0]),
    ],
    ids=["finite", "loss", "norm", "infinite norm", "infinite loss"],
)
def test_keeps_the_first_step_that_is_not_finite(
    steps: list[tuple[float, list[float]]], bad_step: int, bad_loss: float, bad_norms: list[float], backend: Backend,
    device: str,
) -> None:  # fmt: skip
    watched = Watched.begin(10, 3, torch.device(device))
    for loss, norms in steps:
        norm = watch(torch.tensor(loss, device=device), torch.tensor(norms, device=device), watched, backend=backend)
        want = math.sqrt(sum(each * each for each in norms))
        assert norm.shape == () and (float(norm) == pytest.approx(want) or not math.isfinite(want))
        assert math.isfinite(float(norm)) == math.isfinite(want)
    assert int(watched.step) == 10 + len(steps)
    assert int(watched.bad_step) == bad_step
    assert float(watched.bad_loss) == pytest.approx(bad_loss, nan_ok=True)
    assert watched.bad_norms_P.tolist() == pytest.approx(bad_norms, nan_ok=True)


@pytest.mark.parametrize("parameters", [1, 5, 300])
def test_any_number_of_parameters(parameters: int, device: str) -> None:
    norms_P = torch.rand(parameters, generator=torch.Generator().manual_seed(0)).to(device)
    watched = Watched.begin(0, parameters, torch.device(device))
    norm = watch(torch.tensor(1.0, device=device), norms_P, watched, backend="triton")
    torch.testing.assert_close(norm.double(), norms_P.double().norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("sizes", [(1, None), (256, 256), (3, 40), (300, 1)])
@pytest.mark.parametrize("most", [8192, 64])
def test_takes_norms_by_parts_of_their_squares(
    sizes: tuple[int, int | None], most: int, backend: Backend, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One parameter's norm is given, one is in parts with places, one in parts of its own; most: parts at once."""
    monkeypatch.setattr(divergence_triton, "MOST", most)
    rng = torch.Generator().manual_seed(0)
    first, second = (None if size is None else torch.rand(size, generator=rng).to(device) for size in sizes)
    places_S = torch.tensor([0, 3, 0, 3, 3] * 50, dtype=torch.int32, device=device)
    parts = Parts(torch.rand(len(places_S), generator=rng).to(device), places_S)
    ours, theirs = (float(parts.squares_S[places_S == place].sum()) for place in (0, 3))
    watched = Watched.begin(0, 4, torch.device(device))
    loss = torch.tensor(1.0, device=device)
    assert first is not None
    of_table = float(first.sum()) + (0 if second is None else float(second.sum()))
    for given, norms_P in ((16.0, torch.tensor([0.0, NAN, 4.0, 0.0], device=device)), (0.0, None)):
        norm = watch(loss, norms_P, watched, parts, Squares(1, first, second), backend)
        assert float(norm) == pytest.approx(math.sqrt(given + ours + theirs + of_table), rel=1e-6)
    assert int(watched.bad_step) == -1
    norms_P = torch.tensor([0.0, NAN, 4.0, 0.0], device=device)
    watch(loss, norms_P, watched, parts, Squares(1, first * INF, second), backend)
    wanted = [math.sqrt(ours), INF, 4.0, math.sqrt(theirs)]
    assert int(watched.bad_step) == 3 and watched.bad_norms_P.tolist() == pytest.approx(wanted, rel=1e-6)
