// The instructions that the kernels are built from, one small function each. Everything that plain C++ cannot say is
// here, so that the tests can compile the kernels for a CPU against another file of this name.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr unsigned ALL_LANES = 0xffffffffu;

// Dynamic shared memory of the block.
__device__ __forceinline__ uint8_t* shared_memory() {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  return shared_bytes;
}

// D += A B for A [16, 16] and B [16, 8] in f16, D [16, 8] in f32. Lane 4g + t holds
//   a[0], a[1]: rows g, g + 8, columns 2t, 2t + 1;   a[2], a[3]: the same rows, columns 2t + 8, 2t + 9
//   b0: rows 2t, 2t + 1 of column g;                 b1: rows 2t + 8, 2t + 9
//   d[0], d[1]: row g, columns 2t, 2t + 1;           d[2], d[3]: row g + 8
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Start copying 16 bytes from global to shared memory, past the first-level cache.
__device__ __forceinline__ void copy_async(uint8_t* target, const uint8_t* source) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
}

// Bring the line of an address to the second-level cache.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The same of `bytes` from `address` on, both multiples of 16.
__device__ __forceinline__ void prefetch(const void* address, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(bytes));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the last N groups of this thread's copies have landed.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ bool any_lane(bool value) { return __any_sync(ALL_LANES, value); }

// Whether this is the last of `parties` blocks to come here; it then sees what the others have written before. The
// counter is zero again afterwards.
__device__ __forceinline__ bool last_to_arrive(uint32_t* counter, int parties) {
  if (parties == 1) {
    __syncthreads();
    return true;
  }
  __threadfence();
  __syncthreads();
  const bool last = threadIdx.x == 0 && atomicInc(counter, parties - 1) == parties - 1;
  const bool anyone = __syncthreads_or(last);
  __threadfence();
  return anyone;
}

// Read what another block has written: past the first-level cache.
__device__ __forceinline__ float load_past_cache(const float* source) { return __ldcg(source); }

template <typename T>
__device__ __forceinline__ T from_lane(T value, int lane) {
  return __shfl_sync(ALL_LANES, value, lane);
}

template <typename T>
__device__ __forceinline__ T from_neighbour(T value, int mask) {
  return __shfl_xor_sync(ALL_LANES, value, mask);
}

// The same value, which the compiler takes for a new one: it then stays in a register and is not computed again and
// again inside a loop.
__device__ __forceinline__ int pin(int value) { return __shfl_sync(ALL_LANES, value, threadIdx.x % 32); }

// Byte i of the result is byte (selector >> 4i) & 7 of {low, high}.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

// The larger of each of two pairs of 16-bit numbers.
__device__ __forceinline__ uint32_t max_of_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

// f32 to e4m3, to nearest even, at most +-448; the first in the low byte.
__device__ __forceinline__ uint32_t float_pair_to_fp8(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two e4m3 numbers, in the low 16 bits, as f16 pair.
__device__ __forceinline__ uint32_t fp8_pair_to_half2(uint32_t bytes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
  return pair;
}

__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float low_half(uint32_t pair) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(pair)));
}

__device__ __forceinline__ float high_half(uint32_t pair) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16)));
}

// Product of f16 pairs, kept within +-65504.
__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("{.reg .b32 t; mul.rn.f16x2 t, %1, %2; min.f16x2 t, t, %3; max.f16x2 %0, t, %4;}"
      : "=r"(product)
      : "r"(a), "r"(b), "r"(0x7bff7bffu), "r"(0xfbfffbffu));
  return product;
}

// An address in shared memory, which stays in a register; what is written and read there.
using SharedPlace = uint32_t;
__device__ __forceinline__ SharedPlace shared_place(const uint8_t* address) {
  return pin(static_cast<int>(__cvta_generic_to_shared(address)));
}
__device__ __forceinline__ uint32_t load_shared_half(SharedPlace place) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(place) : "memory");
  return half;
}

__device__ __forceinline__ void store_shared(SharedPlace place, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(place), "r"(word) : "memory");
}

// The bits of MASK; the compiler does not see which, and shifts and adds the result in one instruction.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t keep_bits(uint32_t word) {
  uint32_t kept;
  asm("and.b32 %0, %1, %2;" : "=r"(kept) : "r"(word), "n"(MASK));
  return kept;
}

__device__ __forceinline__ uint32_t add_half2(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// a b + c of f16 pairs.
__device__ __forceinline__ uint32_t multiply_add_half2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float bf16_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ __forceinline__ uint16_t float_to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t float_to_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float square_root(float x) { return __fsqrt_rn(x); }

__device__ __forceinline__ void add_atomically(int32_t* target, int value) { atomicAdd(target, value); }

// Launch with dynamic shared memory of any size that the device has; returns a cudaError_t.
template <typename Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int threads, int shared_bytes, void* stream, Arguments arguments) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments);
  return cudaPeekAtLastError();
}
