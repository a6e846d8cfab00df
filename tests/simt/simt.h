// Runs CUDA device code on the CPU: compiles it as plain C++17 and interleaves its threads and blocks at random.
//
//   #include "simt.h"            // before the device code; on a GPU it is not included
//   #include "some_kernel.cuh"
//   SIMT_LAUNCH(seed, blocks, threads, kernel, args...);   // throws simt::Error
//
// It is stricter than a GPU: the lanes of a warp run independently and meet only in a warp intrinsic; a mask may name no
// lane that has ended or that the block does not have; a thread may not end while others of its block wait at a barrier;
// the threads of a block must meet in a barrier at the same line. It does not find a missing __threadfence, since memory is
// sequentially consistent, nor a race without a yield point (intrinsic, atomic, KVPLAN_POINT) between its two accesses.
#pragma once

#include <climits>
#include <type_traits>
#include <utility>

#include "schedule.h"

namespace simt __attribute__((visibility("hidden"))) {

// Runs fn(args...) as every thread of the grid; returns how many times the scheduler chose a thread. Throws Error, or what
// the kernel threw. Fibres that have not ended then never run again, and destructors on their stacks do not run.
template <class F, class... Args>
uint64_t launch(Run run, unsigned blocks, unsigned threads, F&& fn, Args&&... args) {
  auto body = [&] { fn(args...); };
  using Body = decltype(body);
  return Grid(run, blocks, threads, [](void* closure) { (*static_cast<Body*>(closure))(); }, &body).run();
}

// A point where another thread may run. Outside a launch points do nothing, those in atomics included.
inline void point() {
  const Inside inside;
  if (current) current->grid->point();
}
inline void yield() {
  const Inside inside;
  if (current) current->grid->yield();
}

// One indivisible read, change and write of `*at`; returns the old value.
template <class T, class F>
T atomic(T* at, F change) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "atomics are of 32 or 64 bits");
  yield();
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0 && current) current->grid->fail("an atomic is not aligned");
  const Inside inside;
  const T old = *const_cast<volatile T*>(at);
  const T now = change(old);
  if (now != old) *const_cast<volatile T*>(at) = now;
  if (current) now != old ? current->grid->progress() : current->grid->no_progress();
  yield();
  return old;
}
template <class T>
using Same = std::common_type_t<T>;  // of an argument from which T is not deduced

template <class T>
T shuffle(const char* op, uint32_t mask, T value, int from, Site site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles are of 32 or 64 bits");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = current->grid->meet(op, mask, bits, from, site);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int lane() { return static_cast<int>(current->lane); }
inline void check_width(int width) {
  if (width <= 0 || width > 32 || (width & (width - 1))) current->grid->fail("the width of a shuffle is no power of 2");
}
inline uint32_t vote(const char* op, uint32_t mask, bool predicate, Site site) {
  return static_cast<uint32_t>(current->grid->meet(op, mask, predicate, -1, site));
}

}  // namespace simt

