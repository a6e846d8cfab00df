// Carries out descriptors whose memory this process can reach.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "stages.h"
#include "workers.h"

namespace kvplan::cpu {

namespace {

constexpr uint64_t kBytesPerThread = uint64_t{4} << 20;  // below this a thread costs more than it copies
constexpr unsigned kMostThreads = 8;                     // memory bandwidth is used up by then
constexpr uint64_t kPiecesPerThread = 4;                 // so that a thread that falls behind leaves more to the others

// Every word is read once: another thread may write the table.
void copy_some(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t size = __atomic_load_n(nbytes + i, __ATOMIC_RELAXED);
    if (size == 0) continue;  // addresses are then nobody's: a table may end in zeros
    std::memcpy(reinterpret_cast<void*>(dst[i]), reinterpret_cast<const void*>(src[i]), size);
  }
}

}  // namespace

void copy(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += nbytes[i];
  const uint64_t most = std::min<uint64_t>(std::max(1u, std::thread::hardware_concurrency()), kMostThreads);
  const uint64_t threads = std::clamp<uint64_t>(total / kBytesPerThread, 1, most);
  if (threads == 1) return copy_some(src, dst, nbytes, n);
  // Descriptors stay whole; each piece is a stretch of them of about equal bytes.
  const uint64_t pieces = threads * kPiecesPerThread;
  std::vector<int64_t> cuts(1, 0);
  uint64_t done = 0;
  for (int64_t i = 0; i < n; ++i) {
    done += nbytes[i];
    if (cuts.size() < pieces && done >= total / pieces * cuts.size()) cuts.push_back(i + 1);
  }
  cuts.push_back(n);
  for_each_piece(static_cast<int64_t>(cuts.size()) - 1, static_cast<int64_t>(threads), [&](int64_t piece) {
    const int64_t first = cuts[static_cast<size_t>(piece)], last = cuts[static_cast<size_t>(piece) + 1];
    copy_some(src + first, dst + first, nbytes + first, last - first);
  });
}

}  // namespace kvplan::cpu
