// What device code stands on, whoever compiles it: nvcc, NVRTC, or a host compiler for the emulator in tests/simt.
#pragma once
#include "args.h"

#if defined(KVPLAN_SIMT)
#include "simt.h"
#endif
#if !defined(KVPLAN_SHARED)
#define KVPLAN_SHARED(type, name) __shared__ type name
#endif
// `blocks` are to fit into a multiprocessor; that bounds the registers.
#define KVPLAN_KERNEL_OF(blocks) extern "C" __global__ void __launch_bounds__(kvplan::cuda::kThreads, blocks)
#define KVPLAN_KERNEL KVPLAN_KERNEL_OF(2)

namespace kvplan::cuda {

// CUDA's 64-bit atomics know `unsigned long long` alone, which uint64_t need not be.
using Word = unsigned long long;
static_assert(sizeof(Word) == sizeof(uint64_t));

__device__ __forceinline__ uint64_t atomic_add(uint64_t* at, uint64_t value) {
  return atomicAdd(reinterpret_cast<Word*>(at), static_cast<Word>(value));
}
__device__ __forceinline__ uint64_t atomic_max(uint64_t* at, uint64_t value) {
  return atomicMax(reinterpret_cast<Word*>(at), static_cast<Word>(value));
}
__device__ __forceinline__ uint64_t atomic_min(uint64_t* at, uint64_t value) {
  return atomicMin(reinterpret_cast<Word*>(at), static_cast<Word>(value));
}
__device__ __forceinline__ uint64_t atomic_cas(uint64_t* at, uint64_t expected, uint64_t value) {
  return atomicCAS(reinterpret_cast<Word*>(at), static_cast<Word>(expected), static_cast<Word>(value));
}

__device__ __forceinline__ int64_t id_at(const void* ids, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

// A thread's number in the grid, and how many there are.
__device__ __forceinline__ int64_t grid_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t grid_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

}  // namespace kvplan::cuda
