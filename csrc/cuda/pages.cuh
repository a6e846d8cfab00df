// Token slots -> page ids, and the checks on page ids.
#pragma once
#include "device.cuh"

namespace kvplan::cuda {

// One thread a slot: reads it and its page's first one; the thread of a page's first slot writes the page's id.
KVPLAN_KERNEL kvplan_page_indices(const PageArgs args) {
  const int64_t size = args.page_size, length = args.row_length;
  const int64_t span = length > 0 ? length : 1;  // a bad row is told even where rows are empty
  for (int64_t i = grid_thread(); i < args.num_requests * span; i += grid_threads()) {
    const int64_t request = quotient(i, span), at = i - request * span;
    const int64_t row = args.requests == nullptr ? request : args.requests[request];
    const int64_t valid = args.lengths == nullptr ? length : args.lengths[request];
    const bool inside = row >= 0 && row < args.num_rows && valid >= 0 && valid <= length;
    const int64_t page = quotient(at, size), first_at = page * size;
    int64_t id = -1;
    if (!inside) {
      args.bad[request] = static_cast<uint64_t>(kNoRow);  // nothing else is written there
    } else if (at < valid) {
      const int64_t base = row * args.stride;
      const int64_t slot = id_at(args.slots, args.wide, base + at);
      const int64_t first = at == first_at ? slot : id_at(args.slots, args.wide, base + first_at);
      const bool good = at == first_at ? slot >= 0 && slot % size == 0 : follows(slot, first, at - first_at);
      if (!good) atomic_min(args.bad + request, static_cast<uint64_t>(at));
      if (slot >= 0) id = slot / size;
    }
    if (at == first_at && length > 0) args.pages[request * args.columns + page] = id;
  }
}

__device__ __forceinline__ uint64_t hash_of(int64_t id, int64_t scope) {
  // Finalizer of MurmurHash3, which mixes all bits into all.
  uint64_t h = static_cast<uint64_t>(id) + static_cast<uint64_t>(scope) * 0x9e3779b97f4a7c15ull;
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdull;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ull;
  return h ^ h >> 33;
}

// Whether what the host takes the job for is what it says.
__device__ __forceinline__ bool job_is_known(const PlanArgs& args) {
  const auto* said = args.job;
  const auto* believed = reinterpret_cast<const int64_t*>(&args.size);
  bool same = true;
  for (int i = 0; i < words_of<JobSize>(); ++i) same &= said[i] == believed[i];
  const Header& header = *reinterpret_cast<const Header*>(args.tables);
  const int64_t sizes[] = {header.num_entries, header.num_groups, header.num_spaces, header.num_segments};
  for (const int64_t size : sizes) same &= size >= 0 && size <= args.tables_words;
  return same && (args.size.requests == 0 || header.num_segments == args.segments) &&
         args.size.pieces == args.size.requests * header.num_entries &&
         args.size.lists == args.size.requests * header.num_groups &&
         args.tables_words == table_words(header);
}

// One thread a place: an id in range, or the first of its scope. Ids of a scope, shifted, meet in an open hash table, whose slots
// hold the first place of an id; of two that meet, the later one is a failure. The first failure in order is kept.
__device__ __forceinline__ void check_pages(const PlanArgs& args) {
  const Job job = view_job(args.job);
  const int64_t places = job.size.places;
  const auto fail = [&](int64_t place) { atomic_max(args.status, static_cast<uint64_t>(places - place)); };
  const auto check_of = [&](int64_t place) -> const Check& { return job.checks[row_with(job.checks, job.size.checks, place)]; };
  const auto id_of = [&](const Check& check, int64_t place) {
    return id_at(args.pages, args.wide, check.offset + place - check.first);
  };
  for (int64_t place = grid_thread(); place < places; place += grid_threads()) {
    const Check& check = check_of(place);
    const int64_t id = id_of(check, place);
    if (static_cast<Code>(check.code) != Code::kDstTwice) {
      if (id < 0 || id >= check.limit) fail(place);
      continue;
    }
    const uint64_t mine = static_cast<uint64_t>(places - place);  // greater: earlier
    const int64_t page = id + check.shift;
    for (uint64_t slot = hash_of(page, check.scope);; ++slot) {
      uint64_t* const at = args.hash + (slot & args.hash_mask);
      const uint64_t found = atomic_cas(at, 0, mine);
      if (found == 0) break;
      const int64_t other = places - static_cast<int64_t>(found);
      const Check& others = check_of(other);
      if (others.scope != check.scope || id_of(others, other) + others.shift != page) continue;
      const uint64_t before = atomic_max(at, mine);
      fail(places - static_cast<int64_t>(before < mine ? before : mine));
      break;
    }
  }
}

}  // namespace kvplan::cuda
