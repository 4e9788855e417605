// HSTU's attention for heads of 32 numbers in bf16, with the bias as a sheet: the forward and its backward.
//
// Why not Triton: with heads this narrow a tile has little to multiply and much to do between the products, and there a
// warp waits for the tile of four. Here a warp has its rows for itself: their sums stay in registers, and what streams
// past goes through shared memory. reference.py is the ground truth, docs/kernels.md has the numbers.
//
// narrow_sheet writes the bias. The other three have one shape: the rows of a warp stay (queries, or keys), the other
// side streams past in stages, which `copy16` brings while the stage before is computed.
//   narrow_forward: y of 64 queries, 2 heads. A warp has 32 queries of one head.
//   narrow_keys: dk, dv and the gradient of the scores of 64 keys, 2 heads. A warp has 32 keys of one head, and works on
//     transposed scores, which are computed again.
//   narrow_queries: dq of 64 queries, all heads, from the gradient of the scores. A warp has 32 queries of one head. The
//     same stages give the gradients of both biases: summed over the heads, then by distance and by bucket of time.
// Sums have a fixed order: there are no atomics.
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

#include "warp.cuh"

#ifndef HEADS  // 2, 4 or 8
#define HEADS 8
#define HAS_POSITION 1  // which bias weights have a gradient
#define HAS_TIME 1
#endif

constexpr int D = 32, ROW = 2 * D;  // numbers and bytes of a row of one head
constexpr int BUCKETS = 129;  // most time weights; odd, so that rows of a histogram begin in different banks

struct Arguments {  // 8 bytes each, in the order of narrow.py
  const bf16_t *q, *k, *v, *dy;       // [T, HEADS, D]
  bf16_t *y, *dq, *dk, *dv;           // [T, HEADS, D]; y is contiguous
  uint32_t* ds;                       // [B, HEADS, S / 16 keys, S / 16 queries, PATCH], without the factor 1 / n
  bf16_t* sheet;                      // [B or 1, S, S], half of the bias
  const float *position, *time;       // weights [2 * centre + 1] and [last + 1]
  const uint8_t* buckets;             // [B, L, S]
  const long long *starts, *lengths;  // [B]
  float *by_distance, *by_bucket;     // partial sums [units, S], last distance first, and [units, last + 1]
  long long q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, grad_token, grad_head;  // strides
  long long row, sheet_stride, longest, centre, last;  // S, of a sequence's sheet, L, of distance 0, the last bucket
  double scale;                                        // 1 / n
};

// The gradient of 16 keys' scores with 16 queries, as the lanes of narrow_keys hold it: four 8 x 8 matrices, a row for each
// key. They are keys 0-7 and 8-15 of queries 0-7, then the same of queries 8-15. Written so, every store of a warp is one
// whole line, and nothing goes through shared memory, whose speed is the limit here.
constexpr int PATCH = 128;  // pairs of numbers
__device__ __forceinline__ long long patch_of(long long unit, int keys, int queries, int S) {
  return (unit * (S / 16) + keys) * (S / 16) + queries;
}

// Offset in bytes of a chunk of 16 bytes in a tile with rows of BYTES.
template <int BYTES> __device__ __forceinline__ int place(int row, int chunk) {
  if (BYTES == 64) return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
  return row * BYTES + ((chunk ^ (row & 7)) << 4);
}

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

// Of 16 M rows: s += left right^T and d = d_left d_right^T, in an order in which no product waits for the one before.
template <int M>
__device__ __forceinline__ void multiply_both(float (&s)[M][2][4], float (&d)[M][2][4], const uint32_t (&left)[M][2][4],
                                              const uint32_t (&d_left)[M][2][4], const uint32_t (&right)[2][4],
                                              const uint32_t (&d_right)[2][4]) {
  const float zero[4] = {};
#pragma unroll
  for (int x = 0; x < 2; ++x)  // halves of D
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float(&d_before)[4] = *(x ? &d[m][n] : &zero);
        multiply(s[m][n], left[m][x], right[n][2 * x], right[n][2 * x + 1], s[m][n]);
        multiply(d[m][n], d_left[m][x], d_right[n][2 * x], d_right[n][2 * x + 1], d_before);
      }
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
__device__ __forceinline__ void begin(float (&sum)[2][4], const uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i >> 1][2 * (i & 1)] = low_of(x[i]);
    sum[i >> 1][2 * (i & 1) + 1] = high_of(x[i]);
  }
}

