// The kernels' primitives on a CPU: every thread of a block is a fiber, run one after the other from one barrier to the
// next. Asynchronous copies land either at once or at the last moment that the program allows (copies_land_late), so
// that a missing wait and a buffer refilled too early both show.
#pragma once

#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 { uint32_t x, y, z, w; };
struct uint2 { uint32_t x, y; };
using __half = _Float16;

struct Copy { uint8_t* target; const uint8_t* source; };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  uint32_t sent[1];       // what other lanes of the warp may read
  float factors[6][2];
};

struct Barrier {
  int arrived = 0, generation = 0;
};

inline bool copies_land_late = false;
inline std::vector<Fiber> fibers;
inline std::vector<Barrier> warp_barriers;
inline Barrier block_barrier;
inline std::vector<uint8_t> shared_bytes;
inline dim3 blockIdx, threadIdx;
inline ucontext_t scheduler;
inline int current = 0;
inline std::function<void()> body;

inline uint8_t* shared_memory() { return (uint8_t*)(((uintptr_t)shared_bytes.data() + 127) & ~(uintptr_t)127); }
inline Fiber& self() { return fibers[current]; }
inline int warp_of(int thread) { return thread / 32; }

inline void pause_fiber() { swapcontext(&self().context, &scheduler); }

inline void arrive(Barrier& barrier, int parties) {
  const int generation = barrier.generation;
  if (++barrier.arrived == parties) {
    barrier.arrived = 0, ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) pause_fiber();
}

inline void sync_warp() { arrive(warp_barriers[warp_of(current)], 32); }
inline void sync_block() { arrive(block_barrier, (int)fibers.size()); }

inline bool last_to_arrive(uint32_t* counter, int parties) {
  static bool last;
  sync_block();
  if (current == 0) last = (*counter)++ == (uint32_t)parties - 1, *counter %= parties;
  sync_block();
  return last;
}

inline float load_past_cache(const float* source) { return *source; }

// What a lane has sent becomes readable between two barriers.
template <typename Read>
auto exchange(Read read) {
  sync_warp();
  auto result = read(&fibers[current / 32 * 32]);
  sync_warp();
  return result;
}

template <typename T>
T from_lane(T value, int lane) {
  static_assert(sizeof(T) == 4);
  memcpy(self().sent, &value, 4);
  const uint32_t word = exchange([&](Fiber* warp) { return warp[lane & 31].sent[0]; });
  memcpy(&value, &word, 4);
  return value;
}

template <typename T>
T from_neighbour(T value, int mask) {
  return from_lane(value, (current % 32) ^ mask);
}

inline int pin(int value) { return value; }

inline bool any_lane(bool value) {
  self().sent[0] = value;
  return exchange([&](Fiber* warp) {
    return std::any_of(warp, warp + 32, [](const Fiber& lane) { return lane.sent[0] != 0; });
  });
}

inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline float low_half(uint32_t pair) {
  _Float16 x;
  memcpy(&x, &pair, 2);
  return (float)x;
}
inline float high_half(uint32_t pair) { return low_half(pair >> 16); }

inline uint32_t half_bits(float x) {
  const _Float16 half = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
inline uint32_t pack_half2(float low, float high) { return half_bits(low) | half_bits(high) << 16; }

inline uint32_t multiply_half2(uint32_t a, uint32_t b) {
  auto clamp = [](float x) { return fmaxf(fminf((float)(_Float16)x, 65504.0f), -65504.0f); };
  return pack_half2(clamp(low_half(a) * low_half(b)), clamp(high_half(a) * high_half(b)));
}

using SharedPlace = uintptr_t;
inline SharedPlace shared_place(const uint8_t* address) { return (uintptr_t)address; }
inline uint32_t load_shared_half(SharedPlace place) {
  uint16_t half;
  memcpy(&half, (const void*)place, 2);
  return half;
}
inline void store_shared(SharedPlace place, uint32_t word) { memcpy((void*)place, &word, 4); }
template <uint32_t MASK>
uint32_t keep_bits(uint32_t word) {
  return word & MASK;
}
inline uint32_t add_half2(uint32_t a, uint32_t b) {
  return pack_half2(low_half(a) + low_half(b), high_half(a) + high_half(b));
}
inline uint32_t multiply_add_half2(uint32_t a, uint32_t b, uint32_t c) {
  return pack_half2(fmaf(low_half(a), low_half(b), low_half(c)), fmaf(high_half(a), high_half(b), high_half(c)));
}

// The PTX manual's figure of m16n8k16, element by element.
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int i = 0; i < 6; ++i) self().factors[i][0] = low_half(words[i]), self().factors[i][1] = high_half(words[i]);
  struct Four { float x[4]; };
  const Four sums = exchange([&](Fiber* warp) {
    Four result;
    const int group = current % 32 / 4, in_group = current % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = group + (i >= 2 ? 8 : 0), column = in_group * 2 + i % 2;
      double sum = d[i];
      for (int k = 0; k < 16; ++k) {
        const Fiber &lane_a = warp[row % 8 * 4 + k % 8 / 2], &lane_b = warp[column * 4 + k % 8 / 2];
        sum += (double)lane_a.factors[row / 8 + k / 8 * 2][k % 2] * lane_b.factors[4 + k / 8][k % 2];
      }
      result.x[i] = (float)sum;
    }
    return result;
  });
  for (int i = 0; i < 4; ++i) d[i] = sums.x[i];
}

