// A CPU plays the GPU: the names that warp.cuh and CUDA C++ define, so that g++ compiles a kernel and a test runs it.
//
// Every thread of a block is a fiber; blocks run one after the other. A fiber runs until it waits at a meeting point: a
// collective of its warp or __syncthreads. When no lane of a warp can run, `resolve` checks that the lanes wait at the
// same line, does what the collective does, and lets them go. Which warp runs next, and in which direction its lanes run,
// is drawn from a generator seeded by `order` and the block. A launch runs in two orders, so that a missing barrier shows.
//
// What a GPU would let pass is made to fail: memory outside of all tensors may not be touched (`Fenced` in __init__.py),
// shared memory is full of NaN at first, so is the destination of a copy until wait_copies and the sum of a wide product
// until wait_products, what a lane reads from an absent lane is NaN, wide products read only what was shown to them, and
// bytes on both sides of shared memory must stay as they are.

#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define SHARED(name) [[maybe_unused]] static unsigned char* const& name = emulate::shared
#define threadIdx (emulate::current->index)
// Where a meeting point stands in the source: the line of the call.
#define TROPE_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

typedef unsigned short bf16_t;  // the bits of a bf16

struct uint3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static uint3 blockIdx, blockDim, gridDim;

namespace emulate {

constexpr int LANES = 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr size_t STACK = 256 << 10;  // bytes of a fiber
constexpr size_t GUARD = 4096;       // bytes on each side of shared memory that nobody may write
constexpr int POISON = 0xff;         // NaN in every float type

enum class State { runs, meets, waits_for_block, done };

struct Copy { void* shared; const void* global; bool exists; };

// A product of four warps that goes on beside the program. Its sum is NaN until the wait; `before` is what it was.
struct Wide { float* sum; const unsigned char* right; bool along, adds, is_first; uint32_t a[4]; float before[16]; };

struct Fiber {
  uint3 index;
  State state;
  jmp_buf context;
  bool started;
  // The meeting point: `act` works on the lanes of a warp whose bit is set in its second argument.
  const char* what;
  const char* file;
  int line;
  unsigned mask;
  bool whole_warp;  // undefined on a GPU when a lane of the warp is missing
  void (*act)(Fiber*, unsigned);
  // What the lanes exchange there.
  const void* row;
  uint32_t* loaded;
  const uint32_t* a;
  uint32_t b[2];
  float* sum;
  std::vector<Wide> wides;  // under way, and how many of them are in each group
  std::vector<size_t> groups;
  size_t wanted;
  std::vector<size_t> landed;  // 16 bytes of shared memory each that a copy wrote, and `show_to_products` has not shown
  uint64_t sent, received;
  int source;
  // Copies under way: those before `committed.back()` are in groups, which end where `committed` says.
  std::vector<Copy> copies;
  std::vector<size_t> committed;
};

static Fiber* current;
static unsigned char* shared;
static size_t shared_bytes;
static jmp_buf scheduler;
static std::string error;
static uint64_t random_state;
static std::vector<bool> unseen;  // by wide products: 16 bytes of shared memory each

inline uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

inline unsigned draw(unsigned below) {
  random_state = mixed(random_state);
  return unsigned(random_state >> 33) % below;
}

__attribute__((noinline)) static void to_scheduler() {
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

__attribute__((format(printf, 1, 2))) static void say(const char* format, ...) {
  char text[512];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  error += text;
}

static void say_where(unsigned thread) {
  say("block (%u, %u, %u), warp %u, ", blockIdx.x, blockIdx.y, blockIdx.z, thread / LANES);
}

// The first error of a thread ends the launch: the fiber never runs again.
__attribute__((noinline)) static void fail(const char* what) {
  say_where(current->index.x);
  say("lane %u: %s", current->index.x % LANES, what);
  to_scheduler();
}

__attribute__((noinline)) static void meet(
    const char* what, const char* file, int line, unsigned mask, bool whole_warp, void (*act)(Fiber*, unsigned)) {
  current->what = what, current->file = file, current->line = line, current->mask = mask;
  current->whole_warp = whole_warp, current->act = act, current->state = State::meets;
  to_scheduler();
}

inline bool is_shared(const void* p, size_t bytes) {
  auto at = static_cast<const unsigned char*>(p);
  return at >= shared && at + bytes <= shared + shared_bytes;
}

inline float float_of(bf16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

inline bf16_t rounded(float x) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return bf16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void load(Fiber* lanes, unsigned) {
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++)
      memcpy(&lanes[lane].loaded[i], static_cast<const char*>(lanes[8 * i + lane / 4].row) + 4 * (lane % 4), 4);
}

static void load_columns(Fiber* lanes, unsigned) {
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) {
      bf16_t pair[2];
      for (int j = 0; j < 2; j++)
        memcpy(&pair[j], static_cast<const char*>(lanes[8 * i + 2 * (lane % 4) + j].row) + 2 * (lane / 4), 2);
      memcpy(&lanes[lane].loaded[i], pair, 4);
    }
}

static void multiply_all(Fiber* lanes, unsigned) {
  float a[16][16], b[16][8], sum[16][8];
  for (int lane = 0; lane < LANES; lane++) {
    const int g = lane / 4, c = 2 * (lane % 4);
    const Fiber& x = lanes[lane];
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 2; j++) {
        a[g + i % 2 * 8][c + i / 2 * 8 + j] = float_of(x.a[i] >> (16 * j));
        if (i < 2) b[c + i * 8 + j][g] = float_of(x.b[i] >> (16 * j));
        sum[g + i / 2 * 8][c + i % 2] = x.sum[i];
      }
  }
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) sum[m][n] += a[m][k] * b[k][n];
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++) lanes[lane].sum[i] = sum[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

// The first `wanted` products of every lane, as the hardware finds the right side: row r, chunk i of 16 bytes, where bits
// 7-8 of the address change bits 4-5.
static void multiply_wides(Fiber* lanes, unsigned) {
  for (size_t at = 0; at < lanes[0].wanted; at++) {
    float a[16][16], b[16][32];
    const Wide& first = lanes[0].wides[at];
    for (int lane = 0; lane < LANES; lane++)
      for (int i = 0; i < 8; i++) {
        const uint32_t x = lanes[lane].wides[at].a[i / 2];
        a[lane / 4 + i / 2 % 2 * 8][2 * (lane % 4) + i / 4 * 8 + i % 2] = float_of(bf16_t(x >> i % 2 * 16));
      }
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 32; n++) {
        size_t address = first.right - shared + (first.along ? k * 64 + n * 2 : n * 64 + k * 2);
        address ^= (address >> 7 & 3) << 4;
        if (unseen[address / 16] && error.empty()) {
          say_where(lanes[0].index.x);
          say("multiply_wide reads what a copy wrote and show_to_products did not show");
        }
        bf16_t x;
        memcpy(&x, shared + address, 2);
        b[k][n] = float_of(x);
      }
    for (int lane = 0; lane < LANES; lane++) {
      Wide& mine = lanes[lane].wides[at];
      for (int i = 0; i < 16; i++) {
        float sum = mine.adds ? (mine.is_first ? mine.before[i] : mine.sum[i]) : 0.0f;
        for (int k = 0; k < 16; k++) sum += a[lane / 4 + i / 2 % 2 * 8][k] * b[k][i / 4 * 8 + 2 * (lane % 4) + i % 2];
        mine.sum[i] = sum;
      }
    }
  }
}

