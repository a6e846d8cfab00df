// Carries out descriptors whose memory this process can reach: whole pages, gather and scatter of rows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "stages.h"
#include "workers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvplan::cpu {

namespace {

constexpr uint64_t kBytesPerThread = uint64_t{4} << 20;  // below this a thread costs more than it copies
constexpr int64_t kPiecesPerThread = 4;  // so that a thread that falls behind leaves more to the others

constexpr uint64_t kLine = 64;
constexpr uint64_t kTogether = 4 * kLine;          // bytes that are fetched, and copied, at once
constexpr uint64_t kLarge = uint64_t{1} << 20;     // what a smaller table copies stays in the cache, to be used there
constexpr int64_t kFetchedAhead = 8;               // times kTogether: about what memory delivers while one line is fetched
constexpr int64_t kRowsAhead = 8;                  // whose pages are found before: that takes as long as several lines

// Every word is read once where it is used: another thread may write the table.
uint64_t word(const uint64_t* row, int64_t i) { return __atomic_load_n(row + i, __ATOMIC_RELAXED); }

// Fetches what will be read some time before it is, from one descriptor on into the next. A hint alone: nothing depends on
// it, and an address that is nobody's does no harm.
class Ahead {
 public:
  Ahead(const uint64_t* src, const uint64_t* nbytes, int64_t n) : src_(src), nbytes_(nbytes), n_(n) {
    for (int64_t i = 0; i < std::min(kRowsAhead, n); ++i) find_page(i);
    for (int64_t i = 0; i < kFetchedAhead; ++i) fetch();
  }

  inline __attribute__((always_inline)) void fetch() {
    if (left_ <= 0) {
      if (next_ == n_) return;
      const uint64_t at = word(src_, next_);
      at_ = at / kLine * kLine;
      left_ = static_cast<int64_t>(at % kLine + word(nbytes_, next_));
      ++next_;
    }
    fetch_line(0);
    fetch_line(1);
    if (left_ > static_cast<int64_t>(2 * kLine)) {
      fetch_line(2);
      fetch_line(3);
    }
    at_ += kTogether;
    left_ -= static_cast<int64_t>(kTogether);
  }
  void begin(int64_t i) const {
    if (i + kRowsAhead < n_) find_page(i + kRowsAhead);
  }

 private:
  void fetch_line(uint64_t k) const { __builtin_prefetch(reinterpret_cast<const void*>(at_ + k * kLine)); }
  void find_page(int64_t i) const { __builtin_prefetch(reinterpret_cast<const void*>(word(src_, i)), 0, 2); }

  const uint64_t *src_, *nbytes_;
  int64_t n_, next_ = 0;
  uint64_t at_ = 0;
  int64_t left_ = 0;  // bytes of the descriptor before `next_`
};

void copy_plain(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t size = word(nbytes, i);
    if (size == 0) continue;  // addresses are then nobody's: a table may end in zeros
    std::memcpy(reinterpret_cast<void*>(word(dst, i)), reinterpret_cast<const void*>(word(src, i)), size);
  }
}

// Large tables: past the cache, and with the next descriptors fetched meanwhile. (An ordinary store to a line that is not in
// the cache reads it there first.) By the widest vectors that the processor has: no flag of the compiler's names one.
#if defined(__x86_64__)
// Sanitizers do not see stores past the cache: for them the same loop writes as usual.
#if defined(__SANITIZE_ADDRESS__)
#define KVPLAN_STORE(stream, plain) plain
#else
#define KVPLAN_STORE(stream, plain) stream
#endif

// Without it, other threads need not see what was written past the cache.
inline void written() { _mm_sfence(); }

namespace sse2 {
using Vector = __m128i;
inline Vector load(const Vector* from) { return _mm_loadu_si128(from); }
inline void store(Vector* to, Vector vector) { KVPLAN_STORE(_mm_stream_si128, _mm_storeu_si128)(to, vector); }
#include "copy_rows.h"
}  // namespace sse2

#if defined(__clang__)
const auto copy_large = sse2::copy_some;
#else
#pragma GCC push_options
#pragma GCC target("avx")
namespace avx {
using Vector = __m256i;
inline Vector load(const Vector* from) { return _mm256_loadu_si256(from); }
inline void store(Vector* to, Vector vector) { KVPLAN_STORE(_mm256_stream_si256, _mm256_storeu_si256)(to, vector); }
#include "copy_rows.h"
}  // namespace avx
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
using Vector = __m512i;
inline Vector load(const Vector* from) { return _mm512_loadu_si512(from); }
inline void store(Vector* to, Vector vector) { KVPLAN_STORE(_mm512_stream_si512, _mm512_storeu_si512)(to, vector); }
#include "copy_rows.h"
}  // namespace avx512
#pragma GCC pop_options

const auto copy_large = __builtin_cpu_supports("avx512f") ? avx512::copy_some
                        : __builtin_cpu_supports("avx")   ? avx::copy_some
                                                          : sse2::copy_some;
#endif
#else
inline void written() {}

namespace words {
struct Vector {
  uint64_t words[2];
};
inline Vector load(const Vector* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}
inline void store(Vector* to, Vector vector) { std::memcpy(to, &vector, sizeof(vector)); }
#include "copy_rows.h"
}  // namespace words
const auto copy_large = words::copy_some;
#endif

}  // namespace

void copy(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += nbytes[i];
  const auto most = static_cast<int64_t>(std::min<uint64_t>(total / kBytesPerThread, INT64_MAX));
  const int64_t threads = std::clamp<int64_t>(most, 1, num_threads());
  const auto copy_some = total >= kLarge ? copy_large : copy_plain;
  if (threads == 1) return copy_some(src, dst, nbytes, n);
  // Descriptors stay whole; each piece is a stretch of them of about equal bytes.
  const auto pieces = static_cast<uint64_t>(threads * kPiecesPerThread);
  std::vector<int64_t> cuts(1, 0);
  uint64_t done = 0;
  for (int64_t i = 0; i < n; ++i) {
    done += nbytes[i];
    if (cuts.size() < pieces && done >= total / pieces * cuts.size()) cuts.push_back(i + 1);
  }
  cuts.push_back(n);
  for_each_piece(static_cast<int64_t>(cuts.size()) - 1, threads, [&](int64_t piece) {
    const int64_t first = cuts[static_cast<size_t>(piece)], last = cuts[static_cast<size_t>(piece) + 1];
    copy_some(src + first, dst + first, nbytes + first, last - first);
  });
}

}  // namespace kvplan::cpu