// 16 x 16 sums as the left side of a product.
__device__ __forceinline__ void as_left(uint32_t (&x)[4], const float (&sum)[2][4]) {
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

// Copies COUNT rows of NUMBER heads to tiles, one tile of COUNT rows for each head; all THREADS take part.
template <int NUMBER, int COUNT, int THREADS> struct RowCopy {
  static constexpr int STEP = THREADS / (4 * NUMBER);  // rows at once
  static_assert(THREADS % (4 * NUMBER) == 0 && COUNT % STEP == 0 && STEP % 8 == 0, "threads copy whole rows");
  const bf16_t* from;
  long long step;
  int left, to;  // rows from here to the first that does not exist

  // From the row `first` on; rows from `limit` on are zero.
  __device__ __forceinline__ RowCopy(const bf16_t* p, long long token, long long head, int first, int limit) {
    const int chunk = threadIdx.x & 3, h = (threadIdx.x >> 2) % NUMBER, row = threadIdx.x / (4 * NUMBER);
    from = p + (first + row) * token + h * head + 8 * chunk;
    to = h * COUNT * ROW + place<ROW>(row, chunk);
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
template <int ROWS, int COLUMNS, int THREADS> struct SheetCopy {
  static constexpr int CHUNKS = COLUMNS / 8, STEP = THREADS / CHUNKS;  // rows at once
  static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0 && STEP % 8 == 0, "threads copy whole rows");
  const bf16_t* from;
  long long step, next;
  int left, to;  // rows from here to the end of the sheet

  // `next`: numbers in the sheet from one copy to the following.
  __device__ __forceinline__ SheetCopy(const bf16_t* sheet, int S, int first_row, int first_column, long long next)
      : next(next) {
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    from = sheet + static_cast<long long>(first_row + row) * S + first_column + 8 * chunk;
    to = place<2 * COLUMNS>(row, chunk);
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

// -------------------------------------------------------------------------------------------------------------- sheet

constexpr int SHEET_TILE = 64, SHEET_THREADS = 128;
constexpr float HIDDEN = -8192.0f;  // half of a score whose SiLU and slope are 0

// Grid (tiles of queries, tiles of keys, B or 1). A thread has eight keys of every 16th query.
extern "C" __global__ void __launch_bounds__(SHEET_THREADS) narrow_sheet(const Arguments a) {
  SHARED(shared);
  float* by_bucket = reinterpret_cast<float*>(shared);
  float* by_distance = by_bucket + BUCKETS;  // of this tile's distances: key - query + 63
  const int m = blockIdx.x * SHEET_TILE, n = blockIdx.y * SHEET_TILE, S = static_cast<int>(a.row), tid = threadIdx.x;
  // Without a time bias one sheet serves all sequences.
  const int length = static_cast<int>(HAS_TIME ? a.lengths[blockIdx.z] : a.longest), centre = static_cast<int>(a.centre);
  if (n > m || m >= length) return;
  if (HAS_TIME)
    for (int i = tid; i <= a.last; i += SHEET_THREADS) by_bucket[i] = 0.5f * a.time[i];
  // Rows beyond a sequence may be further apart than the weights reach.
  const int distance = n - m + tid - (SHEET_TILE - 1);
  by_distance[tid] = HAS_POSITION ? 0.5f * a.position[centre + max(min(distance, 0), -centre)] : 0.0f;
  __syncthreads();
  const int chunk = 8 * (tid & 7);
#pragma unroll
  for (int row = tid >> 3; row < SHEET_TILE; row += SHEET_THREADS / 8) {
    const bool exists = m + row < length;
    uint2 buckets = {0u, 0u};
    if (HAS_TIME && exists)
      buckets = __ldg(reinterpret_cast<const uint2*>(a.buckets + (blockIdx.z * a.longest + m + row) * S + n + chunk));
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t bucket = ((e < 4 ? buckets.x : buckets.y) >> (8 * (e & 3))) & 255u;
      const bool is_hidden = !exists || n + chunk + e > m + row;
      x[e] = by_distance[chunk + e - row + SHEET_TILE - 1] + (HAS_TIME ? by_bucket[bucket] : 0.0f);
      x[e] = is_hidden ? HIDDEN : x[e];
    }
    const uint4 packed = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
    *reinterpret_cast<uint4*>(a.sheet + blockIdx.z * a.sheet_stride + static_cast<long long>(m + row) * S + n + chunk) =
        packed;
  }
}

// ------------------------------------------------------------------------------------------------------------ forward

constexpr int FORWARD_QUERIES = 64, FORWARD_KEYS = 64, FORWARD_STAGES = 2;
constexpr int FORWARD_ROWS = 32, FORWARD_M = FORWARD_ROWS / 16;  // queries of a warp, in parts of 16
constexpr int FORWARD_GROUPS = FORWARD_QUERIES / FORWARD_ROWS, FORWARD_THREADS = 64 * FORWARD_GROUPS;  // for each head
constexpr int FORWARD_TILE = 2 * FORWARD_KEYS * ROW, FORWARD_BIAS = FORWARD_QUERIES * FORWARD_KEYS * 2;
constexpr int FORWARD_STAGE = 2 * FORWARD_TILE + FORWARD_BIAS;  // keys, values, bias

// Grid (tiles of queries, HEADS / 2, B).
extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, 3) narrow_forward(const Arguments a) {
  SHARED(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, side = warp / FORWARD_GROUPS, head = 2 * blockIdx.y + side;
  const int first = (gridDim.x - 1 - blockIdx.x) * FORWARD_QUERIES;  // the longest walks first
  const int length = static_cast<int>(a.lengths[blockIdx.z]), S = static_cast<int>(a.row);
  const long long start = a.starts[blockIdx.z];  // before the return: both loads wait for memory together
  if (first >= length) return;
  const bf16_t* sheet = a.sheet + blockIdx.z * a.sheet_stride;
  const int stages = (min(first + FORWARD_QUERIES, length) + FORWARD_KEYS - 1) / FORWARD_KEYS;
  RowCopy<2, FORWARD_KEYS, FORWARD_THREADS> copy_keys(
      a.k + start * a.k_token + 2 * blockIdx.y * a.k_head, a.k_token, a.k_head, 0, length);
  RowCopy<2, FORWARD_KEYS, FORWARD_THREADS> copy_values(
      a.v + start * a.v_token + 2 * blockIdx.y * a.v_head, a.v_token, a.v_head, 0, length);
  SheetCopy<FORWARD_QUERIES, FORWARD_KEYS, FORWARD_THREADS> copy_bias(sheet, S, first, 0, FORWARD_KEYS);
  auto fetch = [&](int i) {
    unsigned char* stage = shared + (i % FORWARD_STAGES) * FORWARD_STAGE;
    fetch_stage<FORWARD_TILE>(stage, i < stages, copy_keys, copy_values, copy_bias);
  };
  for (int i = 0; i < FORWARD_STAGES - 1; ++i) fetch(i);

  const int within = FORWARD_ROWS * (warp % FORWARD_GROUPS), row = first + within;  // this warp's first query
  uint32_t q[FORWARD_M][2][4];
  float y[FORWARD_M][4][4] = {};
#pragma unroll
  for (int m = 0; m < FORWARD_M; ++m) {
    load_left(q[m], a.q + start * a.q_token + head * a.q_head, a.q_token, row + 16 * m, length);
    halve(q[m]);
  }
  const Places places;
  auto compute = [&](auto seen, int i) {
    const unsigned char* stage = shared + (i % FORWARD_STAGES) * FORWARD_STAGE;
    const unsigned char* keys = stage + side * FORWARD_KEYS * ROW;
#pragma unroll
    for (int j = 0; j < FORWARD_KEYS; j += 32) {
      if (!decltype(seen)::value && i * FORWARD_KEYS + j >= row + FORWARD_ROWS) break;  // hidden from this warp
      uint32_t right[2][2][4];
      float s[FORWARD_M][2][2][4];  // of 2 x 16 keys
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        load_across(right[n], keys, j + 16 * n, places);
#pragma unroll
        for (int m = 0; m < FORWARD_M; ++m) {
          uint32_t bias[4];
          load_matrices(bias, stage + 2 * FORWARD_TILE + place<2 * FORWARD_KEYS>(within + 16 * m + (lane & 15),
                                                                                (j + 16 * n) / 8 + (lane >> 4)));
          begin(s[m][n], bias);
        }
      }
#pragma unroll
      for (int x = 0; x < 2; ++x)  // halves of D: no product waits for the one before it
#pragma unroll
        for (int m = 0; m < FORWARD_M; ++m)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float(&sum)[4] = s[m][n >> 1][n & 1];
            multiply(sum, q[m][x], right[n >> 1][n & 1][2 * x], right[n >> 1][n & 1][2 * x + 1], sum);
          }
#pragma unroll
      for (int n = 0; n < 2; ++n) load_along(right[n], keys + FORWARD_TILE, j + 16 * n, places);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int m = 0; m < FORWARD_M; ++m) {
          uint32_t left[4];
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            float& h = s[m][n][e >> 2][e & 3];
            h = h * fast_tanh(h) + h;
          }
          as_left(left, s[m][n]);
          multiply_along(y[m], left, right[n]);
        }
    }
  };
  for (int i = 0; i < stages; ++i) {
    wait_copies<FORWARD_STAGES - 2>();
    __syncthreads();
    fetch(i + FORWARD_STAGES - 1);
    if ((i + 1) * FORWARD_KEYS <= row + FORWARD_ROWS)
      compute(Always{}, i);
    else
      compute(Partly{}, i);
  }
  bf16_t* out = a.y + (start * HEADS + head) * D;
