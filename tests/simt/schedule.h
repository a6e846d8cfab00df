// The scheduler: runs a grid of fibres on one operating system thread, in an order drawn from a seed.
//
// At every yield point the running fibre picks the next one and switches to it. A launch draws a policy: how likely a
// fibre is to go on, in which order blocks, warps and lanes take turns, which of them are starved, how many blocks are
// resident and in which order the others follow. The same seed gives the same run. Memory is sequentially consistent.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "access.h"
#include "block.h"
#include "policy.h"

namespace simt __attribute__((visibility("hidden"))) {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// First argument of a launch: `launch(7, ...)` or `launch({7, "name"}, ...)`.
struct Run {
  Run(uint64_t the_seed, const char* the_kernel = "kernel", unsigned blocks_resident = 0)
      : seed(the_seed), kernel(the_kernel), resident(blocks_resident) {}
  uint64_t seed;
  const char* kernel;
  unsigned resident;  // blocks at once; 0: drawn from the seed
};

class Grid : Chooser {
 public:
  static constexpr size_t kMostShared = 48 << 10;  // bytes a block, as for static shared memory
  static constexpr uint64_t kMostSteps = 1 << 30;  // in one launch

  Grid(const Run& run, unsigned blocks, unsigned threads, void (*call)(void*), void* closure)
      : Chooser(checked(run, blocks, threads).seed, blocks, threads, run.resident), run_(run), call_(call),
        closure_(closure), dim_{blocks, 1, 1}, block_dim_{threads, 1, 1},
        patience_(1000 + uint64_t{32} * slots_.size() * threads) {}

  uint64_t run() {
    const Inside inside;
    current = nullptr;
    struct Leave {
      ~Leave() { current = nullptr; }
    } leave;
    unsigned live = 0;
    for (unsigned slot = 0; slot < slots_.size(); ++slot, ++live) start(slot);
    while (live) {
      finished_ = nullptr;
      if (Thread* next = pick()) {
        current = next;
        switch_fiber(root_, *next);
      }
      // Fibres that have not ended are abandoned: device code owns nothing.
      if (exception_) std::rethrow_exception(exception_);
      if (!finished_) throw Error(failure_);
      finished_->shared.clear();
      if (policy_.queue.empty()) {
        --live;
      } else {
        start(finished_->slot);
      }
    }
    return steps_;
  }

  uint3 dim() const { return dim_; }
  uint3 block_dim() const { return block_dim_; }

  // A point where, as the policy draws, another thread may run.
  void yield() {
    const Inside inside;
    if ((policy_.random.next() & 255) >= policy_.stay) switch_away();
  }
  void point() {
    const Inside inside;
    if ((policy_.random.next() & 15) < policy_.point) yield();
  }
  void sleep(const char* op, Site site) {
    const Inside inside;
    Thread& self = *current;
    self.wait_in(op, site);
    idle(kVainWait);
    if (policy_.sleeps) add_asleep(self);
    switch_away();
    self.op = nullptr;
  }
  // Called when memory has changed, or a thread or block has begun or ended: what others wait for may have come.
  void progress() {
    const Inside inside;
    ++generation_;
    quiet_steps_ = dead_generations_ = 0;
    waits_ = false;
  }
  // Called when an atomic changed nothing: the thread may be waiting in a loop.
  void no_progress() {
    const Inside inside;
    idle(kVainWait);
  }

  // A barrier for the whole block; returns how many threads had a true predicate.
  int barrier(const char* op, bool predicate, Site site) {
    const Inside inside;
    yield();
    Thread& self = *current;
    Block& block = *self.block;
    self.wait_in(op, site);
    idle(1);
    if (block.ended)
      fail([&] { return "deadlock: " + waits(self) + ", " + std::to_string(block.ended) + " of the block ended"; });
    if (block.arrived == 0) block.first = &self;
    const Thread& first = *block.first;
    if (op != first.op || !same(site, first.site))
      fail([&] { return "deadlock: " + waits(self) + ", " + waits(first) + ", another barrier"; });
    block.count += predicate;
    if (++block.arrived == block_dim_.x) {
      block.result = block.count;
      block.count = 0;
      block.arrived = 0;
      for (auto& thread : block.threads) thread.op = nullptr;
      for (unsigned w = 0; w < block.warps.size(); ++w) add_ready(block, w, ~block.warps[w].gone);
      yield();
    } else {
      remove_ready(self);
      switch_away();
    }
    return block.result;
  }

