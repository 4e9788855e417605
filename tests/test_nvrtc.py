"""CUDA C++ compiled by NVRTC: packing everywhere, compilation and launches on a GPU."""

import struct
import threading
from pathlib import Path

import pytest
import torch
from conftest import on_gpu

from trope.kernels import nvrtc

SOURCE = """
#include "warp.cuh"
struct Arguments { float* y; long long n; double scale; };

extern "C" __global__ void add(const Arguments a) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < a.n) a.y[i] += STEP * (float)a.scale;
}

// Turns the numbers of a block around. Shared memory holds WORDS floats, of which the last ones are used.
extern "C" __global__ void turn(const Arguments a) {
  SHARED(memory);
  float* kept = (float*)memory + WORDS - blockDim.x;
  kept[threadIdx.x] = high_of(pack(0.0f, a.y[threadIdx.x]));
  __syncthreads();
  a.y[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}
"""
DEFINES = (("STEP", 3), ("WORDS", 20_000))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "small.cu"
    path.write_text(SOURCE)
    return path


def test_arguments_are_packed_in_fields_of_8_bytes() -> None:
    x = torch.zeros(4)
    data = nvrtc.packed([x, 3, -2, 0.5, True, x[1:]])
    assert struct.unpack("qqqdqq", data) == (x.data_ptr(), 3, -2, 0.5, 1, x.data_ptr() + 4)
    assert len(data) == 48 and nvrtc.packed([]) == b""


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch")
def test_a_cpu_build_of_torch_has_no_nvrtc() -> None:
    assert not nvrtc.is_available()


def test_a_missing_library_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    nvrtc._nvrtc.cache_clear()
    try:
        assert nvrtc._nvrtc() is None and nvrtc._nvrtc() is None
        assert [record.getMessage() for record in caplog.records if "libnvrtc.so.99" in record.getMessage()] == [
            "NVRTC (libnvrtc.so.99) was not found: Triton's kernels run instead of those in CUDA C++, and are slower"
        ]
    finally:
        nvrtc._nvrtc.cache_clear()


@on_gpu
def test_a_kernel_runs(source: Path) -> None:
    assert nvrtc.is_available()
    y = torch.zeros(1000, device="cuda")
    add = nvrtc.kernel(source, "add", DEFINES)
    add.launch((4, 1, 1), 256, 0, [y, 999, 0.5])
    assert (y[:999] == 1.5).all() and y[999] == 0
    add.launch((0, 1, 1), 256, 0, [y, 999, 0.5])
    assert nvrtc.kernel(source, "add", DEFINES) is add


@on_gpu
def test_more_than_48_kib_of_shared_memory(source: Path) -> None:
    y = torch.arange(128.0, device="cuda")
    nvrtc.kernel(source, "turn", DEFINES).launch((1, 1, 1), 128, 4 * 20_000, [y, 128, 0.0])
    assert torch.equal(y, torch.arange(128.0, device="cuda").flip(0))


@on_gpu
def test_a_kernel_is_captured_also_at_its_first_use(source: Path) -> None:
    y = torch.arange(128.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nvrtc.kernel(source, "add", DEFINES).launch((1, 1, 1), 128, 0, [y, 128, 1.0])
        nvrtc.kernel(source, "turn", DEFINES).launch((1, 1, 1), 128, 4 * 20_000, [y, 128, 0.0])
    for _ in range(2):
        graph.replay()
    assert torch.equal(y, torch.arange(128.0, device="cuda") + 6)


@on_gpu
def test_a_thread_without_a_context_may_launch(source: Path) -> None:
    y = torch.zeros(128, device="cuda")
    torch.cuda.synchronize()

    def launch() -> None:  # compiled and loaded in the thread, as autograd does with the kernels of a backward
        nvrtc._context.cache_clear()  # of the tests before this one
        nvrtc.kernel(source, "add", DEFINES, device=0).launch((1, 1, 1), 128, 0, [y, 128, 1.0])

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert (y == 3).all()


@on_gpu
def test_errors_are_shown(source: Path) -> None:
    with pytest.raises(RuntimeError, match="STEP"):
        nvrtc.kernel(source, "add", (("WORDS", 1),))
    with pytest.raises(RuntimeError, match="cuModuleGetFunction"):
        nvrtc.kernel(source, "not_there", DEFINES)
    with pytest.raises(RuntimeError, match="cuFuncSetAttribute"):
        nvrtc.kernel(source, "turn", DEFINES).launch((1, 1, 1), 128, 1 << 20, [torch.zeros(1).cuda(), 1, 0.0])
