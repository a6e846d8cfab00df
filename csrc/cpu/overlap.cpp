// Which of many ranges first meets one of a sorted list.
#include <algorithm>

#include "clones.h"
#include "stages.h"

namespace kvplan::cpu {
namespace {

constexpr int64_t kBlock = 4096;         // ranges looked at together: in a plan, about those of one entry
constexpr uint64_t kGranules = 1 << 18;  // at most, a bit each: 32 KiB, which stays in the nearest cache
constexpr uint64_t kGranulesEach = 256;   // for one of the list
constexpr int64_t kTogether = 16;        // ranges of a block that one look at the granules tells of

// Ends are last bytes: an end may be 2^64.
uint64_t last_of(const Ranges& ranges, int64_t i) { return ranges.base[i] + (ranges.nbytes[i] - 1); }

// Where ranges lie: all of [low, high]; none has more bytes than `longest`. Bounds, quick to find, not the least ones.
struct Extent {
  uint64_t low, high, longest;
};

KVPLAN_CLONES void extent_of(const uint64_t* base, const uint64_t* nbytes, int64_t n, Extent* extent) {
  uint64_t low = UINT64_MAX, high = 0, longest = 0;
  for (int64_t i = 0; i < n; ++i) {
    low = std::min(low, base[i]);
    high = std::max(high, base[i]);
    longest |= nbytes[i];
  }
  *extent = {low, high + std::min(longest, UINT64_MAX - high), longest};
}

// Granules of an extent, 2^n of them, a bit each: in which of them a range may begin that meets one of a list.
// Masked, for a table that somebody writes meanwhile.
struct Granules {
  uint64_t low, mask;
  int shift;
  std::vector<uint32_t> bits;

  uint64_t of(uint64_t address) const { return (address - low) >> shift & mask; }
  bool marked(uint64_t address) const { return bits[of(address) / 32] >> (of(address) % 32) & 1; }

  void mark(uint64_t first, uint64_t last) {
    const uint32_t from = ~uint32_t{0} << (first % 32), to = ~uint32_t{0} >> (31 - last % 32);
    if (first / 32 == last / 32) {
      bits[first / 32] |= from & to;
      return;
    }
    bits[first / 32] |= from;
    for (uint64_t word = first / 32 + 1; word < last / 32; ++word) bits[word] = ~uint32_t{0};
    bits[last / 32] |= to;
  }
};

// For each kTogether ranges, whether one begins in a granule that is marked. No branch: in scattered pages none could be
// foreseen.
KVPLAN_CLONES void begin_in(const Granules& granules, const uint64_t* base, int64_t n, uint32_t* begin) {
  const uint32_t* bits = granules.bits.data();
  const uint64_t low = granules.low, mask = granules.mask;
  const int shift = granules.shift;
  const auto marked = [=](uint64_t start) {
    const uint64_t granule = (start - low) >> shift & mask;
    return bits[granule / 32] >> (granule % 32);
  };
  int64_t at = 0;
  for (; at + kTogether <= n; at += kTogether) {
    uint32_t any = 0;
    for (int64_t i = 0; i < kTogether; ++i) any |= marked(base[at + i]);
    *begin++ = any & 1;
  }
  uint32_t any = 0;
  for (; at < n; ++at) any |= marked(base[at]);
  *begin = any & 1;
}

// The part of a sorted list near a block of ranges.
class Near {
 public:
  explicit Near(const Ranges& sorted) : all_(sorted) {}

  // Keeps those of the list that share a byte with an extent; false where there are none.
  bool narrow(const Extent& extent) {
    const uint64_t* end = std::upper_bound(all_.base, all_.base + all_.size, extent.high);
    stop_ = end - all_.base;
    start_ = std::upper_bound(all_.base, end, extent.low) - all_.base;
    if (start_ > 0 && last_of(all_, start_ - 1) >= extent.low) --start_;
    return start_ < stop_;
  }

  int64_t size() const { return stop_ - start_; }

  bool meets(uint64_t start, uint64_t last) const {
    const int64_t at = std::upper_bound(all_.base + start_, all_.base + stop_, last) - all_.base - 1;
    return at >= start_ && last_of(all_, at) >= start;
  }

  // Marks where a range of at most `extent.longest` bytes may begin that meets one of these.
  const Granules& mark(const Extent& extent) {
    uint64_t count = kGranules / 8;
    while (count < kGranules && count < kGranulesEach * static_cast<uint64_t>(size())) count *= 2;
    granules_.low = extent.low;
    granules_.mask = count - 1;
    for (granules_.shift = 0; (extent.high - extent.low) >> granules_.shift >= count;) ++granules_.shift;
    granules_.bits.assign(count / 32, 0);
    for (int64_t i = start_; i < stop_; ++i) {
      const uint64_t base = all_.base[i], back = extent.longest - 1;
      const uint64_t first = base - std::min(back, base);
      const uint64_t stop = granules_.of(std::min(last_of(all_, i), extent.high));
      granules_.mark(granules_.of(std::max(first, extent.low)), stop);
    }
    return granules_;
  }

 private:
  Ranges all_;
  int64_t start_ = 0, stop_ = 0;
  Granules granules_;
};

// Numbers of those of a block that begin in a granule that is marked, and how many.
int64_t likely_of(const Ranges& ranges, const Granules& granules, bool few, int64_t* likely) {
  int64_t count = 0;
  uint32_t begin[kBlock / kTogether + 1];
  if (few) begin_in(granules, ranges.base, ranges.size, begin);
  for (int64_t at = 0; at < ranges.size; at += kTogether) {
    if (few && !begin[at / kTogether]) continue;
    for (int64_t i = at; i < std::min(at + kTogether, ranges.size); ++i) {
      likely[count] = i;
      count += static_cast<int64_t>(granules.marked(ranges.base[i]));
    }
  }
  return count;
}

// The first of `ranges`, a block, that meets one of the list; else -1.
int64_t first_of_block(const Ranges& ranges, Near& near) {
  Extent extent;
  extent_of(ranges.base, ranges.nbytes, ranges.size, &extent);
  if (extent.longest == 0 || !near.narrow(extent)) return -1;
  int64_t likely[kBlock];
  const int64_t count = likely_of(ranges, near.mark(extent), near.size() < kBlock / 16, likely);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t i = likely[k];
    if (ranges.nbytes[i] != 0 && near.meets(ranges.base[i], last_of(ranges, i))) return i;
  }
  return -1;
}

}  // namespace

int64_t first_collision(const Ranges& ranges, const Ranges& sorted) {
  Near near(sorted);
  for (int64_t at = 0; at < ranges.size; at += kBlock) {
    const Ranges block{ranges.base + at, ranges.nbytes + at, std::min(kBlock, ranges.size - at)};
    const int64_t found = first_of_block(block, near);
    if (found >= 0) return at + found;
  }
  return -1;
}

}  // namespace kvplan::cpu
