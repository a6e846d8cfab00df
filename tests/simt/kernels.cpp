// The CUDA kernels and the host code that launches them, on the CPU: the emulator in place of the driver. Built and called
// by tests/simt/test_kernels.py. Every function returns nullptr, or what went wrong.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "simt.h"

#include "../../csrc/cuda/copy.cuh"
#include "../../csrc/cuda/descriptors.cuh"
#include "../../csrc/cuda/launch.h"
#include "../../csrc/cuda/pages.cuh"
#include "../../csrc/cuda/runs.cuh"

namespace {

using namespace kvplan;
using cuda::Kernel;

// Scratch memory begins as rubbish and ends in a guard; grids are small, so that blocks do several tiles.
class Emulator {
 public:
  explicit Emulator(uint64_t seed) : random_(seed) {}
  ~Emulator() = default;

  int64_t* allocate(int64_t words) {
    const auto size = static_cast<size_t>(words);
    kept_.push_back({std::make_unique<int64_t[]>(size + kGuard), size});
    std::memset(kept_.back().words.get(), 0xa5, (size + kGuard) * sizeof(int64_t));
    return kept_.back().words.get();
  }
  void fill(void* at, int byte, int64_t nbytes) { std::memset(at, byte, static_cast<size_t>(nbytes)); }
  int64_t processors() { return 1; }

  void run(Kernel kernel, int64_t blocks, const cuda::PageArgs& args) {
    expect(kernel == Kernel::kPageIndices);
    SIMT_LAUNCH(random_(), few(blocks), cuda::kThreads, cuda::kvplan_page_indices, args);
  }
  void run(Kernel kernel, int64_t blocks, const cuda::PlanArgs& args) {
    expect(kernel == Kernel::kRuns);
    SIMT_LAUNCH(random_(), few(blocks), cuda::kThreads, cuda::kvplan_runs, args);
  }
  void run(Kernel kernel, int64_t blocks, const cuda::FindArgs& args) {
    expect(kernel == Kernel::kFindRuns);
    SIMT_LAUNCH(random_(), few(blocks), cuda::kThreads, cuda::kvplan_find_runs, args);
  }
  void run(Kernel kernel, int64_t blocks, const cuda::StartArgs& args) {
    expect(kernel == Kernel::kStarts);
    SIMT_LAUNCH(random_(), few(blocks), cuda::kThreads, cuda::kvplan_starts, args);
  }
  void run(Kernel kernel, int64_t blocks, const cuda::ExpandArgs& args) {
    expect(kernel == Kernel::kPieces || kernel == Kernel::kDescriptors);
    if (kernel == Kernel::kPieces)
      SIMT_LAUNCH(random_(), few(blocks), cuda::kThreads, cuda::kvplan_pieces, args);
    else
      SIMT_LAUNCH(random_(), blocks, cuda::kThreads, cuda::kvplan_descriptors, args);  // so many shares, times tiles
  }
  void run(Kernel kernel, int64_t blocks, const cuda::CopyArgs& args) {
    expect(kernel == Kernel::kTiles || kernel == Kernel::kCopy);
    if (kernel == Kernel::kTiles)
      SIMT_LAUNCH(random_(), few(blocks), cuda::kThreads, cuda::kvplan_tiles, args);
    else
      SIMT_LAUNCH(random_(), blocks, cuda::kThreads, cuda::kvplan_copy, args);
  }

  void check_guards() const {
    for (const auto& [words, size] : kept_)
      for (size_t i = size; i < size + kGuard; ++i)
        if (words[i] != static_cast<int64_t>(0xa5a5a5a5a5a5a5a5)) throw std::runtime_error("wrote behind its scratch memory");
  }

 private:
  static constexpr size_t kGuard = 64;
  struct Memory {
    std::unique_ptr<int64_t[]> words;
    size_t size;
  };

  static void expect(bool known) {
    if (!known) throw std::logic_error("a kernel was given another's arguments");
  }
  // Any number of blocks will do.
  unsigned few(int64_t blocks) {
    return static_cast<unsigned>(1 + random_() % static_cast<uint64_t>(blocks < 12 ? blocks : 12));
  }

  std::mt19937_64 random_;
  std::vector<Memory> kept_;
};

std::string message;  // of the last failure

template <class Body>
const char* guarded(uint64_t seed, Body body) {
  try {
    Emulator device(seed);
    body(device);
    device.check_guards();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

extern "C" {

const char* page_indices(uint64_t seed, const void* slots, bool wide, int64_t stride, int64_t num_rows, int64_t row_length,
                         const int64_t* requests, const int64_t* lengths, int64_t num_requests, int64_t page_size,
                         int64_t* pages, uint64_t* bad) {
  return guarded(seed, [&](Emulator& device) {
    cuda::page_indices(device, {slots, wide, stride, num_rows, row_length, requests, lengths, num_requests, page_size, pages,
                                ceil_div(row_length, page_size), bad});
  });
}

const char* plan(uint64_t seed, const int64_t* tables, int64_t tables_words, const int64_t* job, const int64_t* sizes,
                 const void* pages, bool wide, uint64_t* table, int64_t room, int64_t* info, int64_t segments) {
  return guarded(seed, [&](Emulator& device) {
    cuda::plan(device, cuda::PlanInput{tables, tables_words, job, *reinterpret_cast<const JobSize*>(sizes), pages, wide,
                                       table, room, info, segments});
  });
}

const char* find_runs(uint64_t seed, const int64_t* src, const int64_t* dst, int64_t pairs, const int64_t* indptr,
                      int64_t lists, int64_t* runs, int64_t* run_indptr) {
  return guarded(seed, [&](Emulator& device) { cuda::find_runs(device, src, dst, pairs, indptr, lists, runs, run_indptr); });
}

const char* expand(uint64_t seed, const int64_t* entries, int64_t num_entries, const int64_t* runs, int64_t num_runs,
                   const int64_t* indptr, const int64_t* steps, int64_t groups, uint64_t* table, int64_t room,
                   int64_t* count) {
  return guarded(seed, [&](Emulator& device) {
    cuda::expand(device, reinterpret_cast<const Entry*>(entries), num_entries, runs, num_runs, indptr,
                 reinterpret_cast<const Steps*>(steps), groups, table, room, count);
  });
}

const char* copy(uint64_t seed, const uint64_t* table, int64_t room, const int64_t* count, const Moved* moved,
                 int64_t num_read, int64_t num_written) {
  return guarded(seed, [&](Emulator& device) {
    cuda::copy(device, table, room, count, moved, static_cast<int>(num_read), static_cast<int>(num_written));
  });
}
}
