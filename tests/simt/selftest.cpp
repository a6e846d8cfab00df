// Kernels that are right, and twins with one mistake each that the emulator must find.
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
typedef int PerThread[kThreads];
typedef int PerWarp[kWarps];

// Sum over a block, by halves.
template <bool kSync>
__global__ void __launch_bounds__(kThreads) block_reduce(const int* in, int n, int* out) {
  KVPLAN_SHARED(PerThread, part);
  const int t = static_cast<int>(threadIdx.x);
  int sum = 0;
  for (int i = t; i < n; i += kThreads) sum += in[i];
  part[t] = sum;
  if (kSync) __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = part[0];
}

__device__ __forceinline__ int warp_scan(int value) {
  for (int delta = 1; delta < 32; delta *= 2) {
    const int other = __shfl_up_sync(~0u, value, delta);
    if (static_cast<int>(threadIdx.x & 31) >= delta) value += other;
  }
  return value;
}

// Inclusive sums by decoupled look-back, one element a thread. A tile's word: its state in the high half (1: its own
// sum; 2: the sum up to it), the sum in the low half. Tiles are taken by ticket; the twin takes blockIdx.
template <bool kTicket>
__global__ void scan(const int* in, int n, int* out, unsigned* ticket, unsigned long long* tiles) {
  KVPLAN_SHARED(int, tile);
  KVPLAN_SHARED(int, before);
  KVPLAN_SHARED(PerWarp, warps);
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) tile = kTicket ? static_cast<int>(atomicAdd(ticket, 1)) : static_cast<int>(blockIdx.x);
  __syncthreads();
  const int at = tile * kThreads + t;
  int value = warp_scan(at < n ? in[at] : 0);
  if (t % 32 == 31) warps[t / 32] = value;
  __syncthreads();
  for (int w = 0; w < t / 32; ++w) value += warps[w];
  if (t == kThreads - 1) {
    auto word = [](unsigned state, int sum) { return static_cast<unsigned long long>(state) << 32 | unsigned(sum); };
    int sum = 0;
    if (tile > 0) {
      atomicExch(&tiles[tile], word(1, value));
      for (int i = tile - 1;; --i) {
        unsigned long long found;
        while ((found = *static_cast<volatile unsigned long long*>(&tiles[i])) == 0) __nanosleep(20);
        sum += static_cast<int>(found);
        if (found >> 32 == 2) break;
      }
    }
    atomicExch(&tiles[tile], word(2, sum + value));
    before = sum;
  }
  __syncthreads();
  if (at < n) out[at] = before + value;
}

// Sum over a warp in shared memory. The twin relies on lockstep.
template <bool kSync>
__global__ void warp_reduce(const int* in, int* out) {
  KVPLAN_SHARED(PerThread, part);
  const int t = static_cast<int>(threadIdx.x);
  const int lane = t & 31;
  part[t] = in[blockIdx.x * kThreads + t];
  if (kSync) __syncwarp();
  for (int half = 16; half > 0; half /= 2) {
    if (lane < half) part[t] += part[t + half];
    if (kSync) __syncwarp();
  }
  if (lane == 0) atomicAdd(out, part[t]);
}

// How many elements are odd. The twin names a mask in which only half the lanes are.
template <unsigned kMask>
__global__ void count_odd(const int* in, int* out) {
  const unsigned odd = __ballot_sync(kMask, in[blockIdx.x * kThreads + threadIdx.x] & 1);
  if (threadIdx.x % 32 == 0) atomicAdd(out, __popc(odd));
}

// Half the warp shuffles; lane 0 reads a lane that does not take part.
__global__ void shuffle_from_outside(int* out) {
  if (threadIdx.x % 32 < 16) atomicAdd(out, __shfl_down_sync(0xffffu, 1, 16));
}

template <bool kAtomic>
__global__ void count_threads(int* out) {
  if (kAtomic) {
    atomicAdd(out, 1);
  } else {
    const int old = *out;
    KVPLAN_POINT();
    *out = old + 1;
  }
}

// As above without a point: seen only where every access is one.
__global__ void count_plainly(volatile int* out) { *out = *out + 1; }

__global__ void divergent_barrier(int* out) {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  atomicAdd(out, 1);
}

__global__ void early_return(int n, int* out) {
  if (static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) >= n) return;
  __syncthreads();
  atomicAdd(out, 1);
}

// The last block tells the first to go on: a dead wait when they are not resident together.
__global__ void wait_for_last_block(int* flag) {
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) atomicExch(flag, 1);
  while (*static_cast<volatile int*>(flag) == 0) __nanosleep(20);
}

// Lanes of one warp that wait for each other's critical sections.
__global__ void lock_without_sleep(int* lock, int* out) {
  while (atomicCAS(lock, 0, 1) != 0) {
  }
  *out += 1;
  atomicExch(lock, 0);
}

