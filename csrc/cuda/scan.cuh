// Ordered prefix sums in a single pass: each tile of kTile items adds up its own, publishes the sum, and looks back over
// what earlier tiles have published (decoupled look-back: Merrill and Garland, NVR-2016-002). Tiles are numbered in the
// order in which blocks begin, so a tile only ever waits for one that runs already.
#pragma once
#include "device.cuh"

namespace kvplan::cuda {

enum : uint64_t {
  kSum = 1,    // a tile's word holds its own sum ...
  kPrefix = 2  // ... or the sum of all tiles up to it. In the low two bits; 0: nothing yet
};
constexpr unsigned kWarp = 0xffffffffu;
// No sum that is meant is as large, and none that is not can wrap: what a thread brings, and what a tile tells.
constexpr int64_t kMostItem = int64_t{1} << 45, kMostSum = int64_t{1} << 55;

// The number of a tile that this block is to do; the same in all its threads.
__device__ __forceinline__ int64_t take_tile(const Scan& scan) {
  KVPLAN_SHARED(uint64_t, ticket);
  // No thread reads the last ticket any more: scan_exclusive, which each tile goes through, has had them meet since.
  if (threadIdx.x == 0) ticket = atomic_add(scan.ticket, 1);
  __syncthreads();
  return static_cast<int64_t>(ticket);
}

// Sum over the warp's threads before this one; *total gets the sum over all of them.
__device__ __forceinline__ int64_t warp_exclusive(int64_t value, int64_t* total) {
  const int lane = threadIdx.x % 32;
  long long sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const long long other = __shfl_up_sync(kWarp, sum, step);
    if (lane >= step) sum += other;
  }
  *total = __shfl_sync(kWarp, sum, 31);
  return sum - value;
}

// Sum over all earlier tiles, told to all threads of a warp. `sum` is this tile's own.
__device__ __forceinline__ int64_t look_back(const Scan& scan, int64_t tile, int64_t sum) {
  const int lane = threadIdx.x % 32;
  volatile uint64_t* const words = scan.tiles;
  if (lane == 0) words[tile] = static_cast<uint64_t>(sum) << 2 | (tile == 0 ? kPrefix : kSum);
  long long before = 0;
  for (int64_t last = tile - 1; last >= 0; last -= 32) {
    const int64_t mine = last - lane;
    uint64_t word = mine >= 0 ? words[mine] : kPrefix;  // nothing lies before the first tile
    while (__any_sync(kWarp, (word & 3) == 0)) {
      __nanosleep(20);
      if (mine >= 0) word = words[mine];
    }
    const unsigned complete = __ballot_sync(kWarp, (word & 3) == kPrefix);
    const int nearest = complete == 0 ? 31 : __ffs(static_cast<int>(complete)) - 1;
    long long part = lane <= nearest ? static_cast<long long>(word >> 2) : 0;
    for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(kWarp, part, step);
    before += part;
    if (complete != 0) break;
  }
  if (before > kMostSum) before = kMostSum;
  if (lane == 0) words[tile] = static_cast<uint64_t>(before + sum) << 2 | kPrefix;
  return before;
}

// Sum of the values of all items before this thread's, over all tiles up to this one.
__device__ __forceinline__ int64_t scan_exclusive(const Scan& scan, int64_t tile, int64_t value) {
  typedef int64_t Sums[kThreads / 32 + 1];
  KVPLAN_SHARED(Sums, sums);  // of each warp; then of all before it
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t total;
  const int64_t within = warp_exclusive(value < kMostItem ? value : kMostItem, &total);
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  if (warp == 0) {
    int64_t all;
    const int64_t mine = lane < kThreads / 32 ? sums[lane] : 0;
    const int64_t before = warp_exclusive(mine, &all);
    const int64_t earlier = look_back(scan, tile, all);
    if (lane < kThreads / 32) sums[lane] = earlier + before;
  }
  __syncthreads();
  return sums[warp] + within;
}

// Ordered starts of items from their counts: put(item, sum of the counts before it) for each, then end(sum of all), once.
template <class Count, class Put, class End>
__device__ __forceinline__ void place_items(const Scan& scan, int64_t items, Count count, Put put, End end) {
  const int64_t tiles = items == 0 ? 1 : ceil_div(items, kTile);
  for (int64_t tile = take_tile(scan); tile < tiles; tile = take_tile(scan)) {
    const int64_t first = tile * kTile + static_cast<int64_t>(threadIdx.x) * kItems;
    int64_t counts[kItems], sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      counts[i] = first + i < items ? count(first + i) : 0;
      sum += counts[i];
    }
    int64_t before = scan_exclusive(scan, tile, sum);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i < items) put(first + i, before);
      before += counts[i];
      if (first + i + 1 == items || (items == 0 && first + i == 0)) end(before);
    }
  }
}

}  // namespace kvplan::cuda
