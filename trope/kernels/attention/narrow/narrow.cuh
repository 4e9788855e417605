// HSTU's attention for heads of 32 numbers in bf16, with the bias as a sheet: the forward and its backward.
//
// Why not Triton: with heads this narrow a tile has little to multiply and much to do between the products, and there a
// warp waits for the tile of four. Here a warp has its rows for itself: their sums stay in registers, and what streams
// past goes through shared memory. reference.py is the ground truth, docs/kernels.md has the numbers.
//
// sheet.cu writes the bias. The other three kernels have one shape: the rows of a warp stay (queries, or keys), the other
// side streams past in stages, which `copy16` brings while the stage before is computed. forward.cu gives y, keys.cu dk
// and dv, and the gradient of the scores, from which queries.cu gives dq and the gradients of the bias. Sums have a fixed
// order: there are no atomics. keys.cu takes Hopper's products of four warps; in forward.cu these gained nothing.
//
// SiLU by the hardware's tanh. With h = s / 2 and t = tanh(h): silu(s) = h (1 + t), and twice its slope is
// 1 + t + h (1 - t^2). Scores come out halved because queries (or keys) and the sheet are halved beforehand, which is
// exact; values are halved too, for the slope's factor 2.
//
// A product takes some 30 cycles until the next can use it, so code is ordered by kind: all products of a step that do
// not wait for each other, then all of SiLU, then the products with it. Where all pairs of a stage may be seen, it has no
// branches (`Always`). Addresses of copies are formed once, not in every stage: that was half of all instructions.
//
// The sheet hides pairs: a hidden one has a score so low that SiLU and its slope are 0. It is written in tiles of 64 x 64
// up to the diagonal, and nothing here looks beyond those. Rows beyond a sequence are read as zeros.
//
// Names: B sequences, L positions, HEADS heads, S stride of a row of the sheet. lane = 4 g + c, as in warp.cuh. A tile in
// shared memory has rows of 64 or 128 bytes in chunks of 16; `place` swaps chunks so that eight rows' chunks lie in eight
// banks.

#pragma once

#include "warp.cuh"

#ifndef HEADS  // 2, 4 or 8
#define HEADS 8
#define HAS_POSITION 1  // which bias weights have a gradient
#define HAS_TIME 1
#endif

constexpr int D = 32, ROW = 2 * D;  // numbers and bytes of a row of one head
constexpr int BUCKETS = 129;  // most time weights; odd, so that rows of a histogram begin in different banks

struct Arguments {  // 8 bytes each, in the order of __init__.py
  const bf16_t *q, *k, *v, *dy;       // [T, HEADS, D]
  bf16_t *y, *dq, *dk, *dv;           // [T, HEADS, D]; y is contiguous
  unsigned char* ds;                  // [B, HEADS, S / 16 keys, S / 32 queries, PATCH], without the factor 1 / n
  bf16_t* sheet;                      // [B or 1, S, S], half of the bias
  const float *position, *time;       // weights [2 * centre + 1] and [last + 1]
  const uint8_t* buckets;             // [B, L, S]
  const long long *starts, *lengths;  // [B]
  float* sums;                        // partial sums [units, sums_row]: by distance [S], the last first, then by bucket
  long long sums_row;
  long long q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, grad_token, grad_head;  // strides
  long long row, sheet_stride, longest, centre, last;  // S, of a sequence's sheet, L, of distance 0, the last bucket
  double scale;                                        // 1 / n
};

// Offset in bytes of a chunk of 16 bytes in a tile with rows of BYTES.
template <int BYTES> __device__ __forceinline__ int place(int row, int chunk) {
  if (BYTES == 64) return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
  return row * BYTES + ((chunk ^ (row & 7)) << 4);
}

