// Checked 64-bit arithmetic and the run predicate: one copy for host and device.
#pragma once
#include <cstdint>

#include "entry.h"

#if defined(__CUDACC__)
#define KVPLAN_HD __host__ __device__ __forceinline__
#else
#define KVPLAN_HD inline
#endif

namespace kvplan {

// out = a * b for a, b >= 0; false where that passes int64.
KVPLAN_HD bool mul(int64_t a, int64_t b, int64_t* out) {
#if defined(__CUDA_ARCH__)
  if (a < 0 || b < 0 || __mul64hi(a, b) != 0 || a * b < 0) return false;
  *out = a * b;
  return true;
#else
  return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, out);
#endif
}

// out = a + b for a, b >= 0; false where that passes int64.
KVPLAN_HD bool add(int64_t a, int64_t b, int64_t* out) {
  if (a < 0 || b < 0 || a > INT64_MAX - b) return false;
  *out = a + b;
  return true;
}

// ceil(a / b) for a >= 0, b > 0. Written so that no intermediate passes int64.
KVPLAN_HD int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// a / b for a >= 0, b > 0. A 64-bit division takes a GPU some hundred instructions, a 32-bit one a fifth of that.
KVPLAN_HD int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// Whether base + index * stride + nbytes stays within the 64-bit address space (its end, 2^64, included).
KVPLAN_HD bool address_fits(uint64_t base, int64_t index, int64_t stride, int64_t nbytes) {
  int64_t offset, end;
  if (!mul(index, stride, &offset) || !add(offset, nbytes, &end)) return false;
  return end == 0 || base <= UINT64_MAX - static_cast<uint64_t>(end - 1);
}

KVPLAN_HD uint64_t address(uint64_t base, int64_t index, int64_t stride) {
  return base + static_cast<uint64_t>(index) * static_cast<uint64_t>(stride);
}

// Number of the last row in [low, high) whose first(row) is not above `place`. Rows rise, and row `low` is taken to begin
// at or before it, unseen.
template <class First>
KVPLAN_HD int64_t last_not_above(int64_t low, int64_t high, int64_t place, First first) {
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (first(middle) <= place)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Where [at, at + nbytes) lies now; false where only its beginning has been moved. The first that holds `at` counts.
KVPLAN_HD bool relocate(const Moved* moved, int64_t count, uint64_t nbytes, uint64_t* at) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t offset = *at - moved[i].home;
    if (offset >= moved[i].nbytes) continue;
    *at = moved[i].now + offset;
    return nbytes <= moved[i].nbytes - offset;
  }
  return true;
}

KVPLAN_HD Steps steps_of(const Group& group) { return {group.src.row_step, group.dst.row_step}; }

// Whether `slot` is `steps` behind `first`. Unsigned: what is no slot may lie more than 2^63 below it.
KVPLAN_HD bool follows(int64_t slot, int64_t first, int64_t steps) {
  return (slot >= first) & (static_cast<uint64_t>(slot) - static_cast<uint64_t>(first) == static_cast<uint64_t>(steps));
}

// Index of a row of a page. Unsigned: a GPU goes on with page ids that are out of range, and drops the result.
KVPLAN_HD int64_t row_index(const Side& side, int64_t page, int64_t row) {
  return static_cast<int64_t>(static_cast<uint64_t>(page) * static_cast<uint64_t>(side.page_step) +
                              static_cast<uint64_t>(row) * static_cast<uint64_t>(side.row_step));
}

// Whether the pair (src, dst) goes on where a pair `count` steps before it started: the run predicate.
KVPLAN_HD bool continues(int64_t src, int64_t dst, const Run& run, const Steps& steps) {
  // Unsigned: near the end of int64 the sum may wrap, and then nothing continues there.
  const auto after = [&](int64_t start, int64_t step) {
    return static_cast<int64_t>(static_cast<uint64_t>(start) +
                                static_cast<uint64_t>(run.count) * static_cast<uint64_t>(step));
  };
  return src > run.src && src == after(run.src, steps.src) && dst > run.dst && dst == after(run.dst, steps.dst);
}

// Whether an entry moves a whole run as one descriptor: its rows lie gap-free on both sides.
KVPLAN_HD bool moves_runs_whole(const Entry& entry, const Steps& steps) {
  int64_t src, dst;
  return mul(entry.src_stride, steps.src, &src) && src == entry.nbytes && mul(entry.dst_stride, steps.dst, &dst) &&
         dst == entry.nbytes;
}

}  // namespace kvplan