  // Waits for the lanes of `mask`. Returns the value of lane `from`, or, where that is -1, a mask of the lanes whose value
  // is not 0.
  uint64_t meet(const char* op, uint32_t mask, uint64_t value, int from, Site site) {
    const Inside inside;
    yield();
    Thread& self = *current;
    Block& block = *self.block;
    Warp& warp = block.warps[self.warp];
    const uint32_t bit = 1u << self.lane;
    self.wait_in(op, site, mask);
    self.value = value;
    self.from = from;
    idle(1);
    if (!(mask & bit)) fail([&] { return waits(self) + ", not in its own mask"; });
    if (const uint32_t gone = mask & warp.gone)
      fail([&] { return "deadlock: " + waits(self) + ", lane " + std::to_string(__builtin_ctz(gone)) + " has ended"; });
    if (from >= 0 && !(mask >> from & 1))
      fail([&] { return waits(self) + ", reads lane " + std::to_string(from) + ", not in the mask"; });
    Meeting* meeting = nullptr;
    for (auto& other : warp.meetings) {
      if (other.mask == mask && other.op == op && same(other.site, site)) {
        meeting = &other;
      } else if ((other.mask & bit) && (other.arrived & mask)) {
        const Thread& peer = block.threads[self.warp * 32 + __builtin_ctz(other.arrived & mask)];
        fail([&] { return "deadlock: " + waits(self) + ", " + waits(peer) + ", each for the other"; });
      }
    }
    if (!meeting) {
      warp.meetings.push_back({op, site, mask, 0});
      meeting = &warp.meetings.back();
    }
    meeting->arrived |= bit;
    if (meeting->arrived != mask) {
      remove_ready(self);
      switch_away();
      return self.result;
    }
    *meeting = warp.meetings.back();
    warp.meetings.pop_back();
    Thread* lanes = &block.threads[self.warp * 32];
    uint64_t votes = 0;
    for (uint32_t rest = mask; rest; rest &= rest - 1)
      votes |= uint64_t{lanes[__builtin_ctz(rest)].value != 0} << __builtin_ctz(rest);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      Thread& lane = lanes[__builtin_ctz(rest)];
      lane.result = lane.from < 0 ? votes : lanes[lane.from].value;
      lane.op = nullptr;
    }
    add_ready(block, self.warp, mask);
    yield();
    return self.result;
  }

