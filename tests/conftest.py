"""Shared by all tests. Without a GPU the kernels run in Triton's interpreter, which must be said before they load."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

# The same examples every time, however slow the machine: what fails in CI fails at home. New ones are for `make fuzz`.
hypothesis.settings.register_profile(
    "trope", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("trope")
torch.set_num_threads(1)  # tensors are tiny here: threads would only wait for each other

SECONDS = (1_500_000_000, 1_600_000_000)  # real timestamps: July 2017 to September 2020


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """A test that only a CUDA device can run; `pytest -m gpu` selects them."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


# On a GPU these are tests of the GPU, so that `pytest -m gpu` runs them.
@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of kernels memory is full of NaN before it is written, so that an output left out is noticed."""
    has_kernels = request.module.__name__.startswith(("test_kernels", "test_narrow"))
    if not (has_kernels or "emulated" in request.fixturenames):
        yield
        return
    torch.use_deterministic_algorithms(True)  # with it, torch fills uninitialised memory
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def draw_times(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Sorted event times, int64 Unix seconds."""
    return torch.randint(*SECONDS, shape, generator=rng).sort(dim=-1).values


def scores(rope: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, times: torch.Tensor, t_now=None) -> torch.Tensor:
    """Attention scores before any mask, [B, H, L, L]: what the theorems speak of."""
    q, k = rope(q, k, times, t_now=t_now)
    return torch.einsum("bmhd,bnhd->bhmn", q, k)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in CUDA C++ run on the CPU (tests/emulator)."""
    import emulator

    from trope.kernels import nvrtc

    if not emulator.HAS_COMPILER:
        pytest.skip("a CPU plays the GPU in C++, which needs g++")
    monkeypatch.setattr(nvrtc, "launch", emulator.launch)


@pytest.fixture
def launched(emulated: None, noted: list[str]) -> list[str]:
    """Names of the kernels in CUDA C++ that are launched from now on, on the CPU."""
    return noted


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels in CUDA C++ that are launched from now on."""
    from trope.kernels import nvrtc

    names: list[str] = []
    launch = nvrtc.launch

    def noting(source: Path, name: str, *rest: Any) -> None:
        names.append(name)
        launch(source, name, *rest)

    monkeypatch.setattr(nvrtc, "launch", noting)
    return names
