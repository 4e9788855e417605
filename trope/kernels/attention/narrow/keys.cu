// dk, dv and the gradient of the scores of 64 keys, 2 heads. Four warps have the keys of one head, and work on transposed
// scores, which are computed again. Their products take the side that streams past from shared memory.

#include "narrow.cuh"

constexpr int KEYS = 64, KEY_QUERIES = 64, KEY_STAGES = 3, KEY_THREADS = 256;
constexpr int KEY_TILE = 2 * KEY_QUERIES * ROW, KEY_BIAS = KEY_QUERIES * KEYS * 2;
constexpr int KEY_STAGE = 2 * KEY_TILE + KEY_BIAS;  // queries, gradients of y, bias

// Grid (tiles of keys, HEADS / 2, B).
extern "C" __global__ void __launch_bounds__(KEY_THREADS, 2) narrow_keys(const Arguments a) {
  SHARED(shared);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);  // known to be of all lanes
  const int side = warp / 4, head = 2 * blockIdx.y + side;
  const int first = blockIdx.x * KEYS;  // the longest walks first
  const int length = static_cast<int>(a.lengths[blockIdx.z]), S = static_cast<int>(a.row);
  const long long start = a.starts[blockIdx.z];  // before the return: both loads wait for memory together
  if (first >= length) return;
  const bf16_t* sheet = a.sheet + blockIdx.z * a.sheet_stride;
  const int from = first / KEY_QUERIES, stages = (length + KEY_QUERIES - 1) / KEY_QUERIES;
  RowCopy<2, KEY_QUERIES, KEY_THREADS, true> copy_queries(
      a.q + start * a.q_token + 2 * blockIdx.y * a.q_head, a.q_token, a.q_head, first, length);
  RowCopy<2, KEY_QUERIES, KEY_THREADS, true> copy_gradients(
      a.dy + start * a.dy_token + 2 * blockIdx.y * a.dy_head, a.dy_token, a.dy_head, first, length);
  SheetCopy<KEY_QUERIES, KEYS, KEY_THREADS, true> copy_bias(
      sheet, S, first, first, static_cast<long long>(KEY_QUERIES) * S);
  auto fetch = [&](int i) {
    unsigned char* stage = shared + (i % KEY_STAGES) * KEY_STAGE;
    fetch_stage<KEY_TILE>(stage, i < stages, copy_queries, copy_gradients, copy_bias);
  };
  for (int i = 0; i < KEY_STAGES - 1; ++i) fetch(from + i);

  const int within = 16 * (warp % 4), row = first + within;  // this warp's first key
  uint32_t k[2][4], v[2][4];
  float dk[4][4] = {}, dv[4][4] = {};
  load_left(k, a.k + start * a.k_token + head * a.k_head, a.k_token, row, length);
  load_left(v, a.v + start * a.v_token + head * a.v_head, a.v_token, row, length);
  halve(k);
  halve(v);
  // Of this warp's keys and the queries of the stage: a lane has eight queries of two keys.
  const long long unit = static_cast<long long>(blockIdx.z) * HEADS + head;
  unsigned char* ds = a.ds + patch_of(unit, row / 16, from * KEY_QUERIES / 32, S) + place<ROW>(lane >> 2, lane & 3);
  // Where this lane begins to read the bias of 16 queries and its warp's keys.
  const int of_bias = place<2 * KEYS>((lane & 7) + (lane >> 4) * 8, within / 8 + ((lane >> 3) & 1));
  const Rows all = rows_at(shared + side * KEY_QUERIES * ROW);
  auto compute = [&](int at) {
    const unsigned char* stage = shared + at;
    const Rows queries = beyond(all, at), gradients = beyond(all, at + KEY_TILE);
#pragma unroll
    for (int j = 0; j < KEY_QUERIES; j += 32) {
      float s[4][4], d[4][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t bias[4];
        load_transposed(bias, stage + 2 * KEY_TILE + of_bias + (j + 16 * n) * 2 * KEYS);
        begin(s + 2 * n, bias);
      }
      begin_products();
      multiply_wide<false, true>(s, k[0], queries, j, 0);
      multiply_wide<false, true>(s, k[1], queries, j, 1);
      commit_products();
      multiply_wide<false, false>(d, v[0], gradients, j, 0);
      multiply_wide<false, true>(d, v[1], gradients, j, 1);
      commit_products();
      uint32_t probability[2][4], gradient[2][4];
      float t[4][4];
      wait_products<1>(s);
#pragma unroll
      for (int e = 0; e < 16; ++e) t[e >> 2][e & 3] = fast_tanh(s[e >> 2][e & 3]);
      wait_products<0>(d);
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        float &h = s[e >> 2][e & 3], &x = d[e >> 2][e & 3];
        x = slope(h, t[e >> 2][e & 3], x);
        h = h * t[e >> 2][e & 3] + h;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        as_left(probability[n], s + 2 * n);
        as_left(gradient[n], d + 2 * n);
      }
      // Before the products: until they are waited for, PTX allows nobody to look at what they read.
#pragma unroll
      for (int e = 0; e < 2; ++e)
        __stcs(reinterpret_cast<uint4*>(ds + j / 32 * PATCH + e * 8 * ROW),
               uint4{gradient[0][e], gradient[0][2 + e], gradient[1][e], gradient[1][2 + e]});
      begin_products();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        multiply_wide<true, true>(dv, probability[n], gradients, j + 16 * n);
        multiply_wide<true, true>(dk, gradient[n], queries, j + 16 * n);
      }
      commit_products();
    }
    wait_products<0>(dk);  // all; both sums are named, so that the compiler touches neither before
    wait_products<0>(dv);
  };
  for (int i = from; i < stages; ++i) {
    wait_copies<KEY_STAGES - 2>();
    show_to_products();
    __syncthreads();
    fetch(i + KEY_STAGES - 1);
    compute(i % KEY_STAGES * KEY_STAGE);  // also what is hidden: narrow_queries reads whole patches
    ds += KEY_QUERIES / 32 * PATCH;
  }
  const float scale = static_cast<float>(a.scale);
  const long long out = start * a.grad_token + head * a.grad_head;
  store_rows(a.dk + out, a.grad_token, dk, row, length, scale);
  store_rows(a.dv + out, a.grad_token, dv, row, length, scale);
}
