// dk, dv and the gradient of the scores of 64 keys, 2 heads. A warp has 32 keys of one head, and works on transposed
// scores, which are computed again.

#include "narrow.cuh"

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