__global__ void too_much_stack() {
  volatile char frame[simt::kStackBytes - 3072];
  for (auto& byte : frame) byte = 1;
}

__global__ void too_much_shared() {
  typedef char Large[49 << 10];
  KVPLAN_SHARED(Large, large);
  large[threadIdx.x] = 0;
}

__global__ void throws() {
  if (threadIdx.x == 5) throw std::runtime_error("thrown by the kernel");
  __syncthreads();
}

__global__ void reads_poison(int* out) {
  KVPLAN_SHARED(int, fresh);
  if (threadIdx.x == 0) *out = fresh;
}

#define EXPECT(condition) \
  if (!(condition)) simt::current->grid->fail("not so: " #condition)

// Every intrinsic against what it means.
__global__ void intrinsics(unsigned* words) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int t = static_cast<int>(threadIdx.x);
  EXPECT(blockDim.x == 64 && blockDim.y == 1 && gridDim.x == 3 && gridDim.z == 1 && threadIdx.y == 0 && warpSize == 32);
  EXPECT(__shfl_sync(~0u, lane * 3L, 5) == 15);
  EXPECT(__shfl_sync(~0u, lane, 5, 8) == (lane & ~7) + 5);
  EXPECT(__shfl_sync(~0u, lane, lane + 1) == (lane + 1) % 32);
  EXPECT(__shfl_up_sync(~0u, 1ull << lane, 3) == 1ull << (lane < 3 ? lane : lane - 3));
  EXPECT(__shfl_up_sync(~0u, lane, 1, 4) == (lane % 4 ? lane - 1 : lane));
  EXPECT(__shfl_down_sync(~0u, -1ll - lane, 30) == -1ll - (lane < 2 ? lane + 30 : lane));
  EXPECT(__shfl_down_sync(~0u, lane, 1, 16) == (lane % 16 == 15 ? lane : lane + 1));
  EXPECT(__shfl_xor_sync(~0u, unsigned(lane), 16) == unsigned(lane ^ 16));
  EXPECT(__shfl_xor_sync(~0u, lane, 4, 4) == ((lane & 4) ? lane ^ 4 : lane));
  EXPECT(__ballot_sync(~0u, lane % 3 == 0) == 0x49249249u);
  EXPECT(__any_sync(~0u, lane == 9) && !__any_sync(~0u, 0) && __all_sync(~0u, 7) && !__all_sync(~0u, lane));
  if (lane < 4) EXPECT(__ballot_sync(0xfu, lane & 2) == 0xcu && __all_sync(0xfu, 1));
  if (lane >= 30) EXPECT(__shfl_sync(0xc0000000u, lane, 31) == 31);
  __syncwarp();
  EXPECT(__syncthreads_or(t == 63) == 1 && __syncthreads_or(0) == 0);
  EXPECT(__syncthreads_count(t % 4 == 0) == 16);
  EXPECT(__syncthreads_and(t < 64) == 1 && __syncthreads_and(t < 63) == 0);
  __threadfence();
  __threadfence_block();
  atomicMax(&words[0], unsigned(t));
  atomicMin(reinterpret_cast<int*>(&words[1]), -t);
  atomicOr(&words[2], 1u << (t % 32));
  atomicAdd(reinterpret_cast<unsigned long long*>(&words[4]), 1ull << 32);
  if (atomicCAS(&words[3], 0u, 1u) == 0) atomicAdd(&words[6], 1);
  EXPECT(__ffs(0) == 0 && __ffs(8) == 4 && __ffsll(1ll << 40) == 41 && __popc(0xf0f0u) == 8 && __popcll(~0ull) == 64);
  EXPECT(__clz(0) == 32 && __clz(-1) == 0 && __clz(1) == 31 && __clzll(0) == 64 && __clzll(1) == 63);
  EXPECT(__umul64hi(~0ull, ~0ull) == ~0ull - 1 && __mul64hi(-1, 1) == -1 && __mul64hi(1ll << 62, 8) == 2);
  static_assert(alignof(uint2) == 8 && alignof(uint4) == 16 && alignof(ulonglong2) == 16 && sizeof(uint4) == 16);
  EXPECT(make_uint4(1, 2, 3, 4).w == 4 && make_ulonglong2(1, 2).y == 2);
}

// Which thread took which ticket: the schedule, as a number.
__global__ void trace(unsigned* next, unsigned long long* hash) {
  const unsigned place = atomicAdd(next, 1);
  atomicAdd(hash, (place + 1ull) * (blockIdx.x * 1000003ull + threadIdx.x * 7919ull + 1) * 0x9e3779b97f4a7c15ull);
}

std::vector<int> numbers(int n) {
  std::vector<int> in(n);
  for (int i = 0; i < n; ++i) in[i] = i * 37 % 101 - 20;
  return in;
}

