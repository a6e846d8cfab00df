// What a launch draws from its seed: how many blocks are resident, in which order blocks start, and which thread runs when.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "block.h"

namespace simt __attribute__((visibility("hidden"))) {

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x2545f4914f6cdd1d + 0x9e3779b97f4a7c15) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  bool one_in(uint32_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

// How the next of several is chosen: at random; the first; the last; the one after that chosen last; that chosen last, while
// it can run.
enum class Order { kUniform, kLowest, kHighest, kNext, kKeep };

struct Policy {
  static constexpr unsigned kNone = ~0u;
  static constexpr unsigned kMostBlocks = 24;     // resident (at most 32: a mask)
  static constexpr unsigned kMostThreads = 8192;  // resident

  Policy(uint64_t seed, unsigned blocks, unsigned threads, unsigned wanted) : random(seed) {
    const unsigned most = std::min({std::max(1u, kMostThreads / threads), kMostBlocks, blocks});
    // Few blocks more often than many: few fit into caches, and two or three show most mistakes.
    resident = wanted ? std::min(wanted, most) : std::min(most, 1 + random.below(1u << random.below(6)));
    queue.resize(blocks);
    std::iota(queue.begin(), queue.end(), 0u);
    const unsigned kind = random.below(8);  // the last first, the first first, else shuffled
    if (kind == 1) std::reverse(queue.begin(), queue.end());
    if (kind > 1)
      for (unsigned i = blocks; i > 1; --i) std::swap(queue[i - 1], queue[random.below(i)]);

    constexpr unsigned kStay[] = {0, 0, 128, 230, 253};
    constexpr unsigned kPoint[] = {16, 4, 1};
    stay = kStay[random.below(5)];
    point = kPoint[random.below(3)];
    sleeps = !random.one_in(4);
    for (Order& each : order) each = random.one_in(3) ? Order::kUniform : static_cast<Order>(random.below(5));

    const unsigned victim = random.below(6);  // 0: a block; 1: a warp of each block; 2: a lane of each warp; else none
    all_but = random.one_in(4);
    if (victim == 0) victim_block = random.below(blocks);
    if (victim == 1) victim_warps = 1u << random.below((threads + 31) / 32);
    if (victim == 2) victim_lanes = 1u << (random.one_in(2) ? 0 : random.below(std::min(threads, 32u)));
    if (victim == 1 && all_but) victim_warps = ~victim_warps;
    if (victim == 2 && all_but) victim_lanes = ~victim_lanes;
    constexpr unsigned char kPoison[] = {0xdb, 0xff, 0x7f};
    poison = kPoison[random.below(3)];
  }

  bool starves(unsigned block) const { return victim_block != kNone && (victim_block == block) != all_but; }

  // One of the bits of `mask`.
  unsigned choose(uint32_t mask, Order by, unsigned last) {
    switch (by) {
      case Order::kLowest:
        return __builtin_ctz(mask);
      case Order::kHighest:
        return 31 - __builtin_clz(mask);
      case Order::kNext: {
        const uint32_t after = mask & ~((2u << last) - 1);
        return __builtin_ctz(after ? after : mask);
      }
      case Order::kKeep:
        if (mask >> last & 1) return last;
        break;
      case Order::kUniform:
        break;
    }
    uint64_t bits = random.next();
    for (int i = 0; i < 4; ++i, bits >>= 5)  // most masks are nearly full
      if (mask >> (bits & 31) & 1) return bits & 31;
    for (uint32_t skip = (bits & 0xffffffff) * __builtin_popcount(mask) >> 32; skip; --skip) mask &= mask - 1;
    return __builtin_ctz(mask);
  }
  unsigned any(uint32_t mask) { return choose(mask, Order::kUniform, 0); }

  Random random;
  unsigned resident;            // blocks at once
  std::vector<unsigned> queue;  // blocks to come, taken from the back
  unsigned stay;                // of 256: how likely a fibre goes on at a yield point
  unsigned point;               // of 16: how likely a point is a yield point
  bool sleeps;                  // __nanosleep sleeps; else it only lets others run
  Order order[3];               // of blocks, warps, lanes
  unsigned victim_block = kNone;  // starved: its threads run only when no other can
  bool all_but = false;           // then all blocks, warps or lanes but the victim are starved
  uint32_t victim_warps = 0, victim_lanes = 0;
  unsigned char poison;  // what fresh shared memory holds
};

// Which threads can run, which sleep, and which runs next.
class Chooser {
 protected:
  Chooser(uint64_t seed, unsigned blocks, unsigned threads, unsigned resident)
      : policy_(seed, blocks, threads, resident), slots_(policy_.resident) {
    for (auto& block : slots_) {
      block.threads.resize(threads);
      block.warps.resize((threads + 31) / 32);
    }
  }

  void add_ready(Block& block, unsigned warp, uint32_t lanes) {
    block.ready.add(warp, lanes);
    ready_ |= 1u << block.slot;
  }
  void remove_ready(Thread& thread) {
    Block& block = *thread.block;
    block.ready.remove(thread.warp, 1u << thread.lane);
    if (!block.ready.warps) ready_ &= ~(1u << block.slot);
  }

  void add_asleep(Thread& thread) {
    remove_ready(thread);
    thread.block->asleep.add(thread.warp, 1u << thread.lane);
    asleep_ |= 1u << thread.block->slot;
  }
  void set_victim(const Block& block) {
    const uint32_t bit = 1u << block.slot;
    victim_slots_ = policy_.starves(block.index.x) ? victim_slots_ | bit : victim_slots_ & ~bit;
  }

  // The next thread, or nullptr if none can run. A starved thread runs when no other can, and otherwise rarely. A sleeping
  // thread wakes when all others sleep or wait, and otherwise now and then. With `fair`, none is starved.
  Thread* next(bool fair) {
    const uint64_t bits = policy_.random.next();
    if (asleep_ && (bits & 7) == 0) wake_one();
    const bool uniform = fair || (bits >> 3 & 63) == 0;
    const bool spare = !fair && (bits >> 9 & 1023) != 0;
    while (ready_ || asleep_) {
      if (ready_) {
        if (Thread* thread = find(spare, uniform)) return thread;
        if (!asleep_ || policy_.random.one_in(2)) return find(false, uniform);
      }
      wake_all();
    }
    return nullptr;
  }

  Policy policy_;
  std::vector<Block> slots_;  // the resident blocks

 private:
  // A thread that can run, or nullptr; with `spare`, none that is starved.
  Thread* find(bool spare, bool uniform) {
    const Order any = Order::kUniform;
    for (uint32_t slots = ready_ & ~(spare ? victim_slots_ : 0); slots;) {
      const unsigned slot = policy_.choose(slots, uniform ? any : policy_.order[0], last_[0]);
      Block& block = slots_[slot];
      for (uint32_t warps = block.ready.warps & ~(spare ? policy_.victim_warps : 0); warps;) {
        const unsigned warp = policy_.choose(warps, uniform ? any : policy_.order[1], last_[1]);
        if (const uint32_t lanes = block.ready.lanes[warp] & ~(spare ? policy_.victim_lanes : 0)) {
          const unsigned lane = policy_.choose(lanes, uniform ? any : policy_.order[2], last_[2]);
          last_[0] = slot;
          last_[1] = warp;
          last_[2] = lane;
          return &block.threads[warp * 32 + lane];
        }
        warps &= ~(1u << warp);
      }
      slots &= ~(1u << slot);
    }
    return nullptr;
  }

  void wake(Block& block, unsigned warp, uint32_t lanes) {
    block.asleep.remove(warp, lanes);
    if (!block.asleep.warps) asleep_ &= ~(1u << block.slot);
    add_ready(block, warp, lanes);
  }
  void wake_one() {
    Block& block = slots_[policy_.any(asleep_)];
    const unsigned warp = policy_.any(block.asleep.warps);
    wake(block, warp, 1u << policy_.any(block.asleep.lanes[warp]));
  }
  void wake_all() {
    for (uint32_t slots = asleep_; slots; slots &= slots - 1) {
      Block& block = slots_[__builtin_ctz(slots)];
      for (uint32_t warps = block.asleep.warps; warps; warps &= warps - 1)
        wake(block, __builtin_ctz(warps), block.asleep.lanes[__builtin_ctz(warps)]);
    }
  }

  uint32_t ready_ = 0, asleep_ = 0;  // slots with such threads
  uint32_t victim_slots_ = 0;        // slots of starved blocks
  unsigned last_[3] = {};            // slot, warp and lane that ran last
};

}  // namespace simt
