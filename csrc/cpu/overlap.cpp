// Which of many ranges first meets one of a sorted list.
#include <algorithm>

#include "stages.h"

namespace kvplan::cpu {
namespace {

constexpr int64_t kMostGranules = int64_t{1} << 20;  // a bit each: 128 KiB, which stays in the cache
constexpr int64_t kGranulesEach = 64;            // for one of the list: few more than its own are set
constexpr int64_t kMany = 4096;                  // ranges from which the bits pay for being set

// The sorted list, and the search in it. Ends are last bytes: an end may be 2^64.
class Others {
 public:
  Others(const uint64_t* base, const uint64_t* nbytes, int64_t n)
      : base_(base), nbytes_(nbytes), n_(n), first_(base[0]), last_(last_of(n - 1)) {}

  bool outside(uint64_t start, uint64_t last) const { return (last < first_) | (start > last_); }

  bool meets(uint64_t start, uint64_t last) const {
    const int64_t at = std::upper_bound(base_, base_ + n_, last) - base_ - 1;  // the last one that begins by then
    return at >= 0 && last_of(at) >= start;
  }

  // Which granules of the list's extent hold bytes of it: most ranges are told apart by one bit.
  void mark() {
    const auto granules = static_cast<uint64_t>(std::min(kMostGranules, kGranulesEach * n_));
    while ((last_ - first_) >> shift_ >= granules) ++shift_;
    bits_.assign(granules / 64, 0);
    for (int64_t i = 0; i < n_; ++i)
      for (uint64_t granule = granule_of(base_[i]); granule <= granule_of(last_of(i)); ++granule)
        bits_[granule / 64] |= uint64_t{1} << (granule % 64);
  }

  // False only where no byte of the list is near. Without a branch: in a plan of scattered pages none can be foreseen.
  bool near(uint64_t start, uint64_t last) const {
    const uint64_t from = granule_of(inside(start)), to = granule_of(inside(last));
    const bool wide = to - from > 1, meets = (last >= first_) & (start <= last_);
    return meets & (wide | bit(from) | bit(to));
  }

 private:
  uint64_t last_of(int64_t i) const { return base_[i] + (nbytes_[i] - 1); }
  uint64_t granule_of(uint64_t address) const { return (address - first_) >> shift_; }
  uint64_t inside(uint64_t address) const { return std::min(std::max(address, first_), last_); }
  bool bit(uint64_t granule) const { return bits_[granule / 64] >> (granule % 64) & 1; }

  const uint64_t *base_, *nbytes_;
  int64_t n_;
  uint64_t first_, last_;
  int shift_ = 0;
  std::vector<uint64_t> bits_;
};

}  // namespace

int64_t first_collision(const Ranges& ranges, const Ranges& sorted) {
  if (sorted.size == 0) return -1;
  Others others(sorted.base, sorted.nbytes, sorted.size);
  const bool marked = ranges.size >= kMany && sorted.size > 8;
  if (marked) others.mark();
  for (int64_t i = 0; i < ranges.size; ++i) {
    const uint64_t start = ranges.base[i], last = start + (ranges.nbytes[i] - 1);
    if (marked ? !others.near(start, last) : others.outside(start, last)) continue;
    if (ranges.nbytes[i] != 0 && others.meets(start, last)) return i;
  }
  return -1;
}

}  // namespace kvplan::cpu
