// Token slots -> page ids, and the checks on page ids.
#include <algorithm>

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
      if (good || bad >= 0) continue;
      // Slots may be written meanwhile: where none is wrong on a second look, the page is still void.
      for (bad = start; bad + 1 < stop && follows(ids[bad], first, bad - start);) ++bad;
    }
    return bad;
  });
}

namespace {

KVPLAN_CLONES bool narrow_all(const int64_t* ids, int64_t n, int32_t* out) {
  uint64_t lost = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = ids[i];
    const int32_t low = static_cast<int32_t>(id);
    out[i] = low;
    lost |= static_cast<uint64_t>(id ^ low);
  }
  return lost == 0;
}

// Highest of ids, where a negative one is above all others. One pass without an early exit vectorises; only a bad list is
// searched for its place.
KVPLAN_CLONES uint64_t highest(const int64_t* ids, int64_t n) {
  uint64_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, static_cast<uint64_t>(ids[i]));
  return most;
}

KVPLAN_CLONES uint64_t highest(const int32_t* ids, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, static_cast<uint32_t>(ids[i]));
  return most > INT32_MAX ? UINT64_MAX : most;
}

}  // namespace

bool narrow_ids(const int64_t* ids, int64_t n, int32_t* out) { return narrow_all(ids, n, out); }

Status check_range(const PageList& pages, int64_t limit, Code code) {
  return with_ids(pages, [&](const auto* ids) -> Status {
    if (pages.size == 0 || highest(ids, pages.size) < static_cast<uint64_t>(limit)) return {};
    int64_t i = 0;
    while (ids[i] >= 0 && ids[i] < limit) ++i;
    return {code, 0, 0, i, static_cast<int64_t>(ids[i])};
  });
}

}  // namespace kvplan::cpu
