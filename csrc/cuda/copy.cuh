// Carries out descriptors between device memory and device memory, or pinned host memory. The bytes of all descriptors
// are cut into tiles, and each warp takes an equal share of consecutive ones: however unequal descriptors are, none is
// left to one warp, nor does one warp look for its place more than once.
#pragma once
#include "scan.cuh"

namespace kvplan::cuda {

__device__ __forceinline__ int64_t descriptors_of(const CopyArgs& args) {
  const int64_t count = args.count == nullptr ? args.room : *args.count;
  return count < 0 || count > args.room ? 0 : count;  // -1: refused
}

__device__ __forceinline__ int64_t tiles_of(uint64_t nbytes) {
  return static_cast<int64_t>(nbytes / kCopyTile + (nbytes % kCopyTile != 0));
}

KVPLAN_KERNEL kvplan_tiles(const CopyArgs args) {
  const int64_t n = descriptors_of(args);
  const uint64_t* const nbytes = args.table + 2 * args.room;
  place_items(
      args.scan, n, [&](int64_t at) { return tiles_of(nbytes[at]); },
      [&](int64_t at, int64_t before) { args.tile_starts[at] = before; },
      [&](int64_t tiles) {
        args.tile_starts[n] = tiles;
        // Divided once, here: in the copy kernel a 64-bit division would cost it registers.
        args.share[0] = quotient(tiles, args.warps);
        args.share[1] = tiles - args.share[0] * args.warps;
      });
}

// [src, src + nbytes) in words of one width, to which both addresses are aligned alike; the ends byte by byte.
template <class Word>
__device__ __forceinline__ void copy_words(uint64_t src, uint64_t dst, uint32_t nbytes, uint32_t lane) {
  constexpr uint32_t kWidth = sizeof(Word);
  constexpr uint32_t kUnroll = 4;  // loads under way before the first store
  const auto copy_byte = [&](uint32_t at) {
    *reinterpret_cast<uint8_t*>(dst + at) = *reinterpret_cast<const uint8_t*>(src + at);
  };
  uint32_t head = -static_cast<uint32_t>(dst) % kWidth;
  if (head > nbytes) head = nbytes;
  if (lane < head) copy_byte(lane);
  const uint32_t end = nbytes - (nbytes - head) % kWidth;  // of the last whole word
  if (end + lane < nbytes) copy_byte(end + lane);
  for (uint32_t at = head + lane * kWidth; at < end; at += 32 * kWidth * kUnroll) {
    Word held[kUnroll];
    const auto* from = reinterpret_cast<const Word*>(src + at);
    auto* to = reinterpret_cast<Word*>(dst + at);
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k)
      if (at + 32 * kWidth * k < end) held[k] = from[32 * k];
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k)
      if (at + 32 * kWidth * k < end) to[32 * k] = held[k];
  }
}

__device__ __forceinline__ void copy_range(uint64_t src, uint64_t dst, uint32_t nbytes, uint32_t lane) {
  const uint64_t apart = src ^ dst;  // the lowest bit in which they differ bounds the width
  if (apart % 16 == 0)
    copy_words<uint4>(src, dst, nbytes, lane);
  else if (apart % 8 == 0)
    copy_words<uint64_t>(src, dst, nbytes, lane);
  else if (apart % 4 == 0)
    copy_words<uint32_t>(src, dst, nbytes, lane);
  else if (apart % 2 == 0)
    copy_words<uint16_t>(src, dst, nbytes, lane);
  else
    copy_words<uint8_t>(src, dst, nbytes, lane);
}

constexpr int64_t kMostTiles = (int64_t{1} << 30) / kCopyTile;

KVPLAN_KERNEL_OF(4) kvplan_copy(const CopyArgs args) {
  const int64_t n = descriptors_of(args);
  const unsigned lane = threadIdx.x % 32;
  const int64_t warp = grid_thread() / 32, each = args.share[0], more = args.share[1];
  int64_t tile = warp * each + (warp < more ? warp : more);
  const int64_t end = tile + each + (warp < more);
  if (tile >= end) return;
  int64_t at = last_not_above(0, n, tile, [&](int64_t i) { return args.tile_starts[i]; });
  while (tile < end) {
    const int64_t next = args.tile_starts[at + 1];
    if (tile == next) {
      ++at;
      continue;
    }
    // At most so much at a time that 32 bits count it.
    int64_t stop = next < end ? next : end;
    if (stop - tile > kMostTiles) stop = tile + kMostTiles;
    const uint64_t nbytes = args.table[2 * args.room + at];
    uint64_t src = args.table[at], dst = args.table[args.room + at];
    const bool whole = relocate(args.moved, args.num_read, nbytes, &src) &&
                       relocate(args.moved + args.num_read, args.num_written, nbytes, &dst);
    const uint64_t skipped = static_cast<uint64_t>(tile - args.tile_starts[at]) * kCopyTile;
    const uint64_t left = nbytes - skipped, most = static_cast<uint64_t>(stop - tile) * kCopyTile;
    tile = stop;
    if (whole) copy_range(src + skipped, dst + skipped, static_cast<uint32_t>(left < most ? left : most), lane);
  }
}

}  // namespace kvplan::cuda
