// Which kernels a stage is, in which order and how large: host code alone, which needs no CUDA compiler. `Device` runs them:
// the CUDA driver (driver.h), or the emulator in tests/simt. It offers
//   int64_t* allocate(int64_t words)          memory that lives until the kernels launched so far have run
//   void fill(void* at, int byte, int64_t nbytes)
//   void run(Kernel, int64_t blocks, const Args&)   kThreads threads a block
//   int64_t processors()
#pragma once
#include "args.h"

namespace kvplan::cuda {

enum class Kernel { kPageIndices, kRuns, kFindRuns, kStarts, kPieces, kDescriptors, kTiles, kCopy };
constexpr const char* kKernelNames[] = {"kvplan_page_indices", "kvplan_runs",        "kvplan_find_runs", "kvplan_starts",
                                        "kvplan_pieces",       "kvplan_descriptors", "kvplan_tiles",     "kvplan_copy"};
constexpr int kKernels = sizeof(kKernelNames) / sizeof(kKernelNames[0]);

constexpr int64_t kBlocksPerProcessor = 8;  // 2,048 threads fill a multiprocessor
constexpr int64_t kResident = 4;            // blocks that surely run at once, of the kernels bounded to it (device.cuh)

// One allocation, cut twice: first from nothing, to learn its size, then for good.
class Cutter {
 public:
  explicit Cutter(int64_t* base) : base_(base) {}
  int64_t* words(int64_t count) {
    int64_t* const at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += count;
    return at;
  }
  uint64_t* unsigned_words(int64_t count) { return reinterpret_cast<uint64_t*>(words(count)); }
  Scan scan(int64_t items) {
    uint64_t* const ticket = unsigned_words(1);
    return {ticket, unsigned_words(tiles(items))};
  }
  int64_t used() const { return used_; }
  static int64_t tiles(int64_t items) { return items == 0 ? 1 : ceil_div(items, kTile); }