static void exchange(Fiber* lanes, unsigned members) {
  for (int lane = 0; lane < LANES; lane++)
    if (members >> lane & 1) {
      const int source = lanes[lane].source;
      lanes[lane].received = members >> source & 1 ? lanes[source].sent : ~uint64_t(0);
    }
}

static void vote(Fiber* lanes, unsigned members) {
  uint64_t votes = 0;
  for (int lane = 0; lane < LANES; lane++)
    if (members >> lane & 1 && lanes[lane].sent) votes |= uint64_t(1) << lane;
  for (int lane = 0; lane < LANES; lane++)
    if (members >> lane & 1) lanes[lane].received = votes;
}

static void nothing(Fiber*, unsigned) {}

template <class T> T shuffled(const char* what, unsigned mask, T x, int source, const char* file, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles exchange 4 or 8 bytes");
  current->sent = 0, current->source = source;
  memcpy(&current->sent, &x, sizeof x);
  meet(what, file, line, mask, false, exchange);
  memcpy(&x, &current->received, sizeof x);
  return x;
}

inline uint64_t voted(const char* what, unsigned mask, bool x, const char* file, int line) {
  current->sent = x;
  meet(what, file, line, mask, false, vote);
  return current->received;
}

inline bool same_place(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.line == b.line && a.act == b.act && a.mask == b.mask && !strcmp(a.what, b.what);
}

