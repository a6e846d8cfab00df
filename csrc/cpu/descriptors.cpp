// Runs x entries -> descriptors. The bulk of all planning: three words written per descriptor, nothing else kept.
#include <algorithm>
#include <type_traits>

#include "clones.h"
#include "past_cache.h"
#include "stages.h"

namespace kvplan::cpu {

namespace {

// out[i] = base + index[i] * stride
KVPLAN_CLONES void fill_addresses(uint64_t* out, const uint32_t* index, int64_t n, uint64_t base, uint64_t stride) {
  // 32 x 32 -> 64 bits is one instruction even where 64 x 64 bits takes many.
  const uint32_t narrow = static_cast<uint32_t>(stride);
  for (int64_t i = 0; i < n; ++i) out[i] = base + uint64_t{index[i]} * narrow;
}

KVPLAN_CLONES void fill_addresses(uint64_t* out, const int64_t* index, int64_t n, uint64_t base, uint64_t stride) {
  for (int64_t i = 0; i < n; ++i) out[i] = base + static_cast<uint64_t>(index[i]) * stride;
}

KVPLAN_CLONES void fill(uint64_t* out, int64_t n, uint64_t value) {
  for (int64_t i = 0; i < n; ++i) out[i] = value;
}

// One address a pair, the pairs of a run `step` bytes apart. All runs in one call: most are a page's few rows.
template <class Index>
inline __attribute__((always_inline)) void fill_runs_body(uint64_t* out, const Index* index, const Index* count, int64_t n,
                                                          uint64_t base, uint64_t stride, uint64_t step) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t first = base + static_cast<uint64_t>(index[i]) * stride;
    const int64_t pairs = static_cast<int64_t>(count[i]);
    for (int64_t k = 0; k < pairs; ++k) out[k] = first + static_cast<uint64_t>(k) * step;
    out += pairs;
  }
}

KVPLAN_CLONES void fill_runs(uint64_t* out, const uint32_t* index, const uint32_t* count, int64_t n, uint64_t base,
                             uint64_t stride, uint64_t step) {
  fill_runs_body(out, index, count, n, base, stride, step);
}

KVPLAN_CLONES void fill_runs(uint64_t* out, const int64_t* index, const int64_t* count, int64_t n, uint64_t base,
                             uint64_t stride, uint64_t step) {
  fill_runs_body(out, index, count, n, base, stride, step);
}

// The pairs of runs, `step` bytes apart: put together in the cache, for runs end within a line.
void fill_runs_cold(uint64_t* out, const uint32_t* index, const uint32_t* count, int64_t n, uint64_t base,
                    uint64_t stride, uint64_t step) {
  constexpr int64_t kRoom = 512;
  alignas(64) uint64_t words[kRoom];
  const int64_t skip = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) / sizeof(uint64_t) % kLine);
  int64_t from = skip, to = skip;  // so that words and table have their lines alike
  const auto flush = [&] {
    copy_cold(out, words + from, to - from);
    out += to - from;
    from = to = 0;
  };
  for (int64_t i = 0; i < n; ++i) {
    uint64_t at = base + uint64_t{index[i]} * stride;
    for (int64_t left = count[i]; left > 0;) {
      const int64_t here = std::min(left, kRoom - to);
      for (int64_t k = 0; k < here; ++k) words[to + k] = at + static_cast<uint64_t>(k) * step;
      at += static_cast<uint64_t>(here) * step;
      left -= here;
      if ((to += here) == kRoom) flush();
    }
  }
  flush();
}
// Addresses of one side, one a pair.
template <class Index>
void fill_pairs(uint64_t* out, const Index* index, const RunColumns<Index>& runs, uint64_t base, uint64_t stride,
                uint64_t step, bool cold) {
  if constexpr (std::is_same_v<Index, uint32_t>) {
    if (cold && runs.size == runs.pairs) return fill_cold(out, index, runs.size, base, stride);
    if (cold) return fill_runs_cold(out, index, runs.count, runs.size, base, stride, step);
  }
  if (runs.size == runs.pairs) return fill_addresses(out, index, runs.size, base, stride);
  fill_runs(out, index, runs.count, runs.size, base, stride, step);
}

template <class Index>
void expand_any(const Entry& entry, const Steps& steps, const RunColumns<Index>& runs, Table out) {
  const uint64_t src_stride = static_cast<uint64_t>(entry.src_stride);
  const uint64_t dst_stride = static_cast<uint64_t>(entry.dst_stride);
  const uint64_t nbytes = static_cast<uint64_t>(entry.nbytes);
  if (runs.size != runs.pairs && moves_runs_whole(entry, steps)) {
    fill_addresses(out.src, runs.src, runs.size, entry.src_base, src_stride);
    fill_addresses(out.dst, runs.dst, runs.size, entry.dst_base, dst_stride);
    for (int64_t i = 0; i < runs.size; ++i) out.nbytes[i] = static_cast<uint64_t>(runs.count[i]) * nbytes;
    return;
  }
  fill_pairs(out.src, runs.src, runs, entry.src_base, src_stride, src_stride * static_cast<uint64_t>(steps.src), out.cold);
  fill_pairs(out.dst, runs.dst, runs, entry.dst_base, dst_stride, dst_stride * static_cast<uint64_t>(steps.dst), out.cold);
  if (out.cold) return fill_cold(out.nbytes, runs.pairs, nbytes);
  fill(out.nbytes, runs.pairs, nbytes);
}

}  // namespace

void expand(const Entry& entry, const Steps& steps, const RunColumns<uint32_t>& runs, Table out) {
  expand_any(entry, steps, runs, out);
}

void expand(const Entry& entry, const Steps& steps, const RunColumns<int64_t>& runs, Table out) {
  expand_any(entry, steps, runs, out);
}

}  // namespace kvplan::cpu