  // The shared memory of the running block for the declaration that `key` identifies.
  void* shared(const void* key, size_t bytes, size_t align) {
    const Inside inside;
    size_t total = bytes;
    for (auto& object : current->block->shared) {
      if (object.key == key) return object.memory.get();
      total += object.bytes;
    }
    if (total > kMostShared)
      fail([&] { return name(*current) + " uses " + std::to_string(total) + " bytes of shared memory"; });
    align = std::max<size_t>(align, 16);
    void* memory = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!memory) fail("out of memory");
    std::memset(memory, policy_.poison, bytes);
    current->block->shared.push_back({key, std::unique_ptr<void, Free>(memory), bytes});
    return memory;
  }

  // Ends the launch with an error whose text `why` makes. The fibre never runs again, nor do destructors on its stack.
  template <class Why>
  [[noreturn]] void fail(Why why) {
    const Inside inside;
    failure_ = prefix() + why();
    leave();
  }
  [[noreturn]] void fail(const char* why) {
    fail([&] { return name(*current) + ": " + why; });
  }

 private:
  void start(unsigned slot) {
    Block& block = slots_[slot];
    block.index = {policy_.queue.back(), 0, 0};
    policy_.queue.pop_back();
    block.slot = slot;
    block.ended = block.arrived = 0;
    block.count = block.result = 0;
    block.ready = block.asleep = Set{};
    const unsigned threads = block_dim_.x;
    for (unsigned w = 0; w < block.warps.size(); ++w) {
      const uint32_t lanes = threads - w * 32 >= 32 ? ~0u : (1u << (threads - w * 32)) - 1;
      block.warps[w].meetings.clear();
      block.warps[w].gone = ~lanes;
      add_ready(block, w, lanes);
    }
    set_victim(block);
    for (unsigned t = 0; t < threads; ++t) {
      Thread& thread = block.threads[t];
      const size_t number = size_t{slot} * threads + t;
      thread.low = stacks().at(number);
      thread.bytes = kStackBytes;
      thread.fake = nullptr;
      thread.grid = this;
      thread.block = &block;
      thread.index = {t, 0, 0};
      thread.warp = t / 32;
      thread.lane = t % 32;
      thread.op = nullptr;
      thread.ended = false;
      thread.generation = 0;
      prepare(thread, entry, number);
    }
    progress();
  }

  static void entry() {
    Grid& grid = *current->grid;
    entered(grid.root_);
    try {
      const Outside outside;
      grid.call_(grid.closure_);
    } catch (...) {
      grid.exception_ = std::current_exception();
    }
    grid.end();
  }

  [[noreturn]] void end() {
    Thread& self = *current;
    Block& block = *self.block;
    if (exception_) leave();
    if (!Stacks::intact(self.low)) overflow(self);
    self.ended = true;
    remove_ready(self);
    if (block.arrived) fail([&] { return "deadlock: " + name(self) + " ended, " + waits(*block.first); });
    Warp& warp = block.warps[self.warp];
    warp.gone |= 1u << self.lane;
    for (auto& meeting : warp.meetings) {
      if (!(meeting.mask >> self.lane & 1)) continue;
      const Thread& peer = block.threads[self.warp * 32 + __builtin_ctz(meeting.arrived)];
      fail([&] { return "deadlock: " + name(self) + " ended, " + waits(peer); });
    }
    progress();
    if (++block.ended == block_dim_.x) {
      finished_ = &block;
      leave();
    }
    Thread* next = pick();
    if (!next) leave();
    current = next;
    switch_fiber(self, *next, true);
    std::abort();
  }

  [[noreturn]] void leave() {
    switch_fiber(*current, root_, true);
    std::abort();
  }

  void switch_away() {
    Thread& self = *current;
    if (static_cast<char*>(__builtin_frame_address(0)) < self.low + kReserveBytes) overflow(self);
    Thread* next = pick();
    if (!next) leave();
    if (next == &self) return;
    current = next;
    switch_fiber(self, *next);
  }

  [[noreturn]] void overflow(Thread& self) {
    Stacks::arm(self.low);
    fail([&] { return name(self) + " overflowed its stack of " + std::to_string(kStackBytes >> 10) + " KiB"; });
  }

  Thread* pick() {
    if (++steps_ > kMostSteps) return stuck("no end: too many steps");
    // After many steps without progress, starved threads run too.
    const bool fair = ++quiet_steps_ > patience_ && (steps_ & 1);
    Thread* thread = next(fair);
    return thread ? thread : stuck("deadlock: no thread can run");
  }

  // Finds threads that wait for ever. Each thread adds up the weights of its waits and intrinsics in this generation. A
  // generation ends with progress, or when every thread that can run has added up kTired. After kDeadGenerations of the
  // second kind in a row, in each of which a thread waited, what they wait for will not come.
  void idle(unsigned weight) {
    Thread& self = *current;
    if (weight == kVainWait) waits_ = true;
    if (self.generation != generation_) {
      self.generation = generation_;
      self.idled = 0;
    }
    const unsigned before = self.idled / kTired;
    self.idled += weight;
    if (self.idled / kTired == before || !waits_ || !all_idle()) return;
    ++generation_;
    waits_ = false;
    if (++dead_generations_ < kDeadGenerations) return;
    stuck("livelock: threads wait for what does not come");
    leave();
  }
  bool all_idle() {
    const size_t threads = block_dim_.x, all = slots_.size() * threads;
    for (size_t i = 0; i < all; ++i, ++witness_) {  // first the thread that was not idle the last time
      if (witness_ >= all) witness_ = 0;
      const Block& block = slots_[witness_ / threads];
      const Thread& thread = block.threads[witness_ % threads];
      const bool can_run = (block.ready.lanes[thread.warp] | block.asleep.lanes[thread.warp]) >> thread.lane & 1;
      if (can_run && (thread.generation != generation_ || thread.idled < kTired)) return false;
    }
    return true;
  }

  std::string prefix() const {
    return std::string("kernel ") + run_.kernel + " (" + std::to_string(dim_.x) + " blocks of " +
           std::to_string(block_dim_.x) + " threads, seed " + std::to_string(run_.seed) + "): ";
  }
  Thread* stuck(const char* what) {
    failure_ = prefix() + what + who_waits(slots_);
    const auto& queue = policy_.queue;
    if (!queue.empty())
      failure_ += "; blocks not started: " + std::to_string(queue.size()) + " (" +
                  std::to_string(*std::min_element(queue.begin(), queue.end())) + ", ...)";
    return nullptr;
  }

  static Stacks& stacks() {
    static thread_local Stacks stacks;
    return stacks;
  }

  static const Run& checked(const Run& run, unsigned blocks, unsigned threads) {
    if (blocks > 0 && blocks <= 0x7fffffff && threads > 0 && threads <= 1024) return run;
    throw Error(std::string("kernel ") + run.kernel + ": cannot launch " + std::to_string(blocks) + " blocks of " +
                std::to_string(threads) + " threads");
  }

  static constexpr unsigned kVainWait = 16;  // weight of a wait in vain; an intrinsic weighs 1
  static constexpr unsigned kTired = 256;    // see idle()
  static constexpr unsigned kDeadGenerations = 64;

  Run run_;
  void (*call_)(void*);
  void* closure_;
  uint3 dim_, block_dim_;
  uint64_t steps_ = 0;
  uint64_t quiet_steps_ = 0, patience_;  // steps since progress; how many there may be before starved threads run too
  uint64_t generation_ = 1;
  unsigned dead_generations_ = 0;
  bool waits_ = false;             // whether a thread waited in this generation
  size_t witness_ = 0;             // number of a thread that was not idle
  Fiber root_;                     // the caller of the launch; a fibre switches to it for one of three reasons:
  Block* finished_ = nullptr;      // its block has ended,
  std::exception_ptr exception_;   // it threw this,
  std::string failure_;            // or the launch failed with this text
};

}  // namespace simt
