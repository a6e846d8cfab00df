// The CUDA driver, found when first needed: the library loads, and its CPU ops run, where there is none.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "launch.h"

namespace kvplan::cuda {

// Takes compiled device code (a cubin or a fat binary): the kernels of csrc/cuda/kernels.cu. Once; later calls are
// ignored. Returns why it could not, or nothing. The image must live on.
std::string load_kernels(const void* image);
bool kernels_loaded();

// Address by which the device reaches a pinned host allocation; 0 where it does not.
uint64_t mapped(const void* host);

int64_t processors(int device);
// Throw std::runtime_error with the driver's words.
void fill(void* stream, void* at, int byte, int64_t nbytes);
void run(void* stream, Kernel kernel, int64_t blocks, void* args);

}  // namespace kvplan::cuda