#define SIMT 1
#define SIMT_LAUNCH(seed, blocks, threads, kernel, ...) \
  ::simt::launch({static_cast<uint64_t>(seed), #kernel}, blocks, threads, kernel, ##__VA_ARGS__)

// Device code says these itself where simt.h is not included: `__shared__ type name` and nothing.
#define KVPLAN_SHARED(type, name)                                                                             \
  static_assert(std::is_trivially_default_constructible_v<type>, "shared memory starts uninitialised");       \
  static char simt_key_of_##name;                                                                             \
  auto& name = *static_cast<std::add_pointer_t<type>>(                                                        \
      ::simt::current->grid->shared(&simt_key_of_##name, sizeof(type), alignof(type)))
#define KVPLAN_POINT() ::simt::point()

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define threadIdx (::simt::current->index)
#define blockIdx (::simt::current->block->index)
#define blockDim (::simt::current->grid->block_dim())
#define gridDim (::simt::current->grid->dim())

constexpr int warpSize = 32;

// Vector types, aligned as CUDA's.
#define SIMT_VECTORS(type, name, align2, align4)                                                      \
  struct alignas(align2) name##2 {                                                                    \
    type x, y;                                                                                        \
  };                                                                                                  \
  struct alignas(align4) name##4 {                                                                    \
    type x, y, z, w;                                                                                  \
  };                                                                                                  \
  constexpr name##2 make_##name##2(type x, type y) { return {x, y}; }                                 \
  constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned, uint, 8, 16)
SIMT_VECTORS(long, long, 16, 16)
SIMT_VECTORS(unsigned long, ulong, 16, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
#undef SIMT_VECTORS

// Barriers.
inline void __syncthreads(simt::Site site = simt::here()) {
  simt::current->grid->barrier("__syncthreads", false, site);
}
inline int __syncthreads_or(int predicate, simt::Site site = simt::here()) {
  return simt::current->grid->barrier("__syncthreads_or", predicate != 0, site) != 0;
}
inline int __syncthreads_and(int predicate, simt::Site site = simt::here()) {
  const int all = static_cast<int>(simt::current->grid->block_dim().x);
  return simt::current->grid->barrier("__syncthreads_and", predicate != 0, site) == all;
}
inline int __syncthreads_count(int predicate, simt::Site site = simt::here()) {
  return simt::current->grid->barrier("__syncthreads_count", predicate != 0, site);
}
inline void __threadfence_block() { simt::yield(); }
inline void __threadfence() { simt::yield(); }
inline void __threadfence_system() { simt::yield(); }
inline void __nanosleep(unsigned, simt::Site site = simt::here()) { simt::current->grid->sleep("__nanosleep", site); }

// Warp intrinsics.
inline void __syncwarp(unsigned mask = ~0u, simt::Site site = simt::here()) {
  simt::vote("__syncwarp", mask, false, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Site site = simt::here()) {
  return simt::vote("__ballot_sync", mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, simt::Site site = simt::here()) {
  return simt::vote("__any_sync", mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simt::Site site = simt::here()) {
  return simt::vote("__all_sync", mask, predicate != 0, site) == mask;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, simt::Site site = simt::here()) {
  simt::check_width(width);
  const int from = (simt::lane() & ~(width - 1)) | (source & (width - 1));
  return simt::shuffle("__shfl_sync", mask, value, from, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, simt::Site site = simt::here()) {
  simt::check_width(width);
  const unsigned inside = simt::lane() & (width - 1);
  return simt::shuffle("__shfl_up_sync", mask, value, simt::lane() - (delta <= inside ? delta : 0), site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, simt::Site site = simt::here()) {
  simt::check_width(width);
  const unsigned inside = simt::lane() & (width - 1);
  const bool there = delta < static_cast<unsigned>(width) - inside;
  return simt::shuffle("__shfl_down_sync", mask, value, simt::lane() + (there ? delta : 0), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, simt::Site site = simt::here()) {
  simt::check_width(width);
  const int other = simt::lane() ^ lanes;
  const bool there = other >= 0 && other < (simt::lane() & ~(width - 1)) + width;
  return simt::shuffle("__shfl_xor_sync", mask, value, there ? other : simt::lane(), site);
}

// Atomics.
template <class T>
T atomicAdd(T* at, simt::Same<T> value) {
  using U = std::make_unsigned_t<T>;  // wraps
  return simt::atomic(at, [=](T old) { return static_cast<T>(static_cast<U>(old) + static_cast<U>(value)); });
}
template <class T>
T atomicSub(T* at, simt::Same<T> value) {
  using U = std::make_unsigned_t<T>;
  return simt::atomic(at, [=](T old) { return static_cast<T>(static_cast<U>(old) - static_cast<U>(value)); });
}
template <class T>
T atomicMax(T* at, simt::Same<T> value) {
  return simt::atomic(at, [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* at, simt::Same<T> value) {
  return simt::atomic(at, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicOr(T* at, simt::Same<T> value) {
  return simt::atomic(at, [=](T old) { return old | value; });
}
template <class T>
T atomicAnd(T* at, simt::Same<T> value) {
  return simt::atomic(at, [=](T old) { return old & value; });
}
template <class T>
T atomicExch(T* at, simt::Same<T> value) {
  return simt::atomic(at, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* at, simt::Same<T> expected, simt::Same<T> value) {
  return simt::atomic(at, [=](T old) { return old == expected ? value : old; });
}

// Arithmetic.
constexpr int __ffs(int x) { return __builtin_ffs(x); }
constexpr int __ffsll(long long x) { return __builtin_ffsll(x); }
constexpr int __popc(unsigned x) { return __builtin_popcount(x); }
constexpr int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
constexpr int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
constexpr int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
constexpr long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
constexpr unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
template <class T>
T __ldg(const T* at) {
  simt::point();
  return *at;
}
