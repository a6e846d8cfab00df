// Runs x entries -> descriptors: first how many each piece makes and where it begins, then every word of the table once.
#pragma once
#include "scan.cuh"

namespace kvplan::cuda {

// Number of the last of starts[low ... high - 1] that is not above `at`.
__device__ __forceinline__ int64_t last_start(const int64_t* starts, int64_t low, int64_t high, int64_t at) {
  return last_not_above(low, high, at, [&](int64_t i) { return starts[i]; });
}

// Lengths of runs -> where each begins among the pairs; and the checks that page ids need not, for runs given as they are.
KVPLAN_KERNEL kvplan_starts(const StartArgs args) {
  const int64_t runs = args.indptr[args.groups];
  const auto fail = [&] { atomic_max(args.status, 1); };
  if (grid_thread() == 0 && (args.indptr[0] != 0 || runs < 0 || runs > args.runs)) fail();
  for (int64_t g = grid_thread(); g < args.groups; g += grid_threads())
    if (args.indptr[g] > args.indptr[g + 1] || args.steps[g].src <= 0 || args.steps[g].dst <= 0) fail();
  const int64_t total = runs < 0 || args.groups == 0 ? 0 : runs < args.runs ? runs : args.runs;
  const auto pairs_of_run = [&](int64_t at) -> int64_t {
    const int64_t count = args.count[at];
    const int64_t group = last_start(args.indptr, 0, args.groups, at);
    int64_t src, dst;
    const Steps steps = args.steps[group];
    if (count > 0 && count <= kMostDescriptors && mul(count - 1, steps.src, &src) && add(args.src[at], src, &src) &&
        mul(count - 1, steps.dst, &dst) && add(args.dst[at], dst, &dst)) {
      atomic_max(args.highest + 2 * group, static_cast<uint64_t>(src));
      atomic_max(args.highest + 2 * group + 1, static_cast<uint64_t>(dst));
      return count;
    }
    fail();
    return 0;
  };
  place_items(
      args.scan, total, pairs_of_run, [&](int64_t run, int64_t before) { args.start[run] = before; },
      [&](int64_t all) { args.start[total] = all; });
}

// What expansion reads, from tables or as given.
struct Expansion {
  const ExpandArgs& args;
  const Entry* entries;
  const Group* groups;  // nullptr: steps are given
  const int64_t* bounds;

  __device__ explicit Expansion(const ExpandArgs& given) : args(given), entries(given.entries), groups(nullptr), bounds(given.bounds) {
    if (given.tables == nullptr) return;
    const Tables tables = view_tables(given.tables);
    entries = tables.entries;
    groups = tables.groups;
    bounds = tables.bounds;
  }
  __device__ int64_t pieces() const { return args.requests * args.num_entries; }
  __device__ Steps steps(int64_t group) const { return groups != nullptr ? steps_of(groups[group]) : args.steps[group]; }
  __device__ PieceName name(int64_t piece) const {
    // Without tables there is one segment and one request.
    return args.tables == nullptr ? PieceName{0, 0, piece} : name_piece(bounds, args.segments, args.requests, piece);
  }
  __device__ int64_t list(const PieceName& name) const { return name.request * args.groups + entries[name.entry].group; }
};

// Descriptors of one piece.
__device__ __forceinline__ int64_t count_of(const Expansion& job, const PieceName& name) {
  const ExpandArgs& args = job.args;
  const Entry& entry = job.entries[name.entry];
  if (args.tables == nullptr) {
    const int64_t group = entry.group;
    const bool good = group >= 0 && group < args.groups && entry.nbytes > 0 && entry.src_stride > 0 && entry.dst_stride > 0 &&
                      address_fits(entry.src_base, static_cast<int64_t>(args.highest[2 * group]), entry.src_stride, entry.nbytes) &&
                      address_fits(entry.dst_base, static_cast<int64_t>(args.highest[2 * group + 1]), entry.dst_stride, entry.nbytes);
    if (!good) {
      atomic_max(args.status, 1);
      return 0;
    }
  }
  const int64_t list = job.list(name);
  const int64_t first = args.runs.indptr[list], last = args.runs.indptr[list + 1];
  return moves_runs_whole(entry, job.steps(entry.group)) ? last - first : args.runs.start[last] - args.runs.start[first];
}

// Where each piece begins. A plan's info gets the first descriptor of each request in each segment.
KVPLAN_KERNEL kvplan_pieces(const ExpandArgs args) {
  // Another block may just be setting it: a block goes on with all its threads, or with none.
  if (__syncthreads_or(*args.status != 0)) return;
  const Expansion job(args);
  const int64_t pieces = job.pieces();
  place_items(
      args.scan, pieces, [&](int64_t piece) { return count_of(job, job.name(piece)); },
      [&](int64_t piece, int64_t before) {
        args.starts[piece] = before;
        const PieceName name = job.name(piece);
        if (args.tables != nullptr && name.entry == job.bounds[name.segment])
          args.info[5 + name.segment * args.requests + name.request] = before;
      },
      [&](int64_t total) {
        args.starts[pieces] = total;
        if (args.tables != nullptr) args.info[5 + args.segments * args.requests] = total;
      });
}

// Why nothing is written: what the status word says (see PlanArgs), or too little room.
__device__ __forceinline__ Status refusal(const ExpandArgs& args, uint64_t status, int64_t total) {
  if (status == 0) return total > args.room ? Status{Code::kRoom, 0, 0, args.room, total} : Status{};
  if (status == ~uint64_t{0}) return {Code::kJob};
  const Job job = view_job(args.job);
  const int64_t place = job.size.places - static_cast<int64_t>(status);
  const Check& check = job.checks[row_with(job.checks, job.size.checks, place)];
  const int64_t at = place - check.first;
  return {static_cast<Code>(check.code), check.request, check.space, check.position + at,
          id_at(args.pages, args.wide, check.offset + at)};
}

// The first words of a plan's info; where it is refused, all the others are zero. Or the one word of an expansion.
__device__ __forceinline__ void tell(const ExpandArgs& args, uint64_t status, int64_t total) {
  if (args.tables == nullptr) {
    if (threadIdx.x == 0) args.info[0] = status != 0 ? -1 : total;
    return;
  }
  const Status found = refusal(args, status, total);
  const int64_t words[] = {static_cast<int64_t>(found.code), found.request, found.space, found.position, found.value};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 5; ++i) args.info[i] = words[i];
  }
  if (found.code == Code::kOk) return;
  for (int64_t i = threadIdx.x; i <= args.segments * args.requests; i += blockDim.x) args.info[5 + i] = 0;
}

