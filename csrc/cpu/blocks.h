// Memory for large results, used again: a fresh block must be zeroed by the kernel page by page before it can be written,
// which takes several times as long as planning into it, and the C library keeps no freed block above 32 MiB.
#pragma once
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

  // Never destroyed: tensors may be freed after static objects are.
  static Blocks& instance() {
    static Blocks* blocks = new Blocks;
    return *blocks;
  }

  struct Block {
    void* data;
    size_t size;
  };

  Block take(size_t nbytes) {
    const size_t size = (nbytes + kHuge - 1) / kHuge * kHuge;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < free_.size(); ++i) {
        if (free_[i].size < size || free_[i].size > 2 * size) continue;
        const Block block = free_[i];
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
        kept_ -= block.size;
        return block;
      }
    }
    void* data = std::aligned_alloc(kHuge, size);
    if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    // Advice: where it fails, nothing is lost. The last, partly used huge page stays small pages.
    madvise(data, nbytes / kHuge * kHuge, MADV_HUGEPAGE);
#endif
    return {data, size};
  }

  void give(Block block) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (kept_ + block.size <= kKept) {
        kept_ += block.size;
        free_.push_back(block);
        return;
      }
    }
    std::free(block.data);
  }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;
  std::mutex mutex_;
  std::vector<Block> free_;
  size_t kept_ = 0;
};

}  // namespace kvplan::cpu
