// Runs x entries -> descriptors: first how many each piece makes and where it begins, then every word of the table once.
#pragma once
#include "scan.cuh"

namespace kvplan::cuda {

// Lengths of runs -> where each begins among the pairs; and the checks that page ids need not, for runs given as they are.
KVPLAN_KERNEL kvplan_starts(const StartArgs args) {
  const int64_t runs = args.indptr[args.groups];
  const auto fail = [&] { atomic_max(args.status, 1); };
  if (grid_thread() == 0 && (args.indptr[0] != 0 || runs < 0 || runs > args.runs)) fail();
  for (int64_t g = grid_thread(); g < args.groups; g += grid_threads())
    if (args.indptr[g] > args.indptr[g + 1] || args.steps[g].src <= 0 || args.steps[g].dst <= 0) fail();
  const int64_t total = runs < 0 || args.groups == 0 ? 0 : runs < args.runs ? runs : args.runs;
  const int64_t tiles = total == 0 ? 1 : ceil_div(total, kTile);
  for (int64_t tile = take_tile(args.scan); tile < tiles; tile = take_tile(args.scan)) {
    const int64_t first = tile * kTile + static_cast<int64_t>(threadIdx.x) * kItems;
    int64_t sum = 0;
    for (int i = 0; i < kItems && first + i < total; ++i) {
      const int64_t at = first + i, count = args.count[at];
      int64_t group = 0;
      for (int64_t high = args.groups; high - group > 1;) {
        const int64_t middle = group + (high - group) / 2;
        (args.indptr[middle] <= at ? group : high) = middle;
      }
      int64_t src, dst;
      const Steps steps = args.steps[group];
      if (count > 0 && count <= kMostDescriptors && mul(count - 1, steps.src, &src) && add(args.src[at], src, &src) &&
          mul(count - 1, steps.dst, &dst) && add(args.dst[at], dst, &dst)) {
        atomic_max(args.highest + 2 * group, static_cast<uint64_t>(src));
        atomic_max(args.highest + 2 * group + 1, static_cast<uint64_t>(dst));
        sum += count;
      } else {
        fail();
      }
    }
    int64_t before = scan_exclusive(args.scan, tile, sum);
    for (int i = 0; i < kItems; ++i) {
      if (first + i < total) {
        args.start[first + i] = before;
        before += args.count[first + i];
      }
      if (first + i + 1 == total || (total == 0 && first + i == 0)) args.start[total] = before;
    }
  }
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
  const int64_t tiles = pieces == 0 ? 1 : ceil_div(pieces, kTile);
  for (int64_t tile = take_tile(args.scan); tile < tiles; tile = take_tile(args.scan)) {
    const int64_t first = tile * kTile + static_cast<int64_t>(threadIdx.x) * kItems;
    int64_t counts[kItems], sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      counts[i] = first + i < pieces ? count_of(job, job.name(first + i)) : 0;
      sum += counts[i];
    }
    int64_t before = scan_exclusive(args.scan, tile, sum);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t piece = first + i;
      if (piece < pieces) {
        args.starts[piece] = before;
        const PieceName name = job.name(piece);
        if (args.tables != nullptr && name.entry == job.bounds[name.segment])
          args.info[5 + name.segment * args.requests + name.request] = before;
      }
      before += counts[i];
      if (piece + 1 == pieces || (pieces == 0 && piece == 0)) {
        args.starts[pieces] = before;
        if (args.tables != nullptr) args.info[5 + args.segments * args.requests] = before;
      }
    }
  }
}

// Number of the last of starts[low ... high - 1] that is not above `at`.
__device__ __forceinline__ int64_t last_start(const int64_t* starts, int64_t low, int64_t high, int64_t at) {
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (starts[middle] <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
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

struct Line {
  uint64_t src, dst, nbytes;
};

// Descriptor number `at` of an entry over the runs of a list.
__device__ __forceinline__ Line line_of(const Expansion& job, const Entry& entry, const Steps& steps, bool whole,
                                        int64_t list, int64_t at) {
  const RunColumns& runs = job.args.runs;
  const int64_t first = runs.indptr[list];
  int64_t run = first + at, within = 0, pairs = 1;
  if (whole) {
    pairs = runs.start[run + 1] - runs.start[run];
  } else {
    const int64_t pair = runs.start[first] + at;
    run = last_start(runs.start, first, runs.indptr[list + 1], pair);
    within = pair - runs.start[run];
  }
  return {address(entry.src_base, runs.src[run] + within * steps.src, entry.src_stride),
          address(entry.dst_base, runs.dst[run] + within * steps.dst, entry.dst_stride),
          static_cast<uint64_t>(pairs) * static_cast<uint64_t>(entry.nbytes)};
}

// One thread a descriptor, neighbours side by side, so that each warp writes whole lines of the table.
KVPLAN_KERNEL kvplan_descriptors(const ExpandArgs args) {
  const Expansion job(args);
  const uint64_t status = *args.status;
  const int64_t pieces = job.pieces();
  const int64_t total = status == 0 ? args.starts[pieces] : 0;
  if (blockIdx.x == 0) tell(args, status, total);
  const bool refused = status != 0 || total > args.room;
  // Only a plan's table may end in what was there before: an expansion's is an output of its own.
  const int64_t end = args.tables == nullptr ? args.room : refused ? 0 : total;
  const int64_t written = refused ? 0 : total;
  KVPLAN_SHARED(int64_t, first_piece);
  KVPLAN_SHARED(int64_t, last_piece);
  for (int64_t tile = blockIdx.x; tile * kTile < end; tile += gridDim.x) {
    const int64_t begin = tile * kTile;
    __syncthreads();
    if (threadIdx.x < 2 && begin < written) {
      const int64_t last = begin + kTile < written ? begin + kTile - 1 : written - 1;
      (threadIdx.x == 0 ? first_piece : last_piece) = last_start(args.starts, 0, pieces, threadIdx.x == 0 ? begin : last);
    }
    __syncthreads();
    int64_t piece = -1, stop = 0, list = 0;  // descriptors before `stop` belong to `piece`
    Entry entry{};
    Steps steps{};
    bool whole = false;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t at = begin + i * kThreads + static_cast<int64_t>(threadIdx.x);
      if (at >= end) continue;
      Line line{0, 0, 0};
      if (at < written) {
        if (at >= stop) {
          piece = last_start(args.starts, piece < 0 ? first_piece : piece, last_piece + 1, at);
          stop = args.starts[piece + 1];
          const PieceName name = job.name(piece);
          entry = job.entries[name.entry];
          steps = job.steps(entry.group);
          whole = moves_runs_whole(entry, steps);
          list = job.list(name);
        }
        line = line_of(job, entry, steps, whole, list, at - args.starts[piece]);
      }
      args.table[at] = line.src;
      args.table[args.room + at] = line.dst;
      args.table[2 * args.room + at] = line.nbytes;
    }
  }
}

}  // namespace kvplan::cuda
