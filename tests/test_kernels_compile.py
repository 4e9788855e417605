"""Every kernel compiles for a GPU: the interpreter, in which the other tests run them, takes what Triton refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from cuda_code import Defines, disassembled, machine_code, nvrtc_in, variants  # noqa: E402


@pytest.mark.compile
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "same_kernels.py", "--code", ROOT, "--out", tmp_path / "out.json"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "launches of" in done.stdout and "in CUDA C++" in done.stdout
    print(done.stdout)


@pytest.mark.compile
def test_gpus_that_nvrtc_does_not_know_run_tritons_kernels(caplog: pytest.LogCaptureFixture) -> None:
    from trope.kernels import nvrtc

    with nvrtc_in(Path(os.environ.get("TROPE_NVRTC", ""))):
        assert nvrtc._knows((8, 0)) and nvrtc._knows((9, 0)) and nvrtc._knows((10, 0))
        assert not caplog.records
        assert not nvrtc._knows((99, 7)) and not nvrtc._knows((99, 7))
        assert [record.getMessage()[:58] for record in caplog.records] == [
            "NVRTC of CUDA 13.0 does not know GPUs of compute capabilit"
        ]


@pytest.mark.compile
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("source", "defines"), variants(ROOT), ids=lambda x: str(x.stem if isinstance(x, Path) else x))
def test_kernels_in_cuda_compile(source: Path, defines: Defines, architecture: str) -> None:
    with nvrtc_in(Path(os.environ.get("TROPE_NVRTC", ""))):
        kernels = disassembled(machine_code(source, defines, architecture))
    assert len(kernels) == len(re.findall('extern "C" __global__', source.read_text())) == 1
    (code,) = kernels.values()
    # NVRTC 13.0 gave some copies with a cache hint a descriptor that no GPU can have (trope/kernels/warp.cuh).
    assert "LDGSTS" in code or source.stem == "sheet"  # which copies nothing to shared memory
    assert not re.search(r"desc\[UR\d*[13579]\]", code)
