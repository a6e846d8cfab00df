// With -fsanitize=thread the compiler calls a function at every access to memory that other threads may see. This file
// defines these functions in place of the sanitizer's library: each access becomes a point where another thread may run,
// so that races between two plain accesses show too. Compile with the flag and link without it:
// g++ -c -fsanitize=thread ...; g++ -shared ...
#pragma once

namespace simt __attribute__((visibility("hidden"))) {

#ifdef __SANITIZE_THREAD__

// Whether the scheduler runs: its own accesses are no points, since they are not the kernel's.
__attribute__((tls_model("initial-exec"))) inline thread_local bool inside = false;

struct Inside {
  __attribute__((no_sanitize("thread"))) Inside() : before(inside) { inside = true; }
  __attribute__((no_sanitize("thread"))) ~Inside() { inside = before; }
  bool before;
};
struct Outside {
  __attribute__((no_sanitize("thread"))) Outside() { inside = false; }
  __attribute__((no_sanitize("thread"))) ~Outside() { inside = true; }
};

void point();

#define SIMT_HOOK extern "C" __attribute__((weak, visibility("hidden"), no_sanitize("thread"))) void
#define SIMT_ACCESS(size)                                                                                      \
  SIMT_HOOK __tsan_read##size(void*) { if (!inside) point(); }                                                 \
  SIMT_HOOK __tsan_write##size(void*) { if (!inside) point(); }                                                \
  SIMT_HOOK __tsan_unaligned_read##size(void*) { if (!inside) point(); }                                       \
  SIMT_HOOK __tsan_unaligned_write##size(void*) { if (!inside) point(); }
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
SIMT_HOOK __tsan_read_range(void*, unsigned long) { if (!inside) point(); }
SIMT_HOOK __tsan_write_range(void*, unsigned long) { if (!inside) point(); }
SIMT_HOOK __tsan_vptr_update(void*, void*) {}
SIMT_HOOK __tsan_init() {}
SIMT_HOOK __tsan_func_entry(void*) {}
SIMT_HOOK __tsan_func_exit() {}
#undef SIMT_ACCESS
#undef SIMT_HOOK

#else

struct Inside {
  Inside() {}
};
struct Outside {
  Outside() {}
};

#endif

}  // namespace simt
