// Whether page ids are distinct, and which of them is the first that was there before.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "clones.h"
#include "stages.h"

namespace kvplan::cpu {

namespace {

constexpr int64_t kBitmapPages = int64_t{1} << 22;  // 512 KiB of bits, which stay in a core's cache
constexpr int64_t kSorted = 1 << 11;                // so few ids are sorted by comparing them
constexpr int kDigit = 11;                          // bits by which many are sorted at a time

KVPLAN_CLONES bool rise_in(const int64_t* ids, int64_t n) {
  bool falls = false;
  for (int64_t i = 1; i < n; ++i) falls |= ids[i] <= ids[i - 1];
  return !falls;
}

KVPLAN_CLONES bool rise_in(const int32_t* ids, int64_t n) {
  bool falls = false;
  for (int64_t i = 1; i < n; ++i) falls |= ids[i] <= ids[i - 1];
  return !falls;
}

// Rising ids are distinct; many lists are of pages side by side. Looked at in parts, since most others fall early.
bool rise(const PageList& list) {
  return with_ids(list, [&](const auto* ids) {
    constexpr int64_t part = 256;
    for (int64_t first = 0; first + 1 < list.size; first += part - 1)
      if (!rise_in(ids + first, std::min(part, list.size - first))) return false;
    return true;
  });
}

// Calls body(id, place) for each id, shifted, places counted over all lists.
template <class Body>
void for_each_id(const std::vector<PageList>& lists, Body body) {
  int64_t place = 0;
  for (const PageList& list : lists)
    with_ids(list, [&](const auto* ids) {
      for (int64_t i = 0; i < list.size; ++i) body(static_cast<int64_t>(ids[i]) + list.shift, place++);
    });
}

// Place of the first id seen before, or `total`.
int64_t first_in_bitmap(const std::vector<PageList>& lists, int64_t limit, int64_t total) {
  std::vector<uint64_t> seen(static_cast<size_t>(ceil_div(limit, 64)), 0);
  uint64_t again = 0;
  for_each_id(lists, [&](int64_t id, int64_t) {
    const uint64_t bit = uint64_t{1} << (id % 64);
    again |= seen[static_cast<size_t>(id / 64)] & bit;
    seen[static_cast<size_t>(id / 64)] |= bit;
  });
  if (again == 0) return total;
  std::fill(seen.begin(), seen.end(), 0);
  int64_t first = total;
  for_each_id(lists, [&](int64_t id, int64_t place) {
    const uint64_t bit = uint64_t{1} << (id % 64);
    if ((seen[static_cast<size_t>(id / 64)] & bit) != 0) first = std::min(first, place);
    seen[static_cast<size_t>(id / 64)] |= bit;
  });
  return first;
}

int bits_of(int64_t n) {  // that numbers 0 to n - 1 take
  int bits = 0;
  while (bits < 63 && n > int64_t{1} << bits) ++bits;
  return bits;
}

// Sorts keys by their bits [low, low + bits), keeping the order of equal ones; `spare` has room for as many.
void sort_by_digits(uint64_t* keys, uint64_t* spare, int64_t n, int low, int bits) {
  const int passes = (bits + kDigit - 1) / kDigit;
  const int digit = passes == 0 ? 0 : (bits + passes - 1) / passes;
  const uint64_t mask = (uint64_t{1} << digit) - 1;
  std::vector<std::array<int64_t, 1 << kDigit>> places(static_cast<size_t>(passes));
  for (auto& counts : places) counts.fill(0);
  for (int64_t i = 0; i < n; ++i)
    for (int pass = 0; pass < passes; ++pass) ++places[static_cast<size_t>(pass)][(keys[i] >> (low + pass * digit)) & mask];
  uint64_t *from = keys, *to = spare;
  for (int pass = 0; pass < passes; ++pass) {
    auto& place = places[static_cast<size_t>(pass)];
    int64_t sum = 0;
    for (int64_t& count : place) sum += std::exchange(count, sum);
    for (int64_t i = 0; i < n; ++i) to[place[(from[i] >> (low + pass * digit)) & mask]++] = from[i];
    std::swap(from, to);
  }
  if (from != keys) std::copy(from, from + n, keys);
}

// The same by sorting (id, place): behind an id stand the later places of it.
int64_t first_by_sorting(const std::vector<PageList>& lists, int64_t limit, int64_t total) {
  const int low = bits_of(total), bits = bits_of(limit);
  int64_t first = total;
  if (low + bits > 64) {  // an id and its place do not fit into one word
    std::vector<std::pair<int64_t, int64_t>> keys;
    keys.reserve(static_cast<size_t>(total));
    for_each_id(lists, [&](int64_t id, int64_t place) { keys.emplace_back(id, place); });
    std::sort(keys.begin(), keys.end());
    for (size_t i = 1; i < keys.size(); ++i)
      if (keys[i].first == keys[i - 1].first) first = std::min(first, keys[i].second);
    return first;
  }
  const Scratch scratch(static_cast<size_t>(2 * total));
  auto* keys = reinterpret_cast<uint64_t*>(scratch.words());
  for_each_id(lists, [&](int64_t id, int64_t place) {
    keys[place] = (static_cast<uint64_t>(id) << low) | static_cast<uint64_t>(place);
  });
  if (total <= kSorted)
    std::sort(keys, keys + total);
  else
    sort_by_digits(keys, keys + total, total, low, bits);
  const uint64_t places = (uint64_t{1} << low) - 1;
  for (int64_t i = 1; i < total; ++i)
    if ((keys[i] ^ keys[i - 1]) <= places) first = std::min(first, static_cast<int64_t>(keys[i] & places));
  return first;
}

}  // namespace

Status check_distinct(const std::vector<PageList>& lists, int64_t limit) {
  if (lists.size() == 1 && rise(lists[0])) return {};
  int64_t total = 0;
  for (const PageList& list : lists) total += list.size;
  // A bitmap costs its clearing; for few ids in a large pool sorting is less.
  const bool dense = limit <= kBitmapPages && limit / 64 <= 64 * total;
  int64_t place = dense ? first_in_bitmap(lists, limit, total) : first_by_sorting(lists, limit, total);
  if (place == total) return {};
  size_t request = 0;
  while (place >= lists[request].size) place -= lists[request++].size;
  const int64_t id = with_ids(lists[request], [&](const auto* ids) { return static_cast<int64_t>(ids[place]); });
  return {Code::kDstTwice, static_cast<int64_t>(request), 0, place, id};
}

}  // namespace kvplan::cpu
