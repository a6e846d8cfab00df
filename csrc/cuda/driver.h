// The CUDA driver, found when first needed: the library loads, and its CPU ops run, where there is none.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "launch.h"

namespace kvplan::cuda {

// The compiled device code (PTX, a cubin or a fat binary) of csrc/cuda/kernels.cu, which must live on. The driver is given it
// when a kernel is first run, so that a process can fork before.
void use_kernels(const void* image);

// Makes a device's primary context, torch's own, current in this thread, if none is; loads the kernels, if they are not.
void prepare(int device);

// Address by which the device reaches a pinned host allocation; 0 where it does not.
uint64_t mapped(const void* host);

int64_t processors(int device);
// All throw std::runtime_error with the driver's words.
void fill(void* stream, void* at, int byte, int64_t nbytes);
void run(void* stream, Kernel kernel, int64_t blocks, void* args);

}  // namespace kvplan::cuda
