// The stages on the CPU: pages -> runs -> descriptors -> copy. Plain structs in and out; no torch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../job.h"
#include "blocks.h"

namespace kvplan::cpu {

// A borrowed list of page ids, int32 or int64. Nobody may write it meanwhile: what is checked is what is used.
struct PageList {
  const void* data = nullptr;
  int64_t size = 0;
  bool wide = true;  // int64
  int64_t shift = 0;  // pages added to its ids where they are compared with those of another list

  PageList part(int64_t offset, int64_t count) const {
    return {static_cast<const char*>(data) + offset * (wide ? 8 : 4), count, wide, shift};
  }
};

// Runs of one group in one request, as columns: `size` of them, `pairs` index pairs in all. Borrowed.
// Index is uint32_t where all indices and strides of a job are below 2^32, which halves what expansion reads and lets
// it multiply 32 by 32 bits; int64_t otherwise.
template <class Index>
struct RunColumns {
  const Index *src, *dst, *count;
  int64_t size, pairs;
};

// The same, owned.
class Runs {
 public:
  Runs(int64_t capacity, int64_t pairs, bool narrow)
      : words_(static_cast<size_t>(narrow ? (3 * capacity + 1) / 2 : 3 * capacity)),
        capacity_(capacity),
        pairs_(pairs),
        narrow_(narrow) {}

  // Calls body(RunColumns<Index>) with the type stored.
  template <class Body>
  auto with_columns(Body body) const {
    return narrow_ ? body(columns<uint32_t>()) : body(columns<int64_t>());
  }
  // Calls body(src, dst, count), the columns to write, which returns how many runs it wrote.
  template <class Body>
  void fill(Body body) {
    const auto call = [&](auto* src) { return body(src, src + capacity_, src + 2 * capacity_); };
    size_ = narrow_ ? call(reinterpret_cast<uint32_t*>(words_.words())) : call(words_.words());
  }

 private:
  template <class Index>
  RunColumns<Index> columns() const {
    const auto* src = reinterpret_cast<const Index*>(words_.words());
    return {src, src + capacity_, src + 2 * capacity_, size_, pairs_};
  }

  Scratch words_;
  int64_t capacity_, pairs_;
  bool narrow_;
  int64_t size_ = 0;
};

// Three rows of N words: source address, destination address, bytes.
struct Table {
  uint64_t* src;
  uint64_t* dst;
  uint64_t* nbytes;
  bool cold = false;  // not in the cache: to be written past it
};

// Calls `body` with a typed pointer to the ids of `list`.
template <class Body>
auto with_ids(const PageList& list, Body body) {
  return list.wide ? body(static_cast<const int64_t*>(list.data)) : body(static_cast<const int32_t*>(list.data));
}

// pages.cpp -----------------------------------------------------------------------------------------------------------

// Page ids of a request from its token slots: slots[i * page_size] / page_size for each page, -1 for a negative slot. A
// page's slots must be aligned and consecutive. Returns the position of the first slot that is not, or -1. Slots may be
// written meanwhile.
int64_t page_indices(const PageList& slots, int64_t page_size, int64_t* pages);

// Copies ids as int32, each read once; false where one does not fit. All that follows then reads half as much.
bool narrow_ids(const int64_t* ids, int64_t n, int32_t* out);

// kSrcRange / kDstRange for the first id outside [0, limit).
Status check_range(const PageList& pages, int64_t limit, Code code);

// distinct.cpp --------------------------------------------------------------------------------------------------------

// kDstTwice for the first id seen before, in the same list or an earlier one; `request` is the list's number. All ids are
// in [0, limit) when shifted. Extra memory: 512 KiB, or 16 bytes an id.
Status check_distinct(const std::vector<PageList>& lists, int64_t limit);

// runs.cpp ------------------------------------------------------------------------------------------------------------

// Runs of the index pairs of one group, whose page lists begin at src_pages and dst_pages. Page ids are in range.
Runs find_runs(const Group& group, const Pairs& pairs, const PageList& src_pages, const PageList& dst_pages,
               bool narrow);

// Runs of n index pairs given one by one; writes at most n of each, returns how many.
int64_t find_runs(const int64_t* src, const int64_t* dst, int64_t n, int64_t* run_src, int64_t* run_dst, int64_t* count);

// descriptors.cpp -----------------------------------------------------------------------------------------------------

// Descriptors that `entry` makes of the runs.
template <class Index>
int64_t count_descriptors(const Entry& entry, const Steps& steps, const RunColumns<Index>& runs) {
  return moves_runs_whole(entry, steps) ? runs.size : runs.pairs;
}

// Writes the descriptors at out[0 ...]. No address passes 64 bits; see address_fits. Behind the last into a cold table
// there must be a written_past_cache().
void expand(const Entry& entry, const Steps& steps, const RunColumns<uint32_t>& runs, Table out);
void expand(const Entry& entry, const Steps& steps, const RunColumns<int64_t>& runs, Table out);

// job.cpp -------------------------------------------------------------------------------------------------------------

// kOverflow where some index of some entry leads past 64 bits. `narrow`: all indices and strides are below 2^32.
Status check_entries(const Tables& tables, bool* narrow);

// The job (see job.h) of `requests` requests, windows [requests, spaces]; or why it is refused. `num_pages` page ids are
// given, and windows lie within them. `narrow` as for check_entries.
Status prepare(const Tables& tables, const Window* windows, int64_t requests, int64_t num_pages,
               std::vector<int64_t>* job, bool* narrow);

// Whether a job, whose sizes are right, leads nowhere but into its page ids: its lists and checks are what is left to see.
bool job_fits(const Tables& tables, const Job& job);

// plan.cpp ------------------------------------------------------------------------------------------------------------

// Plans a job in two steps, so that the caller can allocate the result in between.
class Planner {
 public:
  // `narrow` as check_entries says, which has found nothing wrong.
  Planner(const Tables& tables, const Job& job, PageList pages, bool narrow)
      : tables_(tables), job_(job), pages_(pages), narrow_(narrow) {}
  Status prepare();  // checks the page ids; all but the table, which takes `offsets().back()` descriptors
  // The table is written piece by piece, in any order or at once. Pieces are numbered as name_piece says.
  int64_t pieces() const { return job_.size.pieces; }
  void write(Table out, int64_t first, int64_t last) const;
  // [segments * requests + 1]: where the descriptors of each segment begin, and within it of each request.
  const std::vector<int64_t>& offsets() const { return offsets_; }

 private:
  Status check_ids() const;
  Runs find_runs_of(int64_t list) const;
  const Runs& runs_of(int64_t request, const Entry& entry) const;

  const Tables& tables_;
  const Job& job_;
  PageList pages_;
  bool narrow_;
  std::vector<Runs> runs_;       // [requests, groups]
  std::vector<int64_t> starts_;  // [pieces + 1]: the first descriptor of each
  std::vector<int64_t> offsets_;
};

// overlap.cpp ---------------------------------------------------------------------------------------------------------

// Ranges of memory, as columns. Borrowed. None passes 64 bits.
struct Ranges {
  const uint64_t *base, *nbytes;
  int64_t size;
};

// Number of the first range that shares a byte with one of `sorted`, which ascend, are apart and not empty; else -1. An
// empty range shares none.
int64_t first_collision(const Ranges& ranges, const Ranges& sorted);

// copy.cpp ------------------------------------------------------------------------------------------------------------

// Carries out n descriptors in this process, on the calling thread unless set_num_threads asked for more. Ranges must not
// overlap.
void copy(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n);

}  // namespace kvplan::cpu