template <bool kSync>
bool run_block_reduce(uint64_t seed, int n) {
  const auto in = numbers(n);
  std::vector<int> out(5, -1);
  SIMT_LAUNCH(seed, 5, kThreads, block_reduce<kSync>, in.data(), n, out.data());
  return out == std::vector<int>(5, std::accumulate(in.begin(), in.end(), 0));
}

template <bool kTicket>
bool run_scan(uint64_t seed, int n) {
  const int blocks = std::max(1, (n + kThreads - 1) / kThreads);
  const auto in = numbers(n);
  std::vector<int> out(n, -1), right(n);
  std::partial_sum(in.begin(), in.end(), right.begin());
  std::vector<unsigned long long> tiles(blocks);
  unsigned ticket = 0;
  SIMT_LAUNCH(seed, blocks, kThreads, scan<kTicket>, in.data(), n, out.data(), &ticket, tiles.data());
  return out == right;
}

template <class Kernel>
bool run_over_input(const std::string& what, uint64_t seed, Kernel kernel, int (*map)(int)) {
  const auto in = numbers(3 * kThreads);
  int out = 0, right = 0;
  for (int x : in) right += map(x);
  simt::launch({seed, what.c_str()}, 3, kThreads, kernel, in.data(), &out);
  return out == right;
}

bool run(const std::string& what, uint64_t seed, int n) {
  int out = 0, lock = 0;
  if (what == "block_reduce") return run_block_reduce<true>(seed, n);
  if (what == "block_reduce_without_barrier") return run_block_reduce<false>(seed, n);
  if (what == "scan") return run_scan<true>(seed, n);
  if (what == "scan_without_ticket") return run_scan<false>(seed, n);
  if (what == "warp_reduce") return run_over_input(what, seed, warp_reduce<true>, [](int x) { return x; });
  if (what == "warp_reduce_in_lockstep")
    return run_over_input(what, seed, warp_reduce<false>, [](int x) { return x; });
  if (what == "count_odd") return run_over_input(what, seed, count_odd<~0u>, [](int x) { return x & 1; });
  if (what == "count_odd_wrong_mask")
    return run_over_input(what, seed, count_odd<0xffffu>, [](int x) { return x & 1; });
  if (what == "count_threads") return SIMT_LAUNCH(seed, 4, 64, count_threads<true>, &out), out == 256;
  if (what == "count_threads_without_atomic") return SIMT_LAUNCH(seed, 4, 64, count_threads<false>, &out), out == 256;
  if (what == "count_plainly") return SIMT_LAUNCH(seed, 4, 64, count_plainly, &out), out == 256;
  if (what == "divergent_barrier") return SIMT_LAUNCH(seed, 2, 64, divergent_barrier, &out), out == 128;
  if (what == "early_return") return SIMT_LAUNCH(seed, 2, 64, early_return, n, &out), out == std::min(n, 128);
  if (what == "shuffle_from_outside") return SIMT_LAUNCH(seed, 1, 64, shuffle_from_outside, &out), out == 32;
  if (what == "wait_for_last_block") return SIMT_LAUNCH(seed, 20, 64, wait_for_last_block, &out), true;
  if (what == "lock_without_sleep") return SIMT_LAUNCH(seed, 3, 64, lock_without_sleep, &lock, &out), out == 192;
  if (what == "too_much_stack") return SIMT_LAUNCH(seed, 1, 1, too_much_stack), true;
  if (what == "too_much_shared") return SIMT_LAUNCH(seed, 1, 32, too_much_shared), true;
  if (what == "throws") return SIMT_LAUNCH(seed, 2, 64, throws), true;
  if (what == "reads_poison") return SIMT_LAUNCH(seed, 2, 64, reads_poison, &out), out == 0;
  if (what == "intrinsics") {
    alignas(8) unsigned words[8] = {};
    SIMT_LAUNCH(seed, 3, 64, intrinsics, words);
    return words[0] == 63 && static_cast<int>(words[1]) == -63 && words[2] == ~0u && words[3] == 1 && words[4] == 0 &&
           words[5] == 192 && words[6] == 1;
  }
  throw std::invalid_argument("no case " + what);
}

}  // namespace

// 0: right; 1: a wrong result; 2: an error, whose message is told.
extern "C" int simt_run(const char* what, uint64_t seed, int n, char* message, size_t bytes) {
  try {
    return run(what, seed, n) ? 0 : 1;
  } catch (const std::exception& error) {
    std::snprintf(message, bytes, "%s", error.what());
    return 2;
  }
}

extern "C" uint64_t simt_trace(uint64_t seed) {
  unsigned next = 0;
  unsigned long long hash = 0;
  SIMT_LAUNCH(seed, 6, 64, trace, &next, &hash);
  return hash;
}

// For a build under sanitizers, which a process must start with: arguments are cases, which may fail or not.
int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      char message[4096] = "";
      const int status = simt_run(argv[i], seed, 1025, message, sizeof message);
      std::printf("%s %d %s\n", argv[i], status, message);
    }
  }
}