#pragma unroll
  for (int m = 0; m < FORWARD_M; ++m) store_rows(out, HEADS * D, y[m], row + 16 * m, length, static_cast<float>(a.scale));
}

// --------------------------------------------------------------------------------------------------------------- keys

constexpr int KEYS = 64, KEY_QUERIES = 64, KEY_STAGES = 2;
constexpr int KEY_ROWS = 32, KEY_M = KEY_ROWS / 16;  // keys of a warp, in parts of 16
constexpr int KEY_GROUPS = KEYS / KEY_ROWS, KEY_THREADS = 64 * KEY_GROUPS;  // warps for each of the two heads
constexpr int KEY_TILE = 2 * KEY_QUERIES * ROW, KEY_BIAS = KEY_QUERIES * KEYS * 2;
constexpr int KEY_STAGE = 2 * KEY_TILE + KEY_BIAS;  // queries, gradients of y, bias

// Grid (tiles of keys, HEADS / 2, B).
extern "C" __global__ void __launch_bounds__(KEY_THREADS, 2) narrow_keys(const Arguments a) {
  SHARED(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int side = warp / KEY_GROUPS, head = 2 * blockIdx.y + side;
  const int first = blockIdx.x * KEYS;  // the longest walks first
  const int length = static_cast<int>(a.lengths[blockIdx.z]), S = static_cast<int>(a.row);
  const long long start = a.starts[blockIdx.z];  // before the return: both loads wait for memory together
  if (first >= length) return;
  const bf16_t* sheet = a.sheet + blockIdx.z * a.sheet_stride;
  const int from = first / KEY_QUERIES, stages = (length + KEY_QUERIES - 1) / KEY_QUERIES;
  RowCopy<2, KEY_QUERIES, KEY_THREADS> copy_queries(
      a.q + start * a.q_token + 2 * blockIdx.y * a.q_head, a.q_token, a.q_head, first, length);
  RowCopy<2, KEY_QUERIES, KEY_THREADS> copy_gradients(
      a.dy + start * a.dy_token + 2 * blockIdx.y * a.dy_head, a.dy_token, a.dy_head, first, length);
  SheetCopy<KEY_QUERIES, KEYS, KEY_THREADS> copy_bias(sheet, S, first, first, static_cast<long long>(KEY_QUERIES) * S);
  auto fetch = [&](int i) {
    unsigned char* stage = shared + (i % KEY_STAGES) * KEY_STAGE;
    fetch_stage<KEY_TILE>(stage, i < stages, copy_queries, copy_gradients, copy_bias);
  };
  for (int i = 0; i < KEY_STAGES - 1; ++i) fetch(from + i);

  const int within = KEY_ROWS * (warp % KEY_GROUPS), row = first + within;  // this warp's first key
  uint32_t k[KEY_M][2][4], v[KEY_M][2][4];
  float dk[KEY_M][4][4] = {}, dv[KEY_M][4][4] = {};
#pragma unroll
  for (int m = 0; m < KEY_M; ++m) {
    load_left(k[m], a.k + start * a.k_token + head * a.k_head, a.k_token, row + 16 * m, length);
    load_left(v[m], a.v + start * a.v_token + head * a.v_head, a.v_token, row + 16 * m, length);
    halve(k[m]);
    halve(v[m]);
  }
  uint32_t* ds[KEY_M];  // of this warp's keys and the queries of the stage
#pragma unroll
  for (int m = 0; m < KEY_M; ++m) {
    const long long unit = static_cast<long long>(blockIdx.z) * HEADS + head;
    ds[m] = a.ds + patch_of(unit, row / 16 + m, from * KEY_QUERIES / 16, S) * PATCH + lane;
  }
  const Places places;
  auto compute = [&](int i) {
    const unsigned char* stage = shared + (i % KEY_STAGES) * KEY_STAGE;
    const unsigned char* queries = stage + side * KEY_QUERIES * ROW;
#pragma unroll
    for (int j = 0; j < KEY_QUERIES; j += 16) {
      uint32_t right[2][4], d_right[2][4], probability[KEY_M][4], gradient[KEY_M][4];
      float s[KEY_M][2][4], d[KEY_M][2][4];
      load_across(right, queries, j, places);
      load_across(d_right, queries + KEY_TILE, j, places);
#pragma unroll
      for (int m = 0; m < KEY_M; ++m) {
        uint32_t bias[4];
        load_transposed(bias, stage + 2 * KEY_TILE + place<2 * KEYS>(j + (lane & 7) + 8 * (lane >> 4),
                                                                     within / 8 + 2 * m + ((lane >> 3) & 1)));
        begin(s[m], bias);
      }
      multiply_both(s, d, k, v, right, d_right);
      load_along(right, queries, j, places);
      load_along(d_right, queries + KEY_TILE, j, places);
#pragma unroll
      for (int m = 0; m < KEY_M; ++m) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& h = s[m][e >> 2][e & 3];
          const float t = fast_tanh(h);
          d[m][e >> 2][e & 3] = slope(h, t, d[m][e >> 2][e & 3]);
          h = h * t + h;
        }
        as_left(probability[m], s[m]);
        as_left(gradient[m], d[m]);
      }
#pragma unroll
      for (int m = 0; m < KEY_M; ++m) {
        multiply_along(dv[m], probability[m], d_right);
        multiply_along(dk[m], gradient[m], right);
#pragma unroll
        for (int e = 0; e < 4; ++e) __stcs(ds[m] + j / 16 * PATCH + 32 * e, gradient[m][e]);
      }
    }
  };
  for (int i = from; i < stages; ++i) {
    wait_copies<KEY_STAGES - 2>();
    __syncthreads();
    fetch(i + KEY_STAGES - 1);
    compute(i);  // also what is hidden: others read whole patches of the scores' gradient
#pragma unroll
    for (int m = 0; m < KEY_M; ++m) ds[m] += KEY_QUERIES / 16 * PATCH;
  }
  const float scale = static_cast<float>(a.scale);
  const long long out = start * a.grad_token + head * a.grad_head;