// All lanes of the warp wait or are done. Says whether one may run on; if not, all wait for the block or are done.
static bool resolve(Fiber* lanes, int n) {
  unsigned live = 0, handled = 0;
  bool progress = false;
  for (int i = 0; i < n; i++) live |= unsigned(lanes[i].state != State::done) << i;
  for (int i = 0; i < n; i++) {
    if (lanes[i].state != State::meets || handled >> i & 1) continue;
    if (lanes[i].whole_warp && live != ALL) {
      say_where(lanes[i].index.x);
      say("lane %d: %s (%s:%d) needs all 32 lanes, but some have returned", i, lanes[i].what, lanes[i].file, lanes[i].line);
      return false;
    }
    const unsigned members = lanes[i].mask & live;
    bool met = members >> i & 1;  // a lane must name itself
    for (int j = 0; j < n; j++)
      if (members >> j & 1) met = met && same_place(lanes[i], lanes[j]);
    if (!met) continue;
    lanes[i].act(lanes, members);
    handled |= members;
    progress = true;
    for (int j = 0; j < n; j++)
      if (members >> j & 1) lanes[j].state = State::runs;
  }
  if (progress) return true;
  const Fiber* first = nullptr;
  for (int i = 0; i < n; i++) {
    if (lanes[i].state == State::done) continue;
    if (!first) first = &lanes[i];
    if (lanes[i].state == State::waits_for_block && same_place(*first, lanes[i])) continue;
    const Fiber* other = &lanes[i];
    for (int j = i + 1; j < n && other == first; j++)
      if (lanes[j].state != State::done && !same_place(*first, lanes[j])) other = &lanes[j];
    say_where(first->index.x);
    say("lanes wait at different places: lane %u at %s (%s:%d), lane %u at %s (%s:%d)", first->index.x % LANES,
        first->what, first->file, first->line, other->index.x % LANES, other->what, other->file, other->line);
    return false;
  }
  return false;
}

__attribute__((noinline)) static void resume(Fiber* fiber) {
  current = fiber;
  if (!_setjmp(scheduler)) _longjmp(fiber->context, 1);
}

static void run_block(std::vector<Fiber>& fibers) {
  const int threads = int(fibers.size()), warps = (threads + LANES - 1) / LANES;
  for (Fiber& fiber : fibers) {
    fiber.state = State::runs, fiber.copies.clear(), fiber.committed.clear();
    fiber.wides.clear(), fiber.groups.clear(), fiber.landed.clear();
  }
  std::vector<int> ready;
  for (;;) {
    ready.clear();
    bool all_done = true;
    for (int warp = 0; warp < warps; warp++) {
      bool waits = false, runs = false;
      for (int i = warp * LANES; i < threads && i < (warp + 1) * LANES; i++) {
        waits |= fibers[i].state == State::waits_for_block;
        runs |= fibers[i].state == State::runs;
      }
      all_done &= !waits && !runs;
      if (runs) ready.push_back(warp);
    }
    if (all_done) return;
    if (ready.empty()) {  // all that have not returned are at the barrier
      for (Fiber& fiber : fibers)
        if (fiber.state == State::waits_for_block) fiber.state = State::runs;
      continue;
    }
    const int warp = ready[draw(ready.size())];
    Fiber* lanes = &fibers[warp * LANES];
    const int n = threads - warp * LANES < LANES ? threads - warp * LANES : LANES;
    for (int turns = 1 + draw(16); turns > 0; turns--) {
      const bool down = draw(2);
      for (int i = 0; i < n; i++) {
        Fiber* fiber = &lanes[down ? n - 1 - i : i];
        if (fiber->state == State::runs) resume(fiber);
        if (!error.empty()) return;
      }
      if (!resolve(lanes, n)) break;
    }
    if (!error.empty()) return;
  }
}

// The kernel under way, called by every fiber. Its type is known only to `run`.
static void (*call)();

