// AdamW for the rows of the item table that are no token's input, on a few multiprocessors that it has for itself.
//
// Why not the Triton kernel: beside the network's backward pass its thousands of small programs sit on every
// multiprocessor. The network's products need whole ones, and would wait for programs to drain. Here a block fills a
// multiprocessor and stays: the network has all others from the first launch to the last. reference.py is the ground truth.
//
// A warp has a row at a time, and looks ahead: weights and moments of its next row go to shared memory while it adds up
// the entries of this one. Where the rows after that have their entries is asked for a turn earlier. A lane copies what it
// reads itself, so that nobody waits for another. Rows are dealt in a fixed order, and so are the sums.
//
// Names: WIDTH numbers of a row. Lane i has the numbers 4 i .. 4 i + 3 of each 128.

#include "warp.cuh"

#ifndef WIDTH          // a multiple of 128
#define WIDTH 512
#define CANDIDATES 129 // of a token
#define ROWWISE 0      // one second moment for a row
#define IS_BF16 1      // the outputs and the unit vectors, else float32
#endif

struct Arguments {  // 8 bytes each, in the order of own.py
  float *table, *avg, *sq;        // [rows, WIDTH]; sq [rows] if ROWWISE
  void* unit;                     // [rows, WIDTH] unit vectors
  const void* out;                // [T, WIDTH]
  const float* coefs;             // [T, CANDIDATES]
  const long long* order;         // entries by item
  const int *first, *input_first; // [rows + 1]: where each item's entries begin
  const float* factors;           // of AdamW
  float* partial;                 // [warps] squared gradients
  long long rows;
  double least;                   // length that a row is divided by
};

constexpr int WARPS = 16, THREADS = 32 * WARPS, STAGES = 2;
constexpr int PARTS = WIDTH / 128;          // of a lane, four numbers each
constexpr int STATES = ROWWISE ? 2 : 3;     // weights, first moment, second moment
constexpr int TOGETHER = 4;                 // entries whose outputs are under way at once
constexpr unsigned ALL_LANES = 0xffffffffu;
static_assert(WIDTH % 128 == 0, "a lane has four numbers of each 128");

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(ALL_LANES, x, i);
  return x;
}

// A token's outputs; in bf16 two share a register, and z and w are not used.
__device__ __forceinline__ void load_output(uint4 (&x)[PARTS], const void* out, int token) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    if (IS_BF16) {
      const bf16_t* from = static_cast<const bf16_t*>(out) + 128 * p + 4 * lane;
      const uint2 pairs = __ldg(reinterpret_cast<const uint2*>(from + static_cast<long long>(token) * WIDTH));
      x[p].x = pairs.x, x[p].y = pairs.y;
    } else {
      const float* from = static_cast<const float*>(out) + 128 * p + 4 * lane;
      x[p] = __ldg(reinterpret_cast<const uint4*>(from + static_cast<long long>(token) * WIDTH));
    }
  }
}

// sum += coef * a row of outputs
__device__ __forceinline__ void add_output(float (&sum)[PARTS][4], const uint4 (&x)[PARTS], float coef) {
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    if (IS_BF16) {
      sum[p][0] += coef * low_of(x[p].x), sum[p][1] += coef * high_of(x[p].x);
      sum[p][2] += coef * low_of(x[p].y), sum[p][3] += coef * high_of(x[p].y);
    } else {
      sum[p][0] += coef * __uint_as_float(x[p].x), sum[p][1] += coef * __uint_as_float(x[p].y);
      sum[p][2] += coef * __uint_as_float(x[p].z), sum[p][3] += coef * __uint_as_float(x[p].w);
    }
  }
}

