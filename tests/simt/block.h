// What the scheduler keeps for each thread, warp and block, and the text that error messages say of them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"

struct uint3 {
  unsigned x, y, z;
};

namespace simt __attribute__((visibility("hidden"))) {

// A place in the source. As a default argument, here() is the place of the call.
struct Site {
  const char* file = "";
  int line = 0;
};
constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
inline bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || !std::strcmp(a.file, b.file)); }
inline std::string text(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

struct Block;
class Grid;

struct Thread : Fiber {
  Grid* grid;
  Block* block;
  uint3 index;
  unsigned warp, lane;
  const char* op;        // the intrinsic it waits in; nullptr: it runs or can run
  Site site;             // where in the source it waits
  uint32_t mask;         // of a warp intrinsic; else 0
  int from;              // lane read by a shuffle; -1: a vote
  uint64_t value;        // given to a warp intrinsic
  uint64_t result;       // returned by it
  uint64_t generation;   // in which `idled` was counted, see Grid::idle
  unsigned idled;        // weight of the waits and intrinsics that brought it no further
  bool ended;

  void wait_in(const char* the_op, Site the_site, uint32_t the_mask = 0) {
    op = the_op;
    site = the_site;
    mask = the_mask;
  }
};

// A set of threads of one block.
struct Set {
  uint32_t lanes[32];
  uint32_t warps;  // which of `lanes` are not empty
  void add(unsigned warp, uint32_t mask) {
    lanes[warp] |= mask;
    warps |= 1u << warp;
  }
  void remove(unsigned warp, uint32_t mask) {
    if (!(lanes[warp] &= ~mask)) warps &= ~(1u << warp);
  }
};

// One call of a warp intrinsic: the lanes it needs (mask), and those that are there already.
struct Meeting {
  const char* op;
  Site site;
  uint32_t mask, arrived;
};

struct Warp {
  std::vector<Meeting> meetings;
  uint32_t gone;  // lanes that have ended, or that a block of this size does not have
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};
struct Shared {
  const void* key;
  std::unique_ptr<void, Free> memory;
  size_t bytes;
};

struct Block {
  uint3 index;
  unsigned slot;
  unsigned ended;     // threads
  unsigned arrived;   // threads at the barrier
  Thread* first;      // the first of them
  int count, result;  // true predicates: at the barrier that threads arrive at now, at the last one
  Set ready, asleep;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Shared> shared;
};

inline std::string name(const Thread& thread) {
  return "block " + std::to_string(thread.block->index.x) + " thread " + std::to_string(thread.index.x);
}
inline std::string place(const Thread& thread) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string told = thread.op;
  if (thread.mask) told += " mask 0x";
  for (int shift = 28; thread.mask && shift >= 0; shift -= 4) told += kHex[thread.mask >> shift & 15];
  return told + " (" + text(thread.site) + ")";
}
inline std::string waits(const Thread& thread) { return name(thread) + " waits at " + place(thread); }

// Which threads wait where, in blocks that have not ended. Threads of a block that wait at one place are listed as one.
inline std::string who_waits(const std::vector<Block>& blocks) {
  std::string told;
  unsigned groups = 0;
  for (auto& block : blocks) {
    std::vector<std::pair<const Thread*, unsigned>> seen;
    for (auto& thread : block.threads) {
      if (thread.ended) continue;
      auto it = std::find_if(seen.begin(), seen.end(), [&](auto& entry) {
        const Thread& one = *entry.first;
        return one.op == thread.op && (!one.op || (one.mask == thread.mask && same(one.site, thread.site)));
      });
      if (it == seen.end()) it = seen.insert(seen.end(), {&thread, 0u});
      ++it->second;
    }
    for (auto& [thread, count] : seen) {
      if (++groups > 12) return told + "; ...";
      told += "; " + name(*thread) + (count > 1 ? " and " + std::to_string(count - 1) + " more" : "") +
              (thread->op ? " at " + place(*thread) : " running");
    }
  }
  return told;
}

// The thread that runs now, or nullptr outside a launch.
__attribute__((tls_model("initial-exec"))) inline thread_local Thread* current = nullptr;

}  // namespace simt