// One entry, as a block of expansion holds it.
struct Staged {
  Entry entry;
  int64_t first_piece;   // of request 0
  int64_t next_request;  // pieces from one request to the next
  bool whole;            // moves_runs_whole
};
typedef Staged Stage[kShare];

// Fetches the entries of a block's share; the number of them.
__device__ __forceinline__ int fetch(const Expansion& job, int64_t share, Staged* stage) {
  const ExpandArgs& args = job.args;
  const int64_t first = share * args.share;
  const int64_t left = args.num_entries - first;
  const int count = static_cast<int>(left < args.share ? left : args.share);
  if (static_cast<int>(threadIdx.x) < count) {
    const int64_t e = first + threadIdx.x;
    Staged& mine = stage[threadIdx.x];
    mine.entry = job.entries[e];
    mine.whole = moves_runs_whole(mine.entry, job.steps(mine.entry.group));
    if (args.tables == nullptr) {
      mine.first_piece = e;
      mine.next_request = args.num_entries;
    } else {
      const int64_t segment = last_start(job.bounds, 0, args.segments, e);
      const int64_t begin = job.bounds[segment];
      mine.first_piece = begin * args.requests + e - begin;
      mine.next_request = job.bounds[segment + 1] - begin;
    }
  }
  __syncthreads();
  return count;
}

// One run, or one pair of one, and where it stands among those of its list.
struct Place {
  int64_t request, group, src, dst, pairs, at;
};

__device__ __forceinline__ Place place_of_run(const ExpandArgs& args, int64_t run) {
  const RunColumns& runs = args.runs;
  const int64_t list = last_start(runs.indptr, 0, args.requests * args.groups, run);
  const int64_t request = quotient(list, args.groups);
  return {request, list - request * args.groups, runs.src[run], runs.dst[run], runs.start[run + 1] - runs.start[run],
          run - runs.indptr[list]};
}

__device__ __forceinline__ Place place_of_pair(const Expansion& job, int64_t num_runs, int64_t pair) {
  const RunColumns& runs = job.args.runs;
  const int64_t run = last_start(runs.start, 0, num_runs, pair);
  Place place = place_of_run(job.args, run);
  const Steps steps = job.steps(place.group);
  const int64_t within = pair - runs.start[run];
  place.src += within * steps.src;
  place.dst += within * steps.dst;
  place.pairs = 1;
  place.at = pair - runs.start[run - place.at];
  return place;
}

// What a run (or pair) makes of those staged entries that follow its group and move runs whole (or not). Threads of a
// warp hold neighbours, so that each entry's descriptors are written as whole lines of the table.
__device__ __forceinline__ void write(const ExpandArgs& args, const Staged* stage, int count, bool whole, const Place& place) {
  for (int k = 0; k < count; ++k) {
    const Staged& staged = stage[k];
    const Entry& entry = staged.entry;
    if (entry.group != place.group || staged.whole != whole) continue;
    const int64_t at = args.starts[staged.first_piece + place.request * staged.next_request] + place.at;
    args.table[at] = address(entry.src_base, place.src, entry.src_stride);
    args.table[args.room + at] = address(entry.dst_base, place.dst, entry.dst_stride);
    args.table[2 * args.room + at] = static_cast<uint64_t>(place.pairs) * static_cast<uint64_t>(entry.nbytes);
  }
}

// One thread a run, for the entries of a share that move runs whole; then one a pair, for those that do not. A plan's table
// stays as it was behind its last descriptor.
KVPLAN_KERNEL_OF(4) kvplan_descriptors(const ExpandArgs args) {
  KVPLAN_SHARED(Stage, stage);
  const Expansion job(args);
  const uint64_t status = *args.status;
  const int64_t total = status == 0 ? args.starts[job.pieces()] : 0;
  if (blockIdx.x == 0) tell(args, status, total);
  if (status != 0 || total > args.room || total == 0) return;
  const int64_t share = blockIdx.x % args.shares, first = blockIdx.x / args.shares, step = gridDim.x / args.shares;
  const int count = fetch(job, share, stage);
  bool any_whole = false, any_rows = false;
  for (int k = 0; k < count; ++k) (stage[k].whole ? any_whole : any_rows) = true;
  const int64_t num_runs = args.runs.indptr[args.requests * args.groups];
  if (any_whole) {
    for (int64_t tile = first; tile * kThreads < num_runs; tile += step) {
      const int64_t run = tile * kThreads + threadIdx.x;
      if (run < num_runs) write(args, stage, count, true, place_of_run(args, run));
    }
  }
  if (any_rows) {
    const int64_t num_pairs = args.runs.start[num_runs];
    for (int64_t tile = first; tile * kThreads < num_pairs; tile += step) {
      const int64_t pair = tile * kThreads + threadIdx.x;
      if (pair < num_pairs) write(args, stage, count, false, place_of_pair(job, num_runs, pair));
    }
  }
}

}  // namespace kvplan::cuda