static void fiber_main() {
  if (!_setjmp(current->context)) _longjmp(scheduler, 1);
  for (;;) {
    call();
    current->state = State::done;
    to_scheduler();
  }
}

__attribute__((noinline)) static void prepare(Fiber* fiber, unsigned char* stack) {
  ucontext_t here, there;
  getcontext(&there);
  there.uc_stack.ss_sp = stack;
  there.uc_stack.ss_size = STACK;
  there.uc_link = nullptr;
  makecontext(&there, fiber_main, 0);
  current = fiber;
  if (!_setjmp(scheduler)) swapcontext(&here, &there);
}

namespace {  // or the linker would take the one of another kernel's library, whose Arguments have the same name
template <class Arguments> struct Call {
  static void (*kernel)(Arguments);
  static Arguments arguments;
  static void go() { kernel(arguments); }
};
template <class Arguments> void (*Call<Arguments>::kernel)(Arguments);
template <class Arguments> Arguments Call<Arguments>::arguments;
}  // namespace

// Runs a kernel over a grid. order: a number; another one lets the threads run in another order. Returns what went wrong,
// or nothing.
template <class Arguments>
const char* run(void (*kernel)(Arguments), const void* arguments, size_t bytes, const int* grid, int threads, int wanted,
                int order) {
  error.clear();
  if (bytes != sizeof(Arguments)) {
    say("the kernel takes %zu bytes of arguments, got %zu", sizeof(Arguments), bytes);
    return error.c_str();
  }
  Call<Arguments>::kernel = kernel;
  memcpy(&Call<Arguments>::arguments, arguments, bytes);
  call = Call<Arguments>::go;
  gridDim = {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};
  blockDim = {unsigned(threads), 1, 1};

  shared_bytes = wanted;
  std::vector<unsigned char> memory(shared_bytes + 2 * GUARD + 512);
  shared = memory.data() + GUARD;
  shared += (512 - reinterpret_cast<uintptr_t>(shared) % 512) % 512;

  // A page beside a tensor: the fiber ends there, as after `fail`.
  struct sigaction caught = {}, before;
  caught.sa_sigaction = [](int, siginfo_t* what, void*) {
    say("address %p: ", what->si_addr);
    fail("touches memory outside of all tensors");
  };
  caught.sa_flags = SA_NODEFER | SA_SIGINFO;
  sigaction(SIGSEGV, &caught, &before);
  void* stacks = mmap(nullptr, STACK * threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return "no memory for the stacks of the fibers";
  std::vector<Fiber> fibers(threads);
  for (int i = 0; i < threads; i++) {
    fibers[i].index = {unsigned(i), 0, 0};
    prepare(&fibers[i], static_cast<unsigned char*>(stacks) + i * STACK);
  }
  for (unsigned z = 0; z < gridDim.z && error.empty(); z++)
    for (unsigned y = 0; y < gridDim.y && error.empty(); y++)
      for (unsigned x = 0; x < gridDim.x && error.empty(); x++) {
        blockIdx = {x, y, z};
        random_state = mixed(mixed(mixed(mixed(order) + z) + y) + x);
        memset(memory.data(), POISON, memory.size());
        unseen.assign(shared_bytes / 16 + 1, false);
        run_block(fibers);
        for (size_t i = 0; i < memory.size() && error.empty(); i++)
          if (!is_shared(&memory[i], 1) && memory[i] != POISON)
            say("block (%u, %u, %u) wrote byte %td of %zu bytes of shared memory", x, y, z, &memory[i] - shared, shared_bytes);
      }
  munmap(stacks, STACK * threads);
  sigaction(SIGSEGV, &before, nullptr);
  if (!error.empty()) fprintf(stderr, "emulator: %s\n", error.c_str());
  return error.c_str();
}

}  // namespace emulate

// The words of warp.cuh.

static inline void load_matrices(uint32_t (&x)[4], const void* row, TROPE_PLACE) {
  if (!emulate::is_shared(row, 16)) emulate::fail("load_matrices reads outside of shared memory");
  if (reinterpret_cast<uintptr_t>(row) % 16) emulate::fail("load_matrices needs rows aligned to 16 bytes");
  emulate::current->row = row, emulate::current->loaded = x;
  emulate::meet("load_matrices", file, line, emulate::ALL, true, emulate::load);
}