 private:
  int64_t* base_;
  int64_t used_ = 0;
};

// `cut(Cutter&)` cuts what must be zero first and returns how many words that is. Allocates, cuts and zeroes.
template <class Device, class Cut>
void allocate(Device& device, Cut cut) {
  Cutter none(nullptr);
  cut(none);
  int64_t* const base = device.allocate(none.used());
  Cutter cutter(base);
  const int64_t zeroed = cut(cutter);
  device.fill(base, 0, zeroed * static_cast<int64_t>(sizeof(int64_t)));
}

// Blocks for work that a grid of any size does.
template <class Device>
int64_t blocks_for(Device& device, int64_t items, int64_t per_block) {
  const int64_t wanted = ceil_div(items, per_block), most = device.processors() * kBlocksPerProcessor;
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

template <class Device>
void page_indices(Device& device, const PageArgs& args) {
  const int64_t span = args.row_length > 0 ? args.row_length : 1;
  device.fill(args.bad, 0xff, args.num_requests * static_cast<int64_t>(sizeof(int64_t)));
  device.run(Kernel::kPageIndices, blocks_for(device, args.num_requests * span, kThreads), args);
}

// Blocks are tiles of runs times shares of entries: few entries a block where there are few runs, so that all
// multiprocessors have work; many where there are many, so that a run is read once for all of them.
template <class Device>
void run_descriptors(Device& device, int64_t most_runs, ExpandArgs& args) {
  const int64_t most = device.processors() * kResident;
  const int64_t tiles = most_runs > 0 ? ceil_div(most_runs, kThreads) : 1;
  const int64_t entries = args.num_entries > 0 ? args.num_entries : 1;
  int64_t share = tiles < most ? entries * tiles / most : kShare;
  share = share < 1 ? 1 : share < kShare ? share : kShare;
  args.share = share;
  args.shares = ceil_div(entries, share);
  const int64_t in_turn = ceil_div(most, args.shares);
  device.run(Kernel::kDescriptors, args.shares * (tiles < in_turn ? tiles : in_turn), args);
}

// What plan_ is given, on the device but for the sizes.
struct PlanInput {
  const int64_t* tables;
  int64_t tables_words;
  const int64_t* job;
  JobSize size;
  const void* pages;
  bool wide;
  uint64_t* table;
  int64_t room;
  int64_t* info;
  int64_t segments;
};

template <class Device>
void plan(Device& device, const PlanInput& in) {
  const JobSize& size = in.size;
  const int64_t entries = size.requests == 0 ? 0 : size.pieces / size.requests;
  const int64_t groups = size.requests == 0 ? 0 : size.lists / size.requests;
  int64_t hash_slots = 1;
  while (hash_slots < 2 * size.hashed) hash_slots *= 2;  // at most half full
  PlanArgs args{};
  ExpandArgs expand{};
  allocate(device, [&](Cutter& cutter) {
    args.status = cutter.unsigned_words(1);
    args.hash = cutter.unsigned_words(hash_slots);
    args.scan = cutter.scan(size.pairs);
    expand.scan = cutter.scan(size.pieces);
    args.runs.indptr = cutter.words(size.lists + 1);
    const int64_t zeroed = cutter.used();
    args.runs.src = cutter.words(size.pairs);
    args.runs.dst = cutter.words(size.pairs);
    args.runs.start = cutter.words(size.pairs + 1);
    expand.starts = cutter.words(size.pieces + 1);
    return zeroed;
  });
  args.tables = expand.tables = in.tables;
  args.job = expand.job = in.job;
  args.size = size;
  args.tables_words = in.tables_words;
  args.segments = expand.segments = in.segments;
  args.pages = expand.pages = in.pages;
  args.wide = expand.wide = in.wide;
  args.hash_mask = static_cast<uint64_t>(hash_slots - 1);
  expand.num_entries = entries;
  expand.groups = groups;
  expand.requests = size.requests;
  expand.runs = args.runs;
  expand.status = args.status;
  expand.table = in.table;
  expand.room = in.room;
  expand.info = in.info;
  const int64_t for_places = blocks_for(device, size.places, kThreads), for_pairs = blocks_for(device, size.pairs, kTile);
  device.run(Kernel::kRuns, for_places < for_pairs ? for_pairs : for_places, args);
  device.run(Kernel::kPieces, blocks_for(device, size.pieces, kTile), expand);
  run_descriptors(device, size.pairs, expand);
}

// `runs` [3, pairs] and `run_indptr` [lists + 1] are written whole.
template <class Device>
void find_runs(Device& device, const int64_t* src, const int64_t* dst, int64_t pairs, const int64_t* indptr,
               int64_t lists, int64_t* runs, int64_t* run_indptr) {
  FindArgs args{src, dst, pairs, indptr, lists, {}, {runs, runs + pairs, nullptr, runs + 2 * pairs, run_indptr}};
  allocate(device, [&](Cutter& cutter) {
    args.scan = cutter.scan(pairs);
    return cutter.used();
  });
  device.fill(runs, 0, 3 * pairs * static_cast<int64_t>(sizeof(int64_t)));
  device.fill(run_indptr, 0, (lists + 1) * static_cast<int64_t>(sizeof(int64_t)));
  device.run(Kernel::kFindRuns, blocks_for(device, pairs, kTile), args);
}

// `table` [3, room] and `count` are written whole.
template <class Device>
void expand(Device& device, const Entry* entries, int64_t num_entries, const int64_t* runs, int64_t num_runs,
            const int64_t* indptr, const Steps* steps, int64_t groups, uint64_t* table, int64_t room, int64_t* count) {
  StartArgs starts{runs, runs + num_runs, runs + 2 * num_runs, num_runs, indptr, steps, groups, {}, nullptr, nullptr, nullptr};
  ExpandArgs args{};
  allocate(device, [&](Cutter& cutter) {
    starts.status = args.status = cutter.unsigned_words(1);
    args.highest = starts.highest = cutter.unsigned_words(2 * groups);
    starts.scan = cutter.scan(num_runs);
    args.scan = cutter.scan(num_entries);
    const int64_t zeroed = cutter.used();
    starts.start = cutter.words(num_runs + 1);
    args.starts = cutter.words(num_entries + 1);
    return zeroed;
  });
  args.entries = entries;
  args.steps = steps;
  args.num_entries = num_entries;
  args.groups = groups;
  args.segments = args.requests = 1;
  // Only read from here on.
  args.runs = {const_cast<int64_t*>(runs), const_cast<int64_t*>(runs + num_runs), starts.start, nullptr,
               const_cast<int64_t*>(indptr)};
  args.table = table;
  args.room = room;
  args.info = count;
  device.fill(table, 0, 3 * room * static_cast<int64_t>(sizeof(uint64_t)));
  device.run(Kernel::kStarts, blocks_for(device, num_runs, kTile), starts);
  device.run(Kernel::kPieces, blocks_for(device, num_entries, kTile), args);
  run_descriptors(device, num_runs, args);
}

// `moved`: of memory that is read, then of memory that is written; kMostMoved in all at most.
template <class Device>
void copy(Device& device, const uint64_t* table, int64_t room, const int64_t* count, const Moved* moved = nullptr,
          int num_read = 0, int num_written = 0) {
  CopyArgs args{};
  args.table = table;
  args.room = room;
  args.count = count;
  args.num_read = num_read;
  args.num_written = num_written;
  for (int i = 0; i < num_read + num_written; ++i) args.moved[i] = moved[i];
  allocate(device, [&](Cutter& cutter) {
    args.scan = cutter.scan(room);
    const int64_t zeroed = cutter.used();
    args.tile_starts = cutter.words(room + 1);
    args.share = cutter.words(2);
    return zeroed;
  });
  const int64_t blocks = device.processors() * kResident;
  args.warps = blocks * kThreads / 32;
  device.run(Kernel::kTiles, blocks_for(device, room, kTile), args);
  device.run(Kernel::kCopy, blocks, args);
}

}  // namespace kvplan::cuda
