"""The kernels in CUDA C++ as machine code, without a GPU: for benchmarks/same_kernels.py and the compile tests.

NVRTC comes from a folder, which `make test-compile` fills.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
import triton

Defines = tuple[tuple[str, int], ...]

BIASES: list[Defines] = [
    (("HEADS", heads), ("HAS_POSITION", position), ("HAS_TIME", time))
    for heads, (position, time) in itertools.product((2, 4, 8), ((1, 1), (1, 0), (0, 1)))
]
TABLES: list[Defines] = [
    (("WIDTH", width), ("CANDIDATES", 129), ("ROWWISE", rowwise), ("IS_BF16", is_bf16))
    for width, rowwise, is_bf16 in itertools.product((128, 512), (0, 1), (0, 1))
]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def variants(root: Path) -> list[tuple[Path, Defines]]:
    """Every .cu file of a checkout, with sets of its macros: own.cu is the table's, the others are attention's."""
    sources = sorted((root / "trope" / "kernels").rglob("*.cu"))
    return [(source, defines) for source in sources for defines in (TABLES if source.stem == "own" else BIASES)]


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
        for part in folder.glob("nvidia/*/lib/libnvrtc-builtins.so*"):
            ctypes.CDLL(str(part))  # older checkouts do not load it
        yield
    finally:
        torch.version.cuda, torch.__file__ = before
        _forget(nvrtc)


def _forget(nvrtc: ModuleType) -> None:
    for cached in ("_nvrtc", "_knows"):
        if hasattr(nvrtc, cached):  # an older checkout may not have it
            getattr(nvrtc, cached).cache_clear()


def machine_code(source: Path, defines: Defines, architecture: str) -> bytes:
    """A .cu file compiled for an architecture, such as sm_90a; inside of `nvrtc_in`."""
    from trope.kernels import nvrtc

    return nvrtc._compiled(source, (f"--gpu-architecture={architecture}", *(f"-D{name}={n}" for name, n in defines)))


def disassembled(code: bytes) -> dict[str, str]:
    """The instructions of each kernel in machine code, by the kernel's name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = (part.partition("\n") for part in text.split("Function : ")[1:])
    return {name.strip(): "\n".join(re.findall(r"/\*[0-9a-f]{4,}\*/ +(.*?);", body)) for name, _, body in found}