static inline void load_transposed(uint32_t (&x)[4], const void* row, TROPE_PLACE) {
  if (!emulate::is_shared(row, 16)) emulate::fail("load_transposed reads outside of shared memory");
  if (reinterpret_cast<uintptr_t>(row) % 16) emulate::fail("load_transposed needs rows aligned to 16 bytes");
  emulate::current->row = row, emulate::current->loaded = x;
  emulate::meet("load_transposed", file, line, emulate::ALL, true, emulate::load_columns);
}

static inline void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&before)[4],
                            TROPE_PLACE) {
  for (int i = 0; i < 4; i++) sum[i] = before[i];
  emulate::current->sum = sum, emulate::current->a = a;
  emulate::current->b[0] = b0, emulate::current->b[1] = b1;
  emulate::meet("multiply", file, line, emulate::ALL, true, emulate::multiply_all);
}

static inline void begin_products() {}
static inline void show_to_products() {
  for (size_t at : emulate::current->landed) emulate::unseen[at] = false;
  emulate::current->landed.clear();
}
static inline void commit_products() {
  size_t before = 0;
  for (size_t n : emulate::current->groups) before += n;
  emulate::current->groups.push_back(emulate::current->wides.size() - before);
}
typedef const unsigned char* Rows;
static inline Rows rows_at(const void* p) { return static_cast<Rows>(p); }
static inline Rows beyond(Rows rows, int bytes) { return rows + bytes; }
template <bool ALONG, bool ADDS>
void multiply_wide(float (&sum)[4][4], const uint32_t (&a)[4], Rows rows, int row, int half = 0) {
  rows += 64 * row;
  if (!emulate::is_shared(rows, ALONG ? 1024 : 2048)) emulate::fail("multiply_wide reads outside of shared memory");
  if ((rows - emulate::shared) % 512) emulate::fail("multiply_wide needs rows from a multiple of 512 bytes on");
  std::vector<emulate::Wide>& wides = emulate::current->wides;
  emulate::Wide mine = {sum[0], rows + 32 * half, ALONG, ADDS, true, {a[0], a[1], a[2], a[3]}, {}};
  for (const emulate::Wide& other : wides) mine.is_first = mine.is_first && other.sum != mine.sum;
  if (mine.is_first) memcpy(mine.before, sum, sizeof sum);
  memset(sum, emulate::POISON, sizeof sum);
  wides.push_back(mine);
}
template <int LEFT> void wait_products(float (&)[4][4], TROPE_PLACE) {
  emulate::Fiber& me = *emulate::current;
  me.wanted = 0;
  const size_t done = me.groups.size() > LEFT ? me.groups.size() - LEFT : 0;
  for (size_t i = 0; i < done; i++) me.wanted += me.groups[i];
  emulate::meet("wait_products", file, line, emulate::ALL, true, emulate::multiply_wides);
  // What is left and adds to a sum that is done now has that as the sum before.
  for (size_t i = me.wanted; i < me.wides.size(); i++)
    for (size_t j = 0; j < me.wanted; j++)
      if (me.wides[i].sum == me.wides[j].sum) emulate::fail("a sum must not be in two groups, one of which is left");
  me.wides.erase(me.wides.begin(), me.wides.begin() + me.wanted);
  me.groups.erase(me.groups.begin(), me.groups.begin() + done);
}

static inline void copy16(void* to, const void* from, bool exists) {
  if (!emulate::is_shared(to, 16)) emulate::fail("copy16 writes outside of shared memory");
  if (reinterpret_cast<uintptr_t>(to) % 16) emulate::fail("copy16 needs shared memory aligned to 16 bytes");
  if (exists && reinterpret_cast<uintptr_t>(from) % 16) emulate::fail("copy16 needs global memory aligned to 16 bytes");
  memset(to, emulate::POISON, 16);
  emulate::current->copies.push_back({to, from, exists});
}

static inline void commit_copies() { emulate::current->committed.push_back(emulate::current->copies.size()); }

