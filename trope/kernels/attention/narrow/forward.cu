// y of 64 queries, 2 heads. A warp has 32 queries of one head.

#include "narrow.cuh"

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
