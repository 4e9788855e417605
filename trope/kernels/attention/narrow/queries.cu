// dq of 64 queries, all heads, from the gradient of the scores that keys.cu wrote. A warp has 32 queries of one head. The
// same stages give the gradients of both biases: summed over the heads, then by distance and by bucket of time.

#include "narrow.cuh"

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
  float* by_distance = a.sums + part * a.sums_row;
  float* by_bucket = by_distance + (HAS_POSITION ? S : 0);
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
  constexpr int ROW_PATCHES = QUERIES / 32, ROW_THREADS = ROW_PATCHES * PATCH / 16, ROWS_AT_ONCE = QUERY_THREADS / ROW_THREADS;
  static_assert(QUERY_KEYS == 32 && (ROWS_AT_ONCE == 1 || ROWS_AT_ONCE % 2 == 0), "the rows of a thread are as far apart");
  const int copied = tid / ROW_THREADS;
  const long long unit = static_cast<long long>(blockIdx.y) * HEADS;
  const unsigned char* ds = a.ds + patch_of(unit + copied / 2, copied % 2, first / 32, S) + 16 * (tid % ROW_THREADS);
  auto fetch = [&](int i) {
    unsigned char* stage = shared + (i % QUERY_STAGES) * QUERY_STAGE;
#pragma unroll
    for (int n = 0; n < 2 * HEADS / ROWS_AT_ONCE; ++n) {
      const unsigned char* patch = ds + patch_of(ROWS_AT_ONCE * n / 2, ROWS_AT_ONCE * n % 2, 0, S);
      copy16(stage + (n * QUERY_THREADS + tid) * 16, patch, true);
    }
    ds += patch_of(0, 2, 0, S);
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
  // Turned, so keys are columns. The second 16 queries of a patch are two chunks further.
  const int in_patch = place<ROW>((lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1);
  auto compute = [&](int i) {
    const unsigned char* stage = shared + (i % QUERY_STAGES) * QUERY_STAGE;
    const unsigned char* gradients = stage + head * QUERY_TILE + within / 32 * PATCH;
#pragma unroll
    for (int j = 0; j < QUERY_KEYS; j += 16) {
      uint32_t right[2][4], left[2][4];
      load_along(right, stage + HEADS * QUERY_TILE + head * QUERY_KEYS * ROW, j, places);
#pragma unroll
      for (int m = 0; m < 2; ++m)
        load_transposed(left[m], gradients + j / 16 * ROW_PATCHES * PATCH + (in_patch ^ 32 * m));
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
      const int at = (key / 16 * ROW_PATCHES + chunk / 4) * PATCH + place<ROW>(key & 15, chunk & 3);
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
