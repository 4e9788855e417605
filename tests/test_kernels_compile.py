"""Every kernel compiles for a GPU: the interpreter, in which the other tests run them, takes what Triton refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
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
            "NVRTC 13.0 does not know GPUs of compute capability 99.7: "
        ]


@pytest.mark.compile
@pytest.mark.parametrize(("link", "said"), [(os.symlink, "knows: True\n"), (os.link, "knows: False\n")])
def test_nvrtc_is_found_by_its_name_with_what_lies_beside_it(link: Callable, said: str, tmp_path: Path) -> None:
    """As a system's loader finds it. A library that cannot compile is no NVRTC."""
    (library,) = Path(os.environ.get("TROPE_NVRTC", "")).resolve().glob("nvidia/*/lib/libnvrtc.so.13")
    link(library, tmp_path / library.name)  # a hard link has nothing beside it
    code = (
        "import torch; torch.version.cuda = '13.0'; from trope.kernels import nvrtc; "
        "print('knows:', nvrtc._knows((9, 0)))"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == said, done.stderr
    assert ("NVRTC 13.0 cannot compile (nvrtc: error: failed to open" in done.stderr) == (link is os.link)


def builds() -> list[tuple[Path, Defines, str]]:
    """What is compiled, and for which GPUs: those of attention are for Hopper only."""
    hopper = [(source, defines, "sm_90a") for source, defines in variants(ROOT)]
    return [(*x, "sm_80") for x in variants(ROOT) if x[0].parent.name != "narrow"] + hopper


@pytest.mark.compile
@pytest.mark.parametrize(
    ("source", "defines", "architecture"), builds(), ids=lambda x: str(x.stem if isinstance(x, Path) else x)
)
def test_kernels_in_cuda_compile(source: Path, defines: Defines, architecture: str) -> None:
    with nvrtc_in(Path(os.environ.get("TROPE_NVRTC", ""))):
        kernels = disassembled(machine_code(source, defines, architecture))
    assert len(kernels) == len(re.findall('extern "C" __global__', source.read_text())) == 1
    (code,) = kernels.values()
    # NVRTC 13.0 gave some copies with a cache hint a descriptor that no GPU can have (trope/kernels/warp.cuh).
    assert "LDGSTS" in code or source.stem == "sheet"  # which copies nothing to shared memory
    assert not re.search(r"desc\[UR\d*[13579]\]", code)