// Grid (multiprocessors,).
extern "C" __global__ void __launch_bounds__(THREADS, 1) update_others(const Arguments a) {
  SHARED(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rows = static_cast<int>(a.rows);
  const int unit = blockIdx.x * WARPS + warp, step = gridDim.x * WARPS;
  // [STAGES][STATES][PARTS][32] of this warp, 16 bytes each
  float4* mine = reinterpret_cast<float4*>(shared) + warp * STAGES * STATES * PARTS * 32 + lane;

  // Lanes 0 and 1: where the score entries of a row begin and end; 2 and 3: the same of its input entries.
  auto bounds_of = [&](int row) {
    const int* first = (lane & 2) ? a.input_first : a.first;
    return row < rows ? __ldg(first + row + (lane & 1)) : 0;
  };
  auto is_mine = [&](int bounds) { return __shfl_sync(ALL_LANES, bounds, 2) == __shfl_sync(ALL_LANES, bounds, 3); };
  auto entry_of = [&](int at, int end) { return at + lane < end ? static_cast<int>(__ldg(a.order + at + lane)) : 0; };
  auto fetch = [&](int row, int stage) {
    float4* to = mine + stage * STATES * PARTS * 32;
    const float* from[3] = {a.table, a.avg, a.sq};
#pragma unroll
    for (int s = 0; s < STATES; ++s)
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        copy16(to + (s * PARTS + p) * 32, from[s] + static_cast<long long>(row) * WIDTH + 128 * p + 4 * lane, true);
  };

  const float decay = a.factors[0], beta1 = a.factors[1], rest1 = a.factors[2], beta2 = a.factors[3];
  const float rest2 = a.factors[4], step_size = a.factors[5], inverse_root2 = a.factors[6], eps = a.factors[7];
  const float least = static_cast<float>(a.least);
  float squares = 0.0f;

  int row = 1 + unit, stage = 0;  // row 0 is padding
  int bounds = bounds_of(row), next_bounds = bounds_of(row + step);
  bool has_row = row < rows && is_mine(bounds);
  int entry = entry_of(__shfl_sync(ALL_LANES, bounds, 0), __shfl_sync(ALL_LANES, bounds, 1));
  if (has_row) fetch(row, stage);
  commit_copies();
  for (; row < rows; row += step, stage ^= 1) {
    const int begin = __shfl_sync(ALL_LANES, bounds, 0), end = __shfl_sync(ALL_LANES, bounds, 1);
    const int later_bounds = bounds_of(row + 2 * step);
    const bool has_next = is_mine(next_bounds) && row + step < rows;
    if (has_next) fetch(row + step, stage ^ 1);
    commit_copies();
    const int next_entry =
        entry_of(__shfl_sync(ALL_LANES, next_bounds, 0), __shfl_sync(ALL_LANES, next_bounds, 1));
    if (has_row) {
      float g[PARTS][4] = {};
      for (int at = begin; at < end; at += 32) {
        if (at != begin) entry = entry_of(at, end);
        const int last = min(end - at, 32) - 1;
        const float coef = lane <= last ? __ldg(a.coefs + entry) : 0.0f;
        // Lanes without an entry have the last one's token, and a coefficient of 0: nobody asks which entries exist.
        const int token = __shfl_sync(ALL_LANES, entry / CANDIDATES, min(lane, last));
        for (int i = 0; i <= last; i += TOGETHER) {
          uint4 x[TOGETHER][PARTS];
#pragma unroll
          for (int n = 0; n < TOGETHER; ++n) load_output(x[n], a.out, __shfl_sync(ALL_LANES, token, i + n));
#pragma unroll
          for (int n = 0; n < TOGETHER; ++n) add_output(g, x[n], __shfl_sync(ALL_LANES, coef, i + n));
        }
      }

      wait_copies<1>();
      const float4* states = mine + stage * STATES * PARTS * 32;
      float w[PARTS][4], along = 0.0f, squared = 0.0f;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const float4 x = states[p * 32];
        w[p][0] = x.x, w[p][1] = x.y, w[p][2] = x.z, w[p][3] = x.w;
#pragma unroll
        for (int e = 0; e < 4; ++e) along += g[p][e] * w[p][e], squared += w[p][e] * w[p][e];
      }
      squared = sum_of_warp(squared), along = sum_of_warp(along);
      const float length = sqrtf(squared), inverse = 1.0f / max(length, least);
      // Back through the normalisation: without the radial part, over the length.
      const float radial = length > least ? along * inverse * inverse : 0.0f;
      float square = 0.0f;
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          g[p][e] = (g[p][e] - w[p][e] * radial) * inverse;
          square += g[p][e] * g[p][e];
        }
      squares += square;  // of this lane; all of them are added at the end
      float sq = 0.0f;
      if (ROWWISE) {
        sq = a.sq[row] * beta2 + sum_of_warp(square) / WIDTH * rest2;
        __syncwarp();  // all lanes have read it
        if (lane == 0) a.sq[row] = sq;
      }
      squared = 0.0f;
      const long long begins = static_cast<long long>(row) * WIDTH + 4 * lane;
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const float4 x = states[(PARTS + p) * 32], y = ROWWISE ? float4{} : states[((STATES - 1) * PARTS + p) * 32];
        float avg[4] = {x.x, x.y, x.z, x.w}, of_each[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          avg[e] = avg[e] * beta1 + g[p][e] * rest1;
          of_each[e] = ROWWISE ? sq : of_each[e] * beta2 + g[p][e] * g[p][e] * rest2;
          w[p][e] = w[p][e] * decay - avg[e] * fast_quotient(step_size, fast_sqrt(of_each[e]) * inverse_root2 + eps);
          squared += w[p][e] * w[p][e];
        }
        __stcs(reinterpret_cast<float4*>(a.table + begins + 128 * p), float4{w[p][0], w[p][1], w[p][2], w[p][3]});
        __stcs(reinterpret_cast<float4*>(a.avg + begins + 128 * p), float4{avg[0], avg[1], avg[2], avg[3]});
        if (!ROWWISE)
          __stcs(reinterpret_cast<float4*>(a.sq + begins + 128 * p),
                 float4{of_each[0], of_each[1], of_each[2], of_each[3]});
      }
      const float over = 1.0f / max(sqrtf(sum_of_warp(squared)), least);
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const float u[4] = {w[p][0] * over, w[p][1] * over, w[p][2] * over, w[p][3] * over};
        if (IS_BF16)
          *reinterpret_cast<uint2*>(static_cast<bf16_t*>(a.unit) + begins + 128 * p) =
              uint2{pack(u[0], u[1]), pack(u[2], u[3])};
        else
          *reinterpret_cast<float4*>(static_cast<float*>(a.unit) + begins + 128 * p) = float4{u[0], u[1], u[2], u[3]};
      }
    }
    bounds = next_bounds, next_bounds = later_bounds, entry = next_entry, has_row = has_next;
  }
  squares = sum_of_warp(squares);
  if (lane == 0) a.partial[unit] = squares;
}
