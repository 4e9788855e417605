// The bias of all pairs, halved and with pairs hidden, as the other kernels of this folder read it.

#include "narrow.cuh"

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
  // All loads before the first that waits, or a block would wait for memory three times.
  constexpr int STEP = SHEET_THREADS / 8, TIMES = SHEET_TILE / STEP;
  const int chunk = 8 * (tid & 7), first = tid >> 3;
  uint2 buckets[TIMES] = {};
  if (HAS_TIME) {
    const uint8_t* from = a.buckets + (blockIdx.z * a.longest + m + first) * S + n + chunk;
#pragma unroll
    for (int i = 0; i < TIMES; ++i)
      if (m + first + i * STEP < length) buckets[i] = __ldg(reinterpret_cast<const uint2*>(from + i * STEP * S));
  }
  if (HAS_TIME)
    for (int i = tid; i <= a.last; i += SHEET_THREADS) by_bucket[i] = 0.5f * a.time[i];
  // Rows beyond a sequence may be further apart than the weights reach.
  const int distance = n - m + tid - (SHEET_TILE - 1);
  by_distance[tid] = HAS_POSITION ? 0.5f * a.position[centre + max(min(distance, 0), -centre)] : 0.0f;
  __syncthreads();
  bf16_t* to = a.sheet + blockIdx.z * a.sheet_stride + static_cast<long long>(m + first) * S + n + chunk;
#pragma unroll
  for (int i = 0; i < TIMES; ++i) {
    const int row = first + i * STEP;
    const bool exists = m + row < length;
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const uint32_t bucket = ((e < 4 ? buckets[i].x : buckets[i].y) >> (8 * (e & 3))) & 255u;
      const bool is_hidden = !exists || n + chunk + e > m + row;
      x[e] = by_distance[chunk + e - row + SHEET_TILE - 1] + (HAS_TIME ? by_bucket[bucket] : 0.0f);
      x[e] = is_hidden ? HIDDEN : x[e];
    }
    const uint4 packed = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
    *reinterpret_cast<uint4*>(to + i * STEP * S) = packed;
  }
}
