// Runs x entries -> descriptors. The bulk of all planning: three words written per descriptor, nothing else kept.
#include <algorithm>

#include "stages.h"

// One binary for every x86-64 machine: the loader takes the widest version that the processor runs.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(KVPLAN_NO_CLONES)
#define KVPLAN_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define KVPLAN_CLONES
#endif

namespace kvplan::cpu {

namespace {

// out[i] = base + index[i] * stride
KVPLAN_CLONES void fill_addresses(uint64_t* out, const int64_t* index, int64_t n, uint64_t base, uint64_t stride) {
  for (int64_t i = 0; i < n; ++i) out[i] = base + static_cast<uint64_t>(index[i]) * stride;
}

// out[i] = first + i * step
KVPLAN_CLONES void fill_steps(uint64_t* out, int64_t n, uint64_t first, uint64_t step) {
  for (int64_t i = 0; i < n; ++i) out[i] = first + static_cast<uint64_t>(i) * step;
}

// out[i] = count[i] * nbytes
KVPLAN_CLONES void fill_sizes(uint64_t* out, const int64_t* count, int64_t n, uint64_t nbytes) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint64_t>(count[i]) * nbytes;
}

// One address a pair: the pairs of a run lie `step` bytes apart.
void fill_pairs(uint64_t* out, const int64_t* index, const RunColumns& runs, uint64_t base, uint64_t stride, uint64_t step) {
  if (runs.size == runs.pairs) return fill_addresses(out, index, runs.size, base, stride);
  for (int64_t i = 0; i < runs.size; ++i) {
    fill_steps(out, runs.count[i], base + static_cast<uint64_t>(index[i]) * stride, step);
    out += runs.count[i];
  }
}

}  // namespace

int64_t count_descriptors(const Entry& entry, const Steps& steps, const RunColumns& runs) {
  return moves_runs_whole(entry, steps) ? runs.size : runs.pairs;
}

bool addresses_fit(const Entry& entry, const Group& group, const Space& space) {
  const auto side_fits = [&](uint64_t base, int64_t stride, const Side& side, int64_t limit) {
    int64_t page, row, last;
    return mul(limit - 1, side.page_step, &page) && mul(side.rows - 1, side.row_step, &row) && add(page, row, &last) &&
           address_fits(base, last, stride, entry.nbytes);
  };
  return side_fits(entry.src_base, entry.src_stride, group.src, space.src_limit) &&
         side_fits(entry.dst_base, entry.dst_stride, group.dst, space.dst_limit);
}

void expand(const Entry& entry, const Steps& steps, const RunColumns& runs, Table out) {
  const uint64_t src_stride = static_cast<uint64_t>(entry.src_stride);
  const uint64_t dst_stride = static_cast<uint64_t>(entry.dst_stride);
  const uint64_t nbytes = static_cast<uint64_t>(entry.nbytes);
  if (moves_runs_whole(entry, steps)) {
    fill_addresses(out.src, runs.src, runs.size, entry.src_base, src_stride);
    fill_addresses(out.dst, runs.dst, runs.size, entry.dst_base, dst_stride);
    if (runs.size == runs.pairs)
      std::fill_n(out.nbytes, runs.size, nbytes);
    else
      fill_sizes(out.nbytes, runs.count, runs.size, nbytes);
    return;
  }
  fill_pairs(out.src, runs.src, runs, entry.src_base, src_stride, src_stride * static_cast<uint64_t>(steps.src));
  fill_pairs(out.dst, runs.dst, runs, entry.dst_base, dst_stride, dst_stride * static_cast<uint64_t>(steps.dst));
  std::fill_n(out.nbytes, runs.pairs, nbytes);
}

}  // namespace kvplan::cpu
