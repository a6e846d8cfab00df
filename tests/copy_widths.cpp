// Each loop of csrc/cpu/copy.cpp that this processor can run, on descriptors of every length and alignment, from and to
// blocks of exactly their size. Built by tests/test_copy.py, with and without sanitizers. Prints how many loops ran.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "cpu/copy.cpp"
#include "cpu/workers.cpp"

namespace {

using Copy = void (*)(const uint64_t*, const uint64_t*, const uint64_t*, int64_t);

// Every byte moves from `at` of one block to that of the other, and those between stay: 0 where that is so.
int moved(Copy copy, uint64_t seed) {
  std::mt19937_64 draw(seed);
  const uint64_t lengths = seed % 3 == 0 ? 70 : seed % 3 == 1 ? 700 : 9000;
  std::vector<uint64_t> src, dst, nbytes, from, to;
  uint64_t source = draw() % 64, target = draw() % 64;
  for (uint64_t i = 0; i < 300; ++i) {
    const uint64_t size = seed < 3 ? i : draw() % 5 == 0 ? 0 : draw() % lengths;
    from.push_back(source), to.push_back(target), nbytes.push_back(size);
    source += size + (draw() % 3 == 0 ? draw() % 130 : 0);
    target += size + (draw() % 3 == 0 ? draw() % 130 : 0);
  }
  source -= source - (from.back() + nbytes.back()), target -= target - (to.back() + nbytes.back());
  // The last byte of either block is the last that is copied.
  const std::unique_ptr<unsigned char[]> read(new unsigned char[source]), written(new unsigned char[target]);
  std::vector<unsigned char> want(target);
  for (uint64_t i = 0; i < source; ++i) read[i] = static_cast<unsigned char>(draw());
  for (uint64_t i = 0; i < target; ++i) want[i] = written[i] = static_cast<unsigned char>(draw());
  std::vector<uint64_t> order(from.size());
  for (uint64_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), draw);
  std::vector<uint64_t> sizes;
  for (const uint64_t i : order) {
    src.push_back(nbytes[i] == 0 ? 1 : reinterpret_cast<uint64_t>(read.get() + from[i]));  // of no bytes: nobody's
    dst.push_back(nbytes[i] == 0 ? 1 : reinterpret_cast<uint64_t>(written.get() + to[i]));
    sizes.push_back(nbytes[i]);
    std::memcpy(want.data() + to[i], read.get() + from[i], nbytes[i]);
  }
  copy(src.data(), dst.data(), sizes.data(), static_cast<int64_t>(sizes.size()));
  return std::memcmp(want.data(), written.get(), target) != 0;
}

}  // namespace

int main() {
  std::vector<Copy> loops{kvplan::cpu::copy_plain, kvplan::cpu::copy};
#if defined(__x86_64__)
  loops.push_back(kvplan::cpu::sse2::copy_some);
  if (__builtin_cpu_supports("avx")) loops.push_back(kvplan::cpu::avx::copy_some);
  if (__builtin_cpu_supports("avx512f")) loops.push_back(kvplan::cpu::avx512::copy_some);
#else
  loops.push_back(kvplan::cpu::words::copy_some);
#endif
  for (const Copy copy : loops)
    for (uint64_t seed = 0; seed < 60; ++seed)
      if (moved(copy, seed) != 0) return 1;
  std::printf("%zu\n", loops.size());
}
