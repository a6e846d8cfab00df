// Stores past the cache. An ordinary store to memory that is not in the cache reads it there first; these do not, and take
// half the time. They write lines of eight words; what begins or ends within one is written as usual.
#pragma once
#include <cstdint>

#include "clones.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvplan::cpu {

constexpr int64_t kLine = 8;

inline __attribute__((always_inline)) void write_line(uint64_t* out, const uint64_t* words) {
#if defined(__x86_64__)
  for (int i = 0; i < kLine; i += 2)
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), _mm_load_si128(reinterpret_cast<const __m128i*>(words + i)));
#else
  for (int i = 0; i < kLine; ++i) out[i] = words[i];
#endif
}

// Other threads may read what was written past the cache behind this alone.
inline void written_past_cache() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Body of a function that writes value, an expression of i, to out[i] for i below n.
#define KVPLAN_WRITE_LINES(value, write)                                                 \
  int64_t i = 0;                                                                         \
  for (; i < n && reinterpret_cast<uintptr_t>(out + i) % 64 != 0; ++i) out[i] = (value); \
  while (i + kLine <= n) {                                                               \
    alignas(64) uint64_t line[kLine];                                                    \
    uint64_t* const at = out + i;                                                        \
    for (int k = 0; k < kLine; ++k, ++i) line[k] = (value);                              \
    write(at, line);                                                                     \
  }                                                                                      \
  for (; i < n; ++i) out[i] = (value);

// out[i] = base + index[i] * stride; out[i] = value; out[i] = words[i].
#define KVPLAN_COLD_FILLS(target, write)                                                                             \
  target inline void fill_cold(uint64_t* out, const uint32_t* index, int64_t n, uint64_t base, uint64_t stride) {    \
    const uint32_t narrow = static_cast<uint32_t>(stride);                                                           \
    KVPLAN_WRITE_LINES(base + uint64_t{index[i]} * narrow, write)                                                    \
  }                                                                                                                  \
  target inline void fill_cold(uint64_t* out, int64_t n, uint64_t value) { KVPLAN_WRITE_LINES(value, write) }        \
  target inline void copy_cold(uint64_t* out, const uint64_t* words, int64_t n) { KVPLAN_WRITE_LINES(words[i], write) }

#if defined(KVPLAN_CAN_CHOOSE)
// A line in one store where the processor has it: two thirds of the time of four.
#define KVPLAN_WIDE __attribute__((target("arch=x86-64-v4")))
KVPLAN_WIDE inline __attribute__((always_inline)) void write_wide_line(uint64_t* out, const uint64_t* words) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_load_si512(words));
}
KVPLAN_COLD_FILLS(KVPLAN_WIDE, write_wide_line)
KVPLAN_COLD_FILLS(__attribute__((target("default"))), write_line)
#else
KVPLAN_COLD_FILLS(, write_line)
#endif

}  // namespace kvplan::cpu
