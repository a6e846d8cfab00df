// Threads of kvplan's own, for work that is cut into pieces. The calling thread works too, and it waits only for pieces
// that another thread has begun: on a busy machine a thread that was woken may not run for many milliseconds.
#pragma once
#include <cstdint>
#include <functional>

namespace kvplan::cpu {

// Threads that write a table, or copy, the calling one included: 1 unless somebody asks for more.
void set_num_threads(int64_t n);
int64_t num_threads();

// Calls body(i) once for each i of [0, pieces), on the calling thread and on at most threads - 1 others. `body` throws
// nothing. A child after fork() has workers of its own.
void for_each_piece(int64_t pieces, int64_t threads, const std::function<void(int64_t)>& body);

}  // namespace kvplan::cpu
