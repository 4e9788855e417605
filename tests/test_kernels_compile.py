"""Every kernel compiles for a GPU: the interpreter, in which the other tests run them, takes what Triton refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trope.kernels import nvrtc
from trope.kernels.attention import narrow
from trope.kernels.table import own

ROOT = Path(__file__).parents[1]


@pytest.mark.compile
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "same_kernels.py", "--code", ROOT, "--out", tmp_path / "out.json"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "launches of" in done.stdout
    print(done.stdout)


@pytest.fixture
def _nvrtc_of_the_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NVRTC as beside a CUDA build of torch: `make test-compile` installs it into a folder, and names the folder."""
    folder = Path(os.environ.get("TROPE_NVRTC", ""))
    assert list(folder.glob("nvidia/*/lib/libnvrtc.so.13")), "run `make test-compile`, which installs NVRTC"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__file__", str(folder / "torch" / "__init__.py"))
    nvrtc._nvrtc.cache_clear()
    yield
    nvrtc._nvrtc.cache_clear()


NARROW = [
    (("HEADS", H), ("HAS_POSITION", position), ("HAS_TIME", time))
    for H in narrow.HEADS
    for position, time in ((1, 1), (1, 0), (0, 1))
]
OWN = [
    (("WIDTH", width), ("CANDIDATES", 129), ("ROWWISE", row), ("IS_BF16", low))
    for width in (128, 512)
    for row in (0, 1)
    for low in (0, 1)
]


@pytest.mark.compile
@pytest.mark.usefixtures("_nvrtc_of_the_package")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("source", "defines"), [*((narrow.SOURCE, d) for d in NARROW), *((own.SOURCE, d) for d in OWN)], ids=str
)
def test_kernels_in_cuda_compile(source: Path, defines: nvrtc.Defines, architecture: str, tmp_path: Path) -> None:
    options = (f"--gpu-architecture={architecture}", *(f"-D{name}={n}" for name, n in defines))
    binary = tmp_path / "kernels.cubin"
    binary.write_bytes(nvrtc._compiled(source, options))
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([cuobjdump, "-sass", binary], capture_output=True, text=True, check=True).stdout
    assert code.count("Function :") == len(re.findall('extern "C" __global__', source.read_text()))
    # NVRTC 13.0 gave some copies with a cache hint a descriptor that no GPU can have (trope/kernels/warp.cuh).
    assert "LDGSTS" in code and not re.search(r"desc\[UR\d*[13579]\]", code)
