// Token slots -> page ids, and the checks on page ids.
#include <algorithm>
#include <vector>

#include "clones.h"
#include "stages.h"

namespace kvplan::cpu {

int64_t page_indices(const PageList& slots, int64_t page_size, int64_t* pages) {
  return with_ids(slots, [&](const auto* ids) -> int64_t {
    for (int64_t start = 0; start < slots.size; start += page_size) {
      const int64_t first = ids[start];
      if (first < 0 || first % page_size != 0) return start;
      const int64_t stop = std::min(start + page_size, slots.size);
      bool consecutive = true;
      for (int64_t i = start; i < stop; ++i) consecutive &= ids[i] - first == i - start;
      if (!consecutive) {
        for (int64_t i = start; i < stop; ++i)
          if (ids[i] - first != i - start) return i;
      }
      *pages++ = first / page_size;
    }
    return -1;
  });
}

namespace {

// One pass without an early exit vectorises; only a bad list is searched for its place.
KVPLAN_CLONES bool all_below(const int64_t* ids, int64_t n, int64_t limit) {
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) bad |= (ids[i] < 0) | (ids[i] >= limit);
  return !bad;
}

KVPLAN_CLONES bool all_below(const int32_t* ids, int64_t n, int64_t limit) {
  const uint32_t narrow = static_cast<uint32_t>(std::min(limit, int64_t{1} << 31));  // a negative id is above it
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) bad |= static_cast<uint32_t>(ids[i]) >= narrow;
  return !bad;
}

}  // namespace

Status check_range(const PageList& pages, int64_t limit, Code code) {
  return with_ids(pages, [&](const auto* ids) -> Status {
    if (all_below(ids, pages.size, limit)) return {};
    for (int64_t i = 0;; ++i)
      if (ids[i] < 0 || ids[i] >= limit) return {code, 0, 0, i, static_cast<int64_t>(ids[i])};
  });
}

namespace {

constexpr int64_t kBitmapPages = int64_t{1} << 22;  // 512 KiB of bits

template <class Id>
Status check_distinct_sorted(const Id* ids, int64_t n) {
  std::vector<Id> sorted(ids, ids + n);
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end()) return {};
  // Refused anyway, so time matters no more: the first place whose id came before.
  for (int64_t i = 1; i < n; ++i)
    if (std::find(ids, ids + i, ids[i]) != ids + i) return {Code::kDstTwice, 0, 0, i, static_cast<int64_t>(ids[i])};
  return {};
}

}  // namespace

Status check_distinct(const PageList& pages, int64_t limit) {
  return with_ids(pages, [&](const auto* ids) -> Status {
    // A bitmap costs its clearing; for few ids in a large pool sorting is less.
    if (limit > kBitmapPages || limit / 64 > 64 * pages.size) return check_distinct_sorted(ids, pages.size);
    std::vector<uint64_t> seen(static_cast<size_t>(ceil_div(limit, 64)), 0);
    for (int64_t i = 0; i < pages.size; ++i) {
      const uint64_t id = static_cast<uint64_t>(ids[i]);
      const uint64_t bit = uint64_t{1} << (id % 64);
      if (seen[id / 64] & bit) return {Code::kDstTwice, 0, 0, i, static_cast<int64_t>(id)};
      seen[id / 64] |= bit;
    }
    return {};
  });
}

}  // namespace kvplan::cpu