// The gradient of the scores of 16 keys and 32 queries: a tile with a row for each key. narrow_keys writes it from
// registers, 16 bytes a lane and whole lines a warp, and narrow_queries copies it as it is.
constexpr int PATCH = 16 * ROW;  // bytes
__device__ __forceinline__ long long patch_of(long long unit, int keys, int queries, int S) {
  return ((unit * (S / 16) + keys) * (S / 32) + queries) * PATCH;
}

// The row in which a query lies in the tiles of narrow_keys. There rows are columns of a product, of which a lane has the
// pairs 8 n + 2 c, 8 n + 2 c + 1 of 32: they hold queries 8 c + 2 n, 8 c + 2 n + 1, so a lane has eight that follow each
// other.
__device__ __forceinline__ int turned(int query) { return (query & ~30) | (query & 24) >> 2 | (query & 6) << 2; }

__device__ __forceinline__ uint32_t load_pair(const bf16_t* p, bool exists) {
  return exists ? __ldg(reinterpret_cast<const uint32_t*>(p)) : 0u;
}

// 16 rows of one head as the left side of a product, from global memory; rows from `limit` on are zero.
__device__ __forceinline__ void load_left(uint32_t (&x)[2][4], const bf16_t* p, long long stride, int row, int limit) {
  const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
  for (int s = 0; s < 2; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = row + g + 8 * (i & 1);
      x[s][i] = load_pair(p + at * stride + 16 * s + 8 * (i >> 1) + 2 * c, at < limit);
    }
}

__device__ __forceinline__ void halve(uint32_t (&x)[2][4]) {
#pragma unroll
  for (int s = 0; s < 2; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[s][i] = halved(x[s][i]);
}

// Where a lane begins to read a head's tile; rows from a multiple of 16 on begin a constant further.
struct Places {
  int across, along[2];
  __device__ __forceinline__ Places() {
    const int lane = threadIdx.x & 31;
    across = place<ROW>(lane & 7, lane >> 3);
#pragma unroll
    for (int n = 0; n < 2; ++n) along[n] = place<ROW>(lane & 15, 2 * n + (lane >> 4));
  }
};

// 16 rows of a head's tile from `row` on, a multiple of 16. `across`: as columns of the right side, for products over D.
__device__ __forceinline__ void load_across(uint32_t (&x)[2][4], const unsigned char* tile, int row, const Places& at) {
#pragma unroll
  for (int n = 0; n < 2; ++n) load_matrices(x[n], tile + at.across + (row + 8 * n) * ROW);
}

// `along`: as rows of the right side, for products over the 16 rows.
__device__ __forceinline__ void load_along(uint32_t (&x)[2][4], const unsigned char* tile, int row, const Places& at) {
#pragma unroll
  for (int n = 0; n < 2; ++n) load_transposed(x[n], tile + at.along[n] + row * ROW);
}

// sum [16 x D] += left [16 x 16] right
__device__ __forceinline__ void multiply_along(float (&sum)[4][4], const uint32_t (&left)[4],
                                               const uint32_t (&right)[2][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint32_t(&x)[4] = right[n >> 1];
    multiply(sum[n], left, x[2 * (n & 1)], x[2 * (n & 1) + 1], sum[n]);
  }
}

// The halved bias of 16 x 16 pairs as the beginning of a sum; x as `load_matrices` or `load_transposed` gives it.
__device__ __forceinline__ void begin(float (*sum)[4], const uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i >> 1][2 * (i & 1)] = low_of(x[i]);
    sum[i >> 1][2 * (i & 1) + 1] = high_of(x[i]);
  }
}

// 16 x 16 sums as the left side of a product.
__device__ __forceinline__ void as_left(uint32_t (&x)[4], const float (*sum)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = pack(sum[i >> 1][2 * (i & 1)], sum[i >> 1][2 * (i & 1) + 1]);
}

// The gradient of a score from half of it, its tanh, and half of the gradient of its SiLU.
__device__ __forceinline__ float slope(float h, float t, float d) {
  const float w = h * (1.0f - t * t) + t;
  return d * w + d;
}

