// Index pairs -> runs.
#include <algorithm>
#include <type_traits>

#include "clones.h"
#include "stages.h"

namespace kvplan::cpu {

namespace {

// Appends stretches of pairs to runs, joining a stretch that goes on where the last one ended.
template <class Index>
class Collector {
 public:
  Collector(Index* src, Index* dst, Index* count, Steps steps)
      : src_(src), dst_(dst), count_(count), steps_(steps) {}

  void add(int64_t src, int64_t dst, int64_t count) {
    if (open_.count != 0 && continues(src, dst, open_, steps_)) {
      open_.count += count;
      return;
    }
    close();
    open_ = {src, dst, count};
  }

  int64_t finish() {
    close();
    return size_;
  }

 private:
  void close() {
    if (open_.count == 0) return;
    src_[size_] = static_cast<Index>(open_.src);
    dst_[size_] = static_cast<Index>(open_.dst);
    count_[size_++] = static_cast<Index>(open_.count);
  }

  Index *src_, *dst_, *count_;
  Steps steps_;
  int64_t size_ = 0;
  Run open_{0, 0, 0};
};

// Where a local row lies: list entry and row within it, kept up without dividing anew.
struct Cursor {
  int64_t page, row, rows;

  Cursor(int64_t local, const Side& side) : page(local / side.rows), row(local % side.rows), rows(side.rows) {}
  int64_t left() const { return rows - row; }
  void move(int64_t steps) {
    row += steps;
    if (row >= rows) {
      page += row / rows;
      row %= rows;
    }
  }
};

// Whether pair k of page ids goes on where pair k - 1 left off.
template <class Id>
inline __attribute__((always_inline)) bool joins(const Id* src, const Id* dst, int64_t k) {
  using Word = std::make_unsigned_t<Id>;  // no difference of ids overflows
  const auto one_up = [k](const Id* ids) { return static_cast<Word>(ids[k]) - static_cast<Word>(ids[k - 1]) == Word{1}; };
  return one_up(src) & one_up(dst);
}

template <class Id>
inline __attribute__((always_inline)) int64_t count_joins_body(const Id* src, const Id* dst, int64_t n) {
  constexpr int64_t part = 1 << 16;  // so that a count as wide as an id does, and lanes are as many as can be
  int64_t count = 0;
  for (int64_t first = 1; first < n; first += part) {
    Id here = 0;
    for (int64_t k = first; k < std::min(first + part, n); ++k) here += joins(src, dst, k);
    count += here;
  }
  return count;
}

KVPLAN_CLONES int64_t count_joins(const int64_t* src, const int64_t* dst, int64_t n) { return count_joins_body(src, dst, n); }
KVPLAN_CLONES int64_t count_joins(const int32_t* src, const int32_t* dst, int64_t n) { return count_joins_body(src, dst, n); }

KVPLAN_CLONES void scale(const int64_t* ids, int64_t n, uint32_t step, uint32_t* out) {
  for (int64_t k = 0; k < n; ++k) out[k] = static_cast<uint32_t>(ids[k]) * step;
}
KVPLAN_CLONES void scale(const int32_t* ids, int64_t n, uint32_t step, uint32_t* out) {
  for (int64_t k = 0; k < n; ++k) out[k] = static_cast<uint32_t>(ids[k]) * step;
}
template <class Id>
void scale(const Id* ids, int64_t n, int64_t step, int64_t* out) {
  for (int64_t k = 0; k < n; ++k) out[k] = static_cast<int64_t>(static_cast<uint64_t>(ids[k]) * static_cast<uint64_t>(step));
}

// Whole pages, whose ids themselves go up by one within a run. Without a branch that depends on an id.
template <class Id, class Index>
int64_t collect_pages(const Group& group, int64_t n, const Id* src_ids, const Id* dst_ids, Index* src, Index* dst,
                      Index* count) {
  const int64_t joined = count_joins(src_ids, dst_ids, n);
  const auto src_step = static_cast<Index>(group.src.page_step), dst_step = static_cast<Index>(group.dst.page_step);
  if (joined == 0) {
    scale(src_ids, n, src_step, src);
    scale(dst_ids, n, dst_step, dst);
    std::fill(count, count + n, Index{1});
    return n;
  }
  if (joined == n - 1) {
    scale(src_ids, 1, src_step, src);
    scale(dst_ids, 1, dst_step, dst);
    *count = static_cast<Index>(n);
    return 1;
  }
  int64_t size = 1;
  count[0] = 0;
  for (int64_t k = 1; k < n; ++k) {
    count[size] = static_cast<Index>(k);  // where a run begins, or written over; one pair joins, so there is room
    size += !joins(src_ids, dst_ids, k);
  }
  for (int64_t i = 0; i < size; ++i) {
    const int64_t first = static_cast<int64_t>(count[i]), next = i + 1 < size ? static_cast<int64_t>(count[i + 1]) : n;
    src[i] = static_cast<Index>(src_ids[first]) * src_step;
    dst[i] = static_cast<Index>(dst_ids[first]) * dst_step;
    count[i] = static_cast<Index>(next - first);
  }
  return size;
}

template <class Id, class Index>
int64_t collect(const Group& group, const Pairs& pairs, const Id* src_ids, const Id* dst_ids, Index* run_src,
                Index* run_dst, Index* run_count) {
  const Side &src = group.src, &dst = group.dst;
  const bool dense = pairs.src_step == 1 && pairs.dst_step == 1;
  const auto page_is_index = [](const Side& side) { return side.rows == 1 && side.page_step == side.row_step; };
  if (dense && page_is_index(src) && page_is_index(dst) && pairs.count > 0)
    return collect_pages(group, pairs.count, src_ids + pairs.src_first, dst_ids + pairs.dst_first, run_src, run_dst, run_count);
  Collector<Index> out(run_src, run_dst, run_count, steps_of(group));
  Cursor from(pairs.src_first, src), to(pairs.dst_first, dst);
  for (int64_t k = 0; k < pairs.count;) {
    // Dense pairs go on together up to the end of either page.
    const int64_t count = dense ? std::min({from.left(), to.left(), pairs.count - k}) : 1;
    out.add(row_index(src, src_ids[from.page], from.row), row_index(dst, dst_ids[to.page], to.row), count);
    from.move(count * pairs.src_step);
    to.move(count * pairs.dst_step);
    k += count;
  }
  return out.finish();
}

}  // namespace

Runs find_runs(const Group& group, const Pairs& pairs, const PageList& src_pages, const PageList& dst_pages,
               bool narrow) {
  // Dense pairs break at page ends at most; that bounds the runs far below one a row.
  const bool dense = pairs.src_step == 1 && pairs.dst_step == 1;
  const int64_t most = dense ? std::min(pairs.count, pairs.count / group.src.rows + pairs.count / group.dst.rows + 3)
                             : pairs.count;
  Runs runs(most, pairs.count, narrow);
  with_ids(src_pages, [&](const auto* src_ids) {
    // Both lists are parts of one tensor, so of one type.
    const auto* dst_ids = static_cast<decltype(src_ids)>(dst_pages.data);
    runs.fill([&](auto* src, auto* dst, auto* count) {
      return collect(group, pairs, src_ids, dst_ids, src, dst, count);
    });
  });
  return runs;
}

int64_t find_runs(const int64_t* src, const int64_t* dst, int64_t n, int64_t* run_src, int64_t* run_dst,
                  int64_t* count) {
  Collector<int64_t> out(run_src, run_dst, count, {1, 1});
  for (int64_t k = 0; k < n; ++k) out.add(src[k], dst[k], 1);
  return out.finish();
}

}  // namespace kvplan::cpu
