// What the kernels in CUDA C++ need of a GPU, one short function each; compute capability 8.0 or newer.
//
// With TROPE_EMULATE a CPU plays the GPU: tests/emulator/emulate.h defines the same names, one fiber for each thread.
//
// A fragment is what the 32 lanes of a warp hold of a small matrix, as `mma.sync.m16n8k16` lays it out. Lane 4 g + c has
// of a 16 x 8 sum: [g][2c], [g][2c + 1], [g + 8][2c], [g + 8][2c + 1]. Two bf16 of neighbouring columns share a register,
// the lower column in the lower half.

#pragma once

#ifdef TROPE_EMULATE
#include "emulate.h"
#else

#define SHARED(name) extern __shared__ __align__(512) unsigned char name[]

typedef unsigned int uint32_t;
typedef unsigned short bf16_t;  // the bits of a bf16
typedef unsigned char uint8_t;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of bf16 from shared memory. Lane i has the address of row i % 8 of matrix i / 8, 16 bytes long.
// Lane 4 g + c gets [g][2c], [g][2c + 1] of each.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}

// The same transposed: lane 4 g + c gets [2c][g], [2c + 1][g] of each.
__device__ __forceinline__ void load_transposed(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}

// sum [16 x 8] = before + a [16 x 16] b [16 x 8]. a: four 8 x 8 matrices, rows 0-7 and 8-15 of columns 0-7, then of
// columns 8-15. b: lane 4 g + c has [2c][g], [2c + 1][g] in b0 and the same of rows 8-15 in b1.
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         const float (&before)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(before[0]), "f"(before[1]), "f"(before[2]),
        "f"(before[3]));
}

// Copies 16 bytes to shared memory while the program goes on; zeros if not `exists`, then nothing is read. Without a hint
// for the cache: NVRTC 13.0 makes an illegal instruction of some copies that have one.
__device__ __forceinline__ void copy16(void* shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(shared)), "l"(global), "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

// tanh with an error of 2^-11, which is less than bf16's own.
__device__ __forceinline__ float fast_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// With an error of a few units in the last place; numbers below 2^-126 are taken for 0.
__device__ __forceinline__ float fast_sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_quotient(float x, float y) {
  float z;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Products of four warps, 0-3 or 4-7 and so on, which take one side from shared memory and go on while the program does.
// Only Hopper has them (sm_90a). Sums and left sides must not be touched between `multiply_wide` and the wait for it.

// Before the first product, and after the program has written registers that a product takes.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// A group ends here.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Between the writing of shared memory, also by copies, and the barrier after which products read it.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define TROPE_FOUR(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])

// Waits until all groups but the last LEFT are done, among them the one of `sum`.
template <int LEFT> __device__ __forceinline__ void wait_products(float (&sum)[4][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %16;"
               : TROPE_FOUR(sum[0]), TROPE_FOUR(sum[1]), TROPE_FOUR(sum[2]), TROPE_FOUR(sum[3]) : "n"(LEFT) : "memory");
}

// Where products find rows of 32 numbers, 64 bytes, in shared memory, from a multiple of 512 bytes on. Chunks of 16 bytes
// are swapped in each: chunk i of row r is at place i ^ (r / 2 % 4).
typedef uint32_t Rows;
__device__ __forceinline__ Rows rows_at(const void* p) { return (shared_address(p) & 0x3ffff) >> 4 | 1u << 16; }
__device__ __forceinline__ Rows beyond(Rows rows, int bytes) { return rows + bytes / 16; }

// sum [64 x 32] = a [64 x 16] right, plus the sum before if ADDS. A warp has 16 rows of a and of the sum, laid out as in
// `multiply`. ALONG: right is 16 whole rows, from `row` on. Otherwise it is 16 numbers of 32 rows, which are its columns:
// the first or the second half of each row. `row` and `half` are known when this is compiled.
template <bool ALONG, bool ADDS>
__device__ __forceinline__ void multiply_wide(float (&sum)[4][4], const uint32_t (&a)[4], Rows rows, int row,
                                              int half = 0) {
  // 512 bytes, counted in 16, from eight rows to the next; chunks are swapped among four.
  asm volatile(
      "{.reg .pred p; .reg .b64 right; setp.ne.b32 p, %22, 0; mov.b64 right, {%20, %23};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15}, {%16, %17, %18, %19}, right, p, 1, 1, %21;}"
      : TROPE_FOUR(sum[0]), TROPE_FOUR(sum[1]), TROPE_FOUR(sum[2]), TROPE_FOUR(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(rows + (64 * row + 32 * half) / 16), "n"(ALONG), "n"(ADDS),
        "n"(32u | 2u << 30) : "memory");
}

// Two floats rounded to bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
__device__ __forceinline__ float low_of(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_of(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// Both halves times 1/2, exactly.
__device__ __forceinline__ uint32_t halved(uint32_t x) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x3f003f00u), "r"(0x80008000u));
  return y;
}

#endif