template <int LEFT> void wait_copies() {
  std::vector<size_t>& ends = emulate::current->committed;
  std::vector<emulate::Copy>& copies = emulate::current->copies;
  if (ends.size() <= LEFT) return;
  const size_t groups = ends.size() - LEFT, landed = ends[groups - 1];
  for (size_t i = 0; i < landed; i++)
    if (copies[i].exists) memcpy(copies[i].shared, copies[i].global, 16);
    else memset(copies[i].shared, 0, 16);
  for (size_t i = 0; i < landed; i++) {
    const size_t at = (static_cast<unsigned char*>(copies[i].shared) - emulate::shared) / 16;
    emulate::unseen[at] = true;
    emulate::current->landed.push_back(at);
  }
  copies.erase(copies.begin(), copies.begin() + landed);
  ends.erase(ends.begin(), ends.begin() + groups);
  for (size_t& end : ends) end -= landed;
}

static inline float fast_tanh(float x) { return std::tanh(x); }
static inline float fast_sqrt(float x) { return std::sqrt(x); }
static inline float fast_quotient(float x, float y) { return x / y; }

static inline uint32_t pack(float low, float high) { return emulate::rounded(low) | uint32_t(emulate::rounded(high)) << 16; }
static inline float low_of(uint32_t x) { return emulate::float_of(bf16_t(x)); }
static inline float high_of(uint32_t x) { return emulate::float_of(bf16_t(x >> 16)); }
static inline uint32_t halved(uint32_t x) { return pack(low_of(x) * 0.5f, high_of(x) * 0.5f); }

// CUDA's own words.

static inline void __syncthreads(TROPE_PLACE) {
  emulate::Fiber& fiber = *emulate::current;
  fiber.what = "__syncthreads", fiber.file = file, fiber.line = line, fiber.mask = emulate::ALL;
  fiber.act = emulate::nothing, fiber.state = emulate::State::waits_for_block;
  emulate::to_scheduler();
}

static inline void __syncwarp(unsigned mask = emulate::ALL, TROPE_PLACE) {
  emulate::meet("__syncwarp", file, line, mask, false, emulate::nothing);
}

// `width` lanes, a power of two, exchange among themselves. A source outside of them: the lane's own value.
template <class T> T __shfl_sync(unsigned mask, T x, int source, int width = 32, TROPE_PLACE) {
  const int lane = threadIdx.x % 32;
  return emulate::shuffled("__shfl_sync", mask, x, (lane & -width) + (source & (width - 1)), file, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32, TROPE_PLACE) {
  const int lane = threadIdx.x % 32, source = (lane & (width - 1)) + int(by);
  return emulate::shuffled("__shfl_down_sync", mask, x, source < width ? lane + int(by) : lane, file, line);
}
template <class T> T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, TROPE_PLACE) {
  const int lane = threadIdx.x % 32, source = (lane & (width - 1)) - int(by);
  return emulate::shuffled("__shfl_up_sync", mask, x, source >= 0 ? lane - int(by) : lane, file, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int with, int width = 32, TROPE_PLACE) {
  const int lane = threadIdx.x % 32, source = lane ^ with;
  return emulate::shuffled("__shfl_xor_sync", mask, x, source < (lane & -width) + width ? source : lane, file, line);
}
static inline unsigned __ballot_sync(unsigned mask, bool x, TROPE_PLACE) {
  return unsigned(emulate::voted("__ballot_sync", mask, x, file, line));
}
static inline int __any_sync(unsigned mask, bool x, TROPE_PLACE) {
  return emulate::voted("__any_sync", mask, x, file, line) != 0;
}
static inline int __all_sync(unsigned mask, bool x, TROPE_PLACE) {
  return emulate::voted("__all_sync", mask, !x, file, line) == 0;
}

template <class T> T __ldg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T x) { *p = x; }
template <class T> T atomicAdd(T* p, T x) {
  const T before = *p;
  *p += x;
  return before;
}
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  if constexpr (std::is_floating_point_v<decltype(x + y)>) return std::fmin(x, y);
  return y < x ? y : x;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  if constexpr (std::is_floating_point_v<decltype(x + y)>) return std::fmax(x, y);
  return x < y ? y : x;
}
static inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
static inline float __uint_as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
static inline float __int_as_float(int x) { return __uint_as_float(uint32_t(x)); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline float __fdividef(float x, float y) { return x / y; }
#define __expf(x) std::exp(float(x))  // glibc has functions of these two names
#define __logf(x) std::log(float(x))
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