#pragma unroll
  for (int m = 0; m < KEY_M; ++m) {
    store_rows(a.dk + out, a.grad_token, dk[m], row + 16 * m, length, scale);
    store_rows(a.dv + out, a.grad_token, dv[m], row + 16 * m, length, scale);
  }
}

// ------------------------------------------------------------------------------------------------------------ queries

constexpr int QUERIES = 64, QUERY_KEYS = 32, QUERY_THREADS = 64 * HEADS, QUERY_STAGES = 2;
constexpr int QUERY_TILE = QUERY_KEYS * QUERIES * 2;  // gradients of a head's scores, in patches
constexpr int QUERY_STAGE = HEADS * (QUERY_TILE + QUERY_KEYS * ROW);  // and its keys
// The sum of the gradients over all heads. Rows begin in different banks; rows of zeros around it complete the diagonals.
constexpr int SUM_ROW = QUERY_KEYS + 1, AROUND = QUERY_KEYS - 1, SUM = (QUERIES + 2 * AROUND) * SUM_ROW;
constexpr int HISTOGRAM = QUERIES * BUCKETS;  // of half of the keys
constexpr int DIAGONALS = QUERIES + QUERY_KEYS - 1;
// With enough threads, the first sum over the heads while the others tally. Of these, the first have a half row each of the
// buckets, and if there are enough, the rest have a diagonal each.
constexpr int HALF_ROWS = 2 * QUERIES, ADDS = QUERY_KEYS * QUERIES / 8;
constexpr int FIRST_TALLY = QUERY_THREADS >= ADDS + HALF_ROWS + DIAGONALS ? ADDS : 0;
constexpr int ADDERS = FIRST_TALLY ? ADDS : QUERY_THREADS, TALLIERS = QUERY_THREADS - FIRST_TALLY;
constexpr int FIRST_DIAGONAL = TALLIERS >= HALF_ROWS + DIAGONALS ? HALF_ROWS : 0;
static_assert(TALLIERS >= HALF_ROWS, "a thread has one half row");

