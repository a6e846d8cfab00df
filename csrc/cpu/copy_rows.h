// The loop of copy.cpp, which includes it once for each width of vectors, in a namespace of its own: `Vector`, load(from)
// and store(to, vector), which writes past the cache, are defined there.
// Of few instructions: to find a page stops the processor until those behind it fill its window, and this is as many
// descriptors as fit into it.

void copy_some(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
  constexpr uint64_t kVectors = kTogether / sizeof(Vector);
  Ahead ahead(src, nbytes, n);
  for (int64_t i = 0; i < n; ++i) {
    ahead.begin(i);
    uint64_t left = word(nbytes, i);
    if (left == 0) continue;
    auto* to = reinterpret_cast<char*>(word(dst, i));
    auto* from = reinterpret_cast<const char*>(word(src, i));
    const uint64_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
    if (__builtin_expect(head != 0, 0)) {
      const uint64_t some = std::min(head, left);
      std::memcpy(to, from, some);
      to += some, from += some, left -= some;
    }
    for (; left >= kTogether; to += kTogether, from += kTogether, left -= kTogether) {
      ahead.fetch();
      Vector held[kVectors];
#pragma GCC unroll 16
      for (uint64_t k = 0; k < kVectors; ++k) held[k] = load(reinterpret_cast<const Vector*>(from) + k);
#pragma GCC unroll 16
      for (uint64_t k = 0; k < kVectors; ++k) store(reinterpret_cast<Vector*>(to) + k, held[k]);
    }
    if (left == 0) continue;
    ahead.fetch();
    for (; left >= kLine; to += kLine, from += kLine, left -= kLine)
      for (uint64_t k = 0; k < kLine / sizeof(Vector); ++k)
        store(reinterpret_cast<Vector*>(to) + k, load(reinterpret_cast<const Vector*>(from) + k));
    if (left != 0) std::memcpy(to, from, left);
  }
  written();
}
