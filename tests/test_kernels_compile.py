"""Every kernel compiles for a GPU: the interpreter, in which the other tests run them, takes what Triton refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.compile
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "same_kernels.py", "--code", ROOT, "--out", tmp_path / "out.json"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "launches of" in done.stdout
    print(done.stdout)
