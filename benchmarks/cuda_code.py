"""The kernels in CUDA C++ as machine code, without a GPU: for benchmarks/same_kernels.py and the compile tests.

NVRTC comes from a folder, which `make test-compile` fills.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

Defines = tuple[tuple[str, int], ...]

HEADS: list[Defines] = [(("HEADS", heads),) for heads in (2, 4, 8)]
BIASES: list[Defines] = [
    (*heads, ("HAS_POSITION", position), ("HAS_TIME", time))
    for heads, (position, time) in itertools.product(HEADS, ((1, 1), (1, 0), (0, 1)))
]
TABLES: list[Defines] = [
    (("WIDTH", width), ("CANDIDATES", 129), ("ROWWISE", rowwise), ("IS_BF16", is_bf16))
    for width, rowwise, is_bf16 in itertools.product((128, 512), (0, 1), (0, 1))
]
MACROS = {"own": TABLES, "sheet": BIASES, "queries": BIASES, "forward": HEADS, "keys": HEADS}


def variants(root: Path) -> list[tuple[Path, Defines]]:
    """Every .cu file of a checkout, with sets of macros that compile to different code."""
    sources = sorted((root / "trope" / "kernels").rglob("*.cu"))
    return [(source, defines) for source in sources for defines in MACROS[source.stem]]


@contextmanager
def nvrtc_in(folder: Path) -> Iterator[None]:
    """Inside, trope.kernels.nvrtc finds NVRTC 13 in the folder, as beside a CUDA build of torch."""
    from trope.kernels import nvrtc

    if not list(folder.glob("nvidia/*/lib/libnvrtc.so.13")):
        raise FileNotFoundError(f"no NVRTC in {folder}: run `make test-compile`, which installs it")
    before = torch.version.cuda, torch.__file__
    torch.version.cuda, torch.__file__ = "13.0", str(folder / "torch" / "__init__.py")
    try:
        _forget(nvrtc)
        yield
    finally:
        torch.version.cuda, torch.__file__ = before
        _forget(nvrtc)


def _forget(nvrtc: ModuleType) -> None:
    for cached in ("_nvrtc", "_knows"):
        if hasattr(nvrtc, cached):  # an older checkout may not have it
            getattr(nvrtc, cached).cache_clear()


def machine_code(source: Path, defines: Defines, architecture: str) -> bytes:
    """A .cu file compiled for an architecture, such as sm_90; inside of `nvrtc_in`."""
    from trope.kernels import nvrtc

    return nvrtc._compiled(source, (f"--gpu-architecture={architecture}", *(f"-D{name}={n}" for name, n in defines)))