inline void land(const Copy& copy) {
  if ((uintptr_t)copy.target % 16 || (uintptr_t)copy.source % 16) {
    fprintf(stderr, "a 16-byte copy is not aligned\n");
    abort();
  }
  if (copy.target < shared_memory() || copy.target + 16 > shared_bytes.data() + shared_bytes.size()) {
    fprintf(stderr, "a copy lies outside shared memory\n");
    abort();
  }
  memcpy(copy.target, copy.source, 16);
}

inline void copy_async(uint8_t* target, const uint8_t* source) {
  if (copies_land_late) self().open.push_back({target, source});
  else land({target, source});
}

inline void prefetch(const void*) {}
inline void prefetch(const void* address, uint32_t bytes) {
  if ((uintptr_t)address % 16 || bytes % 16) {
    fprintf(stderr, "a prefetch is not aligned\n");
    abort();
  }
}

inline void commit_copies() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}

template <int N>
void wait_for_copies() {
  while ((int)self().groups.size() > N) {
    for (const Copy& copy : self().groups.front()) land(copy);
    self().groups.pop_front();
  }
}

inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = (uint64_t)high << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

inline float fp8_to_float(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return byte & 0x80 ? -size : size;
}
inline uint32_t fp8_pair_to_half2(uint32_t bytes) { return pack_half2(fp8_to_float(bytes), fp8_to_float(bytes >> 8)); }

// To nearest even, at most +-448.
inline uint32_t float_to_fp8(float x) {
  const uint32_t sign = signbit(x) ? 0x80 : 0;
  x = fminf(fabsf(x), 448.0f);
  if (x < ldexpf(1, -6)) return sign | (uint32_t)nearbyintf(ldexpf(x, 9));
  int exponent;
  const float mantissa = nearbyintf(ldexpf(frexpf(x, &exponent), 4));  // 8 to 16
  return sign | (uint32_t)((exponent + 5) * 8 + (int)mantissa);
}
inline uint32_t float_pair_to_fp8(float low, float high) { return float_to_fp8(low) | float_to_fp8(high) << 8; }

inline uint32_t max_of_halves(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline float square_root(float x) { return sqrtf(x); }
inline void add_atomically(int32_t* target, int value) { *target += value; }
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float exp2_fast(float x) { return exp2f(x); }
inline float bf16_to_float(uint16_t bits) { return bits_to_float((uint32_t)bits << 16); }
inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void run_fiber() {
  body();
  self().done = true;
  pause_fiber();
}

// One block after the other. Fibers are resumed in an order that changes from round to round.
template <typename Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int threads, int shared_size, void*, Arguments arguments) {
  body = [&] { kernel(arguments); };
  for (unsigned block = 0; block < grid.x * grid.y * grid.z; ++block) {
    blockIdx = dim3(block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y);
    shared_bytes.assign(shared_size + 127, 0xff);  // NaN in every format
    fibers.resize(threads);
    warp_barriers = std::vector<Barrier>(threads / 32);
    block_barrier = Barrier();
    for (Fiber& fiber : fibers) {
      fiber.done = false, fiber.open.clear(), fiber.groups.clear(), fiber.stack.resize(1 << 17);
      getcontext(&fiber.context);
      fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, (void (*)())run_fiber, 0);
    }
    int running = threads;
    for (int round = 0; running > 0; ++round) {
      for (int i = 0; i < threads; ++i) {
        const int thread = (i * 5 + round * 37) % threads;
        if (fibers[thread].done) continue;
        current = thread, threadIdx.x = thread;
        swapcontext(&scheduler, &fibers[thread].context);
        running -= fibers[thread].done;
      }
    }
  }
  return 0;
}

extern "C" inline void __attribute__((used)) set_copies_land_late(int late) { copies_land_late = late; }
