// Index pairs -> runs.
#include <algorithm>

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

template <class Id, class Index>
int64_t collect(const Group& group, const Pairs& pairs, const Id* src_ids, const Id* dst_ids, Collector<Index> out) {
  const Side &src = group.src, &dst = group.dst;
  const bool dense = pairs.src_step == 1 && pairs.dst_step == 1;
  const auto page_is_index = [](const Side& side) { return side.rows == 1 && side.page_step == side.row_step; };
  if (dense && page_is_index(src) && page_is_index(dst)) {
    // Whole pages: the ids themselves go up by one within a run, so only its first is multiplied out.
    src_ids += pairs.src_first;
    dst_ids += pairs.dst_first;
    for (int64_t first = 0, k = 0; k < pairs.count; first = k) {
      do ++k;
      while (k < pairs.count && src_ids[k] - src_ids[k - 1] == 1 && dst_ids[k] - dst_ids[k - 1] == 1);
      out.add(row_index(src, src_ids[first], 0), row_index(dst, dst_ids[first], 0), k - first);
    }
    return out.finish();
  }
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
      return collect(group, pairs, src_ids, dst_ids, Collector(src, dst, count, steps_of(group)));
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