// 16 rows of one head to global memory, times `scale`; rows from `limit` on are not written.
__device__ __forceinline__ void store_rows(bf16_t* p, long long stride, const float (&sum)[4][4], int row, int limit,
                                           float scale) {
  const int g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = row + g + 8 * i;
    if (at < limit)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        *reinterpret_cast<uint32_t*>(p + at * stride + 8 * n + 2 * c) =
            pack(sum[n][2 * i] * scale, sum[n][2 * i + 1] * scale);
  }
}

// A constant as a type, so that a stage is compiled twice: with branches, and without.
struct Always { static constexpr bool value = true; };
struct Partly { static constexpr bool value = false; };

// Copies COUNT rows of NUMBER heads to tiles, one tile of COUNT rows for each head; all THREADS take part. TURNED: for
// narrow_keys.
template <int NUMBER, int COUNT, int THREADS, bool TURNED = false> struct RowCopy {
  static constexpr int STEP = THREADS / (4 * NUMBER);  // rows at once
  static_assert(THREADS % (4 * NUMBER) == 0 && COUNT % STEP == 0 && STEP % (TURNED ? 32 : 8) == 0,
                "threads copy whole rows, each to the same place of eight or of 32");
  const bf16_t* from;
  long long step;
  int left, to;  // rows from here to the first that does not exist

  // From the row `first` on; rows from `limit` on are zero.
  __device__ __forceinline__ RowCopy(const bf16_t* p, long long token, long long head, int first, int limit) {
    const int chunk = threadIdx.x & 3, h = (threadIdx.x >> 2) % NUMBER, row = threadIdx.x / (4 * NUMBER);
    from = p + (first + row) * token + h * head + 8 * chunk;
    to = h * COUNT * ROW + place<ROW>(TURNED ? turned(row) : row, chunk);
    left = limit - first - row;
    step = STEP * token;
  }

  // The next COUNT rows.
  __device__ __forceinline__ void operator()(unsigned char* tiles) {
#pragma unroll
    for (int n = 0; n < COUNT; n += STEP, from += step) copy16(tiles + to + n * ROW, from, n < left);
    left -= COUNT;
  }
};

// Copies ROWS x COLUMNS of the sheet to a tile.
template <int ROWS, int COLUMNS, int THREADS, bool TURNED = false> struct SheetCopy {
  static constexpr int CHUNKS = COLUMNS / 8, STEP = THREADS / CHUNKS;  // rows at once
  static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0 && STEP % (TURNED ? 32 : 8) == 0,
                "threads copy whole rows, each to the same place of eight or of 32");
  const bf16_t* from;
  long long step, next;
  int left, to;  // rows from here to the end of the sheet

  // `next`: numbers in the sheet from one copy to the following.
  __device__ __forceinline__ SheetCopy(const bf16_t* sheet, int S, int first_row, int first_column, long long next)
      : next(next) {
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    from = sheet + static_cast<long long>(first_row + row) * S + first_column + 8 * chunk;
    to = place<2 * COLUMNS>(TURNED ? turned(row) : row, chunk);
    left = S - first_row - row;
    step = static_cast<long long>(STEP) * S;
  }

  // The next ROWS x COLUMNS; rows beyond the sheet are zero, where one copy follows the other in a row of the sheet.
  __device__ __forceinline__ void operator()(unsigned char* tile) {
    const bf16_t* p = from;
#pragma unroll
    for (int n = 0; n < ROWS; n += STEP, p += step) copy16(tile + to + n * 2 * COLUMNS, p, n < left);
    from += next;
  }
};

// Begins the copies of a stage: two tiles of TILE bytes and the bias. Past the last stage there is nothing to copy.
template <int TILE, class First, class Second, class Bias>
__device__ __forceinline__ void fetch_stage(unsigned char* stage, bool exists, First& first, Second& second, Bias& bias) {
  if (exists) {
    first(stage);
    second(stage + TILE);
    bias(stage + 2 * TILE);
  }
  commit_copies();
}
