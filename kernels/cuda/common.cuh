// What both kernels count and unroll with.
#pragma once

#include "primitives.cuh"

constexpr int LANES = 32;

constexpr __host__ __device__ int smaller(int a, int b) { return a < b ? a : b; }
constexpr __host__ __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <int I>
struct Index {
  constexpr __host__ __device__ operator int() const { return I; }
};

// body(0), body(1), ... body(N - 1), each with its index as a constant.
template <int N, int I = 0, typename F>
__device__ __forceinline__ void static_for(F&& body) {
  if constexpr (I < N) {
    body(Index<I>{});
    static_for<N, I + 1>(body);
  }
}
