// Fibres: stacks that one operating system thread switches between.
//
// On x86-64 the switch is written here: it saves the callee-saved registers, the stack pointer, mxcsr and the x87 control
// word. swapcontext would make a system call for the signal mask each time; it is used on other machines, and where
// SIMT_UCONTEXT is defined.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif
#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#define SIMT_UCONTEXT 1
#endif
#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

// Hidden: two libraries in one process, each with its own copy of this header, must not share state.
namespace simt __attribute__((visibility("hidden"))) {

#ifdef SIMT_ASAN
constexpr size_t kStackBytes = size_t{256} << 10;  // instrumented frames are large
#else
constexpr size_t kStackBytes = size_t{64} << 10;
#endif
constexpr size_t kReserveBytes = 4096;  // the low end of a stack: a thread that writes there has overflowed it
constexpr uint64_t kCanary = 0x51ac6fe2b7d34e95;

struct Fiber {
  char* low = nullptr;      // lowest byte of the stack
  size_t bytes = 0;         // its size
  void* fake = nullptr;     // the address sanitizer's own stack for this fibre
#ifdef SIMT_UCONTEXT
  ucontext_t context;
#else
  void* sp = nullptr;  // where the registers lie while the fibre does not run
#endif
};

#ifndef SIMT_UCONTEXT
#if defined(__GNUC__) && !defined(__clang__)
#define SIMT_NO_IPA noipa  // else the compiler may assume that caller-saved registers survive
#else
#define SIMT_NO_IPA noinline
#endif
// Saves the registers, stores the stack pointer in *save, and goes on with the stack pointer `to`.
__attribute__((naked, noinline, SIMT_NO_IPA, no_sanitize("thread")))
static void switch_stack(void** /*save*/, void* /*to*/) {
  asm volatile(
      "pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
      "subq $8, %rsp\n\tstmxcsr (%rsp)\n\tfnstcw 4(%rsp)\n\t"
      "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
      "ldmxcsr (%rsp)\n\tfldcw 4(%rsp)\n\taddq $8, %rsp\n\t"
      "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}
#endif

// Makes `fiber`, whose stack is set, start in `entry` when switched to. `entry` never returns. `color` staggers the
// stack tops: stacks that all start at one page offset fight for the same cache lines.
inline void prepare(Fiber& fiber, void (*entry)(), size_t color) {
#ifdef SIMT_ASAN
  __asan_unpoison_memory_region(fiber.low, fiber.bytes);  // marks that an abandoned fibre left
#endif
#ifdef SIMT_UCONTEXT
  (void)color;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.low;
  fiber.context.uc_stack.ss_size = fiber.bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#else
  uint64_t* top = reinterpret_cast<uint64_t*>(fiber.low + fiber.bytes - (color % 32) * 64);
  *--top = 0;  // in place of a return address: keeps the stack aligned as after a call, and ends a backtrace
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  uint32_t mxcsr;
  uint16_t control;
  asm volatile("stmxcsr %0\n\tfnstcw %1" : "=m"(mxcsr), "=m"(control));
  *--top = mxcsr | uint64_t{control} << 32;
  fiber.sp = top;
#endif
}

// Runs `to`; returns when a fibre switches back. With `last`, none does.
inline void switch_fiber(Fiber& from, Fiber& to, bool last = false) {
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake, to.low, to.bytes);
#endif
  (void)last;
#ifdef SIMT_UCONTEXT
  swapcontext(&from.context, &to.context);
#else
  switch_stack(&from.sp, to.sp);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#endif
}

// The first call of a fibre. `root` is the caller of the first fibre; only the sanitizer can say where its stack lies.
inline void entered(Fiber& root) {
#ifdef SIMT_ASAN
  const void* low = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &low, &bytes);
  if (root.low) return;
  root.low = const_cast<char*>(static_cast<const char*>(low));
  root.bytes = bytes;
#else
  (void)root;
#endif
}

// Stacks, mapped once and used again. There are no guard pages, since thousands of mappings are slow: an overflow shows
// in words of the reserve that have changed.
class Stacks {
 public:
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks() {
    for (char* slab : slabs_) munmap(slab, kPerSlab * kStackBytes);
  }

  char* at(size_t i) {
    while (slabs_.size() <= i / kPerSlab) {
      void* slab = mmap(nullptr, kPerSlab * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (slab == MAP_FAILED) throw std::bad_alloc();
      slabs_.push_back(static_cast<char*>(slab));
      for (size_t k = 0; k < kPerSlab; ++k) arm(slabs_.back() + k * kStackBytes);
    }
    return slabs_[i / kPerSlab] + i % kPerSlab * kStackBytes;
  }

  static void arm(char* low) {
    for (size_t at = 0; at < kReserveBytes; at += kStep) std::memcpy(low + at, &kCanary, sizeof kCanary);
  }

  // Whether all of the reserve is untouched.
  static bool intact(const char* low) {
    for (size_t at = 0; at < kReserveBytes; at += kStep)
      if (std::memcmp(low + at, &kCanary, sizeof kCanary) != 0) return false;
    return true;
  }

 private:
  static constexpr size_t kPerSlab = 64;
  static constexpr size_t kStep = kReserveBytes / 8;
  std::vector<char*> slabs_;
};

}  // namespace simt
