// Token slots -> page ids, and the checks on page ids.
#include <algorithm>
#include <set>
#include <vector>

#include "clones.h"
#include "stages.h"

namespace kvplan::cpu {

int64_t page_indices(const PageList& slots, int64_t page_size, int64_t* pages) {
  return with_ids(slots, [&](const auto* ids) -> int64_t {
    int64_t bad = -1;
    for (int64_t start = 0; start < slots.size; start += page_size) {
      const int64_t first = ids[start];
      *pages++ = first >= 0 ? first / page_size : -1;
      if (bad >= 0) continue;
      const int64_t stop = std::min(start + page_size, slots.size);
      bool good = first >= 0 && first % page_size == 0;
      if (!good) bad = start;
      for (int64_t i = start; i < stop; ++i) good &= follows(ids[i], first, i - start);
      for (int64_t i = start; !good && bad < 0; ++i)
        if (!follows(ids[i], first, i - start)) bad = i;
    }
    return bad;
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

template <class Body>
Status for_each_id(const std::vector<PageList>& lists, Body body) {
  for (size_t request = 0; request < lists.size(); ++request) {
    const PageList& list = lists[request];
    const int64_t place = with_ids(list, [&](const auto* ids) {
      for (int64_t i = 0; i < list.size; ++i)
        if (!body(static_cast<int64_t>(ids[i]))) return i;
      return int64_t{-1};
    });
    if (place >= 0) {
      const int64_t id = with_ids(list, [&](const auto* ids) { return static_cast<int64_t>(ids[place]); });
      return {Code::kDstTwice, static_cast<int64_t>(request), 0, place, id};
    }
  }
  return {};
}

}  // namespace

Status check_distinct(const std::vector<PageList>& lists, int64_t limit) {
  int64_t total = 0;
  for (const PageList& list : lists) total += list.size;
  // A bitmap costs its clearing; for few ids in a large pool sorting is less.
  if (limit <= kBitmapPages && limit / 64 <= 64 * total) {
    std::vector<uint64_t> seen(static_cast<size_t>(ceil_div(limit, 64)), 0);
    return for_each_id(lists, [&](int64_t id) {
      const uint64_t bit = uint64_t{1} << (id % 64);
      const bool fresh = (seen[id / 64] & bit) == 0;
      seen[id / 64] |= bit;
      return fresh;
    });
  }
  std::vector<int64_t> ids;
  ids.reserve(static_cast<size_t>(total));
  for_each_id(lists, [&](int64_t id) { return ids.push_back(id), true; });
  std::sort(ids.begin(), ids.end());
  if (std::adjacent_find(ids.begin(), ids.end()) == ids.end()) return {};
  // Refused, so time matters less now: which one comes first in order of the lists?
  std::set<int64_t> seen;
  return for_each_id(lists, [&](int64_t id) { return seen.insert(id).second; });
}

}  // namespace kvplan::cpu