// Shared memory: stages, two sums, two histograms, distances [S]. Grid (tiles of queries, B).
extern "C" __global__ void __launch_bounds__(QUERY_THREADS, 1) narrow_queries(const Arguments a) {
  SHARED(shared);
  constexpr bool TALLIES = HAS_POSITION || HAS_TIME;
  float* sums = reinterpret_cast<float*>(shared + QUERY_STAGES * QUERY_STAGE);
  float* histograms = sums + 2 * SUM;
  float* distances = histograms + 2 * HISTOGRAM;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tid = threadIdx.x;
  const int tile = gridDim.x - 1 - blockIdx.x, first = tile * QUERIES;  // the longest walks first
  const int length = static_cast<int>(a.lengths[blockIdx.y]), S = static_cast<int>(a.row);
  const long long start = a.starts[blockIdx.y];  // before the return: both loads wait for memory together
  const int last = static_cast<int>(a.last);
  const long long part = static_cast<long long>(blockIdx.y) * gridDim.x + tile;
  float* by_distance = a.by_distance + part * S;
  float* by_bucket = a.by_bucket + part * (last + 1);
  if (first >= length) {
    if (HAS_POSITION)
      for (int i = tid; i < S; i += QUERY_THREADS) by_distance[i] = 0.0f;
    if (HAS_TIME)
      for (int i = tid; i <= last; i += QUERY_THREADS) by_bucket[i] = 0.0f;
    return;
  }
  const int stages = (min(first + QUERIES, length) + QUERY_KEYS - 1) / QUERY_KEYS;
  RowCopy<HEADS, QUERY_KEYS, QUERY_THREADS> copy_keys(a.k + start * a.k_token, a.k_token, a.k_head, 0, length);
  // Two rows of patches of every head, each one piece of memory. Threads copy HEADS / 2 rows at once.
  constexpr int ROW_PATCHES = QUERIES / 16, ROW_THREADS = ROW_PATCHES * PATCH / 4, ROWS_AT_ONCE = QUERY_THREADS / ROW_THREADS;
  static_assert(QUERY_KEYS == 32 && (ROWS_AT_ONCE == 1 || ROWS_AT_ONCE % 2 == 0), "the rows of a thread are as far apart");
  const int copied = tid / ROW_THREADS;
  const long long unit = static_cast<long long>(blockIdx.y) * HEADS;
  const uint32_t* ds =
      a.ds + patch_of(unit + copied / 2, copied % 2, first / 16, S) * PATCH + 4 * (tid % ROW_THREADS);
  auto fetch = [&](int i) {
    unsigned char* stage = shared + (i % QUERY_STAGES) * QUERY_STAGE;
#pragma unroll
    for (int n = 0; n < 2 * HEADS / ROWS_AT_ONCE; ++n) {
      const long long patch = patch_of(ROWS_AT_ONCE * n / 2, ROWS_AT_ONCE * n % 2, 0, S);
      copy16(stage + (n * QUERY_THREADS + tid) * 16, ds + patch * PATCH, true);
    }
    ds += patch_of(0, 2, 0, S) * PATCH;
    copy_keys(stage + HEADS * QUERY_TILE);
    commit_copies();
  };
  fetch(0);
  if (HAS_TIME)
    for (int i = tid; i < 2 * HISTOGRAM; i += QUERY_THREADS) histograms[i] = 0.0f;
  if (HAS_POSITION) {
    for (int i = tid; i < S; i += QUERY_THREADS) distances[i] = 0.0f;
    for (int i = tid; i < AROUND * SUM_ROW; i += QUERY_THREADS)
      for (int n = 0; n < 2; ++n) sums[n * SUM + i] = sums[n * SUM + SUM - 1 - i] = 0.0f;
  }

  const int head = warp >> 1, within = 32 * (warp & 1), row = first + within;  // this warp's head and first query
  float dq[2][4][4] = {};
  const Places places;
  auto compute = [&](int i) {
    const unsigned char* stage = shared + (i % QUERY_STAGES) * QUERY_STAGE;
    const unsigned char* gradients = stage + head * QUERY_TILE;
    // Turned, so keys 8-15 of queries 0-7 come last but one.
    const int in_patch = ((lane >> 4) + 2 * ((lane >> 3) & 1)) * PATCH + (lane & 7) * 16;
#pragma unroll
    for (int j = 0; j < QUERY_KEYS; j += 16) {
      uint32_t right[2][4], left[2][4];
      load_along(right, stage + HEADS * QUERY_TILE + head * QUERY_KEYS * ROW, j, places);
#pragma unroll
      for (int m = 0; m < 2; ++m)
        load_transposed(left[m], gradients + (j / 16 * ROW_PATCHES + within / 16 + m) * 4 * PATCH + in_patch);
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_along(dq[m], left[m], right);
    }
  };

  // The sum over the heads: a thread has eight queries of a key. Neighbours have neighbouring keys, in different banks.
  auto add_up = [&](int i) {
    const unsigned char* stage = shared + (i % QUERY_STAGES) * QUERY_STAGE;
    float* sum = sums + (i & 1) * SUM + AROUND * SUM_ROW;
    for (int item = tid; item < ADDS; item += ADDERS) {
      const int key = item % QUERY_KEYS, chunk = item / QUERY_KEYS;
      const int matrix = 4 * (key / 16 * ROW_PATCHES + chunk / 2) + 2 * (chunk & 1) + ((key >> 3) & 1);
      const int at = matrix * PATCH + (key & 7) * 16;
      float total[8] = {};
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        const uint4 x = *reinterpret_cast<const uint4*>(stage + h * QUERY_TILE + at);
        total[0] += low_of(x.x), total[1] += high_of(x.x), total[2] += low_of(x.y), total[3] += high_of(x.y);
        total[4] += low_of(x.z), total[5] += high_of(x.z), total[6] += low_of(x.w), total[7] += high_of(x.w);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[(8 * chunk + e) * SUM_ROW + key] = total[e];
    }
  };

  // By bucket of time: a thread has half a row, of which it keeps one bucket's sum `open`, because buckets of
  // neighbouring keys are mostly equal. It has a histogram of its own.
  const int tally = tid - FIRST_TALLY, half = tally / QUERIES, query = tally % QUERIES;
  const bool has_half = HAS_TIME && tally >= 0 && tally < HALF_ROWS && first + query < length;
  int open = 0;
  float in_open = 0.0f;
  uint4 buckets = {};
  auto fetch_buckets = [&](int i) {
    if (has_half)
      buckets = __ldg(reinterpret_cast<const uint4*>(
          a.buckets + (blockIdx.y * a.longest + first + query) * S + i * QUERY_KEYS + half * 16));
  };
  auto close = [&] { histograms[half * HISTOGRAM + query * BUCKETS + min(open, last)] += in_open; };
  auto tally_buckets = [&](const float* sum) {
    if (!has_half) return;
    const uint32_t four[4] = {buckets.x, buckets.y, buckets.z, buckets.w};
    float x[16];  // all at once, or each would wait for the stores before it
#pragma unroll
    for (int e = 0; e < 16; ++e) x[e] = sum[query * SUM_ROW + half * 16 + e];
    const uint32_t same = 0x01010101u * open;
    if (((four[0] ^ same) | (four[1] ^ same) | (four[2] ^ same) | (four[3] ^ same)) == 0) {
      float total[4] = {};
#pragma unroll
      for (int e = 0; e < 16; ++e) total[e & 3] += x[e];
      in_open += (total[0] + total[1]) + (total[2] + total[3]);
      return;
    }
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int bucket = (four[e >> 2] >> (8 * (e & 3))) & 255u;
      if (bucket != open) {
        close();
        open = bucket, in_open = 0.0f;
      }
      in_open += x[e];
    }
  };
  // By distance: a thread has a diagonal. Where there are enough threads, they are not those that sum by bucket.
  auto tally_distances = [&](int i, const float* sum) {
    if (tally < FIRST_DIAGONAL) return;
    for (int diagonal = tally - FIRST_DIAGONAL; diagonal < DIAGONALS; diagonal += TALLIERS - FIRST_DIAGONAL) {
      const int distance = first - i * QUERY_KEYS + diagonal - AROUND;
      if (distance < 0) continue;
      float total[4] = {};
#pragma unroll
      for (int e = 0; e < QUERY_KEYS; ++e) total[e & 3] += sum[(diagonal - AROUND) * SUM_ROW + e * (SUM_ROW + 1)];
      distances[distance] += (total[0] + total[1]) + (total[2] + total[3]);
    }
  };

  // While stage i is multiplied and summed, the one before it is tallied: one barrier for all.
  for (int i = 0; i < stages + TALLIES; ++i) {
    wait_copies<0>();
    __syncthreads();
    if (i + 1 < stages) fetch(i + 1);
    if (i < stages) {
      compute(i);
      if (TALLIES && tid < ADDERS) add_up(i);
    }
    if (TALLIES && i >= 1 && tally >= 0) {
      const float* sum = sums + ((i - 1) & 1) * SUM + AROUND * SUM_ROW;
      if (HAS_TIME) tally_buckets(sum);
      if (HAS_POSITION) tally_distances(i - 1, sum);
    }
    if (HAS_TIME && i < stages) fetch_buckets(i);
  }
  const float scale = static_cast<float>(a.scale);
#pragma unroll
  for (int m = 0; m < 2; ++m)
    store_rows(a.dq + start * a.grad_token + head * a.grad_head, a.grad_token, dq[m], row + 16 * m, length, scale);
  if (has_half) close();
  if (TALLIES) __syncthreads();
  if (HAS_TIME)
    for (int i = tid; i <= last; i += QUERY_THREADS) {
      float total[4] = {};
#pragma unroll 8
      for (int row = 0; row < 2 * QUERIES; ++row) total[row & 3] += histograms[row * BUCKETS + i];
      by_bucket[i] = ((total[0] + total[1]) + (total[2] + total[3])) * scale;
    }
  if (HAS_POSITION)
    for (int i = tid; i < S; i += QUERY_THREADS) by_distance[S - 1 - i] = distances[i] * scale;
}
