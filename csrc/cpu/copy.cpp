// Carries out descriptors whose memory this process can reach.
#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "stages.h"

namespace kvplan::cpu {

namespace {

constexpr uint64_t kBytesPerThread = uint64_t{4} << 20;  // below this a thread costs more than it copies
constexpr unsigned kMostThreads = 8;                     // memory bandwidth is used up by then

void copy_some(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (nbytes[i] == 0) continue;  // addresses are then nobody's: a table may end in zeros
    std::memcpy(reinterpret_cast<void*>(dst[i]), reinterpret_cast<const void*>(src[i]), nbytes[i]);
  }
}

}  // namespace

void copy(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += nbytes[i];
  const uint64_t most = std::min<uint64_t>(std::max(1u, std::thread::hardware_concurrency()), kMostThreads);
  const uint64_t threads = std::clamp<uint64_t>(total / kBytesPerThread, 1, most);
  if (threads == 1) return copy_some(src, dst, nbytes, n);
  // Descriptors stay whole; each thread takes a stretch of about equal bytes.
  std::vector<std::thread> workers;
  workers.reserve(threads);
  int64_t start = 0;
  uint64_t done = 0;
  for (uint64_t t = 1; t <= threads; ++t) {
    int64_t stop = start;
    while (stop < n && (t == threads || done < total / threads * t)) done += nbytes[stop++];
    try {
      workers.emplace_back(copy_some, src + start, dst + start, nbytes + start, stop - start);
    } catch (const std::system_error&) {  // no more threads to be had: this one does it
      copy_some(src + start, dst + start, nbytes + start, stop - start);
    }
    start = stop;
  }
  for (auto& worker : workers) worker.join();
}

}  // namespace kvplan::cpu
