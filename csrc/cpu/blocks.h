// Memory for large results, used again: a fresh block must be zeroed by the kernel page by page before it can be written,
// which takes several times as long as planning into it, and the C library keeps no freed block above 32 MiB.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvplan::cpu {

class Blocks {
 public:
  static constexpr size_t kLarge = size_t{4} << 20;   // below this the C library does as well
  static constexpr size_t kKept = size_t{256} << 20;  // bytes kept free at the most, in all
  // A block that was given back so lately is still in the cache, unless it is larger than caches are. An idle core loses
  // its cache after 0.3 to 1 ms.
  static constexpr std::chrono::microseconds kWarm{300};
  static constexpr size_t kCache = size_t{32} << 20;

  // Never destroyed: tensors may be freed after static objects are.
  static Blocks& instance() {
    static Blocks* blocks = new Blocks;
    return *blocks;
  }

  struct Block {
    void* data;
    size_t size;
    bool warm;  // likely in the cache
  };

  // The lock is not waited for, since its holder may not run for a while: then the block is a fresh one, or is freed.
  Block take(size_t nbytes) {
    const size_t size = (nbytes + kHuge - 1) / kHuge * kHuge;
    {
      const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      if (!lock.owns_lock()) return fresh(nbytes, size);
      auto best = free_.end();  // the smallest that will do, so that small ones leave the large; of these the latest
      for (auto at = free_.begin(); at != free_.end(); ++at)
        if (at->size >= size && at->size <= 2 * size && (best == free_.end() || at->size <= best->size)) best = at;
      if (best != free_.end()) {
        const Free found = *best;
        free_.erase(best);
        kept_ -= found.size;
        return {found.data, found.size, found.size <= kCache && Clock::now() - found.since < kWarm};
      }
    }
    return fresh(nbytes, size);
  }

  void give(const Block& block) {
    {
      const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      if (lock.owns_lock() && kept_ + block.size <= kKept) {
        kept_ += block.size;
        free_.push_back({block.data, block.size, Clock::now()});
        return;
      }
    }
    std::free(block.data);
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Free {
    void* data;
    size_t size;
    Clock::time_point since;
  };
  static constexpr size_t kHuge = size_t{2} << 20;

  static Block fresh(size_t nbytes, size_t size) {
    void* data = std::aligned_alloc(kHuge, size);
    if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    // Advice: where it fails, nothing is lost. The last, partly used huge page stays small pages.
    madvise(data, nbytes / kHuge * kHuge, MADV_HUGEPAGE);
#endif
    return {data, size, false};
  }

  std::mutex mutex_;
  std::vector<Free> free_;
  size_t kept_ = 0;
};

// Uninitialised words for the time of one call.
class Scratch {
 public:
  explicit Scratch(size_t words)
      : large_(words * sizeof(int64_t) >= Blocks::kLarge),
        block_(large_ ? Blocks::instance().take(words * sizeof(int64_t)) : Blocks::Block{new int64_t[words], 0, true}) {}
  Scratch(Scratch&& other) noexcept : large_(other.large_), block_(other.block_) { other.block_.data = nullptr; }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (!large_)
      delete[] words();
    else if (block_.data != nullptr)
      Blocks::instance().give(block_);
  }
  int64_t* words() const { return static_cast<int64_t*>(block_.data); }

 private:
  bool large_;
  Blocks::Block block_;
};

}  // namespace kvplan::cpu
