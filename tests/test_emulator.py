"""The CPU that plays the GPU for kernels in CUDA C++: what is right passes, what is wrong on a GPU fails here."""

from pathlib import Path

import pytest
import torch
from emulator import HAS_COMPILER, Module, compiled

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")

PRODUCT = """
#include "warp.cuh"
struct Arguments { const bf16_t *a, *b; float* c; long long depth; };

// c [16 rows of a block, 16] = a [., depth] b; b is [depth, 16] or, if TURNED, [16, depth]. Two warps, 8 columns each.
extern "C" __global__ void __launch_bounds__(64) product(const Arguments x) {
  SHARED(memory);
  const int depth = x.depth, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bf16_t* a = reinterpret_cast<bf16_t*>(memory);
  bf16_t* b = a + 16 * depth;
  for (int i = threadIdx.x; i < 16 * depth / 8; i += blockDim.x) {
    copy16(a + 8 * i, x.a + 16 * depth * blockIdx.x + 8 * i, true);
    copy16(b + 8 * i, x.b + 8 * i, true);
  }
  commit_copies();
#if WAIT
  wait_copies<0>();
#endif
  __syncthreads();
  float sum[4] = {0, 0, 0, 0};
  for (int k = 0; k < depth; k += 16) {
    uint32_t left[4], right[4];
    load_matrices(left, a + lane % 16 * depth + k + lane / 16 * 8);
#if TURNED
    load_matrices(right, b + (lane % 8 + lane / 16 * 8) * depth + k + lane / 8 % 2 * 8);
#else
    load_transposed(right, b + (k + lane % 16) * 16 + lane / 16 * 8);
#endif
    multiply(sum, left, right[2 * warp], right[2 * warp + 1], sum);
  }
  for (int i = 0; i < 4; i++)
    x.c[(16 * blockIdx.x + lane / 4 + i / 2 * 8) * 16 + 8 * warp + lane % 4 * 2 + i % 2] = sum[i];
}
"""

WIDE = """
#include "warp.cuh"
struct Arguments { const bf16_t *a, *b; float *across, *along; };

// across [64, 32] = a [64, 32] b^T, along [64, 32] = twice a b; b is [32, 32].
extern "C" __global__ void __launch_bounds__(128) wide(const Arguments x) {
  SHARED(memory);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 4, chunk = threadIdx.x % 4, first = threadIdx.x / 32 * 16;
  copy16(memory + row * 64 + ((chunk ^ (row / 2 % 4)) << 4), x.b + 32 * row + 8 * chunk, true);
  commit_copies();
  wait_copies<0>();
  if (SHOW) show_to_products();
  __syncthreads();
  uint32_t a[2][4];
  for (int n = 0; n < 2; n++)
    for (int i = 0; i < 4; i++)
      a[n][i] = *reinterpret_cast<const uint32_t*>(
          x.a + (first + lane / 4 + i % 2 * 8) * 32 + 16 * n + i / 2 * 8 + lane % 4 * 2);
  const Rows rows = rows_at(memory);
  float across[4][4], along[4][4];
  begin_products();
  multiply_wide<false, false>(across, a[0], rows, 0, 0);
  multiply_wide<false, true>(across, a[1], rows, 0, 1);
  commit_products();
  multiply_wide<true, false>(along, a[0], rows, 0);
  for (int i = 1; i < 4; i++) multiply_wide<true, true>(along, a[i % 2], rows, i % 2 * 16);
  commit_products();
  wait_products<LATER>(across);
  for (int i = 0; i < 16; i++) {
    const int at = (first + lane / 4 + i / 2 % 2 * 8) * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    x.across[at] = across[i / 4][i % 4], x.along[at] = along[i / 4][i % 4];
  }
}
"""

