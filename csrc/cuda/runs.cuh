// Index pairs -> runs, in one ordered pass over the pairs of all lists.
#pragma once
#include "pages.cuh"
#include "scan.cuh"

namespace kvplan::cuda {

struct Pair {
  int64_t src, dst;
};

// Pairs that page ids make; see pairs.h.
struct PairsOfPages {
  const PlanArgs& args;
  Tables tables;
  Job job;

  __device__ int64_t pairs() const { return job.size.pairs; }
  __device__ int64_t lists() const { return job.size.lists; }
  __device__ int64_t list_of(int64_t pair) const { return row_with(job.lists, job.size.lists, pair); }
  __device__ int64_t first(int64_t list) const { return job.lists[list].first; }
  __device__ const Group& group(int64_t list) const {
    return tables.groups[list - quotient(list, tables.size.num_groups) * tables.size.num_groups];
  }
  __device__ Steps steps(int64_t list) const { return steps_of(group(list)); }
  __device__ Pair pair(int64_t number, int64_t at) const {
    const List& list = job.lists[number];
    const Group& rule = group(number);
    const RowPlace src = place_of(rule.src, list.src_first, list.src_step, at - list.first);
    const RowPlace dst = place_of(rule.dst, list.dst_first, list.dst_step, at - list.first);
    return {row_index(rule.src, id_at(args.pages, args.wide, list.src_offset + src.page), src.row),
            row_index(rule.dst, id_at(args.pages, args.wide, list.dst_offset + dst.page), dst.row)};
  }
};

// Pairs given one by one.
struct PairsGiven {
  const FindArgs& args;

  __device__ int64_t pairs() const { return args.pairs; }
  __device__ int64_t lists() const { return args.lists; }
  __device__ int64_t said(int64_t list) const {
    return args.indptr != nullptr ? args.indptr[list] : list == 0 ? 0 : args.pairs;
  }
  // Within the pairs, whatever is said.
  __device__ int64_t first(int64_t list) const {
    const int64_t at = said(list);
    return at < 0 ? 0 : at < args.pairs ? at : args.pairs;
  }
  __device__ int64_t list_of(int64_t pair) const {
    return last_not_above(0, args.lists, pair, [&](int64_t list) { return first(list); });
  }
  __device__ Steps steps(int64_t) const { return {1, 1}; }
  __device__ Pair pair(int64_t, int64_t at) const { return {args.src[at], args.dst[at]}; }
};

// Where lists begin among the runs: list `list` and the empty ones before it begin with run `run`.
template <class Pairs>
__device__ void begin_lists(const Pairs& pairs, const RunColumns& out, int64_t list, int64_t run) {
  const int64_t first = pairs.first(list);
  for (; list >= 0 && pairs.first(list) == first; --list) out.indptr[list] = run;
}

// After the last pair, with `run` runs in all.
template <class Pairs>
__device__ void end_lists(const Pairs& pairs, const RunColumns& out, int64_t run) {
  const int64_t lists = pairs.lists(), total = pairs.pairs();
  if (lists > 0 && pairs.first(lists - 1) == total) begin_lists(pairs, out, lists - 1, run);
  // Zero before; a malformed indptr makes it -1, in either order.
  atomic_max(reinterpret_cast<uint64_t*>(out.indptr + lists), static_cast<uint64_t>(run));
  if (out.start != nullptr)
    out.start[run] = total;
  else if (run > 0)
    atomic_add(reinterpret_cast<uint64_t*>(out.count + run - 1), static_cast<uint64_t>(total));
}

// Run `run` begins with pair `at`, and the one before it ends there.
__device__ __forceinline__ void begin_run(const RunColumns& out, int64_t run, const Pair& pair, int64_t at) {
  out.src[run] = pair.src;
  out.dst[run] = pair.dst;
  if (out.start != nullptr) {
    out.start[run] = at;
    return;
  }
  // A length is where the run ends less where it begins, added up in either order.
  atomic_add(reinterpret_cast<uint64_t*>(out.count + run), static_cast<uint64_t>(-at));
  if (run > 0) atomic_add(reinterpret_cast<uint64_t*>(out.count + run - 1), static_cast<uint64_t>(at));
}

// A pair begins a run unless it goes on where the pair before it, of the same list, left off.
template <class Pairs>
__device__ __forceinline__ void find_runs(const Pairs& pairs, const Scan& scan, const RunColumns& out) {
  const int64_t total = pairs.pairs();
  const int64_t tiles = total == 0 ? 1 : ceil_div(total, kTile);
  for (int64_t tile = take_tile(scan); tile < tiles; tile = take_tile(scan)) {
    const int64_t first = tile * kTile + static_cast<int64_t>(threadIdx.x) * kItems;
    Pair found[kItems];
    int64_t list = 0, begin = 0, end = 0;  // pairs [begin, end) belong to `list`
    unsigned heads = 0, begins = 0;        // one bit an item
    Pair last{0, 0};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t at = first + i;
      if (at >= total) continue;
      if (at >= end) {
        list = pairs.list_of(at);
        begin = pairs.first(list);
        end = pairs.first(list + 1);
      }
      if (i == 0 && at > begin) last = pairs.pair(list, at - 1);
      found[i] = pairs.pair(list, at);
      const bool goes_on = at > begin && continues(found[i].src, found[i].dst, {last.src, last.dst, 1}, pairs.steps(list));
      heads |= static_cast<unsigned>(!goes_on) << i;
      begins |= static_cast<unsigned>(at == begin) << i;
      last = found[i];
    }
    int64_t run = scan_exclusive(scan, tile, __popc(heads));
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t at = first + i;
      if (at < total && (heads >> i & 1) != 0) {
        begin_run(out, run, found[i], at);
        if ((begins >> i & 1) != 0) begin_lists(pairs, out, pairs.list_of(at), run);
        ++run;
      }
      if (at == total - 1) end_lists(pairs, out, run);
    }
    if (total == 0 && threadIdx.x == 0) end_lists(pairs, out, 0);
  }
}

// The first kernel of a plan. Its two parts need nothing of one another: runs of ids that turn out bad are dropped.
KVPLAN_KERNEL kvplan_runs(const PlanArgs args) {
  if (!job_is_known(args)) {
    if (grid_thread() == 0) atomic_max(args.status, ~uint64_t{0});
    return;
  }
  check_pages(args);
  find_runs(PairsOfPages{args, view_tables(args.tables), view_job(args.job)}, args.scan, args.runs);
}

KVPLAN_KERNEL kvplan_find_runs(const FindArgs args) {
  const PairsGiven pairs{args};
  for (int64_t i = grid_thread(); i <= args.lists; i += grid_threads()) {
    const bool good = i < args.lists ? pairs.said(i) <= pairs.said(i + 1) && (i > 0 || pairs.said(0) == 0)
                                     : pairs.said(i) == args.pairs;
    if (!good) atomic_max(reinterpret_cast<uint64_t*>(args.runs.indptr + args.lists), ~uint64_t{0});
  }
  find_runs(pairs, args.scan, args.runs);
}

}  // namespace kvplan::cuda