SMALL = """
#include "warp.cuh"
struct Arguments { float* y; long long n; double scale; };

extern "C" __global__ void shuffles(const Arguments a) {
  const int lane = threadIdx.x % 32;
  float sum = float(threadIdx.x);
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  a.y[threadIdx.x] = sum * float(a.scale);
  a.y[64 + threadIdx.x] = __shfl_sync(0xffffffffu, int(threadIdx.x), 5);
  a.y[128 + threadIdx.x] = __shfl_down_sync(0xffffffffu, threadIdx.x, 3u);
  a.y[192 + threadIdx.x] = lane < 8 ? __shfl_xor_sync(0xffu, threadIdx.x, 1) : 0;
}

extern "C" __global__ void early_return(const Arguments a) {
  SHARED(memory);
  float* kept = reinterpret_cast<float*>(memory);
  if (threadIdx.x >= a.n) return;
  kept[threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  a.y[threadIdx.x] = kept[a.n - 1 - threadIdx.x];
}

extern "C" __global__ void without_barrier(const Arguments a) {
  SHARED(memory);
  float* kept = reinterpret_cast<float*>(memory);
  kept[threadIdx.x] = 1;
  a.y[threadIdx.x] = kept[a.n - 1 - threadIdx.x];
}

extern "C" __global__ void diverges(const Arguments a) {
  if (threadIdx.x % 32 < 7) __syncthreads();
  else __syncwarp();
}

extern "C" __global__ void barrier_in_branch(const Arguments a) {
  float sum[4];
  const uint32_t x[4] = {0, 0, 0, 0};
  if (threadIdx.x != 40) multiply(sum, x, 0, 0, sum);
  __syncthreads();
}

extern "C" __global__ void multiply_after_return(const Arguments a) {
  float sum[4];
  const uint32_t x[4] = {0, 0, 0, 0};
  if (threadIdx.x == 3) return;
  multiply(sum, x, 0, 0, sum);
}

extern "C" __global__ void writes_outside(const Arguments a) {
  SHARED(memory);
  reinterpret_cast<float*>(memory)[threadIdx.x] = 1;
}

extern "C" __global__ void reads_beyond(const Arguments a) { a.y[0] = a.y[a.n]; }
extern "C" __global__ void reads_right_before(const Arguments a) { a.y[0] = a.y[-1] > 0.0f; }
extern "C" __global__ void writes_before(const Arguments a) { a.y[-1024] = 1.0f; }
extern "C" __global__ void writes_right_before(const Arguments a) { a.y[-1] = 1.0f; }

extern "C" __global__ void groups(const Arguments a) {
  SHARED(memory);
  float* kept = reinterpret_cast<float*>(memory);
  copy16(kept, a.y, true);
  commit_copies();
  copy16(kept + 4, a.y + 4, true);
  copy16(kept + 8, nullptr, false);
  commit_copies();
  wait_copies<1>();
  for (int i = 0; i < 12; i++) a.y[12 + i] = kept[i];
  wait_copies<0>();
  for (int i = 0; i < 12; i++) a.y[24 + i] = kept[i];
}

extern "C" __global__ void rounds(const Arguments a) {
  for (int i = 0; i < a.n; i += 2) {
    const uint32_t x = pack(a.y[i], a.y[i + 1]);
    a.y[a.n + i] = low_of(x), a.y[a.n + i + 1] = high_of(x);
    a.y[2 * a.n + i] = low_of(halved(x)), a.y[2 * a.n + i + 1] = high_of(halved(x));
  }
}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Module:
    source = tmp_path_factory.mktemp("small") / "small.cu"
    source.write_text(SMALL)
    return compiled(source, {})


def product(folder: Path, a: torch.Tensor, b: torch.Tensor, turned: int, wait: int) -> torch.Tensor:
    source = folder / "product.cu"
    source.write_text(PRODUCT)
    rows, depth = a.shape
    c = torch.full((rows, 16), torch.nan)
    module = compiled(source, {"TURNED": turned, "WAIT": wait})
    module.launch(
        "product", (rows // 16, 1, 1), 64, 2 * 16 * depth * 2, [a, b.T.contiguous() if turned else b, c, depth]
    )
    return c


@pytest.mark.parametrize("turned", [0, 1])
def test_a_product_is_torchs(turned: int, tmp_path: Path, rng: torch.Generator) -> None:
    a, b = (torch.randn(n, generator=rng).bfloat16() for n in ((48, 32), (32, 16)))
    expected = a.double() @ b.double()
    assert torch.allclose(product(tmp_path, a, b, turned, wait=1).double(), expected, rtol=0, atol=1e-5)


def test_a_missing_wait_gives_nan(tmp_path: Path) -> None:
    a, b = torch.ones(16, 16).bfloat16(), torch.ones(16, 16).bfloat16()
    assert product(tmp_path, a, b, turned=0, wait=0).isnan().all()


def wide_products(folder: Path, rng: torch.Generator, show: int, later: int) -> list[torch.Tensor]:
    source = folder / "wide.cu"
    source.write_text(WIDE)
    a, b = (torch.randn(n, 32, generator=rng).bfloat16() for n in (64, 32))
    across, along = torch.full((2, 64, 32), torch.nan)
    compiled(source, {"SHOW": show, "LATER": later}).launch("wide", (1, 1, 1), 128, 2048, [a, b, across, along])
    return [a.double(), b.double(), across.double(), along.double()]


def test_wide_products_are_torchs(tmp_path: Path, rng: torch.Generator) -> None:
    a, b, across, along = wide_products(tmp_path, rng, show=1, later=0)
    assert torch.allclose(across, a @ b.T, rtol=0, atol=1e-5) and torch.allclose(along, 2 * a @ b, rtol=0, atol=1e-5)


def test_wide_products_that_nobody_waited_for_give_nan(tmp_path: Path, rng: torch.Generator) -> None:
    a, b, across, along = wide_products(tmp_path, rng, show=1, later=1)
    assert torch.allclose(across, a @ b.T, rtol=0, atol=1e-5) and along.isnan().all()


def test_wide_products_read_only_what_was_shown_to_them(tmp_path: Path, rng: torch.Generator) -> None:
    with pytest.raises(RuntimeError, match="show_to_products did not show"):
        wide_products(tmp_path, rng, show=0, later=0)


def test_shuffles(small: Module) -> None:
    y = torch.full((4, 64), torch.nan)
    small.launch("shuffles", (1, 1, 1), 64, 0, [y, 0, 0.5])
    i = torch.arange(64)
    first = i // 32 * 32
    assert torch.equal(y[0], (32 * first + 31 * 16) * 0.5)
    assert torch.equal(y[1], (first + 5).float())
    assert torch.equal(y[2], torch.where(i % 32 < 29, i + 3, i).float())
    assert torch.equal(y[3], torch.where(i % 32 < 8, i ^ 1, 0).float())


@pytest.mark.parametrize("n", [1, 31, 32, 50, 96])
def test_threads_that_returned_do_not_count(n: int, small: Module) -> None:
    y = torch.full((n,), torch.nan)
    small.launch("early_return", (1, 1, 1), 96, 4 * 96, [y, n, 0.0])
    assert torch.equal(y, torch.arange(n).flip(0).float())


def test_a_missing_barrier_is_reported(small: Module) -> None:
    with pytest.raises(RuntimeError, match="in another order"):
        small.launch("without_barrier", (1, 1, 1), 256, 4 * 256, [torch.zeros(256), 256, 0.0])


def test_groups_of_copies_land_in_order(small: Module) -> None:
    y = torch.arange(36.0)
    small.launch("groups", (1, 1, 1), 1, 48, [y, 0, 0.0])
    first, both = y[12:24], y[24:]
    assert torch.equal(first[:4], y[:4]) and first[4:].isnan().all()
    assert torch.equal(both, torch.cat([y[:8], torch.zeros(4)]))


def test_rounding_is_torchs(small: Module, rng: torch.Generator) -> None:
    x = torch.randn(1000, generator=rng)
    x[:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, torch.nan])  # two ties
    y = torch.cat([x, torch.full((2000,), 7.0)])
    small.launch("rounds", (1, 1, 1), 1, 0, [y, 1000, 0.0])
    expected = x.bfloat16().float()
    assert torch.equal(y[1000:2000].nan_to_num(), expected.nan_to_num())
    assert torch.equal(y[2000:].nan_to_num(), (expected / 2).nan_to_num())


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        ("diverges", r"different places: lane 0 at __syncthreads \(.*small.cu:\d+\), lane 7 at __syncwarp"),
        ("barrier_in_branch", r"warp 1, lanes wait at different places: lane 0 at multiply .* lane 8 at __syncthreads"),
        ("multiply_after_return", r"multiply .* needs all 32 lanes"),
        ("writes_outside", r"wrote byte 128 of 128 bytes of shared memory"),
        ("reads_beyond", r"touches memory outside of all tensors"),
        ("reads_right_before", r"touches memory outside of all tensors"),
        ("writes_before", r"touches memory outside of all tensors"),
        ("writes_right_before", r"wrote outside of a tensor"),
    ],
)
def test_what_is_undefined_on_a_gpu_is_reported(kernel: str, error: str, small: Module) -> None:
    for _ in range(2):  # the second launch starts afresh
        with pytest.raises(RuntimeError, match=error):
            small.launch(kernel, (2, 1, 1), 64, 128, [torch.zeros(64), 64, 0.0])


def test_two_libraries_do_not_share_their_arguments(small: Module, tmp_path: Path) -> None:
    """Both have a struct of this name, and the loader would take one for both."""
    wide = tmp_path / "wide.cu"
    wide.write_text(
        '#include "warp.cuh"\nstruct Arguments { long long a[20]; float* y; };\n'
        'extern "C" __global__ void last(const Arguments a) { a.y[threadIdx.x] = a.a[19]; }'
    )
    y, z = torch.full((256,), torch.nan), torch.zeros(32)
    small.launch("shuffles", (1, 1, 1), 64, 0, [y, 0, 0.5])
    compiled(wide, {}).launch("last", (1, 1, 1), 32, 0, [*range(20), z])
    small.launch("shuffles", (1, 1, 1), 64, 0, [y, 0, 0.5])
    assert (z == 19).all() and not y.isnan().any()


def test_arguments_that_do_not_fit_are_refused(small: Module) -> None:
    with pytest.raises(RuntimeError, match="takes 24 bytes of arguments, got 16"):
        small.launch("shuffles", (1, 1, 1), 64, 0, [torch.zeros(256), 0])


def test_the_compilers_error_is_shown(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("int f() { return not_there; }")
    with pytest.raises(RuntimeError, match="not_there"):
        compiled(source, {})
